"""What a fleet's run shows: one object for machines, some lines for people, a line meanwhile."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from edge_agent.bench.fleet_run import Moment, Outcome
from edge_agent.bench.fleet_stats import SESSION_LOSSES, Histogram
from edge_agent.bench.fleet_usage import Usage

#: Seconds between two lines of progress where there is no terminal.
_QUIET_S = 15.0
_MB = 1e6
#: Counters of the edge's sessions that say what went wrong on the way, and was mended.
LOSSES = (
    *SESSION_LOSSES,
    "disconnects",
    "reconnects",
    "dropped",
    "inbox_full",
    "rejected",
    "left_without_goodbye",
    "callback_errors",
)
#: Milliseconds late at which the loop, not the verifier, may be what is measured.
LATE_MS = 20.0


def as_json(
    outcome: Outcome,
    settings: dict[str, Any],
    *,
    counters: dict[str, Any] | None,
    usage: dict[str, Usage | None],
) -> dict[str, Any]:
    """Everything that is known. Times in milliseconds but ``seconds``; sizes in bytes.

    ``counters``: of the verifier, None where it tells none. ``usage``: by the name of what uses it.
    """
    tally, seconds = outcome.tally, outcome.seconds
    counts = tally.counts
    tokens = counts["tokens"]
    messages = counts["messages_up"] + counts["messages_down"]
    return {
        "settings": settings,
        "stopped": outcome.stopped,
        "seconds": round(seconds, 3),
        "generations": counts["generations"],
        "wrong": counts["wrong"] + counts["misplaced"],
        "incomplete": counts["incomplete"],
        "cut_off": counts["cut_off"],
        "refusals": counts["refusals"],
        "tokens": tokens,
        "tokens_per_s": _ratio(tokens, seconds),
        "sessions": {"mean": round(outcome.sessions_mean, 1), "most": outcome.sessions_most},
        "tpt_ms": _times(tally.tpt),
        "ttft_ms": _times(tally.ttft),
        "round_ms": _times(tally.rounds),
        "late_ms": _times(tally.late),
        "verdicts_per_token": _ratio(counts["forwards"], tokens),
        "drafted_per_token": _ratio(counts["drafted"], tokens),
        "accepted": _ratio(counts["accepted"], counts["judged"]),
        "messages_per_s": _ratio(messages, seconds),
        "messages_up_per_token": _ratio(counts["messages_up"], tokens),
        "bytes_up_per_token": _ratio(counts["bytes_up"], tokens),
        "losses": {name: counts[name] for name in LOSSES},
        "reasons": dict(tally.reasons.most_common()),
        "batch": _batch(counters),
        "verifier": counters,
        "usage": {
            name: None if one is None else {"cpu_s": round(one.cpu_s, 2), "peak": one.peak_bytes}
            for name, one in usage.items()
        },
    }


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _times(times: Histogram) -> dict[str, float | None]:
    """In milliseconds."""
    found = {
        "p50": times.quantile(0.5),
        "p90": times.quantile(0.9),
        "p99": times.quantile(0.99),
        "mean": times.mean,
        "most": times.largest if times.count else None,
    }
    return {name: None if one is None else round(one * 1e3, 3) for name, one in found.items()}


def _batch(counters: dict[str, Any] | None) -> dict[str, float | None] | None:
    """Of the verifier's forwards: how many, with how many sessions and tokens each."""
    if counters is None or not counters.get("forwards"):
        return None
    forwards = counters["forwards"]
    return {
        "forwards": forwards,
        "sessions": _ratio(counters["batch_sessions"], forwards),
        "tokens": _ratio(counters["batch_tokens"], forwards),
        "forwards_per_token": _ratio(forwards, counters["committed"]),
    }


def lines(data: dict[str, Any]) -> list[str]:
    """The report for a terminal."""
    settings = data["settings"]
    losses = {name: count for name, count in data["losses"].items() if count}
    found = [
        f"{settings['devices']} devices in {settings['processes']} processes, policy "
        f"{settings['policy']}, verifier {settings['verifier']}",
        f"texts: {settings['texts']}",
        f"{data['generations']} texts complete and exact, {data['wrong']} wrong, "
        f"{data['incomplete']} incomplete, {data['cut_off']} cut off, "
        f"{data['refusals']} refusals, in {data['seconds']:.1f} s",
        f"{data['tokens']} tokens, {_show(data['tokens_per_s'])} a second; sessions at a time "
        f"{data['sessions']['mean']:.0f} (most {data['sessions']['most']})",
        _quantiles("TPT", data["tpt_ms"]),
        _quantiles("TTFT", data["ttft_ms"]),
        _quantiles("request to verdict", data["round_ms"]),
        _quantiles("timers late by", data["late_ms"]),
        f"per token: {_show(data['verdicts_per_token'])} verdicts, "
        f"{_show(data['drafted_per_token'])} drafted, "
        f"{_show(data['messages_up_per_token'])} messages and "
        f"{_show(data['bytes_up_per_token'])} bytes up; {_show(data['accepted'])} of the judged "
        "accepted",
        f"{_show(data['messages_per_s'])} messages a second at the devices; on the way: "
        + (", ".join(f"{name} {count}" for name, count in losses.items()) or "nothing lost"),
    ]
    batch = data["batch"]
    if batch is None:
        found.append("batches: this verifier does not tell")
    else:
        found.append(
            f"{batch['forwards']} forwards of {_show(batch['sessions'])} sessions and "
            f"{_show(batch['tokens'])} tokens, {_show(batch['forwards_per_token'])} a token"
        )
        left = data["verifier"]
        found.append(f"left on the verifier: {left['sessions_left']} sessions")
    used = [
        f"{name} unknown"
        if one is None
        else f"{name} {one['cpu_s']:.1f} s, {one['peak'] / _MB:.0f} MB"
        for name, one in data["usage"].items()
    ]
    found.append("CPU and largest memory: " + "; ".join(used))
    found += [f"{count} times: {reason}" for reason, count in data["reasons"].items()]
    late = data["late_ms"]["p90"]
    if late is not None and late > LATE_MS:
        found.append(
            "the emulation itself was late: the times above hold for this machine, not for the "
            "verifier; use more cores, fewer devices or a longer --think"
        )
    return found


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _quantiles(name: str, times: dict[str, float | None]) -> str:
    parts = ", ".join(f"{which} {_show(times[which])}" for which in ("p50", "p90", "p99", "most"))
    return f"{name} ms: {parts}"


class FleetProgress:
    """Lines on standard error; on a terminal one that is rewritten."""

    def __init__(self, devices: int, stream: TextIO | None = None) -> None:
        self._devices = devices
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._due = 0.0
        self._width = 0
        self._last = (0.0, 0)

    def note(self, line: str) -> None:
        """A line that stays."""
        self.end()
        print(line, file=self._stream, flush=True)

    def show(self, moment: Moment) -> None:
        """How far the fleet is."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + (1.0 if self._terminal else _QUIET_S)
        counts = moment.counts
        then, before = self._last
        self._last = (moment.seconds, counts["tokens"])
        rate = (counts["tokens"] - before) / max(0.001, moment.seconds - then)
        bad = counts["wrong"] + counts["misplaced"] + counts["incomplete"]
        line = (
            f"{moment.seconds:.0f} s: {moment.connected} of {self._devices} connected, "
            f"{moment.attached} sessions, {counts['generations']} texts, {rate:.0f} tokens/s, "
            f"{counts['refusals']} refusals, {bad} wrong or incomplete"
        )
        if not self._terminal:
            print(line, file=self._stream, flush=True)
            return
        print(f"\r{line.ljust(self._width)}", end="", file=self._stream, flush=True)
        self._width = len(line)

    def end(self) -> None:
        """Leave the rewritten line."""
        if self._width:
            print(file=self._stream, flush=True)
            self._width = 0
