"""What a session asks its driver to do, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass

from broker.errors import PipesdError
from broker.messages import Verdict

SOURCE_ACCEPTED = "accepted"  # drafted here, judged right by the target
SOURCE_TARGET = "target"  # the target's own: recovered or bonus
SOURCE_LOCAL = "local"  # drafted here, never judged


@dataclass(frozen=True, slots=True)
class DraftNext:
    """Bring the draft model's cache to ``keep`` tokens, append ``feed``, propose for ``position``.

    Answer with ``EdgeSession.drafted`` or ``EdgeSession.draft_failed``.
    """

    keep: int
    feed: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True)
class Commit:
    """These tokens are final, from position ``start`` on; ``sources`` one of SOURCE_* each."""

    start: int
    tokens: tuple[int, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The session is over. ``reason``: stop, length, cancelled, or error with ``error`` set."""

    reason: str
    error: PipesdError | None = None


Effect = DraftNext | Commit | Finished


@dataclass(slots=True)
class EdgeStats:
    """Counts of one session; tokens unless named otherwise."""

    drafted: int = 0
    accepted: int = 0
    judged: int = 0
    rolled_back: int = 0
    target_tokens: int = 0
    local_tokens: int = 0
    forwards: int = 0  # verdicts that committed something
    triggers_token: int = 0
    triggers_sequence: int = 0
    triggers_window: int = 0
    triggers_end: int = 0  # end of text drafted, or nothing more to draft
    timeouts: int = 0
    stuck: int = 0  # attachments left because no verdict came from a verifier that answers
    resyncs: int = 0
    reopens: int = 0
    refusals: int = 0
    duplicates: int = 0
    gaps: int = 0
    stale: int = 0  # of an earlier attachment
    contradictions: int = 0
    out_of_range: int = 0
    unexpected: int = 0
    hold_ms: float = 0.0
    forward_ms: float = 0.0

    def count_trigger(self, rule: str) -> None:
        """``rule``: token, sequence, window or end."""
        name = f"triggers_{rule}"
        setattr(self, name, getattr(self, name) + 1)

    def count_verdict(self, verdict: Verdict, accepted: int, own: int) -> None:
        """A verdict that committed ``accepted`` draft tokens and ``own`` of the target's."""
        self.forwards += 1
        self.accepted += accepted
        self.judged += verdict.judged
        self.target_tokens += own
        self.hold_ms += verdict.hold_ms
        self.forward_ms += verdict.forward_ms
