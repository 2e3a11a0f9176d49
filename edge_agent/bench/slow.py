"""A draft model on a device that is slower than this machine: an emulation, for measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from broker.sampling import Sampling
from edge_agent.draft import Draft, DraftModel, Proposal


class SlowDraftModel:
    """``model``, each of whose tokens takes at least ``floor_s`` seconds; else it is the same.

    What was quicker is waited out passively, so the rest of the machine has the time. The floor is
    for one evaluation with its proposal, however many tokens are evaluated: the prompt, which a
    device evaluates in batches, is not slowed beyond it. Closing it leaves ``model`` open.
    """

    def __init__(
        self,
        model: DraftModel,
        floor_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = model.name
        self.vocab_size = model.vocab_size
        self.context = model.context
        self.vocab_hash = model.vocab_hash
        self.eos_ids = model.eos_ids
        self._model = model
        self._floor_s = floor_s
        self._clock = clock
        self._sleep = sleep

    def open(self) -> SlowDraft:
        """See ``DraftModel.open``."""
        return SlowDraft(self._model.open(), self._floor_s, self._clock, self._sleep)

    def close(self) -> None:
        """Nothing: the model is another's."""


class SlowDraft:
    """One sequence of a ``SlowDraftModel``."""

    def __init__(
        self,
        draft: Draft,
        floor_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._draft = draft
        self._floor_s = floor_s
        self._clock = clock
        self._sleep = sleep
        self._due = 0.0

    @property
    def length(self) -> int:
        return self._draft.length

    def eval(self, tokens: Sequence[int]) -> None:
        """See ``Draft.eval``."""
        self._due = self._clock() + self._floor_s
        self._draft.eval(tokens)

    def rollback(self, length: int) -> None:
        """See ``Draft.rollback``."""
        self._draft.rollback(length)

    def propose(self, position: int, sampling: Sampling) -> Proposal:
        """See ``Draft.propose``; not before the floor has passed since ``eval`` began."""
        proposal = self._draft.propose(position, sampling)
        left = self._due - self._clock()
        if left > 0.0:
            self._sleep(left)
        return proposal

    def close(self) -> None:
        """See ``Draft.close``."""
        self._draft.close()
