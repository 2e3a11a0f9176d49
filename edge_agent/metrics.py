"""A device's figures (broker.figures): totals of all its generations, the running ones included.

Nothing is counted twice and nothing on the way of a token: each generation keeps its own counts
anyway (``Meter``), and they are added up when somebody asks. So a figure is as it would be if every
token counted itself, at no cost where nobody listens.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from broker.figures import BUCKETS, BY_NAME, BY_NUMBER, COUNTER
from broker.sensors import Readings
from broker.telemetry import Histogram
from edge_agent.core.effects import EdgeStats
from edge_agent.core.sending import Estimates
from edge_agent.meter import Meter

#: Counters of a session and the figure that each adds to.
_STATS = {
    "drafted": "drafted_tokens_total",
    "judged": "judged_tokens_total",
    "accepted": "accepted_tokens_total",
    "target_tokens": "target_tokens_total",
    "local_tokens": "local_tokens_total",
    "rolled_back": "rolled_back_tokens_total",
    "forwards": "forwards_total",
    "triggers_token": "triggers_token_total",
    "triggers_sequence": "triggers_sequence_total",
    "triggers_window": "triggers_window_total",
    "triggers_end": "triggers_end_total",
    "timeouts": "timeouts_total",
    "reopens": "reopens_total",
    "refusals": "refusals_total",
}
#: A generation's traffic, in the order of ``Meter.traffic``.
_TRAFFIC = (
    "uplink_bytes_total",
    "downlink_bytes_total",
    "uplink_messages_total",
    "downlink_messages_total",
)
#: What a machine's sensors say, and the figure that it is.
_READINGS = {
    "cpu_seconds": "cpu_seconds_total",
    "energy_joules": "energy_joules_total",
    "throttled_seconds": "throttled_seconds_total",
    "resident_memory_bytes": "resident_memory_bytes",
    "machine_memory_bytes": "machine_memory_bytes",
    "machine_available_memory_bytes": "machine_available_memory_bytes",
    "temperature_celsius": "temperature_celsius",
    "throttled": "throttled",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """``values`` by number of broker.figures; what is not known is absent. ``policy``: of the
    latest generation."""

    values: dict[int, float]
    ttft: Histogram
    tpt: Histogram
    policy: str


class _Times:
    """Times of one histogram."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._total = 0.0

    def add(self, seconds: float) -> None:
        seconds = max(0.0, seconds)
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self._total += seconds

    @property
    def histogram(self) -> Histogram:
        return Histogram(tuple(self._counts), self._total)


class DeviceFigures:
    """Thread-safe. ``begun``: when the agent started, on its clock, in seconds."""

    def __init__(self, begun: float) -> None:
        self._begun = begun
        self._lock = threading.Lock()
        self._running: dict[int, Meter] = {}  # by identity, the latest last
        self._totals: dict[str, float] = dict.fromkeys(
            (
                "generations_total",
                "generation_errors_total",
                "generation_seconds_total",
                "committed_tokens_total",
                "local_seconds_total",
                *_STATS.values(),
                *_TRAFFIC,
            ),
            0.0,
        )
        self._ttft = _Times()
        self._tpt = _Times()
        self._estimates: Estimates | None = None
        self._remembered = False
        self._policy = ""
        self._highest: dict[int, float] = {}  # of each counter, as it was told

    def remember(self, estimates: Estimates) -> None:
        """What an earlier run of the agent had learnt."""
        with self._lock:
            self._estimates = estimates
            self._remembered = True

    def begin(self, meter: Meter) -> None:
        """A generation was asked for."""
        with self._lock:
            self._running[id(meter)] = meter
            self._policy = meter.policy

    def end(self, meter: Meter, now: float) -> None:
        """It has ended; its meter changes no more."""
        with self._lock:
            if self._running.pop(id(meter), None) is None:
                return
            _add(self._totals, meter, now)
            self._totals["generations_total"] += 1
            self._totals["generation_errors_total"] += meter.failed
            self._estimates = meter.estimates or self._estimates
            progress = meter.progress
            if progress.tokens:
                self._ttft.add(progress.first_at - meter.begun)
                self._tpt.add(meter.generation_seconds / progress.tokens)

    def snapshot(
        self,
        now: float,
        given: Mapping[str, float],
        readings: Readings | None = None,
        *,
        policy: str = "",
    ) -> Figures:
        """All figures as they are at ``now``.

        ``given``: by name, those that the agent itself knows; of ``r1_ratio`` and ``r2_ratio`` they
        are what holds while nothing runs. ``readings``: of the machine's sensors. ``policy``: the
        one that the first generation will go by.
        """
        with self._lock:
            named = dict(self._totals)
            running = list(self._running.values())
            estimates = self._estimates
            for meter in running:
                _add(named, meter, now)
                estimates = meter.estimates or estimates
            named.update(given)
            if running:
                named["r1_ratio"], named["r2_ratio"] = running[-1].thresholds
            named["active_generations"] = float(len(running))
            named["uptime_seconds"] = max(0.0, now - self._begun)
            if estimates is not None:
                drafts = self._remembered or named["drafted_tokens_total"] > 0.0
                named.update(_learnt(estimates, drafts=drafts))
            if readings is not None:
                for name, figure in _READINGS.items():
                    value = getattr(readings, name)
                    if value is not None:
                        named[figure] = value
            values = {BY_NAME[name].number: float(value) for name, value in named.items()}
            self._hold(values)
            name = self._policy or policy
            return Figures(values, self._ttft.histogram, self._tpt.histogram, name)

    def _hold(self, values: dict[int, float]) -> None:
        """No counter ever falls: added up in another order, seconds may differ in the last bit, and
        the least fall of a counter means to Prometheus that it began anew."""
        for number, value in values.items():
            if BY_NUMBER[number].kind == COUNTER:
                highest = max(value, self._highest.get(number, 0.0))
                values[number] = self._highest[number] = highest


def _add(totals: dict[str, float], meter: Meter, now: float) -> None:
    """Add what a generation has counted so far."""
    # Read once: tokens and seconds must be those of the same moment.
    progress = meter.progress
    totals["committed_tokens_total"] += progress.tokens
    totals["generation_seconds_total"] += progress.last_at - meter.begun
    totals["local_seconds_total"] += meter.local_seconds(now)
    stats: EdgeStats = meter.stats
    for name, figure in _STATS.items():
        totals[figure] += getattr(stats, name)
    for figure, count in zip(_TRAFFIC, meter.traffic, strict=True):
        totals[figure] += count


def _learnt(estimates: Estimates, *, drafts: bool) -> dict[str, float]:
    """What is known of link and models; what is only assumed so far is left out.

    ``drafts``: whether the draft model has worked at all.
    """
    found: dict[str, float] = {}
    if drafts:
        found["window_tokens"] = float(estimates.window)
        found["gamma_seconds"] = estimates.gamma
    if estimates.known or estimates.measured:
        link = estimates.link
        found["alpha_seconds"] = link.alpha
        found["beta_seconds"] = link.beta
        found["occupancy_seconds"] = link.occupancy
    if estimates.forward > 0.0:
        found["forward_seconds"] = estimates.forward
    return found
