"""Emulated devices against the verifier's real core, over the broker in memory, by a clock that
jumps: nobody sleeps, and every text is exact or counted as what it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from broker import load_text
from broker.clock import VirtualClock
from broker.codec import decode, encode
from broker.memory import InMemoryBroker, InMemoryTransport
from broker.messages import Accepted, Close
from broker.topics import OPEN_SHARED, up_filter
from broker.transport import ConnectionEvent, ConnectionState, Message
from cloud_verifier.core.verifier import Forward, VerifierCore
from cloud_verifier.engine.scripted_target import ScriptedTarget
from cloud_verifier.engine.target import Work
from cloud_verifier.runtime import config_for, online_status, status_will
from cloud_verifier.wire import feed, publications
from edge_agent.bench.fleet_device import MAX_INBOX, FleetDevice
from edge_agent.bench.fleet_habits import Habits
from edge_agent.bench.fleet_loop import FleetLoop
from edge_agent.bench.fleet_stats import Tally
from edge_agent.bench.fleet_texts import made_up
from edge_agent.core.policies import find_policy
from edge_agent.runtime import device_will

FORWARD_S = 0.02
TEXTS = tuple(made_up(5, 24, 12))


class SimVerifier:
    """The verifier's core and a scripted target; a forward takes FORWARD_S of the clock."""

    def __init__(
        self,
        broker: InMemoryBroker,
        clock: VirtualClock,
        script=load_text.next_token,
        **config: Any,
    ) -> None:
        target = ScriptedTarget(
            script=script,
            vocab_size=load_text.VOCAB_SIZE,
            vocab_hash=load_text.VOCAB_HASH,
            eos_ids=(load_text.END,),
            max_slots=64,
        )
        self.target, self.clock = target, clock
        self.core = VerifierCore(config_for(target, "v1", **config))
        will = status_will("v1", online_status(self.core.config, "scripted"))
        self.running: tuple[float, Forward] | None = None
        self.transport = InMemoryTransport(broker, "v1", will=will)
        self.transport.subscribe(OPEN_SHARED, qos=1)
        self.transport.subscribe(up_filter("v1"))
        self.transport.start(self._on_message, lambda event: None)

    def _on_message(self, message: Message) -> None:
        feed(self.core, message, self.clock.now())
        self._work()

    def _work(self) -> None:
        for topic, payload, qos in publications(self.core, self.clock.now()):
            self.transport.publish(topic, payload, qos=qos)
        if self.running is None and (forward := self.core.next_effect()) is not None:
            self.running = (self.clock.now() + FORWARD_S, forward)

    def due(self) -> float:
        return math.inf if self.running is None else self.running[0]

    def fire(self) -> None:
        if self.running is None or self.clock.now() < self.running[0]:
            return
        (_, forward), self.running = self.running, None
        batch = [
            Work(
                s.slot,
                s.plan.keep,
                s.plan.tokens,
                s.plan.choices,
                s.plan.position,
                s.session.sampling,
            )
            for s in forward.seats
        ]
        choices = self.target.forward(batch)
        self.core.forward_done(forward, choices, self.clock.now(), FORWARD_S)
        self._work()


class Fleet:
    """Devices, a loop, and the network in memory."""

    def __init__(
        self,
        count: int,
        *,
        verifier: bool = True,
        script=load_text.next_token,
        faults=None,
        config=None,
        **habits: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.broker = InMemoryBroker(self.clock, seed=3, delay=(0.002, 0.006), **(faults or {}))
        self.verifier = (
            SimVerifier(self.broker, self.clock, script, **(config or {})) if verifier else None
        )
        self.tally = Tally()
        self.loop = FleetLoop(self, self.clock, self.tally.late)
        settings: dict[str, Any] = {
            "texts": TEXTS,
            "policy": find_policy("pipesd"),
            "vocab_hash": load_text.VOCAB_HASH,
            "generations": 2,
            "patience_s": 60.0,
            **habits,
        }
        self.habits = Habits(**settings)
        self.devices = [self._device(f"fleet-x-{number}") for number in range(count)]
        for device in self.devices:
            device.begin()

    def _device(self, name: str) -> FleetDevice:
        transport = InMemoryTransport(self.broker, name, will=device_will(name, "recorded"))
        return FleetDevice(
            name, transport, self.habits, self.tally, clock=self.clock, arm=self.loop.arm
        )

    def poll(self, timeout: float) -> None:
        """The network: jumps to whatever happens first."""
        until = self.clock.now() + timeout
        due = self.broker.next_delivery()
        due = min(
            until if due is None else due, self.verifier.due() if self.verifier else until, until
        )
        self.clock.advance_to(due)
        self.broker.deliver_due(self.clock.now())
        if self.verifier:
            self.verifier.fire()

    def run(self, seconds: float = 3_600.0) -> Tally:
        end = self.clock.now() + seconds
        while not all(device.done for device in self.devices):
            assert self.clock.now() < end, "no end"
            self.loop.turn(1.0)
        for _ in range(50):
            self.loop.turn(0.1)
        assert all(d.transport.callback_errors == 0 for d in self.devices)
        return self.tally

    def sessions_left(self) -> int:
        return len(self.verifier.core.sessions)


def summary(tally: Tally) -> Sequence[int]:
    return [tally.counts[name] for name in ("generations", "wrong", "incomplete", "misplaced")]


@pytest.mark.parametrize("policy", ["pipesd", "vanilla", "edgellm", "cloud"])
def test_every_device_writes_its_texts(policy) -> None:
    fleet = Fleet(8, policy=find_policy(policy))
    tally = fleet.run()
    assert summary(tally) == [16, 0, 0, 0]
    assert tally.tpt.count == tally.ttft.count == 16
    assert tally.counts["forwards"] > 0
    assert (tally.counts["drafted"] == 0) == (policy == "cloud")
    assert tally.rounds.quantile(0.5) >= 0.98 * FORWARD_S
    assert tally.late.largest < 1e-9, "a clock that jumps is never late"
    assert fleet.sessions_left() == 0
    assert not tally.reasons


def test_a_run_follows_from_its_seed() -> None:
    runs = [Fleet(4, seed=seed).run() for seed in (1, 1, 2)]
    assert runs[0].counts == runs[1].counts
    assert runs[0].counts != runs[2].counts


def test_texts_are_exact_over_a_network_that_loses_and_repeats() -> None:
    fleet = Fleet(6, faults={"drop": 0.1, "duplicate": 0.1, "reorder": 0.1})
    tally = fleet.run()
    assert summary(tally) == [12, 0, 0, 0]
    assert tally.counts["timeouts"] > 0


def test_a_full_verifier_is_waited_for_and_counted() -> None:
    fleet = Fleet(6, config={"max_sessions": 2, "busy_retry": 0.5})
    tally = fleet.run()
    assert summary(tally) == [12, 0, 0, 0]
    assert tally.counts["refusals"] >= 4
    assert fleet.sessions_left() == 0


def test_a_device_that_is_refused_for_too_long_counts_as_incomplete() -> None:
    fleet = Fleet(2, generations=1, patience_s=3.0, config={"max_sessions": 1, "busy_retry": 50.0})
    tally = fleet.run()
    assert summary(tally) == [1, 0, 1, 0]
    (reason,) = tally.reasons
    assert "busy" in reason


def test_another_text_than_the_expected_one_is_wrong() -> None:
    def script(sequence: Sequence[int]) -> int:
        token = load_text.next_token(sequence)
        return 7 if len(sequence) % 40 == 0 else token

    tally = Fleet(6, script=script).run()
    assert tally.counts["wrong"] > 0
    assert tally.counts["wrong"] + tally.counts["generations"] == 12
    assert tally.tpt.count == tally.counts["generations"]


def test_a_text_that_ends_too_early_is_incomplete() -> None:
    def script(sequence: Sequence[int]) -> int:
        return load_text.END if len(sequence) >= 30 else load_text.next_token(sequence)

    # The end itself is a token that was not expected there.
    tally = Fleet(3, script=script, texts=TEXTS[:6]).run()
    assert tally.counts["wrong"] + tally.counts["incomplete"] > 0
    assert tally.counts["generations"] < 6


def test_no_verifier_means_incomplete_after_the_patience() -> None:
    fleet = Fleet(3, verifier=False, generations=1, patience_s=5.0)
    tally = fleet.run(20.0)
    assert summary(tally) == [0, 0, 3, 0]
    (reason,) = tally.reasons
    assert "no verifier answered" in reason
    assert tally.reasons[reason] == 3


def test_devices_begin_nothing_after_the_time_is_over() -> None:
    fleet = Fleet(4, generations=None, until=6.0, think_s=0.5)
    tally = fleet.run(60.0)
    assert tally.counts["generations"] > 8
    assert summary(tally)[1:] == [0, 0, 0]
    assert fleet.clock.now() < 20.0


def test_thinking_takes_time() -> None:
    quick, slow = Fleet(2, generations=4), Fleet(2, generations=4, think_s=10.0)
    for fleet in (quick, slow):
        assert summary(fleet.run()) == [8, 0, 0, 0]
    assert slow.clock.now() - quick.clock.now() > 3 * 5.0 - 5.0
    assert slow.tally.tpt.quantile(0.9) == pytest.approx(quick.tally.tpt.quantile(0.9), rel=0.5)


@pytest.mark.parametrize("within", [0.001, 0.05, 0.5])
def test_readers_that_hang_up_leave_nothing(within) -> None:
    """While it is being opened, just opened, or in the middle of the text."""
    fleet = Fleet(6, generations=12, hang_up=0.6, hang_up_s=within)
    tally = fleet.run()
    counts = tally.counts
    assert counts["hung_up"] > 20
    assert counts["generations"] + counts["hung_up"] == 72
    assert summary(tally)[1:] == [0, 0, 0]
    assert fleet.sessions_left() == 0
    assert len(fleet.verifier.core.slots) == 0
    assert all(device.unanswered is None for device in fleet.devices)


def test_the_gaps_that_a_reader_sees_are_measured() -> None:
    fleet = Fleet(2, generations=1, policy=find_policy("vanilla"))
    tally = fleet.run()
    assert summary(tally) == [2, 0, 0, 0]
    assert tally.gaps.count > 4
    # A window of drafts, two ways over the network, a forward.
    assert FORWARD_S < tally.gaps.quantile(0.5) <= tally.gaps.largest < 1.0


def test_a_lost_connection_costs_time_but_no_token() -> None:
    fleet = Fleet(3, generations=1)
    for _ in range(20):
        fleet.loop.turn(0.1)
    assert all(device.attached for device in fleet.devices)
    assert all(device.tokens_so_far >= 0 for device in fleet.devices)
    for device in fleet.devices[:2]:
        fleet.broker.cut(device.name)
    for _ in range(20):
        fleet.loop.turn(0.1)
    for device in fleet.devices[:2]:
        fleet.broker.restore(device.name)
    tally = fleet.run()
    assert summary(tally) == [3, 0, 0, 0]
    assert tally.counts["disconnects"] == 2


def test_a_connection_given_up_ends_the_device() -> None:
    fleet = Fleet(2, generations=3)
    for _ in range(20):
        fleet.loop.turn(0.1)
    fleet.devices[0]._on_event(ConnectionEvent(ConnectionState.FAILED, "bad password", 0x86))
    tally = fleet.run()
    assert summary(tally) == [3, 0, 1, 0]
    assert any("bad password" in reason for reason in tally.reasons)


@pytest.mark.parametrize(("reason", "counted"), [(None, "cut_off"), ("too late", "incomplete")])
def test_a_cut_is_counted_and_told_to_the_verifier(reason, counted) -> None:
    fleet = Fleet(3)
    for _ in range(20):
        fleet.loop.turn(0.1)
    assert fleet.sessions_left() == 3
    for device in fleet.devices:
        device.cut(reason)
        device.cut(reason)
        device.wake()
    assert fleet.run().counts[counted] == 3
    assert fleet.sessions_left() == 0
    assert fleet.tally.counts["generations"] == 0


def test_a_session_cut_while_it_is_being_opened_is_closed_when_the_answer_comes() -> None:
    fleet = Fleet(1)
    while not fleet.devices[0].generating:
        fleet.loop.turn(0.001)
    (device,) = fleet.devices
    device.cut(None)
    assert device.unanswered
    fleet.run()
    assert device.unanswered is None
    assert fleet.verifier.core.stats.opens == 1
    assert fleet.sessions_left() == 0


def test_a_session_that_was_taken_on_during_a_draft_is_closed_when_cut() -> None:
    slow = replace(TEXTS[0], prompt_seconds=60.0)
    fleet = Fleet(1, texts=(slow,))
    (device,) = fleet.devices
    while not device._inbox:
        fleet.loop.turn(0.01)
    assert not device.attached
    device.cut(None)
    assert device.unanswered is None
    fleet.run()
    assert fleet.sessions_left() == 0
    assert fleet.tally.counts["cut_off"] == 1


def test_a_device_that_never_connected_is_counted_once() -> None:
    fleet = Fleet(1)
    fleet.devices[0].cut("never there")
    assert summary(fleet.tally) == [0, 0, 1, 0]
    fleet.devices[0].cut("never there")
    assert summary(fleet.tally) == [0, 0, 1, 0]


def test_what_does_not_belong_to_a_session_is_dropped_and_counted() -> None:
    fleet = Fleet(1, generations=1)
    for _ in range(10):
        fleet.loop.turn(0.1)
    (device,) = fleet.devices
    for topic, payload in (
        ("pipesd/1/fleet-x-0/s/down", b"\xff"),
        ("pipesd/1/other/s/down", b""),
        ("pipesd/1/_verifiers/v9/status", b"\x01\x02"),
    ):
        device._on_message(Message(topic, payload))
    assert fleet.run().counts["rejected"] == 3
    assert summary(fleet.tally) == [1, 0, 0, 0]


def test_an_answer_that_comes_too_late_is_closed() -> None:
    fleet = Fleet(1, generations=1)
    fleet.run()
    (device,) = fleet.devices
    heard: list[Message] = []
    listener = InMemoryTransport(fleet.broker, "listener")
    listener.subscribe("pipesd/1/fleet-x-0/gone/up/v1")
    listener.start(heard.append, lambda event: None)
    fleet.poll(1.0)
    late = encode(Accepted(4, "v1", 100, 10))
    device._on_message(Message("pipesd/1/fleet-x-0/gone/down", late))
    for _ in range(10):
        fleet.poll(0.1)
    assert [decode(message.payload) for message in heard] == [Close(4)]


def test_an_inbox_is_bounded() -> None:
    fleet = Fleet(
        1, generations=1, texts=(replace(TEXTS[0], gammas=(5.0,) * len(TEXTS[0].tokens)),)
    )
    for _ in range(20):
        fleet.loop.turn(0.05)
    (device,) = fleet.devices
    assert device.attached or device.generating
    for _ in range(MAX_INBOX + 10):
        device._note("some-verifier")
    assert fleet.tally.counts["inbox_full"] >= 10
    device._note(ConnectionEvent(ConnectionState.CONNECTED))
    assert len(device._inbox) > MAX_INBOX, "what the link does is heard even then"
    assert summary(fleet.run()) == [1, 0, 0, 0]
