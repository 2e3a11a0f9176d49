"""Which constants are tried for a policy: its whole grid, or a share of it within a budget.

A budget makes a comparison fair: each policy is granted the same number of candidates, however many
constants it has. One with a small grid is tried whole; in a larger one half of the budget goes to
points drawn at random, and half to the neighbours of the best points found so far.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

from edge_agent.bench.contenders import CONTENDERS
from edge_agent.core.config import DEFAULT_MAX_AHEAD
from edge_agent.core.policies import Policy

#: Candidates that one policy may be granted in one scenario.
MAX_BUDGET = 100_000
#: The share of a budget that is drawn at random, and the rounds in which the rest is spent.
_RANDOM_SHARE = 0.5
_ROUNDS = 4

_R1 = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0)
_R2 = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_SURVIVAL = (0.0, 0.001, 0.01, 0.05, 0.3)
_AGAIN = (1, 4)
_AHEAD = (4, 6, 8, 12, 16, 24)
#: What is tried per policy. One that is not named here has the grid of its base, or no constants. 0
#: turns a rule off. A threshold of 1 asks after each token.
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "vanilla": {"window": tuple(range(1, DEFAULT_MAX_AHEAD + 1))},
    # The paper gives no cap for a draft in which no token is doubtful.
    "hsl": {
        "r2": (*(n / 20 for n in range(1, 20)), 0.98, 0.99),
        "window": (4, 8, 16, 64),
    },
    # Its R1 adapts: only the first few verdicts hang on where it begins. Its cap is not known, and
    # matters more: with a large one it asks so often that a slow uplink never catches up.
    "edgellm": {
        "r1": (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.92, 0.99),
        "max_ahead": (4, 6, 8, 12, 16, 24, 32, 64, 128),
        "ask_again": _AGAIN,
    },
    "pipesd": {
        "r1": _R1,
        "r2": _R2,
        "min_survival": _SURVIVAL,
        "max_ahead": _AHEAD,
        "ask_again": _AGAIN,
    },
    "pipesd-no-pipeline": {"r1": _R1, "r2": _R2},
    "pipesd-fixed": {
        "window": (1, 2, 3, 4, 5, 6, 8, 10, 12),
        "min_survival": _SURVIVAL,
        "max_ahead": _AHEAD,
    },
    "pipesd-token-only": {"r2": _R2[1:], "min_survival": _SURVIVAL, "max_ahead": _AHEAD},
    "pipesd-sequence-only": {"r1": _R1[1:], "min_survival": _SURVIVAL, "max_ahead": _AHEAD},
}

#: Where in a grid: an index for each of its constants.
_Point = tuple[int, ...]


def grid_of(name: str) -> Mapping[str, tuple[float, ...]]:
    """The values tried of each constant of the policy ``name``; empty: it has none."""
    found = GRIDS.get(name)
    return GRIDS.get(CONTENDERS[name].base, {}) if found is None else found


def candidates(name: str) -> Iterator[dict[str, float]]:
    """Every combination in the grid of the policy ``name``.

    With R1 at or above R2 the token rule never decides, so of those only R2 = 0 is tried.
    """
    grid = grid_of(name)
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        if "r1" in chosen and chosen["r1"] >= chosen.get("r2", 0.0) > 0.0:
            continue
        yield chosen


def constants_of(policy: Policy) -> dict[str, float]:
    """The constants that ``policy`` has, as ``--constants`` takes them."""
    limits = policy.thresholds
    return {
        "r1": limits.r1,
        "r2": limits.r2,
        "window": limits.window,
        "min_survival": policy.min_survival,
        "max_ahead": policy.max_ahead,
        "ask_again": policy.ask_again,
    }


def with_constants(name: str, scenario: str, constants: Mapping[str, float]) -> Policy:
    """The contender ``name`` with these constants. Raises ConfigError."""
    return CONTENDERS[name].policy({name: {scenario: constants}}, scenario)


class Search:
    """The candidates of one policy in one scenario, round by round.

    ``budget``: how many at most; None: the whole grid. With a budget the policy's own defaults are
    among them, so that what is found is no worse than they on the texts tuned on. ``seed``: of the
    draw. ``size``: how many will be tried.
    """

    def __init__(self, name: str, budget: int | None = None, seed: int = 0) -> None:
        grid = grid_of(name)
        self._grid = tuple(grid.values())
        self._points: dict[_Point, dict[str, float]] = {}
        taken = {with_constants(name, "", {})} if budget is not None else set()
        for constants in candidates(name):
            policy = with_constants(name, "", constants)
            if policy not in taken:
                taken.add(policy)
                places = (grid[key].index(value) for key, value in constants.items())
                self._points[tuple(places)] = constants
        known = constants_of(with_constants(name, "", {}))
        # The grid's point next to the defaults, from which their neighbours are reckoned.
        self._origin = tuple(_nearest(values, known[key]) for key, values in grid.items())
        extra = budget is not None
        self.size = len(self._points) + extra
        if budget is not None:
            self.size = min(self.size, max(1, budget))
        self._left = self.size
        self._draw = random.Random(seed)  # noqa: S311  (a search, repeatable on purpose)
        self._default_due = extra
        self._untried = dict.fromkeys(self._points)
        self._asked: list[_Point] = []
        self._found: list[tuple[float, _Point]] = []

    def next_round(self) -> list[dict[str, float]]:
        """What to try next, empty at the end. ``learn`` wants the results in the same order."""
        if self._left <= 0:
            return []
        whole = self._left >= len(self._untried) + self._default_due
        if whole:
            points = list(self._untried)
        elif self._default_due:
            count = max(1, round(self._left * _RANDOM_SHARE)) - 1
            points = self._draw.sample(list(self._untried), count)
        else:
            step = max(1, round(self.size * (1.0 - _RANDOM_SHARE) / _ROUNDS))
            points = self._neighbours(min(step, self._left))
        chosen: list[dict[str, float]] = [self._points[point] for point in points]
        if self._default_due:
            chosen.insert(0, {})
            points.insert(0, self._origin)
            self._default_due = False
        self._left -= len(chosen)
        for point in points:
            self._untried.pop(point, None)
        self._asked = points
        return chosen

    def learn(self, seconds: list[float]) -> None:
        """How each candidate of the last round did: seconds per token."""
        self._found += zip(seconds, self._asked, strict=True)
        self._asked = []

    def _neighbours(self, count: int) -> list[_Point]:
        chosen: dict[_Point, None] = {}
        for _, point in sorted(self._found):
            for near in self._around(point):
                if near in self._untried:
                    chosen[near] = None
                if len(chosen) == count:
                    return list(chosen)
        rest = [point for point in self._untried if point not in chosen]
        return [*chosen, *self._draw.sample(rest, min(count - len(chosen), len(rest)))]

    def _around(self, point: _Point) -> Iterator[_Point]:
        """The next points of the grid in each direction, over gaps where there is none."""
        for axis, values in enumerate(self._grid):
            for step in (-1, 1):
                place = point[axis] + step
                while 0 <= place < len(values):
                    near = (*point[:axis], place, *point[axis + 1 :])
                    if near in self._points:
                        yield near
                        break
                    place += step


def _nearest(values: Sequence[float], wanted: float) -> int:
    """The index of the value that is nearest to ``wanted``."""
    return min(range(len(values)), key=lambda index: abs(values[index] - wanted))
