"""The event loop of a fleet: many emulated devices on one thread, each with one moment to wake at.

No device sleeps. The loop waits in the network for messages, for as long as no device has anything
to do, and measures how late it wakes them: a loop that is late measures itself, not the verifier.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence
from typing import Protocol

from broker.clock import Clock
from edge_agent.bench.fleet_stats import Histogram

#: Devices woken between two looks at the network.
_WAKES = 256
#: Entries of the heap for each device, beyond which those that are out of date are thrown out.
_ENTRIES = 4


class Sleeper(Protocol):
    """What the loop wakes."""

    wake_at: float

    def wake(self) -> None: ...


class Network(Protocol):
    """What carries the messages."""

    def poll(self, timeout: float) -> None:
        """Carry what there is; wait for at most ``timeout`` seconds for more."""
        ...


class FleetLoop:
    """See the module. ``late``: gets how many seconds late each device was woken."""

    def __init__(self, network: Network, clock: Clock, late: Histogram) -> None:
        self._network = network
        self._clock = clock
        self._late = late
        self._heap: list[tuple[float, int, Sleeper]] = []
        self._order = itertools.count()
        self._limit = 64

    def __len__(self) -> int:
        """Entries of the heap, out of date or not."""
        return len(self._heap)

    def arm(self, sleeper: Sleeper) -> None:
        """Its ``wake_at`` has changed."""
        if sleeper.wake_at == math.inf:
            return
        if len(self._heap) >= self._limit:
            self._compact()
        heapq.heappush(self._heap, (sleeper.wake_at, next(self._order), sleeper))

    def next_wake(self) -> float:
        """When somebody wants to be woken; infinite: nobody does."""
        heap = self._heap
        while heap and heap[0][0] != heap[0][2].wake_at:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def turn(self, most: float) -> None:
        """Wake whoever is due, then carry messages, waiting for ``most`` seconds at most."""
        for _ in range(_WAKES):
            when = self.next_wake()
            now = self._clock.now()
            if when > now:
                break
            sleeper = heapq.heappop(self._heap)[2]
            self._late.add(now - when)
            sleeper.wake()
        wait = self.next_wake() - self._clock.now()
        self._network.poll(max(0.0, min(most, wait)))

    def _compact(self) -> None:
        newest: dict[int, tuple[float, int, Sleeper]] = {}
        for entry in self._heap:
            if entry[0] == entry[2].wake_at:
                newest[id(entry[2])] = entry
        self._heap = list(newest.values())
        heapq.heapify(self._heap)
        self._limit = max(64, _ENTRIES * len(self._heap))


def spread(count: int, over_s: float, seed: int) -> Sequence[float]:
    """Seconds after which each of ``count`` devices begins, spread evenly and shuffled."""
    starts = [over_s * index / max(1, count) for index in range(count)]
    random.Random(f"fleet starts {seed}").shuffle(starts)  # noqa: S311 (no secret)
    return starts
