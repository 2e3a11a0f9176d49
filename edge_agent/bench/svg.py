"""The plots of a benchmark's report, as SVG that needs nothing from outside."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from edge_agent.bench.watch import (
    DOWN,
    DRAFT,
    FORWARD,
    HOLD,
    ROLLBACK,
    UP_AIR,
    UPLINK,
    VERDICT,
    Span,
)

_ROW = 20
_LABEL = 132
_VALUE = 56
_TOP = 4
#: Prompts whose dots are drawn for one bar.
_MAX_DOTS = 60

_GANTT_ROWS = (
    ("draft", (DRAFT,)),
    ("uplink", (UPLINK, UP_AIR)),
    ("verify", (HOLD, FORWARD)),
    ("downlink", (DOWN,)),
)
_GANTT_ROW = 13
_GANTT_GAP = 14
_GANTT_WIDTH = 720
#: Seconds that a picture of rounds shows at most, and at least.
_MAX_WINDOW, _MIN_WINDOW = 3.0, 0.05


@dataclass(frozen=True, slots=True)
class Bar:
    """``value`` None: nothing to show. ``low``, ``high``: a whisker. ``dots``: single values."""

    label: str
    kind: str
    value: float | None
    text: str
    low: float | None = None
    high: float | None = None
    dots: tuple[float, ...] = ()


def nice_ticks(top: float, count: int = 4) -> list[float]:
    """Round numbers from 0 to about ``top``, which is above 0."""
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= raw * 0.999)
    return [i * step for i in range(math.floor(top / step + 1e-9) + 1)]


def bars(title: str, items: Sequence[Bar], *, width: int = 460, top: float | None = None) -> str:
    """A horizontal bar chart. ``top``: the end of its scale; by default what is shown."""
    shown = [
        value
        for item in items
        for value in (item.value, item.high, *item.dots)
        if value is not None
    ]
    end = top or max([*shown, 0.0]) or 1.0
    plot = width - _LABEL - _VALUE
    height = _TOP + _ROW * len(items) + 18

    def x(value: float) -> float:
        return _LABEL + plot * min(max(value, 0.0), end) / end

    parts = [
        f'<svg class="bars" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title, quote=True)}">'
    ]
    for tick in nice_ticks(end):
        parts.append(
            f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="0" '
            f'y2="{height - 16}"/><text class="tick" x="{x(tick):.1f}" y="{height - 4}" '
            f'text-anchor="middle">{tick:g}</text>'
        )
    for index, item in enumerate(items):
        y = _TOP + index * _ROW
        parts.append(
            f'<text class="name" x="{_LABEL - 6}" y="{y + 13}" text-anchor="end">'
            f"{escape(item.label)}</text>"
        )
        parts.append(
            f'<text class="value" x="{width - 2}" y="{y + 13}" text-anchor="end">'
            f"{escape(item.text)}</text>"
        )
        if item.value is None:
            continue
        parts.append(
            f'<rect class="bar {item.kind}" x="{_LABEL}" y="{y + 3}" '
            f'width="{x(item.value) - _LABEL:.1f}" height="{_ROW - 7}"/>'
        )
        for dot in item.dots[:_MAX_DOTS]:
            parts.append(f'<circle class="dot" cx="{x(dot):.1f}" cy="{y + _ROW / 2}" r="1.6"/>')
        if item.low is not None and item.high is not None and item.high > item.low:
            middle = y + _ROW / 2
            parts.append(
                f'<path class="whisker" d="M{x(item.low):.1f} {middle - 4}v8m0 -4'
                f'H{x(item.high):.1f}m0 -4v8"/>'
            )
    parts.append("</svg>")
    return "".join(parts)


def lost_drafts(spans: Sequence[Span]) -> set[int]:
    """Indices of the DRAFT spans whose tokens were rolled back later; ``spans`` in order."""
    alive: list[int] = []
    lost: set[int] = set()
    for index, span in enumerate(spans):
        if span.lane == DRAFT:
            alive.append(index)
        elif span.lane == ROLLBACK:
            # A draft span that began before the rollback and is not lost yet: the latest go.
            cut = max(0, len(alive) - span.count)
            lost.update(alive[cut:])
            del alive[cut:]
    return lost


def typical_round(spans: Sequence[Span]) -> tuple[float, float] | None:
    """Begin and end (seconds) of the round of median length, from verdict to verdict."""
    moments = [span.begin for span in spans if span.lane == VERDICT]
    rounds = [(b - a, a, b) for a, b in pairwise(moments) if b > a]
    if not rounds:
        return None
    # Neither the first rounds, which still have the prompt in them, nor the last, which ends.
    inner = rounds[1:-1] or rounds
    median = statistics.median_low([length for length, _, _ in inner])
    return next((a, b) for length, a, b in inner if length == median)


def gantt(title: str, timelines: Mapping[str, Sequence[Span]]) -> str:
    """One round or more of each policy on one scale of time, each from a verdict's arrival on."""
    rounds = {name: typical_round(spans) for name, spans in timelines.items()}
    found = {name: pair for name, pair in rounds.items() if pair is not None}
    if not found:
        return ""
    longest = max(end - begin for begin, end in found.values())
    window = min(_MAX_WINDOW, max(_MIN_WINDOW, longest * 1.1))
    block = _GANTT_ROW * len(_GANTT_ROWS) + _GANTT_GAP
    height = block * len(found) + 20
    left = _LABEL + 56
    width = left + _GANTT_WIDTH + 10

    def x(seconds: float) -> float:
        return left + _GANTT_WIDTH * seconds / window

    parts = [
        f'<svg class="gantt" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title, quote=True)}">'
    ]
    for tick in nice_ticks(window * 1000.0, 6):
        at = x(tick / 1000.0)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height - 18}"/>'
            f'<text class="tick" x="{at:.1f}" y="{height - 5}" text-anchor="middle">'
            f"{tick:g} ms</text>"
        )
    for index, (name, (begin, _)) in enumerate(found.items()):
        parts += _gantt_block(name, timelines[name], begin, window, index * block, left)
    parts.append("</svg>")
    return "".join(parts)


def _gantt_block(  # noqa: PLR0917
    name: str, spans: Sequence[Span], begin: float, window: float, top: float, left: float
) -> list[str]:
    def x(seconds: float) -> float:
        return left + _GANTT_WIDTH * (seconds - begin) / window

    parts = [
        f'<text class="name" x="4" y="{top + 2.4 * _GANTT_ROW:.1f}">{escape(name)}</text>',
        f'<line class="rule" x1="0" x2="{left + _GANTT_WIDTH}" '
        f'y1="{top - _GANTT_GAP / 2:.1f}" y2="{top - _GANTT_GAP / 2:.1f}"/>',
    ]
    row_of: dict[str, int] = {}
    for row, (label, lanes) in enumerate(_GANTT_ROWS):
        row_of.update(dict.fromkeys(lanes, row))
        parts.append(
            f'<text class="tick" x="{left - 6}" y="{top + row * _GANTT_ROW + 10}" '
            f'text-anchor="end">{label}</text>'
        )
    lost = lost_drafts(spans)
    end = begin + window
    bottom = top + _GANTT_ROW * len(_GANTT_ROWS)
    for index, span in enumerate(spans):
        if span.end < begin or span.begin > end:
            continue
        if span.lane in (VERDICT, ROLLBACK):
            css = "commit" if span.lane == VERDICT else "rollback"
            what = "committed" if span.lane == VERDICT else "rolled back"
            parts.append(
                f'<line class="{css}" x1="{x(span.begin):.1f}" x2="{x(span.begin):.1f}" '
                f'y1="{top - 2}" y2="{bottom + 1}"><title>{span.count} {what} at '
                f"{span.begin * 1000.0:.1f} ms</title></line>"
            )
            if span.lane == VERDICT:
                parts.append(
                    f'<text class="count" x="{x(span.begin) + 2:.1f}" y="{bottom + 8:.1f}">'
                    f"+{span.count}</text>"
                )
            continue
        a, b = max(span.begin, begin), min(span.end, end)
        css = f"{span.lane} lost" if index in lost else span.lane
        y = top + row_of[span.lane] * _GANTT_ROW + 1
        length = (span.end - span.begin) * 1000.0
        parts.append(
            f'<rect class="{css}" x="{x(a):.2f}" y="{y:.1f}" '
            f'width="{max(0.6, x(b) - x(a) - 0.4):.2f}" height="{_GANTT_ROW - 3}">'
            f"<title>{css}: {length:.1f} ms</title></rect>"
        )
    return parts
