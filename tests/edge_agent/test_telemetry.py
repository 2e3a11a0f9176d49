"""The agent's upkeep by a clock of the test's own: when it tells, what it keeps, what it survives;
and the config that comes in beside it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from broker.clock import VirtualClock
from broker.codec import decode, encode
from broker.errors import TransportError
from broker.figures import BY_NAME
from broker.memory import InMemoryBroker, InMemoryTransport
from broker.sensors import Readings
from broker.telemetry import DeviceConfig, Telemetry
from broker.topics import TELEMETRY_ALL, config_topic
from broker.transport import Message
from edge_agent.core.trigger import Thresholds
from edge_agent.device_config import ALL_TUNABLES
from edge_agent.generation import Generation, Request
from edge_agent.runtime import Agent, device_will
from edge_agent.scripted_draft import ScriptedDraftModel, always_right
from edge_agent.state import StateFile
from edge_agent.telemetry import NEVER, SAMPLE_S, SAVE_S, SETTLE_S, Upkeep, state_path
from tests.system import chooser

CONFIG = DeviceConfig(5, 0.2, 0.6)


class Sensors:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def sample(self, now: float) -> Readings:
        self.asked.append(now)
        return Readings(energy_joules=2.0 * now, energy_source="rapl")


class World:
    """An agent and somebody who listens, on a broker in memory."""

    def __init__(self, upkeep: Upkeep, *, wish: Request | None = None) -> None:
        self.clock = VirtualClock()
        self.broker = InMemoryBroker(self.clock, seed=1)
        self.told: list[Message] = []
        self.listener = InMemoryTransport(self.broker, "exporter")
        self.listener.subscribe(TELEMETRY_ALL)
        self.listener.start(self.told.append, lambda event: None)
        self.wire = InMemoryTransport(self.broker, "device-d", will=device_will("d", "scripted"))
        draft = ScriptedDraftModel(always_right(chooser()), 256, vocab_hash="scripted")
        self.agent = Agent(self.wire, draft, "d", clock=self.clock, upkeep=upkeep, wish=wish)
        self.reporter = self.agent.reporter
        self.reporter._run = lambda: None  # type: ignore[method-assign]  # turned by hand here
        self.agent.start()

    def turn(self, seconds: float = 0.0) -> float:
        """Let time pass, deliver, do what is due, deliver that; when to come again."""
        self.clock.advance_to(self.clock.now() + seconds)
        self.deliver()
        due = self.reporter.turn(self.clock.now())
        self.deliver()
        return due

    def deliver(self) -> None:
        while self.broker.deliver_due(self.clock.now()):
            pass

    def heard(self) -> list[Telemetry]:
        """What was told since the last look."""
        self.deliver()
        told, self.told[:] = [decode(message.payload) for message in self.told], []
        return told  # type: ignore[return-value]

    def configure(self, payload: bytes) -> None:
        self.listener.publish(config_topic("d"), payload, qos=1, retain=True)
        self.deliver()

    def begin(self, **request: object) -> Generation:
        settings: dict[str, object] = {"tunable": ALL_TUNABLES, **request}
        return self.agent.generate(Request((1, 2), **settings))  # type: ignore[arg-type]


def thresholds(generation: Generation) -> Thresholds:
    return generation._core.trigger.thresholds


# ---- telemetry ------------------------------------------------------------------------------


def test_it_tells_at_once_and_then_at_its_interval() -> None:
    world = World(Upkeep(telemetry_s=5.0))
    assert world.turn() == 5.0
    (first,) = world.heard()
    assert (first.sequence, first.draft, first.policy) == (1, "scripted", "pipesd")
    assert first.figures[BY_NAME["generations_total"].number] == 0.0
    assert first.clock > 1e9
    world.turn(4.9)
    assert world.heard() == []
    assert world.turn(0.1) == 10.0
    (second,) = world.heard()
    assert (second.sequence, second.boot) == (2, first.boot)
    assert second.figures[BY_NAME["uptime_seconds"].number] == 5.0
    assert all(not message.retain for message in world.told)


def test_another_start_has_another_boot() -> None:
    boots = {World(Upkeep(telemetry_s=1.0)).reporter.boot for _ in range(3)}
    assert len(boots) == 3


def test_without_a_connection_it_waits_for_one_and_counts_nothing_lost() -> None:
    world = World(Upkeep(telemetry_s=5.0))
    world.turn()
    world.broker.cut("device-d")
    assert world.turn(60.0) == NEVER
    assert (world.reporter.sent, world.wire.dropped) == (1, 0)
    world.broker.restore("device-d")
    world.turn(1.0)
    assert [message.sequence for message in world.heard()] == [1, 2]
    assert world.reporter._wake.is_set(), "the connection wakes the thread"
    assert world.reporter.failed == 0


def test_a_publish_that_fails_is_counted_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(Upkeep(telemetry_s=5.0))

    def refuse(*args: object, **options: object) -> None:
        raise TransportError("too large")

    world.deliver()
    monkeypatch.setattr(world.wire, "publish", refuse)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            world.turn(5.0)
    assert (world.reporter.sent, world.reporter.failed) == (0, 3)
    assert len(caplog.records) == 1
    monkeypatch.undo()
    world.turn(5.0)
    assert [message.sequence for message in world.heard()] == [4]


def test_turned_off_there_is_no_thread_and_no_message() -> None:
    world = World(Upkeep())
    assert world.turn(100.0) in (NEVER, 100.0 + SETTLE_S)
    assert world.heard() == []
    assert world.reporter._thread is None
    world.agent.stop()
    assert world.heard() == []


def test_the_last_figures_are_told_at_the_end() -> None:
    world = World(Upkeep(telemetry_s=3600.0))
    world.turn()
    world.heard()
    world.begin().close()
    world.agent.stop()
    (last,) = world.heard()
    assert last.figures[BY_NAME["generations_total"].number] == 1.0
    world.agent.stop()
    assert world.heard() == []


def test_sensors_are_looked_at_more_often_than_is_told() -> None:
    sensors = Sensors()
    world = World(Upkeep(telemetry_s=60.0, sampler=sensors))  # type: ignore[arg-type]
    assert world.turn() == SAMPLE_S
    for _ in range(3):
        world.turn(SAMPLE_S)
    assert sensors.asked == [0.0, 2.0, 4.0, 6.0]
    (told,) = world.heard()
    assert told.energy_source == "rapl"
    told = world.reporter.telemetry(world.clock.now())
    assert told.figures[BY_NAME["energy_joules_total"].number] == 12.0


def test_a_fault_in_it_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    world = World(Upkeep(telemetry_s=5.0))
    reporter = world.reporter
    asked = []

    def broken(now: float) -> float:
        asked.append(now)
        reporter._stopping = len(asked) == 3
        reporter._wake.set()
        raise RuntimeError("a bug")

    reporter.turn = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        type(reporter)._run(reporter)
    assert reporter.failed == 3
    assert len(caplog.records) == 1


# ---- config ---------------------------------------------------------------------------------


def test_a_config_reaches_running_and_later_generations() -> None:
    world = World(Upkeep(telemetry_s=5.0))
    running = world.begin()
    pinned = world.begin(thresholds=Thresholds(0.9, 0.9), tunable=frozenset())
    other = world.begin(policy=Request((1,)).policy, tunable=ALL_TUNABLES - {"r1"})
    world.configure(encode(CONFIG))
    assert thresholds(running) == Thresholds(0.2, 0.6)
    assert thresholds(pinned) == Thresholds(0.9, 0.9)
    assert thresholds(other) == Thresholds(r2=0.6)
    assert thresholds(world.begin()) == Thresholds(0.2, 0.6)
    world.turn()
    (told,) = world.heard()
    assert told.figures[BY_NAME["config_version"].number] == 5.0
    assert told.figures[BY_NAME["r1_ratio"].number] == 0.2


def test_a_config_is_acknowledged_before_anything_was_generated() -> None:
    world = World(Upkeep(telemetry_s=5.0))
    world.turn()
    world.configure(encode(CONFIG))
    world.heard()
    world.turn(5.0)
    (told,) = world.heard()
    figures = [told.figures[BY_NAME[name].number] for name in ("config_version", "r2_ratio")]
    assert figures == [5.0, 0.6]


def test_another_policy_is_for_the_next_generation() -> None:
    world = World(Upkeep())
    running = world.begin()
    world.configure(encode(DeviceConfig(1, 0.2, 0.6, 0, "hsl")))
    assert thresholds(running) == Thresholds()
    later = world.begin()
    assert (later.policy.name, thresholds(later)) == ("hsl", Thresholds(0.2, 0.6, 64))


def test_an_empty_config_takes_the_thresholds_back_to_the_devices_own() -> None:
    world = World(Upkeep())
    running = world.begin(thresholds=Thresholds(0.5, 0.55))
    world.configure(encode(CONFIG))
    assert thresholds(running) == Thresholds(0.2, 0.6)
    world.configure(b"")
    assert thresholds(running) == Thresholds(0.5, 0.55)
    assert world.agent.remote.version == 0


def test_what_a_policy_learnt_itself_stays_while_a_config_concerns_another() -> None:
    world = World(Upkeep())
    running = world.begin(policy=Request((1,)).policy)
    running.set_thresholds(Thresholds(0.123, 0.0))
    world.configure(encode(DeviceConfig(1, 0.2, 0.6, 0, "hsl")))
    assert thresholds(running) == Thresholds(0.123, 0.0)


def test_wrong_configs_are_counted_in_a_figure_of_their_own() -> None:
    world = World(Upkeep(telemetry_s=5.0))
    world.configure(encode(CONFIG))
    for junk in (b"{}", encode(CONFIG)[:-1], encode(DeviceConfig(1, 0, 0, policy="x"))):
        world.configure(junk)
    running = world.begin()
    assert thresholds(running) == Thresholds(0.2, 0.6)
    world.turn()
    told = world.heard()[-1]
    assert told.figures[BY_NAME["config_rejected_total"].number] == 3.0
    assert told.figures[BY_NAME["rejected_messages_total"].number] == 0.0
    assert world.wire.callback_errors == 0


def test_a_config_that_the_broker_no_longer_retains_is_given_up() -> None:
    """It was taken back while the device was away, so nobody says so."""
    world = World(Upkeep(telemetry_s=5.0))
    world.configure(encode(CONFIG))
    world.turn()
    world.turn(SETTLE_S)
    assert world.agent.remote.version == 5, "it came over this connection"
    world.broker.cut("device-d")
    world.configure(b"")
    world.broker.restore("device-d")
    world.turn(1.0)
    assert world.agent.remote.version == 5
    world.turn(SETTLE_S)
    assert world.agent.remote.version == 0


def test_a_retained_config_survives_a_reconnect() -> None:
    world = World(Upkeep(telemetry_s=5.0))
    world.configure(encode(CONFIG))
    world.broker.cut("device-d")
    world.broker.restore("device-d")
    for _ in range(10):
        world.turn(SETTLE_S)
    assert world.agent.remote.version == 5


def test_another_devices_config_is_not_heard() -> None:
    world = World(Upkeep())
    world.listener.publish(config_topic("e"), encode(CONFIG), qos=1, retain=True)
    world.deliver()
    assert world.agent.remote.version == 0


# ---- state ----------------------------------------------------------------------------------


def test_state_is_kept_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    world = World(Upkeep(state=path))
    world.turn()
    assert not path.exists(), "nothing is known yet"
    world.configure(encode(CONFIG))
    world.turn(SAVE_S / 2)
    assert not path.exists(), "not more often than that"
    world.turn(SAVE_S / 2)
    assert StateFile(path, "d").load().config == CONFIG

    world.begin().close()
    world.agent.stop()
    again = World(Upkeep(state=path, telemetry_s=5.0))
    assert again.agent.remote.current == CONFIG
    assert thresholds(again.begin()) == Thresholds(0.2, 0.6)
    again.turn()
    (told,) = again.heard()
    assert told.figures[BY_NAME["config_version"].number] == 5.0
    assert BY_NAME["gamma_seconds"].number in told.figures


def test_a_broken_state_file_leaves_defaults(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text('{"schema": 1, "dev')
    world = World(Upkeep(state=path))
    assert world.agent.remote.current is None
    assert thresholds(world.begin()) == Thresholds()
    world.configure(encode(CONFIG))
    world.turn()
    assert StateFile(path, "d").load().config == CONFIG


def test_where_the_state_lies(tmp_path: Path) -> None:
    assert state_path("none", "d") is None
    assert state_path(str(tmp_path), "d") == tmp_path
    default = state_path(None, "d")
    assert default is not None
    assert default.name == "device-d.json"
