"""The exporter's own series, ``pipesd_exporter_*``, read from its counters when it is scraped.

Share of messages that are no good, in PromQL::

    sum(rate(pipesd_exporter_dropped_total[5m])) / sum(rate(pipesd_exporter_messages_total[5m]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from broker import __version__

PREFIX = "pipesd_exporter_"
#: Of every cause for which something is left out; each is there from the start, as 0.
CAUSES = (
    "topic", "too_large", "msgpack", "unknown_kind", "fields", "wrong_kind", "retained",
    "old_boot", "old_sequence", "too_many_devices", "too_many_verifiers",
    "unknown_figure", "not_finite", "negative", "too_large_figure", "clock",
)  # fmt: skip
OUTCOMES = ("ok", "unhealthy", "unknown", "failed", "hung_up", "broken")
CHANNELS = ("telemetry", "status", "verifier_status")


@dataclass
class Own:
    """What the exporter counts of itself at one moment."""

    messages: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    devices: int = 0
    online: int = 0
    max_devices: int = 0
    verifiers: int = 0
    expired: int = 0
    connected: bool = False
    reconnects: int = 0
    callback_errors: int = 0
    subscriptions_refused: int = 0
    http: Mapping[str, int] = field(default_factory=dict)
    renders: int = 0
    render_seconds: float = 0.0


class OwnCollector(Collector):
    """``read()`` gives the counters; called at each scrape."""

    def __init__(self, read: Callable[[], Own]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        own = self._read()
        yield _by_label("messages", "MQTT messages heard.", "channel", CHANNELS, own.messages)
        yield _by_label(
            "dropped",
            "Messages, or single figures of messages, left out because they were wrong.",
            "cause",
            CAUSES,
            own.dropped,
        )
        yield _by_label(
            "http_requests", "HTTP requests, by what became of them.", "outcome", OUTCOMES, own.http
        )
        for name, text, count in (
            ("expired", "Devices whose series left because they fell silent.", own.expired),
            ("reconnects", "Connections to the broker after the first.", own.reconnects),
            ("callback_errors", "Messages that met a fault of the exporter.", own.callback_errors),
            (
                "subscriptions_refused",
                "Subscriptions that the broker turned down.",
                own.subscriptions_refused,
            ),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=count)
        for name, text, value in (
            ("devices", "Devices with telemetry that is not too old.", own.devices),
            ("devices_online", "Devices that are connected to the broker.", own.online),
            ("max_devices", "Devices that are kept at most.", own.max_devices),
            ("verifiers", "Verifiers with a status.", own.verifiers),
            ("broker_connected", "1 while the broker can be heard.", int(own.connected)),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        yield SummaryMetricFamily(
            f"{PREFIX}render_seconds",
            "Time in which the devices' series were put together.",
            count_value=own.renders,
            sum_value=own.render_seconds,
        )
        yield InfoMetricFamily(PREFIX[:-1], "What the exporter is.", {"version": __version__})


def _by_label(
    name: str, text: str, label: str, known: tuple[str, ...], counts: Mapping[str, int]
) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value in dict.fromkeys((*known, *counts)):
        family.add_metric([value], counts.get(value, 0))
    return family


class OwnFigures:
    """The exporter's registry; ``text()`` is its part of the exposition, format 0.0.4."""

    def __init__(self, read: Callable[[], Own]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(OwnCollector(read))
        ProcessCollector(registry=self.registry)

    def text(self) -> str:
        return generate_latest(self.registry).decode("utf-8")
