"""The tuner's own series, ``pipesd_tuner_*``, read from its state when it is scraped.

Trials an hour, and the share of them that came to nothing, in PromQL::

    3600 * sum(rate(pipesd_tuner_trials_total[1h]))
    sum(rate(pipesd_tuner_trials_total{state="failed"}[1h]))
        / sum(rate(pipesd_tuner_trials_total[1h]))

What tuning gained on a device, as a factor::

    pipesd_tuner_device_first_tpt_seconds / pipesd_tuner_device_best_tpt_seconds
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from broker import __version__
from cloud_verifier.tuner.core.device import PHASES
from cloud_verifier.tuner.core.messages import Choice, Proposal, Record
from cloud_verifier.tuner.service import Tuner

PREFIX = "pipesd_tuner_"
STATES = ("complete", "early", "failed")
#: Why trials fail; each is there from the start, as 0.
FAILURES = (
    "no_ack", "idle", "gone", "restart", "policy", "config", "link", "pinned", "reset",
    "own_thresholds", "publish", "storage",
)  # fmt: skip
SOURCE_ERRORS = ("away", "timeout", "status", "query", "answer", "size")
REJECTED = ("device", "absent", "value", "sample", "not_finite")
DRIFTS = ("tpt", "link")
#: What else is counted, under ``pipesd_tuner_events_total``.
EVENTS = (
    "restarts", "offered_again", "disobedient", "too_many_devices", "forgotten", "leases_lost",
    "trials_left_behind", "put_off", "late", "overtaken", "broken_studies", "table_full",
)  # fmt: skip


class _Shown(NamedTuple):
    name: str
    tpt: float | None
    first: float | None
    best: Choice | None
    proposal: Proposal | None
    record: Record


class TunerCollector(Collector):
    """Reads ``tuner`` at each scrape."""

    def __init__(self, tuner: Tuner) -> None:
        self._tuner = tuner

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        tuner = self._tuner
        with tuner.lock:
            own = Counter(tuner.core.stats)
            own.update(tuner.stats)
            phases, searching = tuner.core.phases, tuner.core.searching
            strangers = len(tuner.core.strangers)
            devices = [
                _Shown(
                    name, device.tpt, device.first_tpt, device.best, device.proposal, device.record
                )
                for name, device in tuner.core.devices.items()
            ]
        rejected = dict(tuner.source.rejected)
        failed = {cause: own[f"failed_{cause}"] for cause in FAILURES}
        trials = {state: own[state] for state in ("complete", "early")}
        trials["failed"] = sum(failed.values())
        for name, text, label, counts in (
            ("trials", "Trials by how they ended.", "state", trials),
            ("trial_failures", "Trials that came to nothing.", "cause", failed),
            (
                "drifts",
                "Searches begun anew because something moved.",
                "cause",
                {cause: own[f"drift_{cause}"] for cause in DRIFTS},
            ),
            (
                "source_errors",
                "Readings of all devices that failed.",
                "cause",
                {cause: own[f"source_{cause}"] for cause in SOURCE_ERRORS},
            ),
            (
                "rejected",
                "Devices and samples of a reading that were left out.",
                "cause",
                dict.fromkeys(REJECTED, 0) | rejected,
            ),
            ("events", "What else happened.", "event", {event: own[event] for event in EVENTS}),
        ):
            yield _labelled(CounterMetricFamily(PREFIX + name, text, labels=[label]), counts)
        for name, text, count in (
            ("searches", "Searches that ended with a best pair.", own["searches"]),
            ("queries", "Requests to the source.", tuner.source.queries),
            ("config_publishes", "Configs sent to devices.", tuner.configs.publishes),
            ("config_publish_failures", "Configs that did not go out.", own["publish_failed"]),
            ("configs_unreadable", "Configs heard that make no sense.", tuner.configs.rejected),
            ("storage_errors", "Times that the storage did not answer.", own["storage_errors"]),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=count)
        yield _labelled(
            GaugeMetricFamily(PREFIX + "devices", "Devices by phase.", labels=["phase"]),
            {phase: phases[phase] for phase in PHASES},
        )
        for name, text, value in (
            ("searching", "Devices on which trials are made now.", searching),
            ("places", "Devices on which trials may be made at a time.", tuner.core.places),
            ("strangers", "Devices that another tuner minds, or nobody yet.", strangers),
            ("broker_connected", "1 while configs can be sent.", int(tuner.configs.connected)),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        yield from _of_devices(devices)
        yield InfoMetricFamily(PREFIX[:-1], "What the tuner is.", {"version": __version__})


def _of_devices(devices: Iterable[_Shown]) -> Iterable[Metric]:
    families = {
        name: GaugeMetricFamily(f"{PREFIX}device_{name}", text, labels=["device"])
        for name, text in (
            ("current_tpt_seconds", "Seconds per committed token, as measured last."),
            ("first_tpt_seconds", "The same of the first trial of this search."),
            ("best_tpt_seconds", "The same of the best pair known."),
            ("best_r1_ratio", "R1 of the best pair known."),
            ("best_r2_ratio", "R2 of the best pair known."),
            ("trial", "Number of the trial under way in this search; 0: none."),
            ("campaign", "Number of this search on the device."),
            ("pinned", "1 while the operator holds the thresholds."),
        )
    }
    for one in devices:
        best = one.best
        values = {
            "current_tpt_seconds": one.tpt,
            "first_tpt_seconds": one.first,
            "best_tpt_seconds": None if best is None else best.tpt or None,
            "best_r1_ratio": None if best is None else best.pair.r1,
            "best_r2_ratio": None if best is None else best.pair.r2,
            "trial": 0.0 if one.proposal is None else one.proposal.index,
            "campaign": one.record.campaign,
            "pinned": int(one.record.pin is not None),
        }
        for key, value in values.items():
            if value is not None:
                families[key].add_metric([one.name], value)
    yield from families.values()


def _labelled(
    family: CounterMetricFamily | GaugeMetricFamily, counts: Mapping[str, int]
) -> CounterMetricFamily | GaugeMetricFamily:
    for label, count in counts.items():
        family.add_metric([label], count)
    return family


class TunerFigures:
    """The tuner's registry; ``text()`` is the exposition, format 0.0.4."""

    def __init__(self, tuner: Tuner) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(TunerCollector(tuner))
        ProcessCollector(registry=self.registry)

    def text(self) -> str:
        return generate_latest(self.registry).decode("utf-8")
