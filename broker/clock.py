"""Time for drivers: the process's monotonic clock, or a virtual one that tests turn by hand.

The cores never see a clock; drivers read one and pass ``now`` in. Seconds, monotonic, no epoch.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment; never goes backwards."""

    def now(self) -> float: ...


class MonotonicClock:
    """The real one."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Stands still until somebody turns it; for tests and simulation."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance_to(self, when: float) -> None:
        """Turn to ``when`` seconds; a moment that has passed leaves the clock where it is."""
        self._now = max(self._now, when)
