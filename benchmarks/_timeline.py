"""TPT over time as SVG: a line, the moments at which something happened, and the thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from edge_agent.bench.svg import nice_ticks

_WIDTH, _HEIGHT = 900, 360
_LEFT, _RIGHT, _TOP, _MIDDLE, _BOTTOM = 56, 12, 40, 226, 330
_STYLE = (
    "text{font:11px sans-serif;fill:#333}.tpt{fill:none;stroke:#1f6feb;stroke-width:1.5}"
    ".r1{fill:none;stroke:#d1242f}.r2{fill:none;stroke:#1a7f37}"
    ".grid{stroke:#ddd}.moment{stroke:#888;stroke-dasharray:3 3}"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """``at`` in seconds; ``tpt`` in ms per token; the thresholds in force."""

    at: float
    tpt: float
    r1: float
    r2: float


@dataclass(frozen=True, slots=True)
class Moment:
    """What happened ``at`` seconds."""

    at: float
    text: str


def timeline(title: str, samples: Sequence[Sample], moments: Sequence[Moment]) -> str:
    """The picture; ``samples`` in order."""
    end = max([1.0, *(sample.at for sample in samples)])
    top = max([1.0, *(sample.tpt for sample in samples)])

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * at / end

    def y(tpt: float) -> float:
        return _MIDDLE - (_MIDDLE - _TOP) * tpt / top

    def low(ratio: float) -> float:
        return _BOTTOM - (_BOTTOM - _MIDDLE - 20) * ratio

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img"><title>{escape(title)}</title>'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for tick in nice_ticks(top):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" '
            f'y2="{y(tick):.1f}"/><text x="{_LEFT - 4}" y="{y(tick) + 4:.1f}" '
            f'text-anchor="end">{tick:g}</text>'
        )
    for tick in nice_ticks(end, 8):
        parts.append(
            f'<text x="{x(tick):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{tick:g} s</text>'
        )
    for ratio in (0.0, 1.0):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{low(ratio):.1f}" '
            f'y2="{low(ratio):.1f}"/><text x="{_LEFT - 4}" y="{low(ratio) + 4:.1f}" '
            f'text-anchor="end">{ratio:g}</text>'
        )
    for number, moment in enumerate(moments):
        parts.append(
            f'<line class="moment" x1="{x(moment.at):.1f}" x2="{x(moment.at):.1f}" y1="{_TOP - 8}" '
            f'y2="{_BOTTOM}"/><text x="{x(moment.at) + 3:.1f}" y="{12 + 12 * (number % 2)}">'
            f"{escape(moment.text)}</text>"
        )
    parts.append(_line("tpt", [(x(one.at), y(one.tpt)) for one in samples]))
    parts.append(_line("r1", [(x(one.at), low(one.r1)) for one in samples]))
    parts.append(_line("r2", [(x(one.at), low(one.r2)) for one in samples]))
    parts.append(
        f'<text x="{_LEFT + 4}" y="{_TOP + 4}">TPT, ms a token</text>'
        f'<text x="{_LEFT + 4}" y="{_MIDDLE + 14}" style="fill:#d1242f">R1</text>'
        f'<text x="{_LEFT + 24}" y="{_MIDDLE + 14}" style="fill:#1a7f37">R2</text></svg>'
    )
    return "".join(parts)


def _line(kind: str, points: Sequence[tuple[float, float]]) -> str:
    joined = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    return f'<polyline class="{kind}" points="{joined}"/>'
