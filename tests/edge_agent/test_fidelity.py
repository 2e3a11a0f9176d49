"""Replays beside what was measured: paired by text, and told where they part."""

from __future__ import annotations

import pytest

from edge_agent.bench.contenders import CONTENDERS
from edge_agent.bench.fidelity import MARK, beside, drafting_pace, lines_of
from edge_agent.bench.link import SCENARIOS, Cut, Link, Scenario
from edge_agent.bench.replay import replay
from tests.edge_agent.bench_results import result
from tests.edge_agent.bench_traces import make_trace

AGREES = [True, True, False, True] * 5
TRACES = [make_trace(AGREES, name=name) for name in ("a", "b", "c")]
POLICIES = [CONTENDERS[name] for name in ("vanilla", "cloud")]
PLACES = {"4g": SCENARIOS["4g"]}


def measured(factor: float, *, policy: str = "vanilla", prompt: str = "a", **values):
    """A cell that took ``factor`` times as long as its replay."""
    once = replay(TRACES[0], CONTENDERS[policy].policy(), SCENARIOS["4g"])
    return result(
        policy,
        prompt=prompt,
        tokens=TRACES[0].tokens,
        total_s=factor * once.tpt_s * len(TRACES[0].tokens),
        **values,
    )


def test_a_replay_of_itself_is_the_same() -> None:
    cells = [measured(1.0, policy=one.name, prompt=name) for one in POLICIES for name in "abc"]
    rows = beside(cells, TRACES, POLICIES, PLACES, {}, verify="triggered")
    assert [(row.policy, row.texts) for row in rows] == [("vanilla", 3), ("cloud", 3)]
    for row in rows:
        assert row.ratio == pytest.approx(1.0)
        assert row.real_ms == pytest.approx(row.replayed_ms)
        assert row.close


def test_the_ratio_is_the_median_over_texts_of_the_median_over_repeats() -> None:
    cells = [
        measured(1.0 / 1.2, prompt="a"),
        measured(1.0 / 1.2, prompt="a", repeat=1),
        measured(9.0, prompt="a", repeat=2),
        measured(1.0 / 1.3, prompt="b"),
        measured(1.0, prompt="c"),
    ]
    (row,) = beside(cells, TRACES, POLICIES, PLACES, {}, verify="triggered")
    assert row.ratio == pytest.approx(1.2)
    assert not row.close
    assert lines_of([row])[-1] == f"within {100 * MARK:.0f} %: 0 of 1"


def test_what_failed_or_was_not_run_or_is_cut_is_left_out() -> None:
    cut = Scenario("cut", Link(cuts=(Cut(1.0, 0.5),)))
    cells = [
        measured(1.0, prompt="a"),
        measured(5.0, prompt="b", error="gone"),
        result("vanilla", "cut", "a"),
    ]
    places = {**PLACES, "cut": cut}
    (row,) = beside(cells, TRACES, POLICIES, places, {}, verify="triggered")
    assert (row.scenario, row.policy, row.texts) == ("4g", "vanilla", 1)
    assert lines_of([]) == []


def test_the_pace_of_drafting_is_that_of_links_without_a_floor() -> None:
    cells = [
        result("pipesd", gamma_s=0.012),
        result("hsl", gamma_s=0.010),
        result("vanilla", gamma_s=0.011),
        result("pipesd", "slow-edge", gamma_s=0.030),
        result("pipesd", "unknown", gamma_s=0.5),
        result("pipesd", gamma_s=0.9, error="gone"),
        result("cloud", gamma_s=0.0),
    ]
    assert drafting_pace(cells, SCENARIOS) == 0.011
    assert drafting_pace([], SCENARIOS) is None
