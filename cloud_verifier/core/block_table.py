"""Which blocks of the engine's K/V memory each session holds, and what they are known to contain.

Memory is blocks of a fixed number of tokens. A session has a table of them, in the order of its
text, and grows by one at a time; what it gives back others take. Blocks that are full of committed
text are remembered by their tokens: a session whose text begins alike takes them into its own table
instead of computing them, and they outlive their session until somebody needs the room.

Tables are decided here and named to the engine with each work (``Work.blocks``), rather than kept
by the engine and counted here a second time: two books of one memory would have to agree after
every rejection, failure and eviction. Nothing here is copied or computed.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
#: The tokens of an owner's text from one position to another.
Text = Callable[[int, int], tuple[int, ...]]

_TAKEN, _FREE = 0, 1
_FREE_RUN = re.compile(b"\x01+")
#: Remembered blocks are forgotten a sixteenth of the memory at a time, so that runs come free.
_FORGET_SHARE = 16


class _Content(NamedTuple):
    """What a full block holds: ``tokens`` behind the content with the serial number ``before``.

    Serial numbers are never used twice, so a chain of them stands for one text from its beginning.
    """

    before: int
    tokens: tuple[int, ...]


class BlockTable(Generic[Owner]):
    """``total`` blocks of ``block_tokens`` tokens.

    Without ``share`` nothing is remembered, so that no session takes over what another computed.
    ``forgotten`` counts remembered blocks that had to make room. All that is kept is bounded by
    ``total``.
    """

    def __init__(self, total: int, block_tokens: int, *, share: bool = True) -> None:
        self._share = share
        self.total = total
        self.block_tokens = block_tokens
        self.forgotten = 0
        self._free = bytearray([_FREE]) * total  # one byte a block: runs are found by a search
        self._free_count = total
        self._uses = [0] * total
        self._tables: dict[Owner, list[int]] = {}
        # The serial numbers of what an owner's first blocks hold, as far as that is known.
        self._chains: dict[Owner, list[int]] = {}
        self._index: dict[_Content, tuple[int, int]] = {}  # block and serial number
        self._contents: dict[int, _Content] = {}  # of remembered blocks
        # Remembered blocks that are in no table, the one given back first at the front.
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._serial = 0

    @property
    def available(self) -> int:
        """Blocks that are in no session's table."""
        return self._free_count + len(self._unused)

    @property
    def remembered(self) -> int:
        """Blocks that are in no table and still known by what they hold."""
        return len(self._unused)

    def table(self, owner: Owner) -> tuple[int, ...]:
        """The blocks of ``owner`` in the order of its text."""
        return tuple(self._tables.get(owner, ()))

    def room(self, owner: Owner, seated: Collection[Owner]) -> int:
        """Blocks that ``owner`` could take if all others but ``seated`` gave theirs up."""
        held = {block for each in (owner, *seated) for block in self._tables.get(each, ())}
        return self.total - len(held)

    def needed(self, owner: Owner, end: int) -> int:
        """Blocks that ``owner`` lacks to hold ``end`` tokens."""
        return max(0, -(-end // self.block_tokens) - len(self._tables.get(owner, ())))

    def resume(self, owner: Owner, cached: int, text: Text, end: int) -> tuple[int, int]:
        """Make ready to write behind ``cached`` tokens of the text; before anything is planned.

        Returns how many tokens the table holds now, and how many of those came from others: whole
        blocks that are known to hold what ``text`` says up to ``end``. It may be fewer than
        ``cached``: a block that others use, or may come to use, is not written to. Its head is
        computed again in a block of its own instead of copied, which happens only when an edge
        attaches again with another text.
        """
        size = self.block_tokens
        table = self._tables.setdefault(owner, [])
        chain = self._chains.setdefault(owner, [])
        whole, rest = divmod(cached, size)
        if rest and whole < len(table) and self._is_shared(table[whole]):
            cached, rest = whole * size, 0
        self._give_back(table, whole + (rest > 0))
        del chain[whole:]
        adopted = 0
        while not rest and len(chain) == len(table) and cached + size <= end:
            before = chain[-1] if chain else 0
            known = self._index.get(_Content(before, text(cached, cached + size)))
            if known is None:
                break
            block, serial = known
            self._use(block)
            table.append(block)
            chain.append(serial)
            cached += size
            adopted += size
        return cached, adopted

    def upcoming(self, owner: Owner, cached: int, text: Text, end: int) -> Hashable | None:
        """Names the whole block up to ``end`` that ``owner`` computes next; None: there is none.

        Equal for owners of whom one could take over what the other computes.
        """
        size = self.block_tokens
        chain = self._chains.get(owner, [])
        if not self._share or cached + size > end or cached != len(chain) * size:
            return None
        return _Content(chain[-1] if chain else 0, text(cached, cached + size))

    def grow(self, owner: Owner, end: int) -> None:
        """Give ``owner`` room for ``end`` tokens; ``available`` must allow it."""
        count = self.needed(owner, end)
        if not count:
            return
        table = self._tables.setdefault(owner, [])
        if self._free_count < count:
            self._forget(count - self._free_count)
        for missing in range(count, 0, -1):
            block = table[-1] + 1 if table else self.total
            if block >= self.total or self._free[block] != _FREE:
                block = self._new_run(missing)
            self._free[block] = _TAKEN
            self._free_count -= 1
            self._uses[block] = 1
            table.append(block)

    def note(self, owner: Owner, cached: int, text: Text, held: int | None = None) -> None:
        """``owner`` holds ``cached`` tokens of committed text now: remember what is new of it.

        Blocks behind them are given back, or behind the first ``held`` tokens if those are more.
        """
        size = self.block_tokens
        table = self._tables.get(owner)
        if table is None:
            return
        self._give_back(table, -(-max(cached, held or 0) // size))
        if not self._share:
            return
        chain = self._chains.setdefault(owner, [])
        del chain[cached // size :]
        for place in range(len(chain), min(cached // size, len(table))):
            content = _Content(chain[-1] if chain else 0, text(place * size, (place + 1) * size))
            known = self._index.get(content)
            if known is None:
                # Another session may have computed the same meanwhile: then this block is its
                # owner's alone, and only the chain goes on.
                self._serial += 1
                known = (table[place], self._serial)
                self._index[content] = known
                self._contents[table[place]] = content
            chain.append(known[1])

    def release(self, owner: Owner, *, remember: bool = True) -> None:
        """Give all blocks of ``owner`` back; without ``remember`` what they held is lost too."""
        table = self._tables.pop(owner, None)
        self._chains.pop(owner, None)
        if table is None:
            return
        if not remember:
            for block in table:
                self._disown(block)
        self._give_back(table, 0)

    def hand_over(self, old: Owner, new: Owner) -> None:
        """``new`` takes the table of ``old``."""
        if old in self._tables:
            self._tables[new] = self._tables.pop(old)
            self._chains[new] = self._chains.pop(old, [])

    def _is_shared(self, block: int) -> bool:
        return self._uses[block] > 1 or block in self._contents

    def _use(self, block: int) -> None:
        self._uses[block] += 1
        self._unused.pop(block, None)

    def _give_back(self, table: list[int], keep: int) -> None:
        """Drop the blocks behind the first ``keep``; of a text its end is forgotten first."""
        while len(table) > keep:
            block = table.pop()
            self._uses[block] -= 1
            if self._uses[block]:
                continue
            if block in self._contents:
                self._unused[block] = None
            else:
                self._set_free(block)

    def _set_free(self, block: int) -> None:
        self._free[block] = _FREE
        self._free_count += 1

    def _disown(self, block: int) -> None:
        content = self._contents.pop(block, None)
        if content is not None:
            del self._index[content]

    def _forget(self, count: int) -> None:
        for _ in range(min(len(self._unused), max(count, self.total // _FORGET_SHARE))):
            block, _ = self._unused.popitem(last=False)
            self._disown(block)
            self._set_free(block)
            self.forgotten += 1

    def _new_run(self, count: int) -> int:
        """Where to go on with ``count`` blocks that do not fit behind the last one.

        In the middle of the longest free run, so that both this table and the one before the run
        can grow without a gap: the engine reads a table without gaps as it lies.
        """
        start, end = max(
            (found.span() for found in _FREE_RUN.finditer(self._free)),
            key=lambda span: span[1] - span[0],
        )
        half = (end - start) // 2
        return start + half if start and half >= count else start
