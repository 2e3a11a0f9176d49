"""What the live view shows: rows from successive readings of the fleet. No clock, no screen.

A reading is the object of cloud_verifier.exporter.report, from this process or over HTTP, so all of
it is outside input: what has the wrong type is taken for absent, and text is made printable.

Rates are between two messages of a device, as its counters tell: seconds per token (TPT) is
generation seconds over committed tokens, by the paper's definition. Before there are two, ratios
are those since the start of its agent, and what needs time has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from broker.errors import RemoteProtocolError
from cloud_verifier.exporter.report import FORMAT

SORTS = ("tpt", "acceptance", "device", "seen")
MAX_TEXT = 64
#: What is larger is no measurement.
_MOST = 1e30
#: Counters from which rates come.
_COUNTERS = (
    "committed_tokens_total",
    "generation_seconds_total",
    "judged_tokens_total",
    "accepted_tokens_total",
    "energy_joules_total",
)
_TOKENS, _SECONDS, _JUDGED, _ACCEPTED, _JOULES = _COUNTERS


@dataclass(frozen=True)
class Row:
    """One device; None: not known. Times in seconds, ``seen`` is the age of its telemetry."""

    device: str
    online: bool | None = None
    seen: float | None = None
    tpt: float | None = None
    ttft: float | None = None
    acceptance: float | None = None
    tokens_per_second: float | None = None
    joules_per_token: float | None = None
    r1: float | None = None
    r2: float | None = None
    config_version: int | None = None
    policy: str = ""
    alpha: float | None = None
    gamma: float | None = None
    temperature: float | None = None
    machine: str = ""


@dataclass(frozen=True)
class VerifierRow:
    """One replica, as its status says."""

    verifier: str
    online: bool
    model: str = ""
    sessions: int | None = None
    max_sessions: int | None = None


@dataclass(frozen=True)
class Totals:
    """Of all devices and replicas together."""

    devices: int = 0
    online: int = 0
    telemetry: int = 0
    tokens_per_second: float = 0.0
    tpt: float | None = None
    acceptance: float | None = None
    verifiers_online: int = 0
    sessions: int = 0
    max_sessions: int = 0


@dataclass(frozen=True)
class View:
    """What one moment shows; ``time`` in Unix seconds by the clock of the source."""

    time: float | None
    connected: bool
    totals: Totals
    rows: Sequence[Row]
    verifiers: Sequence[VerifierRow]

    def as_json(self) -> dict[str, Any]:
        """For programs: names with units, unknown values null."""
        return {
            "time": self.time,
            "broker_connected": self.connected,
            "totals": _with_units(self.totals),
            "devices": [_with_units(row) for row in self.rows],
            "verifiers": [_with_units(row) for row in self.verifiers],
        }


_UNITS = {
    **dict.fromkeys(("seen", "tpt", "ttft", "alpha", "gamma"), "_seconds"),
    "temperature": "_celsius",
}


def _with_units(row: Row | VerifierRow | Totals) -> dict[str, Any]:
    return {name + _UNITS.get(name, ""): value for name, value in asdict(row).items()}


@dataclass
class _Last:
    """A device's last message: which it was, when it was sent at the earliest, and its figures."""

    boot: str
    sequence: float
    when: float
    counters: Mapping[str, float]
    ttft: tuple[float, float]
    change: Mapping[str, float] = field(default_factory=dict)  # to it from the one before
    ttft_change: tuple[float, float] = (0.0, 0.0)
    span: float = 0.0


class Readings:
    """Turns one reading after another into views; remembers each device's last message."""

    def __init__(self) -> None:
        self._last: dict[str, _Last] = {}

    def view(self, reading: object, sort: str = "tpt") -> View:
        """The view of ``reading``. Raises RemoteProtocolError for what is no reading at all."""
        if not isinstance(reading, Mapping) or not isinstance(reading.get("devices"), Mapping):
            raise RemoteProtocolError("no report of a fleet", cause="fields")
        if reading.get("format") != FORMAT:
            form = printable(reading.get("format"))
            raise RemoteProtocolError(f"a report of format {form}, known is {FORMAT}", cause="kind")
        time = _number(reading.get("time"))
        devices = {
            printable(name): device
            for name, device in reading["devices"].items()
            if isinstance(device, Mapping)
        }
        rows = [self._row(name, device, time) for name, device in devices.items()]
        verifiers = _verifiers(reading.get("verifiers"))
        totals = self._totals(rows, verifiers, devices)
        for gone in self._last.keys() - devices.keys():
            del self._last[gone]
        connected = reading.get("broker_connected") is True
        return View(time, connected, totals, sorted_rows(rows, sort), verifiers)

    def _row(self, name: str, device: Mapping[str, Any], time: float | None) -> Row:
        online = device.get("online")
        online = online if isinstance(online, bool) else None
        figures = device.get("figures")
        if not isinstance(figures, Mapping):
            self._last.pop(name, None)
            return Row(name, online)
        figures = {key: n for key in figures if (n := _number(figures[key])) is not None}
        age = _number(device.get("age_seconds"))
        last = self._note(name, device, figures, (time or 0.0) - (age or 0.0))
        moved = last.change if last.change.get(_TOKENS, 0.0) > 0.0 else last.counters
        judged = last.change if last.change.get(_JUDGED, 0.0) > 0.0 else last.counters
        total, count = last.ttft_change if last.ttft_change[1] > 0.0 else last.ttft
        version = figures.get("config_version")
        return Row(
            name,
            online,
            age,
            _ratio(moved, _SECONDS, _TOKENS),
            _divided(total, count),
            _ratio(judged, _ACCEPTED, _JUDGED),
            _divided(last.change.get(_TOKENS, 0.0), last.span),
            _ratio(moved, _JOULES, _TOKENS),
            figures.get("r1_ratio"),
            figures.get("r2_ratio"),
            None if version is None else int(version),
            printable(device.get("policy", "")),
            figures.get("alpha_seconds"),
            figures.get("gamma_seconds"),
            figures.get("temperature_celsius"),
            printable(device.get("machine", "")),
        )

    def _note(
        self, name: str, device: Mapping[str, Any], figures: Mapping[str, float], when: float
    ) -> _Last:
        boot = str(device.get("boot"))
        sequence = _number(device.get("sequence")) or 0.0
        before = self._last.get(name)
        if before is not None and (before.boot, before.sequence) == (boot, sequence):
            return before  # nothing new since
        counters = {key: figures[key] for key in _COUNTERS if key in figures}
        last = _Last(boot, sequence, when, counters, _histogram(device.get("ttft_seconds")))
        if before is not None and when > before.when:
            # After a restart counters begin at 0, and what they show came since.
            again = before.boot != boot
            last.change = {
                key: value - (0.0 if again else before.counters.get(key, 0.0))
                for key, value in counters.items()
            }
            total, count = (0.0, 0.0) if again else before.ttft
            last.ttft_change = (last.ttft[0] - total, last.ttft[1] - count)
            last.span = when - before.when
        self._last[name] = last
        return last

    def _totals(
        self,
        rows: Sequence[Row],
        verifiers: Sequence[VerifierRow],
        devices: Mapping[str, Mapping[str, Any]],
    ) -> Totals:
        sums = dict.fromkeys(_COUNTERS, 0.0)
        for name in devices:
            last = self._last.get(name)
            if last is not None:
                moved = last.change if last.span > 0.0 else last.counters
                for key in _COUNTERS:
                    sums[key] += moved.get(key, 0.0)
        here = [row for row in verifiers if row.online]
        return Totals(
            len(rows),
            sum(row.online is True for row in rows),
            sum(row.seen is not None for row in rows),
            sum(row.tokens_per_second or 0.0 for row in rows),
            _ratio(sums, _SECONDS, _TOKENS),
            _ratio(sums, _ACCEPTED, _JUDGED),
            len(here),
            sum(row.sessions or 0 for row in here),
            sum(row.max_sessions or 0 for row in here),
        )


def sorted_rows(rows: Sequence[Row], sort: str) -> list[Row]:
    """Those to look at first come first: slow, little accepted, long not seen; unknown is last."""

    def rank(row: Row) -> tuple[float, str]:
        value = {"tpt": row.tpt, "acceptance": row.acceptance, "seen": row.seen}.get(sort, 0.0)
        if value is None:
            return math.inf, row.device
        return (value if sort == "acceptance" else -value), row.device

    return sorted(rows, key=rank)


def printable(value: object) -> str:
    """Text for a terminal: no control or escape codes, and not endless."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() else "?" for c in text[: MAX_TEXT + 1])
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _number(value: object) -> float | None:
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # (one of the two)
    except OverflowError:
        return None
    return number if abs(number) <= _MOST else None


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _ratio(figures: Mapping[str, float], over: str, under: str) -> float | None:
    return _divided(figures[over], figures.get(under, 0.0)) if over in figures else None


def _divided(over: float, under: float) -> float | None:
    """None where nothing was counted, or next to nothing by a broken sender."""
    if under <= 0.0:
        return None
    ratio = over / under
    return ratio if math.isfinite(ratio) else None


def _histogram(value: object) -> tuple[float, float]:
    """Sum and count; (0, 0) where there is none."""
    if not isinstance(value, Mapping) or not isinstance(value.get("counts"), list):
        return 0.0, 0.0
    counts = [_number(count) or 0.0 for count in value["counts"]]
    return _number(value.get("total")) or 0.0, sum(counts)


def _verifiers(value: object) -> list[VerifierRow]:
    if not isinstance(value, Mapping):
        return []
    return sorted(
        (
            VerifierRow(
                printable(name),
                status.get("online") is True,
                printable(status.get("model", "")),
                _whole(status.get("sessions")),
                _whole(status.get("max_sessions")),
            )
            for name, status in value.items()
            if isinstance(status, Mapping)
        ),
        key=lambda row: row.verifier,
    )
