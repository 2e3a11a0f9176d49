"""Time that planning and estimating take: ``python -m benchmarks.planning [--json]``.

Processor time of this thread, medians over many calls: ``plan`` for three kinds of link, replanning
with the sums around it, a drafted token's share (gamma, the plan's table), and an upload with its
answer on an emulated 4g link, fits and looks at the cost model included. The last line weighs a
round of six tokens against the time that it takes to draft them; exit code 1 when a mark is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from edge_agent.core.estimate import GammaEstimator, LinkEstimator
from edge_agent.core.pipeline import LinkCost, Planner, plan

GAMMA = 0.009  # seconds
ROUND = 6  # tokens
LINKS = {
    "ids, 4g": LinkCost(0.015, 0.050, 2e-6),
    "light messages": LinkCost(0.0, 0.020, 0.008),
    "probabilities": LinkCost(0.001, 0.020, 0.116),
}


@dataclass
class Result:
    """Median and worst microseconds of a call; ``mark``: the most that the median may be."""

    name: str
    median: float
    worst: float
    mean: float
    mark: float | None = None


def timed(name: str, calls: Sequence[Callable[[], object]], mark: float | None = None) -> Result:
    took = []
    for call in calls:
        begin = time.thread_time_ns()
        call()
        took.append((time.thread_time_ns() - begin) / 1e3)
    return Result(name, statistics.median(took), max(took), statistics.mean(took), mark)


def plans(times: int) -> Iterator[Result]:
    for n, mark in ((20, 100.0), (100, 1000.0), (512, None)):
        for label, link in LINKS.items():
            yield timed(f"plan of {n}, {label}", [partial(plan, n, link, GAMMA)] * times, mark)


def replans(times: int) -> Result:
    planner = Planner(20, LINKS["ids, 4g"], GAMMA)
    calls = [
        partial(planner.update, 21 - turn % 2, LINKS["ids, 4g"], GAMMA) for turn in range(times)
    ]
    return timed("replan of 20", calls, 100.0)


def tokens(times: int) -> Result:
    gamma = GammaEstimator()
    planner = Planner(20, LINKS["ids, 4g"], GAMMA)

    def one(count: int) -> None:
        gamma.add(GAMMA)
        planner.plan.ends_message(count)

    return timed("a drafted token", [partial(one, count) for count in range(1, times + 1)])


def answers(times: int) -> Result:
    """Uploads on an emulated link; by some of the answers the next ones are under way."""
    draw = random.Random(1)  # noqa: S311 (nothing secret)
    link = LINKS["ids, 4g"]
    estimator = LinkEstimator()
    gamma = GammaEstimator()
    planner = Planner(20, link, GAMMA)

    def upload(now: float, size: int, heard: list[tuple[float, int]]) -> None:
        for arrival, number in heard:
            estimator.answered(number, arrival)
        estimator.sent(now, size)  # the tickets count from 0
        planner.update(20, estimator.cost, gamma.gamma)

    calls = []
    under_way: list[tuple[float, int]] = []
    now = free = arrived = 0.0
    for number in range(times):
        now += draw.uniform(0.03, 0.09)
        heard = [answer for answer in under_way if answer[0] <= now]
        under_way = under_way[len(heard) :]
        size = draw.randint(1, ROUND)
        calls.append(partial(upload, now, size, heard))
        free = max(free, now) + link.occupancy + link.beta * size
        arrived = max(arrived, free + link.propagation + draw.expovariate(500.0))
        under_way.append((arrived, number))
    return timed("an upload and its answer", calls)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--calls", type=int, default=400, help="calls of each case (400)")
    parser.add_argument("--json", action="store_true", help="one JSON object: name -> us")
    arguments = parser.parse_args()
    if arguments.calls < 10:
        parser.error(f"--calls {arguments.calls}: at least 10")
    results = [*plans(arguments.calls), replans(arguments.calls)]
    results += [token := tokens(arguments.calls), answer := answers(2 * arguments.calls)]
    spent = ROUND * token.mean + answer.mean
    share = spent / (ROUND * GAMMA * 1e6)
    kept = all(result.mark is None or result.median <= result.mark for result in results)
    if arguments.json:
        medians = {result.name: round(result.median, 2) for result in results}
        print(json.dumps({**medians, "share of a round": round(share, 5)}))
        return 0 if kept and share <= 0.01 else 1
    print(f"{'us of processor time':36} {'median':>8} {'mean':>8} {'worst':>8}  mark")
    for result in results:
        verdict = ""
        if result.mark is not None:
            verdict = f"{result.mark:g} {'kept' if result.median <= result.mark else 'MISSED'}"
        figures = f"{result.median:8.1f} {result.mean:8.1f} {result.worst:8.1f}"
        print(f"{result.name:36} {figures}  {verdict}")
    verdict = "kept" if share <= 0.01 else "MISSED"
    print(
        f"a round of {ROUND} tokens and one upload: {spent:.0f} us of {ROUND * GAMMA * 1e3:.0f} ms "
        f"drafting, {share:.2%}; mark 1 % {verdict}"
    )
    return 0 if kept and share <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
