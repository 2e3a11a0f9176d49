"""The names of all series that exporter, verifiers, devices and tuner give out."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from threading import Lock
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from broker.exposition import FAMILIES, HISTOGRAM
from broker.sensors import Readings
from cloud_verifier.core.stats import VerifierStats
from cloud_verifier.exporter.figures import Own, OwnFigures
from cloud_verifier.exporter.table import EXTRAS, VERIFIER_FAMILIES
from cloud_verifier.measures import Measures, Snapshot
from cloud_verifier.metrics import COUNTERS, GAUGES, reading_families, replica_families
from cloud_verifier.tuner.core.device import PHASES
from cloud_verifier.tuner.core.fleet import TunerCore
from cloud_verifier.tuner.core.messages import Choice, Proposal, Record, TunerSettings
from cloud_verifier.tuner.core.space import Pair
from cloud_verifier.tuner.figures import TunerCollector


def _names(families: Any) -> set[str]:
    return {sample.name for family in families for sample in family.samples}


def device_metrics() -> set[str]:
    found: set[str] = set()
    for family in (*FAMILIES, *EXTRAS, *VERIFIER_FAMILIES):
        ends = ("_bucket", "_sum", "_count") if family.kind == HISTOGRAM else ("",)
        found.update(family.name + end for end in ends)
    return found


def exporter_metrics() -> set[str]:
    text = OwnFigures(Own).text()
    families: list[Metric] = list(text_string_to_metric_families(text))
    return _names(families)


def verifier_metrics() -> set[str]:
    stats = VerifierStats()
    stats.rejected["fields"] += 1
    snapshot = Snapshot(
        stats={one.name: getattr(stats, one.name) for one in fields(stats)},
        counters=dict.fromkeys(COUNTERS, 0.0),
        gauges=dict.fromkeys(GAUGES, 0.0),
        measures=Measures(),
        waiting=0,
        waited=0.0,
        alive=True,
        connected=True,
    )
    everything = {
        one.name: "rapl" if one.name == "energy_source" else 1.0 for one in fields(Readings)
    }
    readings: Any = Readings
    found = _names([*replica_families(snapshot), *reading_families(readings(**everything))])
    return found | {"pipesd_verifier_build_info"}


def tuner_metrics() -> set[str]:
    """Of a tuner with one device that has everything."""
    pair = Pair(0.2, 0.6)
    device = SimpleNamespace(
        tpt=0.2,
        first_tpt=0.3,
        best=Choice(pair, 0.1, 16),
        proposal=Proposal(1, pair, 1, 16),
        record=Record(),
    )
    tuner: Any = SimpleNamespace(
        lock=Lock(),
        stats=Counter(),
        core=TunerCore(TunerSettings()),
        source=SimpleNamespace(rejected={}, queries=0),
        configs=SimpleNamespace(publishes=0, rejected=0, connected=True),
    )
    tuner.core.devices["pi"] = device
    device.phase = PHASES[0]
    return _names(TunerCollector(tuner).collect())


def known_metrics() -> set[str]:
    """All of them."""
    return device_metrics() | exporter_metrics() | verifier_metrics() | tuner_metrics()
