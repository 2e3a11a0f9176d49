"""A replica's Prometheus metrics, and the HTTP server that gives them.

Everything is read when somebody scrapes (``VerifierRuntime.snapshot``); the path of a token pays
nothing for it. Counters count since the start of the process. Series never grow with devices or
sessions. Names begin with ``pipesd_verifier_``; replicas are told apart by the scrape's own
``instance``, and ``pipesd_verifier_build_info`` says which verifier id that is.

Derived figures, in PromQL:

sessions and tokens in a forward, on average::

    rate(pipesd_verifier_batch_sessions_sum[5m]) / rate(pipesd_verifier_batch_sessions_count[5m])
    rate(pipesd_verifier_batch_tokens_sum[5m]) / rate(pipesd_verifier_batch_tokens_count[5m])

forwards of the target per committed token (a session's share: it sat in that many)::

    rate(pipesd_verifier_batch_sessions_sum[5m]) / rate(pipesd_verifier_committed_tokens_total[5m])

acceptance: of the draft tokens that were judged, those that were accepted::

    rate(pipesd_verifier_accepted_tokens_total[5m]) / rate(pipesd_verifier_judged_tokens_total[5m])

utilisation: the share of time in which the engine had something to do::

    1 - rate(pipesd_verifier_stage_seconds_total{stage="idle"}[5m])

share of the engine's work that is not the target's forward::

    1 - rate(pipesd_verifier_stage_seconds_total{stage="forward"}[5m])
      / ignoring(stage) sum without (stage) (
          rate(pipesd_verifier_stage_seconds_total{stage!~"idle|receive"}[5m]))

99th percentile of a forward::

    histogram_quantile(0.99, rate(pipesd_verifier_forward_duration_seconds_bucket[5m]))

joules per committed token::

    rate(pipesd_verifier_energy_joules_total[5m])
      / ignoring(source) rate(pipesd_verifier_committed_tokens_total[5m])
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from broker.messages import REFUSALS
from broker.metrics_http import MetricsServer, Page
from broker.sensors import BackgroundSampler, Readings
from cloud_verifier.measures import Histogram, Snapshot
from cloud_verifier.runtime import VerifierRuntime

PREFIX = "pipesd_verifier_"
#: Label values of one family; what comes on top is counted together as ``other``.
MAX_LABELS = 40
OTHER = "other"

#: Why input is dropped: from the start at 0, so that the first of each is an increase.
CAUSES = (
    "contradiction", "fields", "msgpack", "retained", "token_out_of_range", "too_far_ahead",
    "too_large", "topic", "unexpected_kind", "unknown_kind",
)  # fmt: skip


class Name(NamedTuple):
    """Of a family, without prefix and ``_total``; ``label`` of a count by label."""

    name: str
    help: str
    label: str = ""


#: Fields of VerifierStats. One that is not here is exported by its own name.
STATS: Mapping[str, Name] = {
    "opens": Name("sessions_opened", "Openings that were accepted, those of one session again."),
    "refused": Name("sessions_refused", "Openings that were refused.", "reason"),
    "closed": Name("sessions_closed", "Sessions that their devices closed."),
    "expired": Name("sessions_expired", "Sessions forgotten because nothing came from them."),
    "forwards": Name("forwards", "Forwards of the target that were done."),
    "forward_failures": Name("forward_failures", "Forwards that failed, their sessions lost."),
    "device_refusals": Name(
        "device_limit_refusals", "Openings refused because their device holds too many sessions."
    ),
    "prefilled_tokens": Name("prefilled_tokens", "Prompt and committed tokens that were computed."),
    "shared_tokens": Name("shared_tokens", "Tokens taken over from what others had computed."),
    "shared_blocks": Name("shared_blocks", "Blocks of K/V memory taken over with them."),
    "evictions": Name("evictions", "Sessions that gave slot and blocks to another one."),
    "blocks_in_use": Name("blocks_in_use", "Blocks of K/V memory that sessions hold."),
    "drafts": Name("drafted_tokens", "Draft tokens that arrived."),
    "judged": Name("judged_tokens", "Draft tokens that the target judged."),
    "accepted": Name("accepted_tokens", "Draft tokens that the target accepted."),
    "committed": Name("committed_tokens", "Tokens made final here: accepted and the target's own."),
    "verdicts": Name("verdicts", "Verdicts, repeated ones left out."),
    "repeats": Name("verdict_repeats", "Times that verdicts were repeated for a device."),
    "resyncs": Name("resyncs", "Times that a device was asked to repeat drafts."),
    "gaps": Name("draft_gaps", "Batches of drafts before which one was missing."),
    "stale_drafts": Name("stale_drafts", "Batches of drafts that came too late to count."),
    "dead_epochs": Name("dead_epochs", "Runs of drafts that contradicted what was committed."),
    "late_triggers": Name("late_triggers", "Requests for a verdict that was given before."),
    "lost_branches": Name("lost_branches", "Branches of draft trees that could not be used."),
    "stale_attach": Name("stale_attachments", "Messages of an earlier attachment of a session."),
    "unknown_sessions": Name("unknown_session_messages", "Messages of sessions not held here."),
    "rejected": Name("rejected_messages", "Input that was dropped because it was wrong.", "cause"),
}
#: How fields end that hold what is, and not what was counted.
NOW = "_in_use"
#: Fields that other families carry: sums of histograms, and the sum over ``refused``.
CARRIED: Mapping[str, str] = {
    "refusals": "sessions_refused_total",
    "forward_seconds": "forward_duration_seconds_sum",
    "batch_sessions": "batch_sessions_sum",
    "batch_tokens": "batch_tokens_sum",
}
#: Label values that are there from the start.
PRESET: Mapping[str, tuple[str, ...]] = {"refused": REFUSALS, "rejected": CAUSES}

COUNTERS: Mapping[str, str] = {
    "core_faults": "Exceptions of the core, each of which cost one session at most: please report.",
    "publish_failures": "Messages that could not be handed to the broker's connection.",
    "mqtt_sent_bytes": "Payload bytes published.",
    "mqtt_received_bytes": "Payload bytes received.",
    "mqtt_sent_messages": "Messages published.",
    "mqtt_received_messages": "Messages received.",
    "mqtt_reconnects": "Connections to the broker after the first.",
    "mqtt_dropped_messages": "Messages dropped because there was no connection.",
    "mqtt_callback_errors": "Exceptions of what handles messages: please report.",
}
GAUGES: Mapping[str, str] = {
    "sessions": "Sessions held.",
    "sessions_limit": "Sessions that may be held at a time.",
    "slots": "K/V slots of the target.",
    "slots_used": "K/V slots that sessions hold.",
    "blocks": "Blocks of K/V memory.",
    "block_tokens": "Tokens in a block of K/V memory.",
}
#: What becomes of requests, see MetricsServer.
_ANSWERS = ("ok", "unhealthy", "unknown", "failed", "hung_up", "broken")
#: Readings that only grow; ``energy_joules`` has its source as a label.
_GROWING: Mapping[str, tuple[str, str]] = {
    "cpu_seconds": ("process_cpu_seconds", "CPU seconds of this process."),
    "machine_cpu_seconds": ("machine_cpu_seconds", "Busy seconds of all processors, summed."),
    "throttled_seconds": ("throttled_seconds", "Seconds in which the hardware was throttled."),
}
_NOW: Mapping[str, tuple[str, str]] = {
    "resident_memory_bytes": ("process_resident_memory_bytes", "Resident memory of this process."),
    "machine_memory_bytes": ("machine_memory_bytes", "Memory of the machine."),
    "machine_available_memory_bytes": (
        "machine_available_memory_bytes",
        "Memory that is available on the machine.",
    ),
    "temperature_celsius": ("temperature_celsius", "Temperature of the processor."),
    "throttled": ("throttled", "1 while the hardware is throttled."),
    "undervoltage": ("undervoltage", "1 while the supply is too weak."),
}


def bounded(counts: Mapping[str, int]) -> dict[str, int]:
    """At most ``MAX_LABELS`` of the labels, the first that came; the rest under ``OTHER``."""
    labels = list(counts)
    found = {label[:64]: counts[label] for label in labels[:MAX_LABELS]}
    rest = sum(counts[label] for label in labels[MAX_LABELS:])
    if rest:
        found[OTHER] = found.get(OTHER, 0) + rest
    return found


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, help, value=value)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, help, value=value)


def _labelled(name: str, help: str, label: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, help, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _histogram(name: str, help: str, held: Histogram) -> Metric:
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip((*held.bounds, float("inf")), held.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), below))
    return HistogramMetricFamily(PREFIX + name, help, buckets=buckets, sum_value=held.total)


def replica_families(snapshot: Snapshot) -> Iterator[Metric]:
    """What a replica counts and holds."""
    for field, value in snapshot.stats.items():
        if field in CARRIED:
            continue
        words = field.replace("_", " ")
        name, text, label = STATS.get(field) or Name(field, f"Count of {words}.", "kind")
        if isinstance(value, Mapping):
            preset = dict.fromkeys(PRESET.get(field, ()), 0)
            yield _labelled(name, text, label, bounded({**preset, **value}))
        elif field.endswith(NOW):
            yield _gauge(name, text, value)
        else:
            yield _counter(name, text, value)
    for name, value in snapshot.counters.items():
        if name not in snapshot.stats:
            yield _counter(name, COUNTERS.get(name, f"Count of {name.replace('_', ' ')}."), value)
    for name, value in snapshot.gauges.items():
        yield _gauge(name, GAUGES.get(name, f"{name.replace('_', ' ').capitalize()}."), value)
    measures = snapshot.measures
    yield _histogram("forward_duration_seconds", "Time of a forward.", measures.forward_seconds)
    yield _histogram("batch_sessions", "Sessions in a forward.", measures.batch_sessions)
    yield _histogram("batch_tokens", "Tokens in a forward.", measures.batch_tokens)
    stages = "Where the time of the engine (and, receive and publish, the network's thread) goes."
    yield _labelled("stage_seconds", stages, "stage", measures.stages)
    waiting = "Sessions that want a verdict and have no seat in the forward that runs."
    yield _gauge("sessions_waiting", waiting, snapshot.waiting)
    yield _gauge("longest_wait_seconds", "For which the first of these waits.", snapshot.waited)
    yield _gauge("broker_connected", "1 while connected to the broker.", snapshot.connected)
    yield _gauge("engine_alive", "1 while the engine runs and takes work.", snapshot.alive)


def reading_families(readings: Readings) -> Iterator[Metric]:
    """What the machine says; what it does not have has no series."""
    for field, (name, text) in _GROWING.items():
        if (value := getattr(readings, field)) is not None:
            yield _counter(name, text, value)
    for field, (name, text) in _NOW.items():
        if (value := getattr(readings, field)) is not None:
            yield _gauge(name, text, value)
    if readings.energy_joules is not None:
        text = "Energy since the start, as the source measures it; estimate: not measured."
        source = readings.energy_source or OTHER
        yield _labelled("energy_joules", text, "source", {source: readings.energy_joules})


class VerifierMetrics(Collector):
    """Collector and server in one. ``port`` 0 takes a free one; raises ConfigError.

    It may be opened before the target is loaded: ``/healthz`` says so until ``watch`` is called.
    """

    def __init__(
        self,
        host: str,
        port: int,
        sampler: BackgroundSampler,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._sampler = sampler
        self._runtime: VerifierRuntime | None = None
        self._build: dict[str, str] = {}
        self._started = wall()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.server = MetricsServer(host, port, self.render, self.health)

    def start(self) -> None:
        """Begin to answer, and to sample the machine."""
        self._sampler.start()
        self.server.start()

    def watch(self, runtime: VerifierRuntime, build: Mapping[str, str]) -> None:
        """From now on ``runtime`` is what is shown; ``build`` are the labels of build_info."""
        self._build = {name: value[-200:] for name, value in build.items()}
        self._runtime = runtime

    def close(self) -> None:
        """Idempotent."""
        self.server.close()
        self._sampler.stop()

    def __enter__(self) -> VerifierMetrics:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def health(self) -> str | None:
        """Why this replica serves nobody; None: it does."""
        if self._runtime is None:
            return "the target is loading"
        if not self._runtime.alive:
            return "the engine does not run"
        return None if self._runtime.connected else "no connection to the broker"

    def render(self, accept: str) -> Page:
        """The page, in the format that the Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return Page(encode(self._registry), content_type)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for at each scrape."""
        yield _gauge("start_time_seconds", "Start of the process, Unix time.", self._started)
        if self._runtime is not None:
            build = InfoMetricFamily(PREFIX + "build", "What runs here.", value=self._build)
            yield build
            yield from replica_families(self._runtime.snapshot())
        yield from reading_families(self._sampler.latest)
        failures = bounded(dict(self._sampler.sampler.failures))
        yield _labelled("sensor_failures", "Readings that failed.", "sensor", failures)
        answers = bounded({**dict.fromkeys(_ANSWERS, 0), **self.server.counts})
        yield _labelled("http_requests", "Requests of metrics and health.", "result", answers)
