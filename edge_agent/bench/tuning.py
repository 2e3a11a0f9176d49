"""The best constants of each policy in each scenario, by trying a grid of them on recorded texts.

    python -m edge_agent.bench.tuning TRACES --out FILE [--table FILE] [--policies ...]

Every policy of a comparison gets its best constants in this way, or the baselines would be straw
men. Compare on other texts than those tuned on.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait

from broker.command import run
from broker.errors import ConfigError, PipesdError
from broker.settings import Parser, parse
from edge_agent.bench.contenders import Constants, select
from edge_agent.bench.files import check_writable, write_json
from edge_agent.bench.grids import MAX_BUDGET, Search, constants_of, with_constants
from edge_agent.bench.link import Scenario
from edge_agent.bench.replay import replay_all
from edge_agent.bench.replay_command import (
    add_selection_flags,
    names,
    selected_scenarios,
    selected_traces,
)
from edge_agent.bench.traces import Trace
from edge_agent.core.config import DEFAULT_VERIFY

PROGRAM = "tuning"
#: Candidates that a worker takes at a time. Those it has taken are still tried after Ctrl-C.
_CHUNK = 4
MAX_PROCESSES = 256

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


def measure(
    traces: Sequence[Trace],
    name: str,
    scenario: Scenario,
    constants: dict[str, float],
    verify: str = DEFAULT_VERIFY,
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
    verify: str = DEFAULT_VERIFY,
    processes: int = 1,
    budget: int | None = None,
    known: Constants | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tuning:
    """Try each policy's grid in each scenario; of equally good candidates the first one wins.

    ``processes``: so many at once, 1: in this one. ``budget``: candidates that each policy is
    granted in each scenario (``Search``, ``seed``), None: the whole grid. ``known``: pairs of
    policy and scenario that are there already are left out. ``progress``: called with the
    candidates done and all of them. Raises ConfigError.
    """
    if not 1 <= processes <= MAX_PROCESSES:
        raise ConfigError(f"{processes} processes: give 1 to {MAX_PROCESSES}")
    if budget is not None and not 1 <= budget <= MAX_BUDGET:
        raise ConfigError(f"a budget of {budget} candidates: give 1 to {MAX_BUDGET}")
    if not traces:
        raise ConfigError("no texts to tune on: record some")
    searches = [
        (name, scenario, Search(name, budget, seed))
        for name in policies
        for scenario in scenarios
        if known is None or scenario.name not in known.get(name, {})
    ]
    total = sum(search.size for _, _, search in searches)
    found: list[list[Row]] = [[] for _ in searches]
    done = 0
    with _Workers(traces, processes) as workers:
        # Round by round for all of them at once: the rounds of one would not fill the workers.
        while True:
            rounds = [search.next_round() for _, _, search in searches]
            jobs: list[_Job] = [
                (name, scenario, constants, verify)
                for (name, scenario, _), chosen in zip(searches, rounds, strict=True)
                for constants in chosen
            ]
            if not jobs:
                break
            rows = workers.measure(jobs)
            for (_, _, search), chosen, own in zip(searches, rounds, found, strict=True):
                fresh: list[Row] = []
                for _ in chosen:
                    fresh.append(next(rows))
                    done += 1
                    if progress is not None:
                        progress(done, total)
                search.learn([row.tpt_s for row in fresh])
                own.extend(fresh)
    best: dict[str, dict[str, dict[str, float]]] = {}
    for (name, scenario, _), own in zip(searches, found, strict=True):
        chosen_row = min(own, key=lambda row: row.tpt_s)
        policy = with_constants(name, scenario.name, chosen_row.constants)
        best.setdefault(name, {})[scenario.name] = constants_of(policy)
    return Tuning(best, tuple(row for own in found for row in own))


class _Workers:
    """Processes that measure candidates on ``traces``; 1: this one. A context manager."""

    def __init__(self, traces: Sequence[Trace], processes: int) -> None:
        self._traces = traces
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> _Workers:
        if self._processes > 1:
            # Not forked: the caller may have threads.
            self._pool = ProcessPoolExecutor(
                self._processes,
                get_context("spawn"),
                initializer=_begin,
                initargs=(self._traces,),
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def measure(self, jobs: Sequence[_Job]) -> Iterator[Row]:
        """Their rows, in order."""
        if self._pool is None:
            for name, scenario, constants, verify in jobs:
                yield measure(self._traces, name, scenario, constants, verify)
            return
        chunk = max(1, min(_CHUNK, len(jobs) // (4 * self._processes)))
        try:
            # Workers begin here and inherit the mask: Ctrl-C reaches the whole group, and it is for
            # their owner to end them.
            with _no_interrupt():
                rows = self._pool.map(_measure, jobs, chunksize=chunk)
            yield from rows
        except BrokenProcessPool:
            raise PipesdError("a tuning process died: run fewer of them at once") from None


@contextmanager
def _no_interrupt() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
        "--budget",
        type=int,
        metavar="N",
        help="candidates for each policy in each scenario, drawn and refined (the whole grid)",
    )
    parser.add_argument(
        "--nice", type=int, default=0, metavar="N", help="how far to step back for others (0)"
    )
    return parser


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
    scenarios = selected_scenarios(args)
    if args.budget is not None and not 1 <= args.budget <= MAX_BUDGET:
        raise ConfigError(f"--budget {args.budget} is outside 1 to {MAX_BUDGET}")
    if not 0 <= args.nice <= 19:
        raise ConfigError(f"--nice {args.nice} is outside 0 to 19")
    traces = selected_traces(args.traces)
    os.nice(args.nice)  # inherited by the processes
    for path in (args.out, args.table):
        if path is not None:
            check_writable(path)
    found = tune(
        traces,
        policies,
        scenarios,
        verify=args.verify,
        processes=args.processes,
        budget=args.budget,
        progress=_Progress(),
    )
    write_json(args.out, found.best)
    if args.table:
        write_json(
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
