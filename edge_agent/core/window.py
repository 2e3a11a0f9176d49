"""The tokens of one session on the edge: committed, drafted ahead, sent, and in the model's cache.

prompt | committed ...... | draft: sent ... | unsent ... | being drafted
       0                  len(committed)    sent         position
"""

from __future__ import annotations

import math
from typing import NamedTuple

from broker.messages import DraftBatch, Verdict
from edge_agent.core.effects import DraftNext

APPLIED = "applied"
GAP = "gap"
DUPLICATE = "duplicate"
CONTRADICTION = "contradiction"


class Outcome(NamedTuple):
    """What a verdict did. ``kind``: one of the constants above; the rest is set when APPLIED.

    ``start`` and ``fresh``: the newly committed tokens; ``accepted`` of them were right drafts by
    the verifier's account; ``lost`` draft tokens were rolled back, None when the draft stands.
    """

    kind: str
    start: int = 0
    fresh: tuple[int, ...] = ()
    accepted: int = 0
    lost: int | None = None


class DraftWindow:
    """See the module. Positions count generated tokens; cache lengths include the prompt."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.committed: list[int] = []
        self.draft: list[int] = []
        self.epoch = 0
        self._confidences: list[float] = []  # of the draft tokens
        self._sent = 0  # position up to which the verifier was sent this epoch's draft
        self._fed = 0  # tokens that are certainly in the draft model's cache
        self._drafting: DraftNext | None = None

    @property
    def position(self) -> int:
        """The position of the next token to draft."""
        return len(self.committed) + len(self.draft)

    @property
    def length(self) -> int:
        """Tokens of the whole sequence, prompt included."""
        return len(self.prompt) + self.position

    @property
    def drafting(self) -> bool:
        """Whether a DraftNext has not been answered yet."""
        return self._drafting is not None

    @property
    def survival(self) -> float:
        """The chance that the whole draft is right, as far as the draft model knows."""
        return math.prod(self._confidences)

    @property
    def unsent(self) -> int:
        """Drafted tokens that the verifier was not sent."""
        return self.position - max(self._sent, len(self.committed))

    @property
    def has_unsent(self) -> bool:
        return self.unsent > 0

    # -- drafting -------------------------------------------------------------------------------

    def append(self, token: int, confidence: float) -> None:
        """One more drafted token."""
        self.draft.append(token)
        self._confidences.append(confidence)

    def clear_draft(self) -> list[int]:
        """Forget the draft; its tokens."""
        tokens, self.draft = self.draft, []
        self._confidences.clear()
        return tokens

    def next_draft(self) -> DraftNext:
        """The outstanding request to the draft model, or a new one."""
        if self._drafting is None:
            keep = min(self._fed, self.length - 1)
            self._drafting = DraftNext(keep, self._sequence(keep), self.position)
            # Only what is certain: the answer raises it, a rollback may overtake the effect.
            self._fed = keep
        return self._drafting

    def answered(self, effect: DraftNext) -> bool:
        """The draft model answered ``effect``: whether the answer is for the present sequence."""
        if effect is not self._drafting:
            return False
        self._drafting = None
        self._fed = effect.keep + len(effect.feed)
        return effect.position == self.position

    def abandon(self, effect: DraftNext) -> None:
        """The draft model did not answer: its cache counts as empty."""
        if effect is self._drafting:
            self._drafting = None
        self._fed = 0

    def _sequence(self, start: int) -> tuple[int, ...]:
        """Prompt, committed and drafted tokens from index ``start`` of the whole on."""
        base = len(self.prompt)
        if start >= base + len(self.committed):
            return tuple(self.draft[start - base - len(self.committed) :])
        if start >= base:
            return (*self.committed[start - base :], *self.draft)
        return (*self.prompt[start:], *self.committed, *self.draft)

    # -- sending --------------------------------------------------------------------------------

    def take_batch(self, attach: int, *, verify: bool, go_on: bool = False) -> DraftBatch | None:
        """Everything unsent as one batch, from now on counted as sent; None if it says nothing."""
        committed = len(self.committed)
        base = max(self._sent, committed)
        tokens = tuple(self.draft[base - committed :])
        if not tokens and not verify:
            return None
        self._sent = base + len(tokens)
        return DraftBatch(attach, self.epoch, base, tokens, None, verify, go_on)

    def resend_from(self, have: int) -> None:
        """The verifier has the draft only up to ``have``."""
        self._sent = min(self._sent, max(have, len(self.committed)))

    def new_verifier(self) -> None:
        """Nothing of the draft is known where the session is attached now."""
        self.epoch += 1
        self._sent = len(self.committed)

    # -- verdicts -------------------------------------------------------------------------------

    def apply(self, verdict: Verdict) -> Outcome:
        """Commit what ``verdict`` adds; the draft stays as far as it begins with the new tokens."""
        have = len(self.committed)
        end = verdict.start + len(verdict.tokens)
        if verdict.start > have:
            return Outcome(GAP)
        overlap = min(have, end) - verdict.start
        if tuple(self.committed[verdict.start : have])[:overlap] != verdict.tokens[:overlap]:
            return Outcome(CONTRADICTION)
        if end <= have:
            return Outcome(DUPLICATE)
        fresh = verdict.tokens[overlap:]
        matched = 0
        for token, drafted in zip(fresh, self.draft, strict=False):
            if token != drafted:
                break
            matched += 1
        lost: int | None = None
        if matched < min(len(fresh), len(self.draft)):
            lost = len(self.draft) - matched
            self._roll_back(have + matched)
        else:
            del self.draft[:matched]
            del self._confidences[:matched]
        self.committed.extend(fresh)
        self._sent = max(self._sent, end)
        return Outcome(APPLIED, have, fresh, max(0, verdict.accepted - overlap), lost)

    def commit_local(self, token: int) -> None:
        """One token that no verifier has seen."""
        self.committed.append(token)

    def _roll_back(self, position: int) -> None:
        """The draft is wrong from ``position`` on: forget it, in the model's cache too."""
        self.clear_draft()
        self.epoch += 1
        self._sent = 0
        self._fed = min(self._fed, len(self.prompt) + position)
        self._drafting = None
