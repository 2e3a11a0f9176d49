"""What a benchmark shows in a terminal: progress, a table, and what is to be said about it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from edge_agent.bench.cells import Result
from edge_agent.bench.contenders import CONTENDERS
from edge_agent.bench.summary import Difference, Row

#: Seconds between two lines of progress where there is no terminal.
_QUIET_S = 15.0
_COLUMNS = (
    ("policy", "policy"),
    ("TPT ms", "tpt"),
    ("quartiles", "spread"),
    ("TTFT ms", "ttft"),
    ("accepted", "acceptance"),
    ("draft", "length"),
    ("fwd/tok", "forwards"),
    ("up B/tok", "bytes"),
    ("msg/tok", "messages"),
    ("kept", "kept"),
    ("x cloud", "cloud"),
    ("x best", "best"),
)
#: Differences named one by one; the rest is counted.
_SHOWN = 5


class Progress:
    """Lines on standard error; on a terminal one that is rewritten."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._shown_at = -_QUIET_S
        self._width = 0

    def note(self, line: str) -> None:
        """A line that stays."""
        self.end()
        print(line, file=self._stream, flush=True)

    def cell(self, done: int, result: Result, left_s: float | None) -> None:
        """``done`` cells are done, ``result`` is the latest."""
        what = f"{result.scenario} {result.policy} {result.prompt}"
        if result.error is not None:
            self.note(f"{what} failed: {result.error}")
        self.step(done, self._total, f"{what}: {result.tpt_s * 1000.0:.1f} ms a token", left_s)

    def step(self, done: int, total: int, what: str, left_s: float | None) -> None:
        """``done`` of ``total`` steps are done, ``what`` is the latest."""
        now = time.monotonic()
        if not self._terminal and now - self._shown_at < _QUIET_S and done < total:
            return
        self._shown_at = now
        left = "" if left_s is None else f", about {duration(left_s)} left"
        line = f"[{done}/{total}] {what}{left}"
        if self._terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
            self._stream.flush()
        else:
            print(line, file=self._stream, flush=True)

    def end(self) -> None:
        """Leave the rewritten line."""
        if self._width:
            self._stream.write("\n")
            self._width = 0


def duration(seconds: float) -> str:
    """For people: ``40 s``, ``12 min``, ``1 h 05 min``."""
    if seconds < 90.0:
        return f"{max(0.0, seconds):.0f} s"
    minutes = round(seconds / 60.0)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def cells_of(row: Row) -> dict[str, str]:
    """A row's figures as text, by short names."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{100.0 * value:.0f} %"

    def times(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    best = "best" if row.policy == row.baseline else times(row.speedup_baseline)
    return {
        "policy": row.policy,
        "tpt": f"{row.tpt_ms:.1f}",
        "spread": f"{row.tpt_low_ms:.0f}-{row.tpt_high_ms:.0f}",
        "ttft": f"{row.ttft_ms:.0f}",
        "acceptance": share(row.acceptance),
        "length": f"{row.draft_length:.1f}" if row.draft_length else "-",
        "forwards": f"{row.forwards_per_token:.2f}" if row.forwards_per_token else "-",
        "bytes": f"{row.wire_up_per_token:.0f}" if row.messages_up_per_token else "-",
        "messages": f"{row.messages_up_per_token:.2f}" if row.messages_up_per_token else "-",
        "kept": share(row.kept),
        "cloud": times(row.speedup_cloud),
        "best": best,
    }


def table(rows: Sequence[Row], labels: Mapping[str, str]) -> list[str]:
    """Lines: for each scenario its name and a row for each policy. ``labels``: of scenarios."""
    texts = [(row.scenario, cells_of(row)) for row in rows]
    widths = {
        key: max([len(title), *(len(text[key]) for _, text in texts)]) for title, key in _COLUMNS
    }

    def line(values: Mapping[str, str]) -> str:
        first, *rest = (key for _, key in _COLUMNS)
        return "  ".join(
            [values[first].ljust(widths[first]), *(values[key].rjust(widths[key]) for key in rest)]
        ).rstrip()

    lines: list[str] = []
    for scenario in dict.fromkeys(name for name, _ in texts):
        mine = [row for row in rows if row.scenario == scenario]
        lines += ["", f"{labels.get(scenario, scenario)}  {_conditions(mine)}"]
        lines.append(line({key: title for title, key in _COLUMNS}))
        lines += [line(text) for name, text in texts if name == scenario]
        lines += remarks(mine)
    return lines


def remarks(rows: Sequence[Row]) -> list[str]:
    """What the figures of a scenario do not show, and what disturbed them."""
    lines = []
    planning = max((row.planning_share for row in rows), default=0.0)
    if planning > 0.0:
        lines.append(f"planning and estimating: {100.0 * planning:.2f} % of the time at most")
    measured = next((row for row in rows if row.policy == "pipesd" and row.link_model), None)
    measured = measured or next((row for row in rows if row.link_model), None)
    if measured is not None:
        lines.append(
            f"link as {measured.policy} measured it: {measured.alpha_ms:.1f} ms there and back, "
            f"busy for {measured.occupancy_ms:.1f} ms a message ({measured.link_model} cost model)"
        )
    repeated = [f"{row.policy} {row.timeouts}" for row in rows if row.timeouts]
    if repeated:
        lines.append(f"requests repeated for want of a verdict in time: {', '.join(repeated)}")
    failed = [f"{row.policy} {row.failed}" for row in rows if row.failed]
    if failed:
        lines.append(f"failed, and left out for all: {', '.join(failed)}")
    return lines


def load_line(rows: Sequence[Row], cores: int) -> str | None:
    """A warning where other work took the cores; None on a quiet machine."""
    load = statistics.median(row.load for row in rows) if rows else 0.0
    # The bench itself keeps about as many threads busy as there are cores, and one more.
    if load <= cores + 1.5:
        return None
    return (
        f"the machine was busy (load {load:.1f} on {cores} cores): times are longer than on a "
        "quiet one, for all policies alike"
    )


def _conditions(rows: Sequence[Row]) -> str:
    """What drafting and verifying cost there, and how many generations each row is of."""
    gammas = sorted(row.gamma_ms for row in rows if row.gamma_ms is not None)
    forwards = sorted(
        row.forward_ms for row in rows if row.forward_ms is not None and row.policy != "local"
    )
    words = [f"{rows[0].pairs} generations each"]
    if gammas:
        words.append(f"draft {gammas[len(gammas) // 2]:.1f} ms a token")
    if forwards:
        words.append(f"forward {forwards[0]:.0f}-{forwards[-1]:.0f} ms")
    return f"({', '.join(words)})"


def legend() -> list[str]:
    """What the columns mean."""
    return [
        "",
        "TPT: ms per committed token from the request on, median over prompts, and quartiles.",
        "draft: tokens judged per verdict. up: bytes of MQTT packets, and messages, per token.",
        "kept: share of the tokens drafted while a verdict was awaited that stayed.",
        "x cloud, x best: how many times as fast as the target alone, as the best baseline.",
    ]


def texts_line(compared: int, found: Sequence[Difference], dtype: str) -> list[str]:
    """Whether all texts are the same, as they must be; in float32 exactly."""
    if not compared:
        return ["no texts to compare"]
    if not found:
        return [f"texts: the same in all {compared} generations that asked the target"]
    lines = [f"texts: {len(found)} of {compared} generations differ"]
    lines += [f"  {one}" for one in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"  and {len(found) - _SHOWN} more")
    if dtype != "float32":
        lines.append(
            f"  ({dtype} rounds differently for other numbers of tokens, so near ties may fall "
            "otherwise; float32 is exact)"
        )
    return lines


def failures(results: Sequence[Result]) -> list[str]:
    """A line for each cell that failed."""
    return [
        f"failed: {one.policy} in {one.scenario}, prompt {one.prompt}: {one.error}"
        for one in results
        if one.error is not None
    ]


def as_json(
    header: Mapping[str, Any],
    rows: Sequence[Row],
    results: Sequence[Result],
    found: Sequence[Difference],
    *,
    planned: int,
) -> dict[str, Any]:
    """Everything, for ``--json`` and the report's file."""
    good = sum(result.error is None for result in results)
    return {
        **header,
        "cells_planned": planned,
        "cells_done": good,
        "policies": {
            name: {"group": one.group, "note": one.note} for name, one in CONTENDERS.items()
        },
        "differences": [str(one) for one in found],
        "summary": [row.to_dict() for row in rows],
        "cells": [result.to_dict() for result in results],
    }
