"""The simulated target: cheap, deterministic, and watchful about its slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cloud_verifier.engine.target import Work
from cloud_verifier.engine.trees import choice_positions, lineage, trunk
from edge_agent.scripted_draft import Chooser

VOCAB = 64
EOS = 0


def target_token(sequence: Sequence[int], stop_share: int = 0) -> int:
    """A cheap deterministic target: the next token follows from the last three and the length.

    ``stop_share``: of 1024 places so many hold the end of the text.
    """
    mixed = len(sequence) * 2654435761
    for token in sequence[-3:]:
        mixed = (mixed ^ (token + 1)) * 2246822519 & 0xFFFFFFFF
        mixed ^= mixed >> 13
    if (mixed >> 16) % 1024 < stop_share:
        return EOS
    return 1 + mixed % (VOCAB - 1)


def reference(
    prompt: Sequence[int],
    max_tokens: int,
    next_token: Callable[[Sequence[int]], int] = target_token,
) -> list[int]:
    """What the target alone would write."""
    sequence = list(prompt)
    while len(sequence) - len(prompt) < max_tokens:
        sequence.append(next_token(sequence))
        if sequence[-1] == EOS:
            break
    return sequence[len(prompt) :]


class ScriptedEngine:
    """The target in the simulation: keeps each slot's tokens, so that a wrong ``keep`` shows."""

    def __init__(self, slots: int, chooser: Chooser) -> None:
        self.slots: list[list[int]] = [[] for _ in range(slots)]
        self.chooser = chooser
        self.drafted: dict[int, tuple[int, ...]] = {}  # of a slot whose last work fed a tree

    def held(self, slot: int, path: Sequence[int]) -> list[int]:
        """What a slot holds when ``path`` is what became of its last tree."""
        return [*self.slots[slot], *(self.drafted[slot][node] for node in path)]

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        results = []
        assert len({work.slot for work in batch}) == len(batch), "two sessions in one slot"
        for work in batch:
            self.slots[work.slot] = slot = self.held(work.slot, work.path)
            self.drafted.pop(work.slot, None)
            assert 0 <= work.keep <= len(slot), "the core believes in a cache that is not there"
            assert work.tokens, "a seat without tokens"
            del slot[work.keep :]
            first = len(work.tokens) - work.choices
            chosen = []
            positions = iter(choice_positions(work))
            for index, token in enumerate(work.tokens[: trunk(work)]):
                slot.append(token)
                if index >= first:
                    chosen.append(self.chooser(slot, next(positions), work.sampling))
            if work.parents is not None:
                self.drafted[work.slot] = drafted = work.tokens[trunk(work) :]
                for node in range(len(drafted)):
                    branch = [drafted[each] for each in lineage(work.parents, node)]
                    chosen.append(self.chooser([*slot, *branch], next(positions), work.sampling))
            results.append(chosen)
        return results
