"""A target without a model, for tests and simulation: the next token is what a function says.

It keeps each slot's tokens and refuses whatever a real engine would refuse, so that a wrong
``keep`` in a session core shows as an error or as a wrong token, not as silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from broker.errors import ConfigError, ModelError
from broker.sampling import Sampler
from cloud_verifier.engine.batch import check_batch
from cloud_verifier.engine.slots import Blocks
from cloud_verifier.engine.target import Work
from cloud_verifier.engine.trees import choice_positions, lineage, trunk

Logits = Callable[[Sequence[int]], npt.NDArray[np.float32]]
Script = Callable[[Sequence[int]], int]


class ScriptedTarget:
    """``Target`` for tests and simulation, over one of two functions of a sequence of token ids.

    ``logits_fn(sequence)``: float32[at least vocab_size], chosen from with the shared noise.
    ``script(sequence)``: the token itself, whatever the sampling settings; for simulations, where
    thousands of forwards must cost nothing. Both are handed the slot's own list and must neither
    change nor keep it. ``fail_at``: numbers of the forwards, from 1 on, that raise ModelError.
    """

    def __init__(
        self,
        logits_fn: Logits | None = None,
        vocab_size: int = 256,
        *,
        script: Script | None = None,
        context: int = 4096,
        max_slots: int = 16,
        eos_ids: Iterable[int] = (),
        name: str = "scripted",
        vocab_hash: str = "0" * 16,
        fail_at: Iterable[int] = (),
        block_tokens: int | None = None,
        total_blocks: int | None = None,
    ) -> None:
        if (logits_fn is None) == (script is None):
            raise ConfigError("a scripted target takes logits_fn or script: give one of them")
        self.name = name
        self.vocab_size = vocab_size
        self.context = context
        self.vocab_hash = vocab_hash
        self.eos_ids = frozenset(eos_ids)
        self.max_slots = max_slots
        self.fail_at = set(fail_at)
        self.forwards = 0
        """Forwards so far, failed ones included."""
        self.tokens_run = 0
        """Tokens of all works so far."""
        self._logits_fn = logits_fn
        self._script = script
        self._sampler = Sampler(vocab_size)
        self.block_tokens = block_tokens or context
        self.total_blocks = total_blocks or max_slots * -(-context // self.block_tokens)
        self._blocks = Blocks(
            max_slots=max_slots,
            context=context,
            block_tokens=self.block_tokens,
            total=self.total_blocks,
        )
        # What each block holds. A table of one block is the sequence itself, and not copied.
        self._store: list[list[int]] = [[] for _ in range(self.total_blocks)]
        self._tables: dict[int, tuple[int, ...]] = {}  # of a slot's last work
        # Of a slot whose last work fed a tree: parents and tokens of the drafted ones.
        self._trees: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def held(self, slot: int) -> tuple[int, ...]:
        """The tokens that ``slot`` holds, those of a tree left out."""
        return tuple(self._sequence(self._tables.get(slot, ())))

    def free(self, slot: int) -> None:
        """Forget what ``slot`` holds."""
        self._forget(self._tables.pop(slot, ()), 0)
        self._trees.pop(slot, None)

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        """As ``Target.forward``."""
        trees = {slot: parents for slot, (parents, _) in self._trees.items()}
        check_batch(batch, self, self._blocks.length, trees)
        self._blocks.check(batch)
        if not batch:
            return []
        self.forwards += 1
        try:
            if self.forwards in self.fail_at:
                raise ModelError(f"forward {self.forwards} fails by script: start again from 0")
            return [self._run(work) for work in batch]
        except ModelError:
            for work in batch:
                # Blocks that are named may be shared up to where this work begins.
                self._forget(self._blocks.table(work), work.keep if work.blocks else 0)
                self._trees.pop(work.slot, None)
            raise

    def close(self) -> None:
        for block in self._store:
            block.clear()
        self._blocks.clear()
        self._tables.clear()
        self._trees.clear()

    def _run(self, work: Work) -> list[int]:
        self.tokens_run += len(work.tokens)
        table = self._tables[work.slot] = self._blocks.table(work)
        sequence = self._sequence(table)
        start = min(len(sequence), work.keep)
        _, drafted = self._trees.pop(work.slot, ((), ()))
        sequence.extend(drafted[node] for node in work.path)
        del sequence[work.keep :]
        chain = trunk(work)
        silent = len(work.tokens) - work.choices
        positions = iter(choice_positions(work))
        chosen: list[int] = []
        for index, token in enumerate(work.tokens[:chain]):
            sequence.append(token)
            if index >= silent:
                chosen.append(self._choose(sequence, next(positions), work))
        self._keep(table, sequence, start)
        if work.parents is not None:
            drafted = work.tokens[chain:]
            for node in range(len(drafted)):
                branch = [drafted[each] for each in lineage(work.parents, node)]
                chosen.append(self._choose([*sequence, *branch], next(positions), work))
            self._trees[work.slot] = work.parents, drafted
        return chosen

    def _sequence(self, table: Sequence[int]) -> list[int]:
        """What lies in ``table``: the block's own list where it is one, else a copy."""
        if len(table) == 1:
            return self._store[table[0]]
        sequence: list[int] = []
        for block in table:
            sequence += self._store[block]
            if len(self._store[block]) < self.block_tokens:
                break
        return sequence

    def _keep(self, table: Sequence[int], sequence: list[int], start: int) -> None:
        """``sequence`` is what ``table`` holds now; before ``start`` nothing has changed."""
        size = self.block_tokens
        if len(table) > 1:
            for place in range(start // size, len(table)):
                self._store[table[place]] = sequence[place * size : (place + 1) * size]
        self._blocks.commit(table, start, len(sequence))

    def _forget(self, table: Sequence[int], keep: int) -> None:
        if table:
            sequence = self._sequence(table)
            del sequence[keep:]
            self._keep(table, sequence, keep)

    def _choose(self, sequence: Sequence[int], position: int, work: Work) -> int:
        if self._script is not None:
            return self._script(sequence)
        assert self._logits_fn is not None
        return self._sampler.choose(self._logits_fn(sequence), position, work.sampling)


def hashed_script(
    vocab_size: int, *, order: int = 4, eos_id: int = -1, eos_share: int = 0
) -> Script:
    """A script whose text looks random and follows from its last ``order`` tokens and its length.

    ``eos_share``: about one token in so many is ``eos_id``; 0: none is.
    """

    def script(sequence: Sequence[int]) -> int:
        state = len(sequence)
        for token in sequence[-order:]:
            state = (state * 1_000_003 + token + 1) & 0xFFFFFFFF
        state = ((state ^ (state >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
        state ^= state >> 13
        if eos_share and state % eos_share == 0:
            return eos_id
        return (state >> 4) % vocab_size

    return script
