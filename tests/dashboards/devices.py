"""Devices that only report: every figure of the table, over one connection to a real broker."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from broker.codec import decode, encode
from broker.errors import RemoteProtocolError
from broker.figures import BUCKETS, BY_NAME, COUNTER, FIGURES
from broker.messages import DeviceStatus
from broker.mqtt import MqttSettings, MqttTransport
from broker.telemetry import DeviceConfig, Histogram, Telemetry
from broker.topics import (
    CONFIG_ALL,
    open_topic,
    parse_device_topic,
    status_topic,
    telemetry_topic,
)
from broker.transport import Message

#: Tokens that a device commits a second.
RATE = 40.0
#: Of counters, what a committed token adds; 0.1 where nothing is said.
PER_TOKEN = {
    "generations_total": 0.02,
    "generation_errors_total": 0.0,
    "committed_tokens_total": 1.0,
    "drafted_tokens_total": 1.2,
    "judged_tokens_total": 1.0,
    "accepted_tokens_total": 0.8,
    "target_tokens_total": 0.2,
    "local_tokens_total": 0.0,
    "local_seconds_total": 0.0,
    "uplink_bytes_total": 12.0,
    "downlink_bytes_total": 8.0,
    "energy_joules_total": 0.3,
    "config_rejected_total": 0.0,
    "rejected_messages_total": 0.0,
    "throttled_seconds_total": 0.0,
}
#: Of gauges; 0.01 where nothing is said.
NOW = {
    "window_tokens": 5.0,
    "active_generations": 1.0,
    "resident_memory_bytes": 3e8,
    "machine_memory_bytes": 8e9,
    "machine_available_memory_bytes": 4e9,
    "temperature_celsius": 55.0,
    "throttled": 0.0,
}


class ReportingDevice:
    """One of them. It takes the thresholds that it is told, and writes the faster the nearer they
    are to 0.3 and 0.7."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.config = DeviceConfig(0, 0.9, 0.9)
        self._totals = {figure.name: 0.0 for figure in FIGURES if figure.kind == COUNTER}
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sequence = 0

    def seconds_per_token(self) -> float:
        return 0.02 + 0.05 * (abs(self.config.r1 - 0.3) + abs(self.config.r2 - 0.7))

    def telemetry(self, seconds: float) -> Telemetry:
        """The next message, ``seconds`` after the last."""
        tokens = RATE * seconds
        for name in self._totals:
            self._totals[name] += tokens * PER_TOKEN.get(name, 0.1)
        self._totals["generation_seconds_total"] += tokens * (self.seconds_per_token() - 0.1)
        self._counts[6] += 1
        self._sequence += 1
        now = {figure.name: NOW.get(figure.name, 0.01) for figure in FIGURES}
        now |= self._totals
        now |= {"r1_ratio": self.config.r1, "r2_ratio": self.config.r2}
        now |= {"config_version": self.config.version, "uptime_seconds": 60.0 + self._sequence}
        histogram = Histogram(tuple(self._counts), 0.03 * sum(self._counts))
        return Telemetry(
            boot="boot",
            sequence=self._sequence,
            clock=time.time(),
            figures={BY_NAME[name].number: value for name, value in now.items()},
            ttft=histogram,
            tpt=histogram,
            version="0.1.0",
            draft="emulated",
            policy="pipesd",
            machine="emulated board",
            energy_source="ina3221",
        )


class ReportingFleet:
    """``count`` of them at ``url``, called ``dev-00`` and so on; as a context manager."""

    def __init__(self, url: str, count: int, interval_s: float = 0.5) -> None:
        self.devices = {f"dev-{n:02}": ReportingDevice(f"dev-{n:02}") for n in range(count)}
        self._interval = interval_s
        self._over = threading.Event()
        self.transport = MqttTransport(MqttSettings.from_url(url, "reporting-fleet"))
        self.transport.subscribe(CONFIG_ALL, qos=1)
        self._thread = threading.Thread(target=self._report, daemon=True)

    def _on_message(self, message: Message) -> None:
        device = self.devices.get(parse_device_topic(message.topic).device)
        if device is None:
            return
        try:
            told = decode(message.payload)
        except RemoteProtocolError:
            return
        if isinstance(told, DeviceConfig):
            device.config = told

    def _report(self) -> None:
        last = time.monotonic() - self._interval
        while not self._over.wait(self._interval):
            now = time.monotonic()
            for name, device in self.devices.items():
                self.transport.publish(telemetry_topic(name), encode(device.telemetry(now - last)))
            # And something to count for whoever counts what is wrong.
            for topic in (telemetry_topic("junk"), open_topic("junk", "s1")):
                self.transport.publish(topic, b"junk")
            last = now

    def __enter__(self) -> ReportingFleet:
        self.transport.start(self._on_message, lambda event: None)
        for name in self.devices:
            online = encode(DeviceStatus(online=True, version="0.1.0", draft="emulated"))
            self.transport.publish(status_topic(name), online, qos=1, retain=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(5.0)
        self.transport.stop(1.0)
