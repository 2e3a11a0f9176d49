"""What one generation counts, where another thread can read it at any time.

The thread that drives the generation writes, telemetry reads, and neither waits for the other:
what belongs together is one tuple that is replaced as a whole, once for each commit.
"""

from __future__ import annotations

from typing import NamedTuple

from edge_agent.core.sending import Estimates
from edge_agent.core.session import EdgeSession, State

#: Seconds from one look at what a running session has learnt to the next.
_LEARNT_EVERY = 1.0


class Progress(NamedTuple):
    """``tokens``: committed so far; ``first_at``, ``last_at``: on the clock, when the first and the
    last of them were. Without any both are the moment of the request."""

    tokens: int
    first_at: float
    last_at: float


class Meter:
    """Of the generation that ``core`` is, which was asked for at ``begun`` (the clock's seconds).

    ``traffic``: payload bytes up and down, messages up and down. ``failed``: it ended with an
    error. ``estimates``: what it has learnt lately; None: nothing yet.
    """

    def __init__(self, core: EdgeSession, begun: float) -> None:
        self.begun = begun
        self.policy = core.policy.name
        self.stats = core.stats
        self.traffic = [0, 0, 0, 0]
        self.failed = False
        self.progress = Progress(0, begun, begun)
        self.estimates: Estimates | None = None
        self._core = core
        self._local: tuple[float, float | None] = (0.0, None)  # seconds, and since when again
        self._look_at = begun + _LEARNT_EVERY

    @property
    def thresholds(self) -> tuple[float, float]:
        """R1 and R2 as they are now; a policy may have changed R1 itself."""
        limits = self._core.trigger.thresholds
        return limits.r1, limits.r2

    @property
    def generation_seconds(self) -> float:
        """From the request to the last committed token so far."""
        return self.progress.last_at - self.begun

    def local_seconds(self, now: float) -> float:
        """Spent without the cloud until ``now``."""
        seconds, since = self._local
        return seconds if since is None else seconds + max(0.0, now - since)

    # -- for the thread that drives the generation ----------------------------------------------

    def look(self, now: float) -> None:
        """Note whether the session goes on alone; cheap where nothing changed."""
        alone = self._core.state is State.LOCAL
        if alone is not (self._local[1] is not None):
            self._local = (self.local_seconds(now), now if alone else None)

    def committed(self, tokens: int, now: float) -> None:
        """So many more tokens are final."""
        before = self.progress
        first_at = before.first_at if before.tokens else now
        self.progress = Progress(before.tokens + tokens, first_at, now)
        if now >= self._look_at:
            self._look_at = now + _LEARNT_EVERY
            self.estimates = self._core.sending.estimates

    def ended(self, now: float) -> None:
        """Nothing more is counted."""
        self._local = (self.local_seconds(now), None)
        self.estimates = self._core.sending.estimates
