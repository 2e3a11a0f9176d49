"""A device over Mosquitto: its telemetry comes, its figures are those of its sessions, and what is
published for it changes a running generation."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest

from broker.codec import decode, encode
from broker.figures import BY_NAME
from broker.messages import DeviceStatus
from broker.mqtt import MqttSettings, MqttTransport
from broker.sensors import Sampler
from broker.telemetry import DeviceConfig, Telemetry
from broker.topics import config_topic, status_topic, telemetry_topic
from broker.transport import Message
from cloud_verifier.engine.scripted_target import hashed_script
from edge_agent.core.effects import EdgeStats
from edge_agent.core.trigger import Thresholds
from edge_agent.device_config import ALL_TUNABLES
from edge_agent.scripted_draft import sometimes_right
from edge_agent.telemetry import Upkeep
from tests.brokers import free_port, wait_until
from tests.commands import PATIENCE, Command
from tests.draft_models import draft_model
from tests.system import VOCAB, Device, PacedTarget, Replica, chooser, continuation, scripted_draft

DEVICE = "pi-7"


class Fleet:
    """What an exporter and a tuner do: listens to one device and configures it."""

    def __init__(self, url: str) -> None:
        self.telemetry: list[Telemetry] = []
        self.online: bool | None = None
        self._transport = MqttTransport(MqttSettings.from_url(url, "fleet"))
        self._transport.subscribe(telemetry_topic(DEVICE))
        self._transport.subscribe(status_topic(DEVICE))
        self._transport.start(self._on_message, lambda event: None)
        assert wait_until(lambda: self._transport.connected, PATIENCE)

    def _on_message(self, message: Message) -> None:
        found = decode(message.payload)
        if isinstance(found, Telemetry):
            assert not message.retain
            self.telemetry.append(found)
        elif isinstance(found, DeviceStatus):
            self.online = found.online

    def configure(self, payload: bytes) -> None:
        self._transport.publish(config_topic(DEVICE), payload, qos=1, retain=True)

    def latest(self, name: str) -> float | None:
        if not self.telemetry:
            return None
        return self.telemetry[-1].figures.get(BY_NAME[name].number)

    def stop(self) -> None:
        self._transport.stop()


@contextmanager
def fleet_at(url: str) -> Iterator[Fleet]:
    fleet = Fleet(url)
    try:
        yield fleet
    finally:
        fleet.configure(b"")
        fleet.stop()


def test_telemetry_comes_and_a_config_changes_a_running_generation(
    url: str, tmp_path: Path
) -> None:
    draft = scripted_draft(sometimes_right(chooser(), VOCAB, 0.8, seed=3))
    upkeep = Upkeep(0.1, tmp_path / "state.json", Sampler())
    with (
        fleet_at(url) as fleet,
        Replica(url, PacedTarget(seconds=0.004)),
        Device(url, draft, DEVICE, upkeep=upkeep) as device,
    ):
        # Every token asks; the target writes each round, until the config says otherwise.
        often = Thresholds(0.99, 0.99, 1)
        running = device.run(max_tokens=6_000, thresholds=often, tunable=ALL_TUNABLES)
        assert running.reached(50)
        assert wait_until(lambda: (fleet.latest("committed_tokens_total") or 0) >= 50, PATIENCE)
        assert fleet.latest("r1_ratio") == 0.99
        assert fleet.latest("triggers_sequence_total") == 0.0
        assert fleet.latest("active_generations") == 1.0
        assert running.generation.finish is None, "it ended before the config came"
        fleet.configure(encode(DeviceConfig(4, 0.3, 0.0, 16)))
        assert wait_until(lambda: fleet.latest("config_version") == 4.0, PATIENCE)
        assert wait_until(lambda: (fleet.latest("triggers_sequence_total") or 0) > 10, PATIENCE)
        assert (fleet.latest("r1_ratio"), fleet.latest("r2_ratio")) == (0.3, 0.0)
        for junk in (b"\x9f\xfd\x74", b"{}", encode(DeviceConfig(5, 0.5, 0.5, policy="no"))):
            fleet.configure(junk)
        assert wait_until(lambda: fleet.latest("config_rejected_total") == 3.0, PATIENCE)
        assert fleet.latest("config_version") == 4.0
        running.generation.cancel()
        tokens = running.wait()
        assert tokens == continuation((1, 2, 3), len(tokens))
        stats = running.generation.stats
        device.stop()
        assert wait_until(lambda: fleet.online is False, PATIENCE)
        # The last word: what the session itself has counted.
        assert fleet.latest("generations_total") == 1.0
        for field in fields(EdgeStats):
            for name in (f"{field.name}_total", f"{field.name}_tokens_total"):
                if name in BY_NAME:
                    assert fleet.latest(name) == getattr(stats, field.name), name
        assert fleet.latest("committed_tokens_total") == len(tokens)
        assert fleet.latest("uplink_bytes_total") == running.generation.traffic.uplink_bytes
        assert fleet.latest("downlink_messages_total") == (
            running.generation.traffic.downlink_messages
        )
        assert sum(fleet.telemetry[-1].ttft.counts) == 1
        assert (fleet.latest("resident_memory_bytes") or 0) > 1_000_000
        boots = {message.boot for message in fleet.telemetry}
        sequences = [message.sequence for message in fleet.telemetry]
        assert len(boots) == 1
        assert sequences == sorted(sequences)
        for number in (3, 4, 7, 11, 16):
            values = [message.figures[number] for message in fleet.telemetry]
            assert values == sorted(values), "a counter fell"
    assert json.loads((tmp_path / "state.json").read_text())["config"]["version"] == 4


@pytest.mark.models
@pytest.mark.slow
def test_a_device_works_on_until_it_is_told_to_stop(url: str, tmp_path: Path) -> None:
    """The command: prompts from a file for ever, its own /metrics, the cloud away for a while."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello", "id": "first"}\n{"prompt": "Once", "chat": false}\n')
    port = free_port()
    flags = [
        *("--broker", url, "--pair", "smollm2", "--threads", "1", "--device-id", DEVICE),
        *("--prompts", str(prompts), "--repeat", "0", "--pause", "0.05", "--json"),
        *("--max-tokens", "6", "--timeout", "1", "--telemetry-interval", "0.2"),
        *("--metrics-port", str(port), "--state-file", str(tmp_path / "state.json")),
    ]
    draft = draft_model("smollm2")
    facts = {"vocab_size": draft.vocab_size, "vocab_hash": draft.vocab_hash}
    target = PacedTarget(hashed_script(draft.vocab_size), **facts)
    with fleet_at(url) as fleet, Command("edge-agent", "generate", *flags) as device:
        device.until(lambda: "failed (first)" in device.err)
        with Replica(url, target):
            device.until(lambda: device.out.count("\n") >= 3)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                text = page.read().decode()
            assert f'pipesd_device_committed_tokens_total{{device="{DEVICE}"}}' in text
            fleet.configure(encode(DeviceConfig(9, 0.2, 0.6, policy="hsl")))
            assert wait_until(lambda: fleet.latest("config_version") == 9.0, PATIENCE)
            assert wait_until(lambda: fleet.telemetry[-1].policy == "hsl", PATIENCE)
            device.signal(signal.SIGTERM)
            done = device.wait()
    assert done.code == 0, done.err
    objects = [json.loads(line) for line in done.out.splitlines()]
    assert {found["prompt"] for found in objects} == {"first", "line 2"}
    assert all(found["tokens"] == 6 for found in objects)
    assert (fleet.latest("generation_errors_total") or 0) >= 1
    assert (fleet.latest("committed_tokens_total") or 0) >= 6 * len(objects)
    assert fleet.online is False
    assert json.loads((tmp_path / "state.json").read_text())["config"]["policy"] == "hsl"
