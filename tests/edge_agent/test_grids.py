"""Which constants a tuning tries: whole grids, and fair shares of them within a budget."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from edge_agent.bench.contenders import CONTENDERS
from edge_agent.bench.grids import GRIDS, Search, candidates, grid_of, with_constants
from edge_agent.bench.tuned import BUDGET

TUNABLE = [name for name in CONTENDERS if grid_of(name)]


def run(search: Search, judge: Callable[[dict[str, float]], float]) -> list[dict[str, float]]:
    """The whole search, every candidate judged by ``judge``; what was tried."""
    tried: list[dict[str, float]] = []
    while chosen := search.next_round():
        tried += chosen
        search.learn([judge(one) for one in chosen])
    return tried


def test_every_grid_is_of_a_contender_and_of_constants_that_it_takes() -> None:
    for name in GRIDS:
        assert name in CONTENDERS
        tried = list(candidates(name))
        assert len(tried) == len({json.dumps(one) for one in tried}) > 5
        policies = {with_constants(name, "4g", constants) for constants in tried}
        assert len(policies) == len(tried), f"{name}: some constants change nothing"


def test_pipesd_is_tried_with_either_rule_alone_and_with_both() -> None:
    pairs = {(one["r1"], one["r2"]) for one in candidates("pipesd")}
    assert any(r2 > r1 > 0.0 for r1, r2 in pairs)
    assert any(r1 == 0.0 < r2 for r1, r2 in pairs)
    assert any(r2 == 0.0 < r1 for r1, r2 in pairs)
    assert (0.0, 0.0) in pairs
    # Where the token rule can never decide, trying it again is waste.
    assert not any(r1 >= r2 > 0.0 for r1, r2 in pairs)


def test_a_policy_without_constants_is_measured_once() -> None:
    assert list(candidates("cloud")) == [{}]
    for budget in (None, 10):
        search = Search("cloud", budget)
        assert search.size == 1
        assert run(search, lambda constants: 1.0) == [{}]


def test_a_contender_without_a_grid_has_that_of_its_base() -> None:
    for name, one in CONTENDERS.items():
        if name not in GRIDS:
            assert grid_of(name) == GRIDS.get(one.base, {})


def test_without_a_budget_the_whole_grid_is_tried_in_order() -> None:
    for name in TUNABLE:
        search = Search(name)
        assert run(search, lambda constants: 1.0) == list(candidates(name))
        assert search.size == len(list(candidates(name)))


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 20, 64, 500, 100_000])
@pytest.mark.parametrize("name", TUNABLE)
def test_every_policy_gets_what_it_is_granted(name, budget) -> None:
    search = Search(name, budget, seed=1)
    tried = run(search, lambda constants: constants.get("r1", 0.5) + constants.get("window", 0.0))
    policies = [with_constants(name, "4g", constants) for constants in tried]
    assert len(policies) == len(set(policies)) == search.size <= budget
    assert policies[0] == CONTENDERS[name].policy(), "the defaults are tried, and first"
    every = {with_constants(name, "4g", constants) for constants in candidates(name)}
    assert set(policies) <= every | {policies[0]}
    assert search.size == min(budget, len(every | {policies[0]}))


def test_a_small_grid_is_tried_whole_within_the_default_budget() -> None:
    tried = run(Search("vanilla", BUDGET), lambda constants: 1.0)
    assert {with_constants("vanilla", "4g", one).thresholds.window for one in tried} == {
        *range(1, 25)
    }


def test_a_search_is_repeatable_and_its_seed_changes_it() -> None:
    def judge(constants: dict[str, float]) -> float:
        return sum(constants.values())

    first = run(Search("pipesd", 40, seed=3), judge)
    assert first == run(Search("pipesd", 40, seed=3), judge)
    assert first != run(Search("pipesd", 40, seed=4), judge)


def test_the_second_half_goes_where_the_first_did_well() -> None:
    """A smooth bowl: the share finds its bottom, or almost, where chance alone would not."""
    bottom = {"r1": 0.2, "r2": 0.6, "min_survival": 0.01, "max_ahead": 12, "ask_again": 4}
    grid = grid_of("pipesd")

    def judge(constants: dict[str, float]) -> float:
        return sum(
            (grid[key].index(value) - grid[key].index(bottom[key])) ** 2
            for key, value in constants.items()
        ) or (0.0 if constants else 50.0)

    found = [min(map(judge, run(Search("pipesd", 64, seed), judge))) for seed in range(20)]
    assert sum(found) / len(found) <= 1.0
    assert min(found) == 0.0


def test_neighbours_are_found_over_gaps_of_the_grid() -> None:
    """From R2 off, a step must reach the first R2 above R1, though those between are no points."""
    search = Search("pipesd", 60, seed=0)

    def judge(constants: dict[str, float]) -> float:
        return abs(constants.get("r1", 0.0) - 0.5) + abs(constants.get("r2", 0.0) - 0.6)

    tried = run(search, judge)
    best = min(tried, key=judge)
    assert (best["r1"], best["r2"]) == (0.5, 0.6)
