"""When bytes leave and arrive over an emulated link: arithmetic alone, no clock and no socket.

``now`` is passed in. The relay asks this model when to hand real bytes on; a replay under a
virtual clock asks it the same questions. Equal settings, seed and calls give equal answers.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from edge_agent.bench.link import Cut, Link


class Passage(NamedTuple):
    """How something crossed the link; times in seconds, ``size`` in bytes as charged.

    ``sent``: handed to the link. ``start``: the link began with it. ``departed``: its last bit
    left, and the next may begin. ``arrived``: its last bit is there. ``stalled``: late by a loss
    of its own.
    """

    sent: float
    start: float
    departed: float
    arrived: float
    size: int
    stalled: bool = False


class Rates:
    """A rate that changes over time, from ``origin`` on; bits per second, None: no limit.

    ``steps``: pairs (seconds after origin, rate), the first at 0, ascending. ``repeat_s``: the
    period, 0: the last rate stays.
    """

    def __init__(
        self,
        steps: Sequence[tuple[float, float | None]],
        repeat_s: float = 0.0,
        origin: float = 0.0,
    ) -> None:
        self._starts = [start for start, _ in steps]
        self._bps = [rate for _, rate in steps]
        self._ends = [*self._starts[1:], repeat_s or math.inf]
        self._repeat_s = repeat_s
        self._origin = origin
        self._bits_per_period = math.inf
        if repeat_s and None not in self._bps:
            self._bits_per_period = math.fsum(
                (end - start) * (rate or 0.0)
                for start, end, rate in zip(self._starts, self._ends, self._bps, strict=True)
            )

    def finish(self, start: float, bits: float) -> float:
        """When the last of ``bits`` has left that begin at ``start``; seconds."""
        now = start
        phase = max(0.0, start - self._origin)
        if self._repeat_s:
            phase = math.fmod(phase, self._repeat_s)
        if bits > self._bits_per_period:
            # Whole periods at once, or a huge message would walk through thousands of steps.
            periods = math.floor(bits / self._bits_per_period)
            now += periods * self._repeat_s
            bits = max(0.0, bits - periods * self._bits_per_period)
        index = bisect_right(self._starts, phase) - 1
        while True:
            rate, end = self._bps[index], self._ends[index]
            if rate is None:
                return now
            room = (end - phase) * rate
            if bits <= room:
                return now + bits / rate
            bits -= room
            now += end - phase
            # The next step is taken by its index: ``now`` may round to before its start.
            index = (index + 1) % len(self._starts)
            phase = self._starts[index]


class Lane:
    """One direction of a link: one thing at a time, in order.

    Counters: ``messages``, ``bytes`` (as charged), ``busy_s`` (seconds occupied), ``stalls``.
    """

    def __init__(self, link: Link, rates: Rates, startup_s: float, seed: str) -> None:
        self.messages = 0
        self.bytes = 0
        self.busy_s = 0.0
        self.stalls = 0
        self.busy_until = -math.inf
        self._delay_s = link.delay_s
        self._jitter_s = link.jitter_s
        self._stall_probability = link.stall_probability
        self._stall_s = link.stall_s
        self._rates = rates
        self._startup_s = startup_s
        self._last_arrival = -math.inf
        self._random = random.Random(seed)  # noqa: S311  (a simulation, repeatable on purpose)

    def send(self, now: float, size: int, *, message: bool = True) -> Passage:
        """Put ``size`` bytes on the link at ``now``.

        ``message``: a new message begins here, which costs start-up, may be late by jitter and may
        stall; False for anything that only takes its bytes' time (acknowledgements, keepalives,
        the rest of a message that is sent in pieces).
        """
        start = max(now, self.busy_until)
        begin = start + self._startup_s if message else start
        departed = self._rates.finish(begin, size * 8)
        late = 0.0
        stalled = False
        if message:
            self.messages += 1
            # Drawn for each message in turn, so that what happens to the n-th does not depend on
            # how the bytes between the messages were cut.
            if self._jitter_s:
                late = self._random.uniform(0.0, self._jitter_s)
            if self._stall_probability and self._random.random() < self._stall_probability:
                late += self._stall_s
                self.stalls += 1
                stalled = True
        arrived = max(self._last_arrival, departed + self._delay_s + late)
        self.bytes += size
        self.busy_s += departed - start
        self.busy_until = departed
        self._last_arrival = arrived
        return Passage(now, start, departed, arrived, size, stalled)

    def clear(self, now: float) -> None:
        """What waited or was under way is gone; the lane is free at ``now``."""
        self.busy_s -= max(0.0, self.busy_until - now)
        self.busy_until = now
        self._last_arrival = now


class LinkModel:
    """Both directions of ``link``, which starts at ``start`` seconds on the caller's clock.

    ``seed`` decides jitter and stalls; the two directions draw independently of each other.
    """

    def __init__(self, link: Link, *, seed: int = 0, start: float = 0.0) -> None:
        self.link = link
        up = [(0.0, link.up_bps), *((change.at_s, change.up_bps) for change in link.rates)]
        down = [(0.0, link.down_bps), *((change.at_s, change.down_bps) for change in link.rates)]
        repeat = link.rates_repeat_s
        self.up = Lane(link, Rates(up, repeat, start), link.startup_s, f"up {seed}")
        self.down = Lane(link, Rates(down, repeat, start), 0.0, f"down {seed}")
        self._start = start
        self._cut_until = -math.inf

    def next_cut(self, now: float) -> tuple[float, Cut] | None:
        """The first scheduled cut after ``now`` and its moment, or None."""
        for cut in self.link.cuts:
            if self._start + cut.at_s > now:
                return self._start + cut.at_s, cut
        return None

    def cut(self, now: float, for_s: float = 0.0) -> None:
        """Everything under way is lost; nothing can be sent for ``for_s`` seconds."""
        self.up.clear(now)
        self.down.clear(now)
        self._cut_until = max(self._cut_until, now + for_s)

    def is_cut(self, now: float) -> bool:
        """Whether the link is down at ``now``."""
        return now < self._cut_until
