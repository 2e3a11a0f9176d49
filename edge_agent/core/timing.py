"""How long the edge waits: for an answer, before another try, before it gives the cloud up.

The time-out of a verdict follows the measured response times as TCP's does (RFC 6298: smoothed
mean plus four deviations, doubled at each silence), because a fixed one is either a needless
message on every long verification or a long gap after every loss.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """All in seconds, but for ``silent_timers``: time-outs without a sign of life before moving.

    ``stuck_after``: a verifier that answers but brings no verdict for so long is left: its engine
    hangs.
    """

    open_timeout: float = 1.0
    first_timeout: float = 1.0
    min_timeout: float = 0.15
    max_timeout: float = 8.0
    silent_timers: int = 3
    offline_after: float = 30.0
    stuck_after: float = 120.0


class ResponseTimer:
    """Smoothed response time and the time-out that follows from it."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._mean: float | None = None
        self._deviation = 0.0
        self._backoff = 1.0

    def sample(self, seconds: float) -> None:
        """One undisturbed request-to-answer time."""
        if self._mean is None:
            self._mean, self._deviation = seconds, seconds / 2
        else:
            self._deviation += 0.25 * (abs(seconds - self._mean) - self._deviation)
            self._mean += 0.125 * (seconds - self._mean)
        self._backoff = 1.0

    def back_off(self) -> None:
        self._backoff = min(self._backoff * 2.0, 64.0)

    def answered(self) -> None:
        """A sign of life: the next wait is a first one again."""
        self._backoff = 1.0

    @property
    def timeout(self) -> float:
        limits = self._timing
        if self._mean is None:
            base = limits.first_timeout
        else:
            base = max(limits.min_timeout, self._mean + 4 * self._deviation)
        return min(base * self._backoff, limits.max_timeout)
