"""Runs the cells of a benchmark one after the other, and says how long the rest takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from edge_agent.bench.cells import Cell, Result, ResultsFile


class Runs(Protocol):
    """What runs a cell: ``Runner``."""

    def run(self, cell: Cell, at_s: float) -> Result:
        """Run one, which begins ``at_s`` seconds after the first."""
        ...


class Pace:
    """How long cells take, and so what is left."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], list[float]] = defaultdict(list)

    def note(self, cell: Cell, seconds: float) -> None:
        """``cell`` took that long."""
        self._seen[cell.policy, cell.scenario].append(seconds)

    def left_s(self, cells: Sequence[Cell]) -> float | None:
        """Seconds that ``cells`` will take; None before anything is known."""
        means = {key: sum(times) / len(times) for key, times in self._seen.items()}
        if not means:
            return None
        overall = sum(means.values()) / len(means)
        return sum(means.get((cell.policy, cell.scenario), overall) for cell in cells)


def run_all(
    runner: Runs,
    cells: Sequence[Cell],
    file: ResultsFile,
    *,
    limit_s: float,
    report: Callable[[int, Result, float | None], None],
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run the cells that ``file`` lacks, each result into it; whether all of them were run.

    ``report`` hears how many cells are done, the latest result, and the seconds left. After
    ``limit_s`` seconds no more cell begins.
    """
    begin = clock()
    pace = Pace()
    todo = [cell for cell in cells if not file.done(cell)]
    for number, cell in enumerate(todo):
        start = clock()
        if start - begin >= limit_s:
            return False
        result = runner.run(cell, start - begin)
        file.add(result)
        pace.note(cell, clock() - start)
        done = len(cells) - len(todo) + number + 1
        report(done, result, pace.left_s(todo[number + 1 :]))
    return True
