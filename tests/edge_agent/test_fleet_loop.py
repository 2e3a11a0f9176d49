"""The loop of a fleet by a clock that jumps: order, lateness, and a heap that stays small."""

from __future__ import annotations

import math

import pytest

from broker.clock import VirtualClock
from edge_agent.bench.fleet_loop import FleetLoop, spread
from edge_agent.bench.fleet_stats import Histogram


class JumpingNetwork:
    """Waits by turning the clock; does what it is told at a moment."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.waits: list[float] = []
        self.arrivals: list[tuple[float, object]] = []

    def poll(self, timeout: float) -> None:
        self.waits.append(timeout)
        until = self.clock.now() + timeout
        if self.arrivals and self.arrivals[0][0] <= until:
            when, action = self.arrivals.pop(0)
            self.clock.advance_to(when)
            action()
        else:
            self.clock.advance_to(until)


class Sleeper:
    def __init__(self, name: str, log: list, clock: VirtualClock, then: list[float]) -> None:
        self.name, self.log, self.clock = name, log, clock
        self.then = then
        self.wake_at = math.inf
        self.loop: FleetLoop | None = None

    def sleep(self, until: float) -> None:
        self.wake_at = until
        self.loop.arm(self)

    def wake(self) -> None:
        self.log.append((self.name, round(self.clock.now(), 6)))
        self.wake_at = math.inf
        if self.then:
            self.sleep(self.then.pop(0))


class World:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.network = JumpingNetwork(self.clock)
        self.late = Histogram()
        self.loop = FleetLoop(self.network, self.clock, self.late)
        self.log: list = []

    def add(self, name: str, *times: float) -> Sleeper:
        sleeper = Sleeper(name, self.log, self.clock, list(times[1:]))
        sleeper.loop = self.loop
        sleeper.sleep(times[0])
        return sleeper


@pytest.fixture
def world() -> World:
    return World()


def test_everybody_wakes_when_they_asked_to(world) -> None:
    world.add("a", 0.3, 0.7)
    world.add("b", 0.1, 0.2, 0.9)
    for _ in range(20):
        world.loop.turn(1.0)
    assert world.log == [("b", 0.1), ("b", 0.2), ("a", 0.3), ("a", 0.7), ("b", 0.9)]
    assert world.late.count == 5
    assert world.late.largest == 0.0
    assert max(world.network.waits) == 1.0


def test_a_message_may_call_somebody_off_or_earlier(world) -> None:
    a, b = world.add("a", 5.0), world.add("b", 6.0)
    world.network.arrivals = [
        (1.0, lambda: a.sleep(2.0)),
        (1.5, lambda: setattr(b, "wake_at", math.inf)),
    ]
    for _ in range(20):
        world.loop.turn(1.0)
    assert world.log == [("a", 2.0)]
    assert world.loop.next_wake() == math.inf
    assert len(world.loop) == 0, "entries that nobody waits for any more are gone"


def test_late_is_measured(world) -> None:
    world.add("a", 1.0)
    world.clock.advance_to(1.25)
    world.loop.turn(0.0)
    assert world.late.largest == 0.25


def test_many_who_are_due_do_not_keep_messages_waiting(world) -> None:
    for number in range(1_000):
        world.add(str(number), 0.0)
    world.loop.turn(1.0)
    assert 0 < len(world.log) < 1_000
    assert world.network.waits == [0.0], "it looks at the network and does not wait there"
    for _ in range(10):
        world.loop.turn(0.0)
    assert len(world.log) == 1_000


def test_the_heap_stays_small_however_often_minds_change(world) -> None:
    sleepers = [world.add(str(number), 1e6 + number) for number in range(50)]
    for step in range(20_000):
        sleepers[step % 50].sleep(1e5 - step)
    assert len(world.loop) <= 4 * 50 + 64
    assert world.loop.next_wake() == 1e5 - 19_999


def test_starts_are_spread_and_follow_from_the_seed() -> None:
    starts = spread(10, 5.0, 1)
    assert sorted(starts) == [0.5 * index for index in range(10)]
    assert list(starts) == list(spread(10, 5.0, 1)) != list(spread(10, 5.0, 2))
    assert list(spread(3, 0.0, 1)) == [0.0, 0.0, 0.0]
