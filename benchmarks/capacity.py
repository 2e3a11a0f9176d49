"""How many sessions one verifier carries with drafts and without, with the real pair's texts.

    python -m benchmarks.capacity [--dtype bfloat16] [--threads N] [--check] [--json]

A session is carried while its TPT stays below 1.5 times that of a lone session that the target
alone serves. Everything runs by a virtual clock: real session cores, the real verifier core,
recorded texts and drafting times; a forward takes what the real engine took for so many sessions
and tokens, measured first (about a minute) or read from --table. ``--check`` then runs some numbers
of sessions through the fleet load tool, with Mosquitto and a real verifier, and puts the TPT
beside.

Mark: with drafts (``auto``, as shipped) at least 2 times as many as by the target alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import _forward_times, _pair, _virtual
from benchmarks._forward_times import ForwardTimes
from benchmarks._progress import Progress
from broker.errors import ConfigError, PipesdError, TransportError
from edge_agent.bench.forward_table import ForwardTable
from edge_agent.bench.traces import Trace
from edge_agent.core.policies import Policy, cloud, pipesd
from edge_agent.cpus import usable_cores

MARK, LIMIT = 2.0, 1.5
#: How a session is served: its policy, and what the target may do unasked.
MODES: dict[str, tuple[Callable[[], Policy], str]] = {
    "cloud": (cloud, "auto"),
    "triggered": (pipesd, "triggered"),
    "auto": (pipesd, "auto"),
}
SIZES = (1, 2, 4, 8, 16)
CHECKED = (1, 4, 8)
MOST_SESSIONS = 128
CONTEXT = 512
CHECK_S = 900.0
#: Virtual seconds that are measured: at least so many, and of few sessions several texts.
LEAST_S, SESSION_S = 30.0, 160.0


class Bench:
    """Runs scenes and remembers them. ``delay_s``: of the link, one way; ``least_s``: measured."""

    def __init__(
        self,
        texts: Sequence[Trace],
        times: ForwardTimes,
        delay_s: float,
        *,
        least_s: float = LEAST_S,
    ) -> None:
        self._texts = texts
        self._engine = _virtual.TableEngine(texts, times.seconds)
        self._delay_s = delay_s
        self._least_s = least_s
        self._seen: dict[tuple[str, int], _virtual.Seen] = {}
        self.base_s = self.tpt_s("cloud", 1)

    def seen(self, mode: str, sessions: int) -> _virtual.Seen:
        """What a fleet of ``sessions`` sessions sees."""
        key = mode, sessions
        if key not in self._seen:
            policy, verify = MODES[mode]
            scene = _virtual.Scene(
                self._texts, policy(), sessions, verify=verify, delay_s=self._delay_s
            )
            measured_s = self._least_s * max(1.0, SESSION_S / LEAST_S / sessions)
            self._seen[key] = _virtual.run(
                scene, self._engine, warm_s=self._least_s / 3.0, measured_s=measured_s
            )
        return self._seen[key]

    def tpt_s(self, mode: str, sessions: int) -> float:
        """Median over the generations of seconds per token."""
        return self.seen(mode, sessions).tpt_s

    def capacity(self, mode: str) -> int:
        """The most sessions whose TPT is below LIMIT times the lone one's."""
        return most(lambda sessions: self.tpt_s(mode, sessions) < LIMIT * self.base_s)


def most(carried: Callable[[int], bool], limit: int = MOST_SESSIONS) -> int:
    """The largest number up to ``limit`` that is carried; 0: none. More are never easier."""
    if not carried(1):
        return 0
    low, high = 1, 2
    while high <= limit and carried(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if carried(middle) else (low, middle)
    return low


def rows_of(bench: Bench) -> dict[str, dict[str, Any]]:
    """By mode: what is carried, and the figures at SIZES."""
    found: dict[str, dict[str, Any]] = {}
    with Progress("virtual fleets") as progress:
        for number, mode in enumerate(MODES):
            progress.show((number + 0.5) / len(MODES))
            carried = bench.capacity(mode)
            sizes = {}
            for sessions in SIZES:
                seen = bench.seen(mode, sessions)
                sizes[str(sessions)] = {
                    "tpt_ms": round(1e3 * seen.tpt_s, 2),
                    "tokens_per_s": round(seen.tokens_per_s, 1),
                    "forwards_per_token": _per_token(seen, seen.stats.forwards),
                    "target_tokens_per_token": _per_token(seen, seen.stats.batch_tokens),
                    "sessions_per_forward": round(seen.per_forward("batch_sessions"), 2),
                }
            found[mode] = {"carried": carried, "sizes": sizes}
    return found


def _per_token(seen: _virtual.Seen, count: int) -> float:
    return round(count / max(1, seen.stats.committed), 3)


# -- the table ------------------------------------------------------------------------------------


def load_times(path: Path) -> ForwardTimes:
    """A table that ``save_times`` wrote. Raises ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        entries = tuple((int(tokens), float(seconds)) for tokens, seconds in data["alone"])
        return ForwardTimes(ForwardTable(entries), float(data["per_session"]), float(data["off"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--table {path} is no table of forward times: {error}") from None


def save_times(path: Path, times: ForwardTimes) -> None:
    """Raises ConfigError when it cannot be written."""
    data = {"alone": times.alone.entries, "per_session": times.per_session, "off": times.off}
    try:
        path.write_text(json.dumps(data) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--table {path} cannot be written: {error.strerror}") from None


def forward_times(chosen: _pair.Chosen, path: Path | None, rounds: int) -> ForwardTimes:
    """From the file, or measured and written there. Raises PipesdError."""
    if path is not None and path.exists():
        return load_times(path)
    target = _pair.load_target(chosen, _forward_times.MOST_SESSIONS, CONTEXT)
    with Progress("forward times") as progress:
        times = _forward_times.measure(target, rounds, progress.show)
    target.close()
    if path is not None:
        save_times(path, times)
    return times


# -- the check ------------------------------------------------------------------------------------


def check(chosen: _pair.Chosen, traces: Path, bench: Bench) -> list[dict[str, Any]]:
    """TPT of real fleets beside those of virtual ones. Raises TransportError."""
    found = []
    for mode in ("cloud", "auto"):
        for sessions in CHECKED:
            print(f"checking {mode} with {sessions} devices", file=sys.stderr, flush=True)
            real = _fleet(chosen, traces, mode, sessions)
            virtual = 1e3 * bench.tpt_s(mode, sessions)
            found.append(
                {
                    "mode": mode,
                    "sessions": sessions,
                    "tpt_ms": real["tpt_ms"]["p50"],
                    "virtual_tpt_ms": round(virtual, 2),
                    "ratio": round(real["tpt_ms"]["p50"] / virtual, 3),
                    "late_p90_ms": real["late_ms"]["p90"],
                    "wrong": real["wrong"],
                }
            )
    return found


def _fleet(chosen: _pair.Chosen, traces: Path, mode: str, sessions: int) -> dict[str, Any]:
    policy, verify = MODES[mode]
    command = [sys.executable, "-m", "edge_agent.cli", "bench", "--fleet", str(sessions)]
    command += ["--pair", chosen.pair, "--dtype", chosen.dtype]
    command += ["--target-threads", str(chosen.threads), "--policy", policy().name]
    command += ["--verify", verify, "--traces", str(traces), "--broker-kind", "mosquitto"]
    command += ["--generations", "3", "--ramp", "3", "--processes", "1", "--json"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=CHECK_S,
        )
    except subprocess.TimeoutExpired:
        raise TransportError(f"{sessions} devices took over {CHECK_S:.0f} s: try fewer") from None
    try:
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        float(found["tpt_ms"]["p50"])
    except (ValueError, KeyError, TypeError, AssertionError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise TransportError(f"the fleet told nothing ({last}): run it by hand") from None
    return found


# -- the command ----------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pair", choices=("smollm2", "gemma3"), default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--engine", choices=_pair.ENGINES, default="torch")
    parser.add_argument("--threads", type=int, help="of the target (all cores)")
    parser.add_argument(
        "--delay-ms", type=float, default=2.0, metavar="MS", help="of the link, one way (2)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each forward (7)")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="forward times; measured into it if not there"
    )
    parser.add_argument("--traces", metavar="FILE", help="texts; recorded into it if not there")
    parser.add_argument(
        "--check", action="store_true", help="also run real fleets and compare (torch only)"
    )
    parser.add_argument("--json", action="store_true")
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything. Raises PipesdError."""
    if not 0.0 <= args.delay_ms <= 1000.0 or args.rounds < 1:
        raise ConfigError("--delay-ms is 0 to 1000 and --rounds at least 1")
    if args.check and args.engine != "torch":
        raise ConfigError("--check runs the torch engine: leave out --engine")
    chosen = _pair.Chosen(args.pair, args.engine, args.dtype, args.threads or usable_cores())
    texts, path = _pair.texts_of(args.pair, args.dtype, args.traces)
    times = forward_times(chosen, args.table, args.rounds)
    bench = Bench(texts, times, args.delay_ms / 1e3)
    rows = rows_of(bench)
    alone = rows["cloud"]["carried"]
    return {
        **asdict(chosen),
        "delay_ms": args.delay_ms,
        "base_tpt_ms": round(1e3 * bench.base_s, 2),
        "times": {
            "alone_ms": [[n, round(1e3 * took, 2)] for n, took in times.alone.entries],
            "per_session_ms": round(1e3 * times.per_session, 3),
            "off": round(times.off, 3),
        },
        "modes": rows,
        "ratios": {mode: round(row["carried"] / max(1, alone), 2) for mode, row in rows.items()},
        "check": check(chosen, path, bench) if args.check else None,
    }


def lines_of(data: dict[str, Any]) -> list[str]:
    """For a terminal."""
    times = data["times"]
    some = ", ".join(f"{n}: {took:.0f}" for n, took in times["alone_ms"] if n & (n - 1) == 0)
    found = [
        f"{data['pair']} in {data['dtype']}, {data['engine']}, {data['threads']} threads; by a "
        f"virtual clock, forwards as measured, links of {data['delay_ms']:g} ms one way",
        f"a forward of one session, ms by tokens: {some}; {times['per_session_ms']:.1f} ms for "
        f"each session more; measured ones of several are off by {100 * times['off']:.0f} %",
        f"a lone session by the target alone: {data['base_tpt_ms']:.1f} ms a token; carried is "
        f"what stays below {LIMIT:g} times that",
        "TPT in ms (tokens a second of all; tokens through the target for each committed):",
    ]
    for mode, row in data["modes"].items():
        cells = [
            f"{n}: {one['tpt_ms']:.1f} ({one['tokens_per_s']:.0f}; "
            f"{one['target_tokens_per_token']:.2f})"
            for n, one in row["sizes"].items()
        ]
        found.append(f"  {mode:9}  {'  '.join(cells)}")
    for mode, ratio in data["ratios"].items():
        mark = f" (mark {MARK:g}: {'met' if ratio >= MARK else 'MISSED'})" if mode == "auto" else ""
        carried = data["modes"][mode]["carried"]
        found.append(
            f"{mode}: {carried} sessions carried, {ratio:.2f} times the target alone{mark}"
        )
    for one in data["check"] or ():
        found.append(
            f"real fleet, {one['mode']}, {one['sessions']} devices: TPT {one['tpt_ms']:.1f} ms, "
            f"virtual {one['virtual_tpt_ms']:.1f}, ratio {one['ratio']:.2f}"
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        data = measure(args)
    except PipesdError as error:
        print(f"capacity: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(data) if args.json else "\n".join(lines_of(data)))
    return 0 if data["ratios"]["auto"] >= MARK else 1


if __name__ == "__main__":
    sys.exit(main())
