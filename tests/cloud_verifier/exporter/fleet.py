"""Telemetry of devices that exist on paper, and what a scrape says of them."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from broker.codec import encode
from broker.figures import BUCKETS, BY_NAME, FIGURES
from broker.messages import DeviceStatus, VerifierStatus
from broker.telemetry import Histogram, Telemetry
from broker.topics import status_topic, telemetry_topic, verifier_status_topic
from cloud_verifier.exporter.table import FleetTable

#: Unix seconds of the exporter's clock where a test does not care.
WALL = 1_800_000_000.0
COMMITTED = "pipesd_device_committed_tokens_total"


def histogram(*counts: int, total: float = 1.0) -> Histogram:
    return Histogram((*counts, *[0] * (len(BUCKETS) + 1 - len(counts))), total)


def telemetry(boot: str = "b1", sequence: int = 1, **figures: float) -> Telemetry:
    """With ``figures`` by name; one more of each of the rest than nothing."""
    values = {BY_NAME[name].number: value for name, value in figures.items()}
    return Telemetry(boot, sequence, WALL, values, version="1.0", policy="pipesd", machine="Pi 5")


def full(boot: str = "b1", sequence: int = 1, scale: float = 1.0, **other: Any) -> Telemetry:
    """Every figure and both histograms."""
    values = {figure.number: scale * figure.number for figure in FIGURES}
    fields: dict[str, Any] = {
        "clock": WALL, "ttft": histogram(0, 2, 1), "tpt": histogram(5), "version": "1.0",
        "draft": "smollm2-q3", "policy": "pipesd", "machine": "Raspberry Pi 5",
        "energy_source": "pmic",
    }  # fmt: skip
    return Telemetry(boot, sequence, figures=values, **(fields | other))


class Fleet:
    """A table, and the time at which everything happens to it."""

    def __init__(self, **limits: Any) -> None:
        self.table = FleetTable(**limits)
        self.now = 1_000.0
        self.wall = WALL

    def tell(self, device: str, message: Telemetry | bytes, *, retain: bool = False) -> None:
        payload = message if isinstance(message, bytes) else encode(message)
        self.table.receive(telemetry_topic(device), payload, retain, self.now, self.wall)

    def status(self, device: str, online: bool | None, *, retain: bool = False) -> None:
        """``online`` None: the retained status is taken away."""
        payload = b"" if online is None else encode(DeviceStatus(online, "1.0", "d"))
        self.table.receive(status_topic(device), payload, retain, self.now, self.wall)

    def verifier(self, name: str, online: bool | None, sessions: int = 0) -> None:
        status = VerifierStatus(bool(online), "1.0", "m", "h", 100, sessions, 8)
        payload = b"" if online is None else encode(status)
        self.table.receive(verifier_status_topic(name), payload, True, self.now, self.wall)

    def text(self) -> str:
        return self.table.snapshot(self.now).text()

    def series(self) -> dict[str, float]:
        return series(self.text())

    def of(self, device: str) -> dict[str, float]:
        """The device's series by name, its label left out; histograms and info aside."""
        end = f'{{device="{device}"}}'
        return {
            key.removesuffix(end): value
            for key, value in self.series().items()
            if key.endswith(end)
        }


def series(text: str) -> dict[str, float]:
    """Each line of an exposition, read by the parser of prometheus_client; none comes twice."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            key = f"{sample.name}{{{labels}}}"
            assert key not in found, key
            found[key] = sample.value
    return found
