"""What a running replica measures of itself, beside what its core counts.

Kept by the driver under its lock, some hundred nanoseconds for each forward and message; exporters
read a copy (``VerifierRuntime.snapshot``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: Upper bounds, in seconds: from the scripted target to a long prefill on a small CPU.
FORWARD_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5,
    2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
BATCH_SESSIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BATCH_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

#: Where a replica's time goes. The network's thread: ``receive`` (decoding, and what the core does
#: with it). The engine's: ``schedule`` (timers and the next batch), ``forward`` (the target),
#: ``commit`` (judging the drafts) and ``idle`` (nothing to do). Both: ``publish`` (encoding, and
#: handing over to the transport). Waiting for the lock between the two is in none of them.
STAGES = ("receive", "schedule", "forward", "commit", "publish", "idle")


class Histogram:
    """Counts by upper bound, each of them the values up to it and above the one before."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last: above every bound
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        other = Histogram(self.bounds)
        other.counts = list(self.counts)
        other.total = self.total
        return other


@dataclass(slots=True)
class Measures:
    """Since the start."""

    forward_seconds: Histogram = field(default_factory=lambda: Histogram(FORWARD_SECONDS))
    batch_sessions: Histogram = field(default_factory=lambda: Histogram(BATCH_SESSIONS))
    batch_tokens: Histogram = field(default_factory=lambda: Histogram(BATCH_TOKENS))
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def forward(self, seconds: float, sessions: int, tokens: int) -> None:
        """One forward was done."""
        self.forward_seconds.observe(seconds)
        self.batch_sessions.observe(sessions)
        self.batch_tokens.observe(tokens)
        self.stages["forward"] += seconds

    def copy(self) -> Measures:
        return Measures(
            self.forward_seconds.copy(),
            self.batch_sessions.copy(),
            self.batch_tokens.copy(),
            dict(self.stages),
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A replica at one moment.

    ``stats``: the fields of VerifierStats by name, numbers and counts by label. ``gauges``: what it
    holds now, by name. ``waiting``: sessions that want a verdict and have no seat in the forward
    that runs; ``waited``: seconds for which the longest of them has (0.0 without any).
    """

    stats: Mapping[str, float | Mapping[str, int]]
    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    measures: Measures
    waiting: int
    waited: float
    alive: bool
    connected: bool
