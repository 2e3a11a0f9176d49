"""Token batches: exact against all splits, against Algorithm 1, and replanned when it is time."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import ConfigError
from edge_agent.core.pipeline import (
    FLOOR,
    MAX_WINDOW,
    LinkCost,
    Plan,
    PlanInputs,
    Planner,
    WindowLength,
    delivery_time,
    plan,
    replan_needed,
)

#: Sums and products of these are exact, so that ties are ties.
EIGHTHS = st.integers(0, 80).map(lambda n: n / 8)
SECONDS = st.sampled_from([0.0, 1e-9, 1e-6]) | st.floats(0.0, 100.0) | EIGHTHS


def outcomes(n: int, link: LinkCost, gamma: float) -> list[tuple[float, int]]:
    """(time without propagation, messages) of each of the 2^(n-1) splits of a window."""
    ways: list[list[tuple[float, int]]] = [[(0.0, 0)]]
    for j in range(1, n + 1):
        ready = gamma * j
        ways.append(
            [
                (max(free, ready) + link.occupancy + link.beta * (j - i), messages + 1)
                for i in range(j)
                for free, messages in ways[i]
            ]
        )
    return ways[n]


def algorithm_1(n: int, alpha: float, beta: float, gamma: float) -> float:
    """The least time, as the paper computes it."""
    dp = [0.0]
    for j in range(1, n + 1):
        dp.append(min(max(dp[i], gamma * j) + alpha + beta * (j - i) for i in range(j)))
    return dp[n]


def check_shape(ends: tuple[int, ...], n: int) -> None:
    assert ends[-1] == n
    assert ends[0] >= 1
    assert all(a < b for a, b in itertools.pairwise(ends))


def check_against_all(n: int, link: LinkCost, gamma: float, slack: float = 0.0) -> None:
    ends = plan(n, link, gamma, slack)
    check_shape(ends, n)
    ways = outcomes(n, link, gamma)
    least = min(ways)[0]
    took = delivery_time(ends, LinkCost(link.occupancy, 0.0, link.beta), gamma)
    assert delivery_time(ends, link, gamma) == took + link.propagation
    assert took <= (least + slack) * (1 + 4e-12)
    fewest = min(messages for took, messages in ways if took <= least + slack)
    assert len(ends) <= fewest
    # Not fewer by being worse, either, and no later than so many need to be.
    within = [way for way in ways if way[0] <= (least + slack) * (1 + 4e-12)]
    assert len(ends) >= min(messages for _, messages in within)
    earliest = min(took for took, messages in within if messages == len(ends))
    assert took <= earliest * (1 + 1e-11) + slack * 1e-11


# -- the plan -----------------------------------------------------------------------------------


def test_every_split_of_thousands_of_random_cases() -> None:
    draw = random.Random(7)

    def seconds() -> float:
        kind = draw.random()
        if kind < 0.15:
            return 0.0
        if kind < 0.5:
            return draw.choice([1, 2, 3, 4, 5, 6, 8, 10, 20]) / 8
        return 10 ** draw.uniform(-9, 3)

    for case in range(4000):
        n = draw.randint(1, 12) if case % 4 == 0 else draw.randint(1, 8)
        check_against_all(n, LinkCost(seconds(), seconds(), seconds()), seconds())


@given(st.integers(1, 9), SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
def test_every_split_of_odd_cases(n, occupancy, propagation, beta, gamma, slack) -> None:
    check_against_all(n, LinkCost(occupancy, propagation, beta), gamma)
    check_against_all(n, LinkCost(occupancy, propagation, beta), gamma, slack)


@given(st.integers(1, 120), EIGHTHS, EIGHTHS, EIGHTHS)
def test_the_serial_cost_is_that_of_algorithm_1(n, alpha, beta, gamma) -> None:
    link = LinkCost(alpha, 0.0, beta)
    assert delivery_time(plan(n, link, gamma), link, gamma) == pytest.approx(
        algorithm_1(n, alpha, beta, gamma), rel=1e-12
    )


@given(st.integers(1, MAX_WINDOW), SECONDS, SECONDS, SECONDS)
def test_any_window_is_split_into_what_is_possible(n, occupancy, beta, gamma) -> None:
    link = LinkCost(occupancy, 0.0, beta)
    ends = plan(n, link, gamma)
    check_shape(ends, n)
    took = delivery_time(ends, link, gamma)
    least = gamma * n + occupancy  # the last token is drafted, and its message begins
    assert took >= least * (1 - 1e-12)
    assert took <= delivery_time((n,), link, gamma) * (1 + 1e-12)
    assert took <= delivery_time(tuple(range(1, n + 1)), link, gamma) * (1 + 1e-12)


@given(st.integers(1, 40), SECONDS, SECONDS, SECONDS, SECONDS)
def test_what_is_under_way_blocks_nothing(n, occupancy, propagation, beta, gamma) -> None:
    """Propagation adds to the time once and changes no plan; counted as occupancy it costs."""
    pipelined = LinkCost(occupancy, propagation, beta)
    bare = LinkCost(occupancy, 0.0, beta)
    serial = LinkCost(occupancy + propagation, 0.0, beta)
    ends = plan(n, pipelined, gamma)
    assert ends == plan(n, bare, gamma)
    took = delivery_time(ends, pipelined, gamma)
    assert took == pytest.approx(delivery_time(ends, bare, gamma) + propagation)
    slower = delivery_time(plan(n, serial, gamma), serial, gamma)
    assert took <= slower * (1 + 1e-9) + 1e-12


def test_a_case_by_hand() -> None:
    """Tokens at 10, 20, 30; a message takes 4, each token 3 more."""
    link = LinkCost(4.0, 0.0, 3.0)
    # (1,2,3): 17, 27, 37. (2,3): 30, 37. Two messages are enough.
    assert plan(3, link, 10.0) == (2, 3)
    assert delivery_time((2, 3), link, 10.0) == 37.0
    assert delivery_time((3,), link, 10.0) == 43.0
    assert delivery_time((1, 2, 3), link, 10.0) == 37.0
    # A message less is worth 6.
    assert plan(3, link, 10.0, slack=5.9) == (2, 3)
    assert plan(3, link, 10.0, slack=6.0) == (3,)


def test_the_worked_example_of_a_review_is_impossible() -> None:
    """Nothing arrives before all six tokens are drafted."""
    gamma = 25.0
    for alpha in (0.0, 1.0, 30.0):
        link = LinkCost(alpha, 0.0, 5.0)
        assert delivery_time(plan(6, link, gamma), link, gamma) >= 6 * gamma


@pytest.mark.parametrize("n", [1, 2, 20, MAX_WINDOW])
def test_ids_that_weigh_nothing_go_in_one_message(n) -> None:
    assert plan(n, LinkCost(0.015, 0.025, 0.0), 0.01) == (n,)


def test_drafts_that_cost_nothing_go_in_one_message() -> None:
    assert plan(20, LinkCost(0.015, 0.0, 0.1), 0.0) == (20,)


def test_messages_that_cost_nothing_leave_one_token_for_the_last() -> None:
    ends = plan(20, LinkCost(0.0, 0.0, 0.009), 0.01)
    assert ends[-2:] == (19, 20)
    assert delivery_time(ends, LinkCost(0.0, 0.0, 0.009), 0.01) == pytest.approx(0.209)


def test_the_authors_regime_is_bound_by_the_upload() -> None:
    """0.29 MB a token at 2.5 MB/s, gamma 30 ms: the link never waits but for the first token."""
    link = LinkCost(0.01, 0.0, 0.116)
    ends = plan(20, link, 0.03)
    busy = len(ends) * link.occupancy + 20 * link.beta
    assert delivery_time(ends, link, 0.03) == pytest.approx(ends[0] * 0.03 + busy)
    assert 1 < len(ends) < 20


@pytest.mark.parametrize("n", [0, -1, MAX_WINDOW + 1])
def test_a_window_that_cannot_be(n) -> None:
    with pytest.raises(ConfigError, match="window"):
        plan(n, LinkCost(0.01), 0.01)


@pytest.mark.parametrize("seconds", [-1e-9, math.nan, math.inf, 86_401.0])
def test_times_that_cannot_be(seconds) -> None:
    for fields in ((seconds, 0.0, 0.0), (0.0, seconds, 0.0), (0.0, 0.0, seconds)):
        with pytest.raises(ConfigError, match="seconds"):
            LinkCost(*fields)
    with pytest.raises(ConfigError, match="gamma"):
        plan(5, LinkCost(0.01), seconds)
    with pytest.raises(ConfigError, match="slack"):
        plan(5, LinkCost(0.01), 0.01, seconds)


def test_planning_takes_no_time_to_speak_of() -> None:
    """The marks are 0.1 ms at 20 tokens and 1 ms at 100; the best of many, on a busy machine."""
    for n, mark in ((20, 1e-4), (100, 1e-3)):
        for link in (
            LinkCost(0.02, 0.0, 5e-4),
            LinkCost(0.001, 0.0, 0.02),
            LinkCost(0.0, 0.0, 9e-3),
        ):
            best = math.inf
            for _ in range(30):
                begin = time.perf_counter()
                plan(n, link, 0.01)
                best = min(best, time.perf_counter() - begin)
            assert best <= mark


# -- its use ------------------------------------------------------------------------------------


@given(st.integers(1, 30), EIGHTHS, EIGHTHS, EIGHTHS)
def test_a_plan_repeats_with_its_window(n, occupancy, beta, gamma) -> None:
    cyclic = Plan(PlanInputs(n, LinkCost(occupancy, 0.0, beta), gamma))
    ends = [count for count in range(1, 3 * n + 1) if cyclic.ends_message(count)]
    once = list(cyclic.ends)
    assert ends == once + [n + end for end in once] + [2 * n + end for end in once]
    assert cyclic.time == delivery_time(cyclic.ends, cyclic.inputs.link, gamma)


BASE = PlanInputs(20, LinkCost(0.02, 0.03, 0.001), 0.01)


def changed(**fields: float) -> PlanInputs:
    link = BASE.link
    return PlanInputs(
        int(fields.get("n", BASE.n)),
        LinkCost(
            fields.get("occupancy", link.occupancy),
            fields.get("propagation", link.propagation),
            fields.get("beta", link.beta),
        ),
        fields.get("gamma", BASE.gamma),
    )


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({}, False),
        ({"n": 21}, True),
        ({"n": 19}, True),
        ({"occupancy": 0.0239}, False),
        ({"occupancy": 0.0241}, True),
        ({"occupancy": 0.0161}, False),
        ({"occupancy": 0.0159}, True),
        ({"beta": 0.00119}, False),
        ({"beta": 0.00121}, True),
        ({"beta": 0.0}, True),
        ({"gamma": 0.0119}, False),
        ({"gamma": 0.0121}, True),
        ({"gamma": 0.0079}, True),
        ({"propagation": 1.0}, False),
        ({"occupancy": 0.05, "propagation": 0.0}, True),  # another cost model
    ],
)
def test_when_to_plan_anew(fields, needed) -> None:
    assert replan_needed(BASE, changed(**fields)) is needed


@given(st.floats(0.0, FLOOR), st.floats(0.0, FLOOR), st.floats(0.0, FLOOR / 20))
def test_what_is_next_to_nothing_does_not_flap(occupancy, gamma, beta) -> None:
    nothing = PlanInputs(20, LinkCost(0.0), 0.0)
    assert not replan_needed(nothing, PlanInputs(20, LinkCost(occupancy, 0.0, beta), gamma))


def test_a_planner_keeps_its_plan_until_it_is_out_of_date() -> None:
    planner = Planner(20, LinkCost(0.01, 0.0, 0.002), 0.01)
    first = planner.plan
    assert not planner.update(20, LinkCost(0.0115, 0.0, 0.002), 0.011)
    assert planner.plan is first
    # Each small step is measured from the plan, not from the step before.
    assert planner.update(20, LinkCost(0.0125, 0.0, 0.002), 0.011)
    assert planner.plan is not first
    assert planner.plan.inputs == PlanInputs(20, LinkCost(0.0125, 0.0, 0.002), 0.011)
    assert planner.update(7, LinkCost(0.0125, 0.0, 0.002), 0.011)
    assert planner.plan.ends[-1] == 7
    assert planner.replans == 3


def test_a_planner_weighs_messages_against_time() -> None:
    link = LinkCost(4.0, 0.0, 3.0)
    assert Planner(3, link, 10.0).plan.ends == (2, 3)
    assert Planner(3, link, 10.0, slack=6.0).plan.ends == (3,)


# -- the window ---------------------------------------------------------------------------------


def test_the_window_begins_with_twenty_and_follows_the_drafts() -> None:
    window = WindowLength()
    assert window.value == 20
    window.add(5)
    assert window.value == 5
    window.add(6)
    assert window.value == 6  # 5.5, half up
    window.add(5)
    assert window.value == 5


@given(st.lists(st.integers(-3, 2000), max_size=300))
def test_the_window_is_the_mean_of_the_last_hundred(lengths) -> None:
    window = WindowLength()
    for length in lengths:
        window.add(length)
    last = [length for length in lengths if length > 0][-100:]
    if not last:
        assert window.value == 20
    else:
        assert window.value == min(MAX_WINDOW, math.floor(sum(last) / len(last) + 0.5))
        assert 1 <= window.value <= MAX_WINDOW


def test_the_window_has_a_top() -> None:
    window = WindowLength(first=4, keep=3, top=8)
    assert window.value == 4
    for _ in range(3):
        window.add(50)
    assert window.value == 8
    for _ in range(3):
        window.add(2)
    assert window.value == 2


@pytest.mark.parametrize(
    "fields", [{"first": 0}, {"first": 9, "top": 8}, {"keep": 0}, {"top": 513}]
)
def test_windows_that_cannot_be(fields) -> None:
    with pytest.raises(ConfigError, match="planning window"):
        WindowLength(**fields)
