"""The port to what proposes trials, and the plan of one search.

``plan`` says what the trials of a search are before and after those that a sampler thinks up: the
default pair first, so that the search never ends worse than where devices begin; then what was best
for devices of the same class; and at the end the leaders once more, since one measurement over 50
tokens is luck as much as speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cloud_verifier.tuner.core.messages import Choice, Proposal
from cloud_verifier.tuner.core.space import DEFAULT, Pair, to_search

#: Trials of a search (the paper's), and of one that begins with what its class found.
BUDGET, BUDGET_WITH_PRIOR = 16, 8
#: Pairs of the class that are tried.
MAX_PRIOR = 3
#: Trials that measure the leaders again: this share and one more, each over so many times the
#: tokens. The users have good pairs meanwhile.
_AGAIN = 0.2
AGAIN_WEIGHT = 4
#: So many failed trials for each of the budget end a search with what it has.
MAX_FAILED = 3
#: How far two points of the search are alike, the spread of log TPT over pairs, and what chance
#: makes of it over NOISE_TOKENS tokens; by replays, see docs/tuning.md.
_REACH, _SIGNAL = 0.4, 0.3**2
_NOISE, _NOISE_TOKENS = 0.12**2, 50.0


@dataclass(frozen=True, slots=True)
class Told:
    """A finished trial: seconds per token over ``tokens`` of them."""

    pair: Pair
    tpt: float
    tokens: float = 50.0


def first_pairs(prior: Sequence[Pair]) -> list[Pair]:
    """What a search begins with, in order."""
    pairs = [DEFAULT]
    for pair in prior:
        if len(pairs) > MAX_PRIOR:
            break
        if all(not _same(pair, other) for other in pairs):
            pairs.append(pair)
    return pairs


def _same(left: Pair, right: Pair) -> bool:
    return all(abs(a - b) < 0.05 for a, b in zip(to_search(left), to_search(right), strict=True))


def budget_for(trials: int, with_prior: bool) -> int:
    """How many of ``trials`` a search gets: half of them where its class is known."""
    return max(1, round(trials * BUDGET_WITH_PRIOR / BUDGET)) if with_prior else trials


def again(budget: int) -> int:
    """Trials at the end of a search that measure its leaders again."""
    return round(budget * _AGAIN) + 1 if budget >= 4 else 0


def next_again(
    told: Sequence[Told], order: Sequence[tuple[float, Pair]], budget: int
) -> Pair | None:
    """Which of the leaders to measure once more: of the few first the one measured least."""
    few = [pair for _, pair in order[: max(2, again(budget) - 1)]]
    if not few:
        return None
    return min(few, key=lambda pair: sum(one.pair == pair for one in told))


def leaders(told: Sequence[Told]) -> list[tuple[float, Pair]]:
    """``(seconds per token, pair)`` of the distinct pairs, fastest first by what is to be expected.

    What is to be expected of a pair leans on its own measurements and on those of its neighbours:
    the mean of a Gaussian process over log TPT with a Matern 5/2 kernel.
    """
    if not told:
        return []
    values = [math.log(one.tpt) for one in told]
    points = [to_search(one.pair) for one in told]
    mean = sum(values) / len(values)
    gram = [[_kernel(a, b) for b in points] for a in points]
    for index, one in enumerate(told):
        gram[index][index] += _NOISE * _NOISE_TOKENS / max(one.tokens, 1.0)
    weights = _solve(gram, [value - mean for value in values])
    distinct: dict[Pair, tuple[float, float]] = {}
    for one, point in zip(told, points, strict=True):
        distinct[one.pair] = point
    found = [
        (
            math.exp(
                mean
                + sum(
                    weight * _kernel(point, other)
                    for weight, other in zip(weights, points, strict=True)
                )
            ),
            pair,
        )
        for pair, point in distinct.items()
    ]
    return sorted(found, key=lambda item: item[0])


def _kernel(left: tuple[float, float], right: tuple[float, float]) -> float:
    away = math.sqrt(5.0) * math.dist(left, right) / _REACH
    return _SIGNAL * (1.0 + away + away * away / 3.0) * math.exp(-away)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """``x`` with ``matrix @ x = right``, by Cholesky: the matrix is positive definite."""
    size = len(right)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = math.sqrt(rest) if i == j else rest / lower[j][j]
    half: list[float] = []
    for i in range(size):
        half.append((right[i] - sum(lower[i][k] * half[k] for k in range(i))) / lower[i][i])
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = half[i] - sum(lower[k][i] * found[k] for k in range(i + 1, size))
        found[i] = rest / lower[i][i]
    return found


class Studies(Protocol):
    """One study per device and campaign. Every method raises StudyError when the storage fails."""

    def ask(self, device: str, campaign: int, device_class: str) -> Proposal | Choice:
        """The next trial, or how the search ended."""
        ...

    def tell(
        self, device: str, campaign: int, number: int, tpt: float, tokens: float, *, early: bool
    ) -> None:
        """A trial's result; one that has ended already stays as it is."""
        ...

    def fail(self, device: str, campaign: int, number: int, cause: str) -> None:
        """A trial came to nothing; one that has ended already stays as it is."""
        ...

    def fail_running(self, device: str, campaign: int, cause: str) -> int:
        """Fail what another tuner left behind; how many trials that were."""
        ...
