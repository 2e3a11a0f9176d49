"""The best constants of each policy in each scenario, by trying a grid of them on recorded texts.

    python -m edge_agent.bench.tuning TRACES --out FILE [--table FILE] [--policies ...]

Every policy of a comparison gets its best constants in this way, or the baselines would be straw
men. Compare on other texts than those tuned on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path

from broker.command import run
from broker.errors import ConfigError, PipesdError
from broker.messages import VERIFY_TRIGGERED
from broker.settings import Parser, parse
from edge_agent.bench.contenders import CONTENDERS, select
from edge_agent.bench.link import Scenario, find_scenario
from edge_agent.bench.replay import replay_all
from edge_agent.bench.replay_command import add_selection_flags, names, selected_traces
from edge_agent.bench.traces import Trace
from edge_agent.core.policies import Policy

PROGRAM = "tuning"
#: Candidates that a worker takes at a time.
_CHUNK = 16
MAX_PROCESSES = 256

_R1 = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0)
_R2 = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_SURVIVAL = (0.0, 0.05, 0.2)
_AHEAD = (6, 8, 12, 16, 24)
#: What is tried per policy; one that is not named here has no constants. 0 turns a rule off. A
#: threshold of 1 asks after each token.
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "vanilla": {"window": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)},
    "hsl": {"r2": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)},
    # Its R1 adapts: only the first few verdicts hang on where it begins. Its cap is not known, and
    # matters more: with a large one it asks so often that a slow uplink never catches up.
    "edgellm": {
        "r1": (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.92, 0.99),
        "max_ahead": (4, 6, 8, 12, 16, 24, 32, 64, 128),
    },
    "pipesd": {"r1": _R1, "r2": _R2, "min_survival": _SURVIVAL, "max_ahead": _AHEAD},
    "pipesd-no-pipeline": {"r1": _R1, "r2": _R2},
    "pipesd-fixed": {
        "window": (1, 2, 3, 4, 5, 6, 8, 10, 12),
        "min_survival": _SURVIVAL,
        "max_ahead": _AHEAD,
    },
    "pipesd-token-only": {"r2": _R2[1:], "min_survival": _SURVIVAL, "max_ahead": _AHEAD},
    "pipesd-sequence-only": {"r1": _R1[1:], "min_survival": _SURVIVAL, "max_ahead": _AHEAD},
}
#: Tuned when no policy is named.
TUNED = ("vanilla", "hsl", "edgellm", "pipesd")


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate's figures. ``tpt_s``: all seconds by all tokens; the others per token."""

    policy: str
    scenario: str
    constants: dict[str, float]
    tpt_s: float
    forwards: float
    drafted: float
    bytes_up: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """``rows``: every candidate, by policy, scenario and grid. ``best``: by policy, scenario."""

    best: dict[str, dict[str, dict[str, float]]]
    rows: tuple[Row, ...]


def constants_of(policy: Policy) -> dict[str, float]:
    """The constants that ``policy`` has, as ``--constants`` takes them."""
    limits = policy.thresholds
    return {
        "r1": limits.r1,
        "r2": limits.r2,
        "window": limits.window,
        "min_survival": policy.min_survival,
        "max_ahead": policy.max_ahead,
    }


def with_constants(name: str, scenario: str, constants: dict[str, float]) -> Policy:
    """The contender ``name`` with these constants. Raises ConfigError."""
    return CONTENDERS[name].policy({name: {scenario: constants}}, scenario)


def candidates(name: str) -> Iterator[dict[str, float]]:
    """What is tried: every combination in the grid of the policy ``name``.

    With R1 at or above R2 the token rule never decides, so of those only R2 = 0 is tried.
    """
    grid = GRIDS.get(name, {})
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        if "r1" in chosen and chosen["r1"] >= chosen.get("r2", 0.0) > 0.0:
            continue
        yield chosen


def measure(
    traces: Sequence[Trace],
    name: str,
    scenario: Scenario,
    constants: dict[str, float],
    verify: str = VERIFY_TRIGGERED,
) -> Row:
    """The figures of one candidate over all ``traces``."""
    policy = with_constants(name, scenario.name, constants)
    results = replay_all(traces, policy, scenario, verify=verify)
    tokens = sum(result.tokens for result in results)
    return Row(
        name,
        scenario.name,
        constants,
        sum(result.seconds for result in results) / tokens,
        sum(result.forwards for result in results) / tokens,
        sum(result.drafted for result in results) / tokens,
        sum(result.bytes_up for result in results) / tokens,
    )


_Job = tuple[str, Scenario, dict[str, float], str]
_traces: Sequence[Trace] = ()


def _begin(traces: Sequence[Trace]) -> None:
    global _traces  # noqa: PLW0603 (a worker process's own, set once)
    _traces = traces
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()


def _end_with_parent() -> None:
    # A pool whose owner was killed waits for work for ever.
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _measure(job: _Job) -> Row:
    name, scenario, constants, verify = job
    return measure(_traces, name, scenario, constants, verify)


def tune(
    traces: Sequence[Trace],
    policies: Sequence[str],
    scenarios: Sequence[Scenario],
    *,
    verify: str = VERIFY_TRIGGERED,
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Tuning:
    """Try each policy's grid in each scenario; of equally good candidates the first one wins.

    ``processes``: so many at once, 1: in this one. ``progress``: called with the candidates done
    and all of them. Raises ConfigError.
    """
    if not 1 <= processes <= MAX_PROCESSES:
        raise ConfigError(f"{processes} processes: give 1 to {MAX_PROCESSES}")
    if not traces:
        raise ConfigError("no texts to tune on: record some")
    jobs: list[_Job] = [
        (name, scenario, constants, verify)
        for name in policies
        for scenario in scenarios
        for constants in candidates(name)
    ]
    rows: list[Row] = []
    for row in _run(traces, jobs, processes):
        rows.append(row)
        if progress is not None:
            progress(len(rows), len(jobs))
    best: dict[str, dict[str, dict[str, float]]] = {}
    for name in policies:
        best[name] = {}
        for scenario in scenarios:
            own = [row for row in rows if (row.policy, row.scenario) == (name, scenario.name)]
            chosen = min(own, key=lambda row: row.tpt_s).constants
            best[name][scenario.name] = constants_of(with_constants(name, scenario.name, chosen))
    return Tuning(best, tuple(rows))


def _run(traces: Sequence[Trace], jobs: Sequence[_Job], processes: int) -> Iterator[Row]:
    if processes == 1:
        for name, scenario, constants, verify in jobs:
            yield measure(traces, name, scenario, constants, verify)
        return
    # Not forked: the caller may have threads.
    with ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=_begin, initargs=(traces,)
    ) as pool:
        try:
            yield from pool.map(_measure, jobs, chunksize=_CHUNK)
        except BrokenProcessPool:
            raise PipesdError("a tuning process died: run fewer of them at once") from None
        finally:
            pool.shutdown(cancel_futures=True)


# -- the command --------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description="Find each policy's best constants per scenario on recorded texts.",
        allow_abbrev=False,
    )
    add_selection_flags(parser, TUNED)
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="where to write the best constants (JSON)"
    )
    parser.add_argument("--table", metavar="FILE", help="where to write all candidates (JSON)")
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="candidates at a time (1)"
    )
    parser.add_argument(
        "--nice", type=int, default=0, metavar="N", help="how far to step back for others (0)"
    )
    return parser


def _check_writable(path: str | None) -> None:
    """Before the work, not after it; what is there stays."""
    try:
        if path is not None:
            with Path(path).open("a", encoding="utf-8"):
                pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another") from None


def _write(path: str, data: object) -> None:
    try:
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another") from None


class _Progress:
    """A line on standard error every few seconds."""

    def __init__(self, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._begin = self._next = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next and done < total:
            return
        self._next = now + self._every_s
        left = (now - self._begin) * (total - done) / done
        print(f"{PROGRAM}: {done} of {total} tried, {left:.0f} s left", file=sys.stderr)


def tuning_command(args: argparse.Namespace) -> int:
    """Tune, write, and print the best."""
    policies = [one.name for one in select(names(args.policies))]
    scenarios = [find_scenario(name) for name in names(args.scenarios)]
    if not 0 <= args.nice <= 19:
        raise ConfigError(f"--nice {args.nice} is outside 0 to 19")
    traces = selected_traces(args.traces)
    os.nice(args.nice)  # inherited by the processes
    for path in (args.out, args.table):
        _check_writable(path)
    found = tune(
        traces,
        policies,
        scenarios,
        verify=args.verify,
        processes=args.processes,
        progress=_Progress(),
    )
    _write(args.out, found.best)
    if args.table:
        _write(
            args.table,
            [{name: getattr(row, name) for name in Row.__dataclass_fields__} for row in found.rows],
        )
    print(f"{'scenario':11}{'policy':21}{'TPT ms':>8}  constants")
    for scenario in scenarios:
        for name in policies:
            own = [row for row in found.rows if (row.policy, row.scenario) == (name, scenario.name)]
            row = min(own, key=lambda row: row.tpt_s)
            chosen = ", ".join(f"{key} {value:g}" for key, value in row.constants.items())
            print(f"{scenario.label:11}{name:21}{1e3 * row.tpt_s:8.1f}  {chosen or '-'}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run(lambda: tuning_command(parse(build_parser(), argv, program=PROGRAM)), PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
