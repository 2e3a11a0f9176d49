"""The in-memory broker's own promises: repeatable, and faults only where they are allowed."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker import memory
from broker.clock import VirtualClock
from broker.errors import LocalProtocolError
from broker.memory import Faults, InMemoryBroker, InMemoryTransport
from broker.transport import ConnectionEvent, ConnectionState, Message, Will

CONNECTED, DISCONNECTED = ConnectionState.CONNECTED, ConnectionState.DISCONNECTED


class World:
    """A broker and its clock; ``run`` jumps from delivery to delivery."""

    def __init__(self, seed: int = 1, **faults: Any) -> None:
        self.clock = VirtualClock()
        self.broker = InMemoryBroker(self.clock, seed, **faults)
        self.heard: dict[str, list[Message]] = {}
        self.at: dict[str, list[float]] = {}
        self.events: dict[str, list[ConnectionEvent]] = {}

    def client(self, name: str, *filters: str, qos: int = 0, **options: Any) -> InMemoryTransport:
        transport = InMemoryTransport(self.broker, name, **options)
        for topic_filter in filters:
            transport.subscribe(topic_filter, qos=qos)
        heard, at = self.heard.setdefault(name, []), self.at.setdefault(name, [])

        def on_message(message: Message) -> None:
            heard.append(message)
            at.append(self.clock.now())

        transport.start(on_message, self.events.setdefault(name, []).append)
        self.run()
        return transport

    def run(self, until: float = float("inf")) -> None:
        while (due := self.broker.next_delivery()) is not None and due <= until:
            self.clock.advance_to(due)
            self.broker.deliver_due(self.clock.now())

    def payloads(self, name: str) -> list[int]:
        return [int(message.payload) for message in self.heard[name]]


def send(transport: InMemoryTransport, count: int, qos: int, topic: str = "t") -> list[int]:
    for number in range(count):
        transport.publish(topic, b"%d" % number, qos=qos)
    return list(range(count))


def story(seed: int) -> list[tuple[str, list[int], list[float]]]:
    world = World(seed, drop=0.2, duplicate=0.2, reorder=0.3, delay=(0.01, 0.1))
    speaker = world.client("speaker")
    for name in ("a", "b", "c"):
        world.client(name, "t", "$share/g/t")
    send(speaker, 50, 0)
    world.run()
    return [(name, world.payloads(name), world.at[name]) for name in ("a", "b", "c")]


def test_same_seed_same_story() -> None:
    assert story(3) == story(3)
    assert story(3) != story(4)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    qos=st.integers(0, 1),
    reorder=st.sampled_from([0.0, 0.3]),
    drop=st.sampled_from([0.0, 0.3]),
    duplicate=st.sampled_from([0.0, 0.3]),
    longest=st.sampled_from([0.0, 0.2]),
)
def test_faults_keep_to_their_kind(
    seed: int, qos: int, reorder: float, drop: float, duplicate: float, longest: float
) -> None:
    world = World(seed, drop=drop, duplicate=duplicate, reorder=reorder, delay=(0.0, longest))
    speaker = world.client("speaker")
    world.client("listener", "t", qos=1)
    sent = send(speaker, 40, qos)
    world.run()
    got = world.payloads("listener")
    first = list(dict.fromkeys(got))
    if qos == 1 or not drop:
        assert sorted(first) == sent, "nothing lost"
    if qos == 1 or not reorder:
        assert first == sorted(first), "nothing overtaken"
    if not duplicate:
        assert len(first) == len(got), "nothing twice"
    assert world.broker.dropped == len(sent) - len(first)
    assert len(got) - len(first) <= world.broker.duplicated
    latest = longest + 4 * max(longest, 0.01) * 2
    assert all(moment <= latest for moment in world.at["listener"])


def test_faults_happen_as_often_as_asked() -> None:
    world = World(5, drop=0.25, duplicate=0.1, reorder=0.5, delay=(0.01, 0.02))
    speaker = world.client("speaker")
    world.client("listener", "t")
    send(speaker, 4_000, 0)
    world.run()
    broker = world.broker
    assert broker.dropped == pytest.approx(1_000, rel=0.15)
    assert broker.reordered == pytest.approx(1_500, rel=0.15)
    assert broker.duplicated == pytest.approx(300, rel=0.25)
    assert len(world.heard["listener"]) == 4_000 - broker.dropped + broker.duplicated


def test_lower_qos_of_the_two_decides() -> None:
    for published, granted in ((0, 1), (1, 0), (0, 0)):
        world = World(drop=1.0)
        speaker = world.client("speaker")
        world.client("listener", "t", qos=granted)
        speaker.publish("t", b"1", qos=published)
        world.run()
        assert world.heard["listener"] == []
    world = World(drop=1.0)
    speaker = world.client("speaker")
    world.client("listener", "t", qos=1)
    speaker.publish("t", b"1", qos=1)
    world.run()
    assert world.payloads("listener") == [1]


def test_faults_change_at_runtime() -> None:
    world = World()
    speaker = world.client("speaker")
    world.client("listener", "t")
    world.broker.faults = Faults(drop=1.0)
    speaker.publish("t", b"1")
    world.broker.faults = Faults(delay=(5.0, 5.0))
    speaker.publish("t", b"2")
    world.run(4.9)
    assert world.heard["listener"] == []
    world.run()
    assert world.payloads("listener") == [2]
    assert world.at["listener"] == [5.0]


@pytest.mark.parametrize("faults", [{"drop": 1.1}, {"reorder": -0.1}, {"delay": (0.2, 0.1)}])
def test_impossible_faults(faults: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        Faults(**faults)


def test_answers_wait_for_the_next_call() -> None:
    """Two peers that answer each other at once do not hold ``deliver_due`` for ever."""
    world = World()
    peers = {}
    for name, other in (("a", "b"), ("b", "a")):
        transport = InMemoryTransport(world.broker, name)
        transport.subscribe(name)
        peers[name] = transport
        transport.start(
            lambda message, own=transport, to=other: own.publish(to, message.payload),  # type: ignore[misc]
            lambda event: None,
        )
    world.broker.deliver_due(0.0)
    peers["a"].publish("b", b"ping")
    for _ in range(10):
        assert world.broker.next_delivery() == 0.0
        assert world.broker.deliver_due(0.0) == 1


def test_cut_loses_what_is_under_way_and_restore_brings_the_rest() -> None:
    world = World(delay=(1.0, 1.0))
    speaker = world.client("speaker")
    listener = world.client("listener", "t", qos=1)
    speaker.publish("t", b"1", qos=1)
    world.broker.cut("listener")
    assert not listener.connected
    world.broker.cut("listener")
    speaker.publish("t", b"2", qos=1)
    listener.publish("x", b"draft")
    assert listener.dropped == 1
    world.run()
    world.broker.restore("listener")
    world.broker.restore("listener")
    world.run()
    speaker.publish("t", b"3", qos=1)
    world.run()
    assert world.payloads("listener") == [3]
    states = [event.state for event in world.events["listener"]]
    assert states == [CONNECTED, DISCONNECTED, CONNECTED]
    assert listener.reconnects == 1


def test_late_will_waits_for_its_moment() -> None:
    world = World()
    will = Will("s", b"0", birth=b"1")
    world.client("watcher", "s")
    world.client("device", will=will)
    world.broker.cut("device", will_delay=3.0)
    world.broker.restore("device")
    world.run(2.9)
    assert world.payloads("watcher") == [1, 1]
    world.run()
    assert world.payloads("watcher") == [1, 1, 0, 1]


def test_client_that_never_connected_has_no_will() -> None:
    world = World()
    world.client("watcher", "s")
    transport = InMemoryTransport(world.broker, "device", will=Will("s", b"0"))
    transport.start(lambda message: None, lambda event: None)
    world.broker.cut("device")
    world.run()
    assert world.heard["watcher"] == []


def test_limits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_IN_FLIGHT", 10)
    monkeypatch.setattr(memory, "MAX_RETAINED", 2)
    world = World()
    speaker = world.client("speaker")
    world.client("listener", "t", qos=1)
    send(speaker, 15, 1)
    world.run()
    assert world.payloads("listener") == list(range(10))
    assert world.broker.overflowed == 5
    send(speaker, 10, 1)
    world.run()
    assert world.broker.overflowed == 5
    for name in ("r/1", "r/2", "r/3", "r/1"):
        speaker.publish(name, b"1", retain=True)
    assert world.broker.overflowed == 6
    world.client("late", "r/+")
    assert [message.topic for message in world.heard["late"]] == ["r/1", "r/2"]


def test_a_simulated_message_is_cheap() -> None:
    """Ten thousand schedules of a few hundred messages must be a matter of minutes."""
    world = World(drop=0.1, duplicate=0.1, reorder=0.1, delay=(0.01, 0.05))
    devices = [world.client(f"d{number}", f"p/d{number}/+/down") for number in range(50)]
    world.client("verifier", "p/+/+/up/v")
    begin = time.perf_counter()
    for _ in range(20):
        for number, device in enumerate(devices):
            device.publish(f"p/d{number}/s/up/v", b"x" * 40)
        world.run()
    assert (time.perf_counter() - begin) / 1_000 < 0.000_5
