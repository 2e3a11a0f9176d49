"""A device's telemetry as Prometheus series: for the fleet's exporter and for the device itself.

``render`` gives text of the exposition format 0.0.4 (prometheus.io, Exposition formats), cut up by
family, so that an exporter can keep it per device and put thousands of devices together by joining
texts.

What a broken sender might send is left out here and counted by cause: a series that is absent can
be seen, one that is wrong spoils every rate over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from broker.figures import BUCKETS, BY_NAME, BY_NUMBER, FIGURES, GAUGE, MAX_VALUE
from broker.telemetry import Histogram, Telemetry

PREFIX = "pipesd_device_"
HISTOGRAM = "histogram"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Why a figure was left out.
UNKNOWN, NOT_FINITE, NEGATIVE, TOO_LARGE = CAUSES = (
    "unknown_figure",
    "not_finite",
    "negative",
    "too_large_figure",
)
#: The only figure that may be below 0: a device may stand in the cold.
_SIGNED = BY_NAME["temperature_celsius"].number


class Family(NamedTuple):
    """``name``: with prefix; ``kind``: counter, gauge or histogram; ``help``: one line."""

    name: str
    kind: str
    help: str

    @property
    def header(self) -> str:
        """Its HELP and TYPE lines."""
        text = self.help.replace("\\", "\\\\").replace("\n", "\\n")
        return f"# HELP {self.name} {text}\n# TYPE {self.name} {self.kind}\n"


TTFT = Family(
    f"{PREFIX}ttft_seconds", HISTOGRAM, "From a request to its first committed token, each."
)
TPT = Family(
    f"{PREFIX}tpt_seconds", HISTOGRAM, "Mean time per committed token, of each generation."
)
INFO = Family(f"{PREFIX}info", GAUGE, "What the device is; always 1.")
#: Every family of a device's telemetry, in the order of ``Rendered.texts``.
FAMILIES: tuple[Family, ...] = (
    *(Family(PREFIX + figure.name, figure.kind, figure.help) for figure in FIGURES),
    TTFT,
    TPT,
    INFO,
)
_PLACES = {figure.number: place for place, figure in enumerate(FIGURES)}
_NAMES = {figure.number: PREFIX + figure.name for figure in FIGURES}
_HEADERS = tuple(family.header for family in FAMILIES)
_LE = (*map(repr, BUCKETS), "+Inf")


class Rendered(NamedTuple):
    """``texts``: one for each of FAMILIES, empty where the device has nothing; ``dropped``: figures
    that were left out, by cause."""

    texts: tuple[str, ...]
    dropped: dict[str, int]


def clean(figures: Mapping[int, float]) -> tuple[dict[int, float], dict[str, int]]:
    """The figures that can be, and how many could not, by cause."""
    good: dict[int, float] = {}
    dropped: dict[str, int] = {}
    for number, value in figures.items():
        if number not in BY_NUMBER:
            cause = UNKNOWN
        elif not math.isfinite(value):
            cause = NOT_FINITE
        elif value < 0.0 and number != _SIGNED:
            cause = NEGATIVE
        elif abs(value) > MAX_VALUE:
            cause = TOO_LARGE
        else:
            good[number] = value
            continue
        dropped[cause] = dropped.get(cause, 0) + 1
    return good, dropped


def label_value(text: str) -> str:
    """``text`` for a label, escaped as the format wants; what cannot be printed becomes ``?``."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def sample(name: str, device: str, value: float) -> str:
    """One line of a series whose only label is the device; for what an exporter adds itself."""
    return f'{name}{{device="{label_value(device)}"}} {value!r}\n'


def info_labels(telemetry: Telemetry) -> dict[str, str]:
    """The labels of ``pipesd_device_info`` beside the device."""
    return {
        "version": telemetry.version,
        "draft": telemetry.draft,
        "policy": telemetry.policy,
        "machine": telemetry.machine,
        "energy_source": telemetry.energy_source,
    }


def render(device: str, telemetry: Telemetry) -> Rendered:
    """The series of one device's telemetry as text; about 50 microseconds."""
    good, dropped = clean(telemetry.figures)
    label = f'device="{label_value(device)}"'
    texts = [""] * len(FAMILIES)
    for number, value in good.items():
        texts[_PLACES[number]] = f"{_NAMES[number]}{{{label}}} {value!r}\n"
    texts[-3] = _histogram_text(TTFT.name, label, telemetry.ttft)
    texts[-2] = _histogram_text(TPT.name, label, telemetry.tpt)
    info = ",".join(f'{k}="{label_value(v)}"' for k, v in info_labels(telemetry).items())
    texts[-1] = f"{INFO.name}{{{label},{info}}} 1\n"
    return Rendered(tuple(texts), dropped)


def _histogram_text(name: str, label: str, histogram: Histogram) -> str:
    if not histogram.counts:
        return ""
    lines = [
        f'{name}_bucket{{{label},le="{le}"}} {count}\n'
        for le, count in zip(_LE, accumulate(histogram.counts), strict=True)
    ]
    lines.append(f"{name}_sum{{{label}}} {histogram.total!r}\n")
    lines.append(f"{name}_count{{{label}}} {sum(histogram.counts)}\n")
    return "".join(lines)


def join(devices: Iterable[Sequence[str]]) -> str:
    """One exposition of the ``texts`` of many devices; families that nobody has are left out."""
    parts: list[str] = []
    for header, texts in zip(_HEADERS, zip(*devices, strict=True), strict=False):
        body = "".join(texts)
        if body:
            parts += (header, body)
    return "".join(parts)
