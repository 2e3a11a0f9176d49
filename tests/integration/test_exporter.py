"""Devices over a real Mosquitto, the real exporter, a real Prometheus: what PromQL answers."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker.codec import encode
from broker.figures import BUCKETS, BY_NAME
from broker.messages import DeviceStatus
from broker.mqtt import MqttSettings, MqttTransport
from broker.telemetry import Histogram, Telemetry
from broker.topics import status_topic, telemetry_topic
from broker.transport import Will
from tests.brokers import free_port, wait_until
from tests.commands import PATIENCE, Command
from tests.prometheus import Prometheus, check_metrics

#: Seconds: of the exporter, and between two messages of a device.
TTL, INTERVAL = 3.0, 0.5
#: The derived figures, as broker.figures words them, over what these tests last.
TPT = (
    "increase(pipesd_device_generation_seconds_total[1m])"
    " / increase(pipesd_device_committed_tokens_total[1m])"
)
ACCEPTANCE = (
    "increase(pipesd_device_accepted_tokens_total[1m])"
    " / increase(pipesd_device_judged_tokens_total[1m])"
)


class PaperDevice:
    """A device that claims ``tpt`` seconds per token and ``acceptance``; ten tokens a message."""

    def __init__(self, url: str, name: str, tpt: float, acceptance: float, clock: float) -> None:
        self.name, self.tpt, self.acceptance, self.clock = name, tpt, acceptance, clock
        offline = encode(DeviceStatus(False))
        will = Will(status_topic(name), offline, encode(DeviceStatus(True, "1", "d")), offline)
        settings = MqttSettings.from_url(url, f"device-{name}", will=will)
        self.transport = MqttTransport(settings)
        self.tokens = 0  # of this boot
        self.counted = 0  # of all boots, from the first message on
        self.boot, self.sequence = 0, 0
        self.talks = True

    def start(self) -> PaperDevice:
        self.transport.start(lambda message: None, lambda event: None)
        assert wait_until(lambda: self.transport.connected, PATIENCE)
        return self

    def restart(self) -> None:
        """Its counters begin anew."""
        self.boot, self.sequence, self.tokens = self.boot + 1, 0, 0

    def tell(self) -> None:
        if not self.talks:
            return
        self.tokens += 10
        self.counted += 10
        self.sequence += 1
        values = {
            "committed_tokens_total": self.tokens,
            "generation_seconds_total": self.tokens * self.tpt,
            "judged_tokens_total": 2 * self.tokens,
            "accepted_tokens_total": 2 * self.tokens * self.acceptance,
            "uptime_seconds": self.sequence * INTERVAL,
        }
        counts = [0] * (len(BUCKETS) + 1)
        counts[next(i for i, bound in enumerate(BUCKETS) if self.tpt <= bound)] = self.sequence
        message = Telemetry(
            f"boot-{self.boot}",
            self.sequence,
            self.clock,
            {BY_NAME[name].number: float(value) for name, value in values.items()},
            tpt=Histogram(tuple(counts), self.sequence * self.tpt),
            policy="pipesd",
        )
        self.transport.publish(telemetry_topic(self.name), encode(message))


@contextmanager
def talking(devices: list[PaperDevice]) -> Iterator[None]:
    """They all send telemetry every INTERVAL seconds, from one thread."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(INTERVAL):
            for device in devices:
                device.tell()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def exporter(url: str, port: int) -> Command:
    flags = ("--broker", url, "--port", str(port), "--ttl", str(TTL))
    command = Command("cloud-verifier", "exporter", *flags)
    command.until(lambda: "exporter serves" in command.out)
    return command


def page(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def test_prometheus_answers_for_devices_that_come_go_and_start_again(
    url: str, tmp_path: Path
) -> None:
    port = free_port()
    steady = PaperDevice(url, "steady", 0.05, 0.8, time.time())
    restarted = PaperDevice(url, "restarted", 0.12, 0.5, time.time() + 7_200.0)
    silent = PaperDevice(url, "silent", 0.3, 0.25, 1_000.0)
    devices = [steady, restarted, silent]
    committed = "pipesd_device_committed_tokens_total"
    with Prometheus(tmp_path, {"exporter": [f"127.0.0.1:{port}"]}, scrape_s=0.5) as prometheus:

        def shown() -> dict[str, float]:
            return prometheus.values(committed, "device")

        with exporter(url, port) as command:
            for device in devices:
                device.start()
            with talking(devices):
                # Each has been scraped, grown and scraped again.
                assert wait_until(lambda: len(prometheus.query(TPT)) == 3, PATIENCE)
                assert check_metrics(page(port)) == ""
                silent.talks = False
                restarted.restart()
                assert wait_until(
                    lambda: "silent" not in prometheus.values(committed, "device"), 20
                )
                # Online as the broker has it; but nothing else is left.
                assert prometheus.values("pipesd_device_online", "device") == dict.fromkeys(
                    ("steady", "restarted", "silent"), 1.0
                )
                left = prometheus.query('count by (device) ({device="silent"})')
                assert left == {frozenset({("device", "silent")}): 1.0}
                assert page(port).count('device="silent"') == 1
                silent.talks = True
                assert wait_until(lambda: "silent" in shown(), PATIENCE)
                command.signal(15)
                assert command.wait().code == 0
        with exporter(url, port), talking(devices):
            seen = time.time()
            fresh = f"timestamp({committed}) > {seen}"
            assert wait_until(lambda: len(prometheus.query(fresh)) == 3, PATIENCE)
            tpt = prometheus.values(TPT, "device")
            acceptance = prometheus.values(ACCEPTANCE, "device")
            quantile = "histogram_quantile(0.5, rate(pipesd_device_tpt_seconds_bucket[1m]))"
            medians = prometheus.values(quantile, "device")
            offset = prometheus.values("pipesd_device_clock_offset_seconds", "device")
            increase = prometheus.values(f"increase({committed}[5m])", "device")
            resets = prometheus.values(f"resets({committed}[5m])", "device")
            fleet = json.loads(page(port, "/fleet.json"))
        for device in devices:
            name = device.name
            assert tpt[name] == pytest.approx(device.tpt, rel=0.02)
            assert acceptance[name] == pytest.approx(device.acceptance, rel=0.02)
            above = next(bound for bound in BUCKETS if bound >= device.tpt)
            assert 0.5 * above <= medians[name] <= above
            # No ghosts, of neither restart; PromQL extrapolates by at most a scrape at either end.
            assert 10 < increase[name] <= device.counted + 60
            assert fleet["devices"][name]["figures"]["uptime_seconds"] > 0.0
        assert resets == {"steady": 0.0, "restarted": 1.0, "silent": 0.0}
        assert offset["restarted"] == pytest.approx(7_200.0, abs=120.0)
        assert offset["silent"] == pytest.approx(1_000.0 - time.time(), abs=120.0)
        for device in devices:
            device.transport.stop()
