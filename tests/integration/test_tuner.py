"""The tuner over Mosquitto, the exporter and Prometheus, with devices that follow configs."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from broker.codec import decode, encode
from broker.figures import BY_NAME
from broker.messages import DeviceStatus
from broker.mqtt import MqttSettings, MqttTransport
from broker.telemetry import DeviceConfig, Telemetry
from broker.topics import config_topic, status_topic, telemetry_topic
from broker.transport import Message, Will
from cloud_verifier.scripted import make_target
from tests.brokers import free_port, wait_until
from tests.commands import PATIENCE, Command, call, run_command
from tests.prometheus import Prometheus, check_metrics
from tests.system import Replica

#: Seconds between two messages of a device; each tells of 60 tokens.
INTERVAL, TOKENS = 0.3, 60


class SwiftDevice:
    """A device whose tokens cost what its thresholds make of them, and whose time runs faster."""

    def __init__(self, url: str, name: str, best: tuple[float, float]) -> None:
        self.name, self.best = name, best
        self.r1 = self.r2 = 0.99
        self.version = 0
        self.history: list[float] = []
        self._tokens = self._seconds = 0.0
        self._sequence = 0
        offline = encode(DeviceStatus(False))
        will = Will(status_topic(name), offline, encode(DeviceStatus(True, "1", "d")), offline)
        self._transport = MqttTransport(MqttSettings.from_url(url, f"device-{name}", will=will))
        self._transport.subscribe(config_topic(name), qos=1)

    def start(self) -> None:
        self._transport.start(self._on_message, lambda event: None)
        assert wait_until(lambda: self._transport.connected, PATIENCE)

    def stop(self) -> None:
        self._transport.stop()

    @property
    def tpt(self) -> float:
        return 0.05 * (
            1.0 + 2.0 * (self.r1 - self.best[0]) ** 2 + 2.0 * (self.r2 - self.best[1]) ** 2
        )

    def _on_message(self, message: Message) -> None:
        config = decode(message.payload) if message.payload else DeviceConfig(0, 0.99, 0.99)
        assert isinstance(config, DeviceConfig)
        assert 0.0 < config.r1 < 1.0
        assert 0.0 < config.r2 < 1.0
        self.version, self.r1, self.r2 = config.version, config.r1, config.r2

    def tell(self) -> None:
        self.history.append(self.tpt)
        self._tokens += TOKENS
        self._seconds += TOKENS * self.tpt
        self._sequence += 1
        values = {
            "committed_tokens_total": self._tokens,
            "generation_seconds_total": self._seconds,
            "generations_total": self._sequence,
            "forwards_total": self._tokens / 3,
            "uptime_seconds": self._seconds,
            "config_version": self.version,
            "alpha_seconds": 0.02,
            "gamma_seconds": 0.01,
            "forward_seconds": 0.03,
            "r1_ratio": self.r1,
            "r2_ratio": self.r2,
        }
        message = Telemetry(
            "boot",
            self._sequence,
            figures={BY_NAME[name].number: float(value) for name, value in values.items()},
            draft="small",
            policy="pipesd",
            machine="board",
        )
        self._transport.publish(telemetry_topic(self.name), encode(message))


@contextmanager
def telling(devices: list[SwiftDevice]) -> Iterator[None]:
    over = threading.Event()

    def tell() -> None:
        while not over.wait(INTERVAL):
            for device in devices:
                device.tell()

    for device in devices:
        device.start()
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for device in devices:
            device.stop()


def status(storage: str, *arguments: str) -> dict[str, dict[str, object]]:
    result = call("cloud-verifier", "tune", "status", *arguments, "--json", "--storage", storage)
    assert result.code == 0, result.err
    return json.loads(result.out)["devices"]


def settled(storage: str, *names: str) -> bool:
    found = status(storage)
    return all(found.get(name, {}).get("state") == "settled" for name in names)


def exporter_at(url: str, port: int) -> Command:
    return Command("cloud-verifier", "exporter", "--broker", url, "--port", str(port), "--ttl", "5")


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_devices_are_tuned_by_way_of_prometheus_and_obey_an_operator(
    url: str, tmp_path: Path
) -> None:
    storage = f"sqlite:///{tmp_path / 'tuner.sqlite3'}"
    port, own = free_port(), free_port()
    devices = [SwiftDevice(url, "a", (0.2, 0.5)), SwiftDevice(url, "b", (0.3, 0.8))]
    flags = [
        *("tune", "--broker", url, "--storage", storage, "--interval", "0.4", "--trials", "5"),
        *("--sampler", "random", "--metrics-port", str(own), "--devices", "[ab]"),
    ]
    with ExitStack() as stack:
        exporter = stack.enter_context(exporter_at(url, port))
        exporter.until(lambda: "exporter serves" in exporter.out)
        targets = {"fleet": [f"127.0.0.1:{port}"]}
        prometheus = stack.enter_context(Prometheus(tmp_path, targets, scrape_s=0.3))
        stack.enter_context(telling([*devices, SwiftDevice(url, "other", (0.5, 0.5))]))
        flags += ["--prometheus", prometheus.url]
        with Command("cloud-verifier", *flags) as tuner:
            tuner.until(lambda: "trial 3/5" in tuner.err)
            tuner.signal(signal.SIGTERM)
            assert tuner.wait().code == 0
        with Command("cloud-verifier", *flags) as tuner:
            tuner.until(lambda: tuner.err.count("settled on") == 2)
            assert settled(storage, "a", "b")
            # The trials before the restart count; the one that it cut off has failed.
            assert "trial 5/5" in tuner.err
            (one,) = status(storage, "a").values()
            assert one["trials"] == 5
            assert sum(trial["state"] == "complete" for trial in one["history"]) == 5
            assert "other" not in status(storage)
            found = status(storage)
            for device in devices:
                best = (found[device.name]["r1"], found[device.name]["r2"])
                assert wait_until(lambda d=device, b=best: (d.r1, d.r2) == b, PATIENCE)
                assert device.tpt < device.history[0]
            text = scrape(own)
            assert check_metrics(text) == ""
            for line in (
                'pipesd_tuner_devices{phase="settled"} 2.0',
                "pipesd_tuner_broker_connected 1.0",
                "pipesd_tuner_searches_total",
                'pipesd_tuner_device_best_r1_ratio{device="a"}',
            ):
                assert line in text, line
            # An operator, beside the tuner.
            pin = ("tune", "pin", "a", "--r1", "0.11", "--r2", "0.22")
            result = run_command("cloud-verifier", *pin, "--storage", storage, "--broker", url)
            assert result.code == 0, result.err
            assert wait_until(lambda: (devices[0].r1, devices[0].r2) == (0.11, 0.22), PATIENCE)
            assert status(storage)["a"]["state"] == "pinned"
            unpin = call("cloud-verifier", "tune", "unpin", "a", "--storage", storage)
            assert unpin.code == 0, unpin.err
            assert wait_until(lambda: devices[0].r1 == found["a"]["r1"], PATIENCE)
            reset = ("tune", "reset", "b", "--storage", storage, "--broker", url)
            assert run_command("cloud-verifier", *reset).code == 0
            tuner.until(lambda: tuner.err.count("b: settled on") == 2)
            assert status(storage)["b"]["search"] == 2
            # The broker of the figures goes away: nothing ends, and it says so once.
            prometheus.stop()
            tuner.until(lambda: "nothing is known of the devices" in tuner.err)
            tuner.signal(signal.SIGINT)
            assert tuner.wait().code == 0
            assert tuner.err.count("nothing is known of the devices") == 1


def test_emulated_devices_with_bad_thresholds_get_better_ones(url: str, tmp_path: Path) -> None:
    """The fleet tool's devices, sessions and drafts; no Prometheus."""
    storage = f"sqlite:///{tmp_path / 'tuner.sqlite3'}"
    port = free_port()
    bench = [
        *("bench", "--fleet", "2", "--minutes", "5"),
        *("--telemetry-interval", "0.5", "--start-thresholds", "0.99,0.99", "--processes", "1"),
        *("--max-tokens", "32", "--broker", url),
        *("--verify", "triggered", "--out", str(tmp_path / "fleet")),
    ]
    with ExitStack() as stack:
        exporter = stack.enter_context(exporter_at(url, port))
        exporter.until(lambda: "exporter serves" in exporter.out)
        stack.enter_context(Replica(url, make_target(16, 0.01)))
        fleet = stack.enter_context(Command("edge-agent", *bench))
        fleet.until(lambda: 'pipesd_device_committed_tokens_total{device="' in scrape(port))
        before = thresholds(scrape(port))
        assert set(before.values()) == {(0.99, 0.99)}
        tuner = stack.enter_context(
            Command(
                *("cloud-verifier", "tune", "--broker", url, "--storage", storage),
                *("--exporter", f"http://127.0.0.1:{port}", "--interval", "0.5"),
                *("--trials", "4", "--sampler", "random", "--devices", "fleet*"),
            )
        )
        tuner.until(lambda: tuner.err.count("settled on") == 2)
        found = status(storage)
        assert set(found) == set(before)
        assert all(one["tpt_ms"] for one in found.values())
        best = {name: (one["r1"], one["r2"]) for name, one in found.items()}
        tuner.until(lambda: thresholds(scrape(port)) == best)
        tuner.signal(signal.SIGTERM)
        assert tuner.wait().code == 0


def thresholds(text: str) -> dict[str, tuple[float, float]]:
    """R1 and R2 of each device in a page of the exporter."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        for name in ("r1", "r2"):
            head = f'pipesd_device_{name}_ratio{{device="'
            if line.startswith(head):
                device, _, value = line.removeprefix(head).partition('"} ')
                found.setdefault(device, {})[name] = float(value)
    return {device: (one["r1"], one["r2"]) for device, one in found.items()}
