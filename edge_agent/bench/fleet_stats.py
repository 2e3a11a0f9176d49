"""What a fleet counts: bounded however long it runs, and addable across processes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

#: Seconds that the first bucket of a histogram ends at, and the ratio from one to the next.
_FIRST_S, _RATIO = 1e-5, 1.02
_SCALE = 1.0 / math.log(_RATIO)
_BUCKETS = 1_200  # beyond a day
#: Different reasons for failed generations that are kept apart.
MAX_REASONS = 20
_OTHER = "other reasons"
#: Counters of an edge's session that say what went wrong on the way, and was mended.
SESSION_LOSSES = (
    "timeouts",
    "resyncs",
    "reopens",
    "stuck",
    "gaps",
    "duplicates",
    "stale",
    "contradictions",
    "out_of_range",
    "unexpected",
)


class Histogram:
    """Times in seconds, known to one per cent; at most ``_BUCKETS`` numbers."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """One more time; a negative one counts as none."""
        self.count += 1
        self.total += max(0.0, seconds)
        self.largest = max(self.largest, seconds)
        place = 0
        if seconds > _FIRST_S:
            place = min(_BUCKETS - 1, 1 + int(math.log(seconds / _FIRST_S) * _SCALE))
        self._buckets[place] += 1

    def merge(self, other: Histogram) -> None:
        """Add all times of ``other``."""
        self.count += other.count
        self.total += other.total
        self.largest = max(self.largest, other.largest)
        self._buckets.update(other._buckets)

    @property
    def mean(self) -> float | None:
        """Seconds; None without any."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The time that ``share`` of all times do not exceed; None without any."""
        wanted = share * self.count
        seen = 0
        for place in sorted(self._buckets):
            seen += self._buckets[place]
            if seen >= wanted and seen:
                if place == 0:
                    return _FIRST_S
                return min(self.largest, _FIRST_S * math.pow(_RATIO, place - 0.5))
        return None


@dataclass(slots=True)
class Tally:
    """Counts of some devices. ``counts``: by name, a fixed set.

    ``tpt``: seconds per token of each generation, its wait for the first included; ``ttft``: to the
    first token; ``gaps``: from one commit of a text to the next; ``rounds``: from a request to its
    verdict; ``late``: how late timers were heard, which is the emulation's own fault.
    """

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    tpt: Histogram = field(default_factory=Histogram)
    ttft: Histogram = field(default_factory=Histogram)
    gaps: Histogram = field(default_factory=Histogram)
    rounds: Histogram = field(default_factory=Histogram)
    late: Histogram = field(default_factory=Histogram)

    def fail(self, reason: str) -> None:
        """A generation came to nothing; ``reason`` is kept short and only so many apart."""
        reason = " ".join(reason.split())[:160]
        known = reason in self.reasons or len(self.reasons) < MAX_REASONS
        self.reasons[reason if known else _OTHER] += 1

    def merge(self, other: Tally) -> None:
        """Add everything of ``other``."""
        self.counts.update(other.counts)
        for reason, count in other.reasons.items():
            known = reason in self.reasons or len(self.reasons) < MAX_REASONS
            self.reasons[reason if known else _OTHER] += count
        self.tpt.merge(other.tpt)
        self.ttft.merge(other.ttft)
        self.gaps.merge(other.gaps)
        self.rounds.merge(other.rounds)
        self.late.merge(other.late)
