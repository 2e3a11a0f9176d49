"""The fleet as JSON: for ``cloud-verifier top``, and for tuners without a Prometheus.

    {"format": 1, "time": Unix seconds, "ttl_seconds": 60.0, "broker_connected": true,
     "buckets_seconds": [0.001, ...],
     "devices": {"pi-7": {"online": true, "age_seconds": 1.2, "clock_offset_seconds": 0.01,
                          "boot": "...", "sequence": 17, "version": "...", "draft": "...",
                          "policy": "...", "machine": "...", "energy_source": "...",
                          "figures": {"committed_tokens_total": 812.0, ...},
                          "ttft_seconds": {"counts": [...], "total": 9.5}, "tpt_seconds": {...}}},
     "verifiers": {"verifier-1": {"online": true, "version": "...", "model": "...",
                                  "context": 2048, "sessions": 3, "max_sessions": 256}}}

``figures`` by the names of broker.figures; one that could not be measured is absent. A device
without telemetry has ``online`` alone, ``online`` is null where the broker says nothing. Counts of
histograms are per bucket, not cumulative, the last one above all bounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from broker.exposition import clean
from broker.figures import BUCKETS, BY_NUMBER
from broker.messages import VerifierStatus
from broker.telemetry import Histogram
from cloud_verifier.exporter.table import Entry

FORMAT = 1


def device_report(entry: Entry) -> dict[str, Any]:
    """One device's object; nothing in it is NaN or infinite."""
    report: dict[str, Any] = {"online": entry.online}
    telemetry = entry.telemetry
    if telemetry is None:
        return report
    good, _ = clean(telemetry.figures)
    report |= {
        "age_seconds": entry.age,
        "clock_offset_seconds": entry.clock_offset,
        "boot": telemetry.boot,
        "sequence": telemetry.sequence,
        "version": telemetry.version,
        "draft": telemetry.draft,
        "policy": telemetry.policy,
        "machine": telemetry.machine,
        "energy_source": telemetry.energy_source,
        "figures": {BY_NUMBER[number].name: value for number, value in good.items()},
    }
    for name, histogram in (("ttft_seconds", telemetry.ttft), ("tpt_seconds", telemetry.tpt)):
        if histogram.counts:
            report[name] = _histogram(histogram)
    return report


def _histogram(histogram: Histogram) -> dict[str, Any]:
    return {"counts": list(histogram.counts), "total": histogram.total}


def fleet_head(
    verifiers: Mapping[str, VerifierStatus], *, wall: float, ttl: float, connected: bool
) -> dict[str, Any]:
    """Everything but the devices; see the module."""
    return {
        "format": FORMAT,
        "time": wall,
        "ttl_seconds": ttl,
        "broker_connected": connected,
        "buckets_seconds": list(BUCKETS),
        "verifiers": {
            name: {
                "online": status.online,
                "version": status.version,
                "model": status.model,
                "context": status.context,
                "sessions": status.sessions,
                "max_sessions": status.max_sessions,
            }
            for name, status in verifiers.items()
        },
    }


def fleet_report(head: Mapping[str, Any], entries: Iterable[Entry]) -> dict[str, Any]:
    """The whole object."""
    return {**head, "devices": {entry.name: device_report(entry) for entry in entries}}


def fleet_json(head: Mapping[str, Any], entries: Iterable[Entry]) -> str:
    """The whole object as text, made a device at a time: a fleet's objects would take many times
    its memory, and no other thread waits long for the interpreter."""
    devices = ",".join(
        f"{json.dumps(entry.name)}:{json.dumps(device_report(entry), allow_nan=False)}"
        for entry in entries
    )
    return f'{json.dumps(head, allow_nan=False)[:-1]},"devices":{{{devices}}}}}\n'
