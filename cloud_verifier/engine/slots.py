"""How far each block of K/V memory is valid, and which blocks a slot is made of.

There is no policy here: which blocks belong to whom, who shares and who is evicted is decided in
``cloud_verifier.core`` and named with each work. Nor is there any tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from broker.errors import ConfigError, LocalProtocolError
from cloud_verifier.engine.target import Work

BLOCK = 64  # tokens


class Blocks:
    """``total`` blocks of ``block_tokens`` tokens, for up to ``max_slots`` sessions at a time.

    A work without blocks has the slot's own, as many as hold a whole ``context``, where there is
    memory for that. Those are not kept from others: once blocks were named, whoever hands them out
    may remember any of them for a text to come, so from then on all works must name theirs.

    Raises ConfigError when all blocks together do not hold one context.
    """

    def __init__(self, *, max_slots: int, context: int, block_tokens: int, total: int) -> None:
        self.max_slots = max_slots
        self.context = context
        self.block_tokens = block_tokens
        self.total = total
        self._own = -(-context // block_tokens)
        if total < self._own:
            raise ConfigError(
                f"{total} blocks of {block_tokens} tokens hold no session of {context} tokens: "
                f"give {self._own} at least"
            )
        self._valid = [0] * total  # tokens from the start of each block
        self.handed_out = False
        """Whether blocks were named, so that a slot has none of its own any more."""

    def table(self, work: Work) -> tuple[int, ...]:
        """The blocks of ``work``, in the order of its text.

        Raises LocalProtocolError for a work that names none of a memory that is handed out.
        """
        if self.handed_out and not work.blocks:
            raise LocalProtocolError(
                f"slot {work.slot} names no blocks where blocks are handed out: name some that "
                "nobody else was given"
            )
        return work.blocks or self.own(work.slot)

    def own(self, slot: int) -> tuple[int, ...]:
        """The blocks of a slot for which none are named; fewer than a context's beyond memory."""
        start = slot * self._own
        return tuple(range(start, min(start + self._own, self.total)))

    def length(self, work: Work) -> int:
        """How many tokens at the start of the work's blocks are valid."""
        length = 0
        for block in self.table(work):
            valid = self._valid[block] if 0 <= block < self.total else 0
            length += valid
            if valid < self.block_tokens:
                break
        return length

    def check(self, batch: Sequence[Work]) -> None:
        """Raise LocalProtocolError unless each work has room, and writes to no block of another."""
        named = any(work.blocks for work in batch)
        if named and not all(work.blocks for work in batch):
            raise LocalProtocolError("a batch names blocks for some works only: name all of them")
        tables = [self.table(work) for work in batch]
        uses = Counter(block for table in tables for block in table)
        for work, table in zip(batch, tables, strict=True):
            end = work.keep + len(work.tokens)
            if len(table) * self.block_tokens < end:
                raise LocalProtocolError(
                    f"slot {work.slot}: {len(table)} blocks hold no {end} tokens: name enough"
                )
            if min(table) < 0 or max(table) >= self.total:
                raise LocalProtocolError(
                    f"slot {work.slot}: a block is not one of {self.total}: choose below"
                )
            if len(set(table)) < len(table) or any(
                uses[block] > 1 for block in table[work.keep // self.block_tokens :]
            ):
                raise LocalProtocolError(
                    f"slot {work.slot} would write to a block that is used twice: share whole "
                    "blocks before what is fed"
                )
        self.handed_out = self.handed_out or named

    def commit(self, table: Sequence[int], start: int, length: int) -> None:
        """Say that ``table`` holds ``length`` valid tokens, new or fewer from ``start`` on.

        What lies in blocks before ``start`` is left alone: others may share them.
        """
        size = self.block_tokens
        for place in range(min(start, length) // size, len(table)):
            self._valid[table[place]] = min(size, max(0, length - place * size))

    def clear(self) -> None:
        """Nothing is valid any more, and nothing handed out."""
        self._valid = [0] * self.total
        self.handed_out = False
