"""Emulated devices in a fleet that is watched and tuned, over the broker in memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from broker.codec import decode, encode
from broker.errors import ConfigError
from broker.figures import BY_NAME, BY_NUMBER, COUNTER
from broker.memory import InMemoryTransport
from broker.settings import parse
from broker.telemetry import DeviceConfig, Telemetry
from broker.topics import TELEMETRY_ALL, config_topic, parse_device_topic
from broker.transport import Message
from edge_agent.bench.fleet_command import FleetChoices
from edge_agent.cli import build_parser
from edge_agent.core.policies import SEND_HELD, edgellm, pipesd
from edge_agent.core.trigger import Thresholds
from tests.edge_agent.test_fleet_device import Fleet

CONFIG = DeviceConfig(7, 0.2, 0.6, 5)


class Watched(Fleet):
    """With somebody who hears all telemetry and publishes configs."""

    def __init__(self, count: int, **habits: object) -> None:
        super().__init__(count, **{"telemetry_s": 1.0, **habits})
        self.told: dict[str, list[Telemetry]] = {device.name: [] for device in self.devices}
        self.watch = InMemoryTransport(self.broker, "exporter")
        self.watch.subscribe(TELEMETRY_ALL)
        self.watch.start(self._on_telemetry, lambda event: None)

    def _on_telemetry(self, message: Message) -> None:
        found = decode(message.payload)
        assert isinstance(found, Telemetry)
        self.told[parse_device_topic(message.topic).device].append(found)

    def configure(self, name: str, payload: bytes) -> None:
        self.watch.publish(config_topic(name), payload, qos=1, retain=True)

    def turn(self, seconds: float) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.loop.turn(0.05)

    def total(self, name: str) -> float:
        return sum(told[-1].figures[BY_NAME[name].number] for told in self.told.values())


def test_the_devices_figures_are_those_of_the_fleet() -> None:
    fleet = Watched(6, generations=3)
    tally = fleet.run()
    for device in fleet.devices:
        device.report.leave()
    fleet.turn(0.5)
    counts = tally.counts
    assert fleet.total("generations_total") == counts["generations"] == 18
    assert fleet.total("committed_tokens_total") == counts["tokens"]
    for name in ("drafted", "judged", "accepted"):
        assert fleet.total(f"{name}_tokens_total") == counts[name]
    assert fleet.total("forwards_total") == counts["forwards"]
    last = [told[-1] for told in fleet.told.values()]
    assert sum(message.tpt.total for message in last) == pytest.approx(tally.tpt.total)
    assert sum(message.ttft.total for message in last) == pytest.approx(tally.ttft.total)
    assert sum(sum(message.ttft.counts) for message in last) == 18
    for told in fleet.told.values():
        assert [message.sequence for message in told] == list(range(1, len(told) + 1))
        assert len({message.boot for message in told}) == 1
        assert {message.policy for message in told} == {"pipesd"}
        for before, after in pairwise(told):
            for number, value in before.figures.items():
                if BY_NUMBER[number].kind == COUNTER:
                    assert after.figures[number] >= value


def test_a_config_reaches_the_running_generation_and_is_acknowledged() -> None:
    fleet = Watched(2, generations=None, think_s=0.1, telemetry_s=0.2)
    first, second = fleet.devices
    fleet.turn(1.0)
    assert first.report._given()["config_version"] == 0.0
    fleet.configure(first.name, encode(CONFIG))
    fleet.configure(first.name, b"\x9f\xfd\x74")
    fleet.turn(2.0)
    told = fleet.told[first.name][-1].figures
    figures = [told[BY_NAME[n].number] for n in ("config_version", "r1_ratio", "r2_ratio")]
    assert figures == [7.0, 0.2, 0.6]
    assert told[BY_NAME["config_rejected_total"].number] == 1.0
    if first._core is not None:
        assert first._core.trigger.thresholds == Thresholds(0.2, 0.6, 5)
    assert fleet.told[second.name][-1].figures[BY_NAME["config_version"].number] == 0.0
    fleet.configure(first.name, encode(replace(CONFIG, version=8, policy="edgellm")))
    fleet.turn(5.0)
    assert fleet.told[first.name][-1].policy == "edgellm"
    fleet.configure(first.name, b"")
    fleet.turn(5.0)
    assert fleet.told[first.name][-1].policy == "pipesd"
    assert first.report.policy == pipesd()
    for device in fleet.devices:
        device.cut(None)
    assert fleet.tally.counts["wrong"] == 0


def test_without_an_interval_they_are_silent_and_follow_nobody() -> None:
    fleet = Watched(2, telemetry_s=0.0)
    fleet.configure(fleet.devices[0].name, encode(CONFIG))
    fleet.run()
    for device in fleet.devices:
        device.report.leave()
    fleet.turn(1.0)
    assert not any(fleet.told.values())
    assert fleet.devices[0].report.policy == pipesd()


def test_other_policies_keep_their_thresholds() -> None:
    fleet = Watched(1, policy=edgellm())
    fleet.configure(fleet.devices[0].name, encode(CONFIG))
    fleet.turn(1.0)
    assert fleet.devices[0].report._given()["config_version"] == 7.0
    assert fleet.devices[0].report.policy == edgellm()


# ---- flags ----------------------------------------------------------------------------------


def choices(*flags: str) -> FleetChoices:
    words = ["bench", "--fleet", "2", "--broker", "mqtt://localhost", *flags]
    return FleetChoices(parse(build_parser(), words, program="edge-agent", environ={}))


def test_devices_may_begin_with_bad_thresholds() -> None:
    assert choices("--start-thresholds", "0.99,0.98").policy.thresholds == Thresholds(0.99, 0.98)
    assert choices().policy.thresholds == Thresholds()


def test_devices_without_the_pipeline_follow_configs_for_thresholds() -> None:
    policy = choices("--no-pipeline", "--start-thresholds", "0.99,0.99").policy
    assert (policy.name, policy.proactive, policy.sending) == ("pipesd", False, SEND_HELD)
    assert policy.thresholds == Thresholds(0.99, 0.99)
    fleet = Watched(1, policy=policy)
    name = fleet.devices[0].name
    fleet.configure(name, encode(CONFIG))
    fleet.turn(1.0)
    now = fleet.devices[0].report.policy
    assert (now.thresholds.r1, now.thresholds.r2) == (CONFIG.r1, CONFIG.r2)
    assert (now.proactive, now.sending) == (False, SEND_HELD)
    assert fleet.told[name][-1].policy == "pipesd"
    with pytest.raises(ConfigError, match="no-pipeline"):
        choices("--no-pipeline", "--policy", "vanilla")


@pytest.mark.parametrize(
    "flag",
    [
        "--start-thresholds=0.9",
        "--start-thresholds=a,b",
        "--start-thresholds=0.1,0.2,0.3",
        "--start-thresholds=2,0.5",
        "--start-thresholds=nan,0.5",
        "--telemetry-interval=-1",
        "--telemetry-interval=0.01",
        "--telemetry-interval=nan",
    ],
)
def test_wrong_flags(flag: str) -> None:
    with pytest.raises(ConfigError):
        choices(flag)
