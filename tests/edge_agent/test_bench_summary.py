"""From cells to the figures that are compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_agent.bench.summary import compared, differences, quartiles, summarise
from edge_agent.core.sending import Learnt
from tests.edge_agent.bench_results import TOKENS, result

POLICIES = ["pipesd", "vanilla", "hsl", "cloud", "local"]


def rows(results):
    return {row.policy: row for row in summarise(results, POLICIES, ["4g", "far"])}


def test_a_row_says_what_its_cells_did() -> None:
    row = rows([result("pipesd")])["pipesd"]
    assert (row.pairs, row.failed, row.tokens) == (1, 0, 10)
    assert row.tpt_ms == pytest.approx(100.0)
    assert row.ttft_ms == pytest.approx(100.0)
    assert row.after_first_ms == pytest.approx(100.0)
    assert row.acceptance == pytest.approx(0.75)
    assert row.draft_length == pytest.approx(2.0)
    assert row.forwards_per_token == pytest.approx(0.4)
    assert row.drafted_per_token == pytest.approx(1.2)
    assert row.wire_up_per_token == pytest.approx(20.0)
    assert row.payload_up_per_token == pytest.approx(9.0)
    assert row.messages_up_per_token == pytest.approx(0.5)
    assert row.kept == pytest.approx(0.75)
    assert row.gamma_ms == pytest.approx(10.0)
    assert row.forward_ms == pytest.approx(50.0)
    assert row.speedup_cloud is None
    assert row.baseline is None


def test_medians_are_over_prompts_of_medians_over_repeats() -> None:
    seconds = {"a": (1.0, 9.0, 2.0), "b": (3.0, 3.0, 3.0), "c": (8.0, 4.0, 4.0)}
    row = rows(
        [
            result("pipesd", prompt=prompt, repeat=repeat, total_s=total)
            for prompt, times in seconds.items()
            for repeat, total in enumerate(times)
        ]
    )["pipesd"]
    assert row.tpt_prompts_ms == pytest.approx((200.0, 300.0, 400.0))
    assert (row.tpt_low_ms, row.tpt_ms, row.tpt_high_ms) == pytest.approx((250.0, 300.0, 350.0))
    assert row.pairs == 9


def test_only_prompts_that_all_have_are_compared() -> None:
    found = rows(
        [
            result("pipesd", prompt="a", total_s=1.0),
            result("pipesd", prompt="b", total_s=50.0),
            result("cloud", prompt="a", total_s=2.0),
            result("cloud", prompt="b", error="the broker ended", tokens=()),
        ]
    )
    assert found["pipesd"].tpt_ms == pytest.approx(100.0)
    assert found["pipesd"].speedup_cloud == pytest.approx(2.0)
    assert (found["cloud"].pairs, found["cloud"].failed) == (1, 1)


def test_a_policy_without_any_result_takes_nothing_from_the_others() -> None:
    found = rows([result("pipesd"), result("hsl", error="gone", tokens=())])
    assert set(found) == {"pipesd"}
    assert found["pipesd"].pairs == 1


def test_the_best_baseline_is_the_quickest_and_ratios_are_paired() -> None:
    times = {"pipesd": (1.0, 4.0), "vanilla": (2.0, 6.0), "hsl": (3.0, 9.0), "cloud": (4.0, 4.0)}
    found = rows(
        [
            result(policy, prompt=prompt, total_s=total)
            for policy, pair in times.items()
            for prompt, total in zip("ab", pair, strict=True)
        ]
    )
    assert {row.baseline for row in found.values()} == {"vanilla"}
    assert found["pipesd"].speedup_baseline == pytest.approx((2.0 + 1.5) / 2)
    assert found["pipesd"].speedup_cloud == pytest.approx((4.0 + 1.0) / 2)
    assert found["vanilla"].speedup_baseline == pytest.approx(1.0)
    assert found["cloud"].speedup_cloud == pytest.approx(1.0)


def test_scenarios_are_apart_and_in_their_order() -> None:
    found = summarise(
        [result("cloud", "far"), result("pipesd", "far"), result("pipesd", "4g")],
        POLICIES,
        ["4g", "far"],
    )
    places = [(row.scenario, row.policy) for row in found]
    assert places == [("4g", "pipesd"), ("far", "pipesd"), ("far", "cloud")]


def test_no_results_no_rows() -> None:
    assert summarise([], POLICIES, ["4g"]) == []
    assert quartiles([3.0]) == (3.0, 3.0)


def test_texts_that_differ_are_found_where_they_part() -> None:
    other = (*TOKENS[:7], 99, *TOKENS[8:])
    results = [
        result("pipesd"),
        result("cloud", tokens=other),
        result("hsl", "far", tokens=TOKENS[:4]),
        result("vanilla", finish="stop"),
        result("pipesd", prompt="b", tokens=other),  # another prompt
        result("pipesd", repeat=1, tokens=other),  # another seed
        result("local", tokens=(5,)),  # another text by design
        result("edgellm", error="gone", tokens=()),
    ]
    found = differences(results)
    assert [(one.other.policy, one.position) for one in found] == [
        ("cloud", 7),
        ("hsl", 4),
        ("vanilla", 10),
    ]
    assert str(found[0]) == ("prompt a: pipesd in 4g and cloud in 4g differ from token 7 on")
    assert compared(results) == 6


LINK = Learnt("pipelined", True, 0.065, 0.015, 0.0, 0.01, 0.04, 4, 1, 2, 8, 0)


def test_planning_is_a_share_of_the_time_and_the_link_the_median_of_its_model() -> None:
    cells = [
        result("pipesd", prompt=name, planning_s=0.002, learnt=link)
        for name, link in {
            "a": LINK,
            "b": replace(LINK, alpha=0.075),
            "c": replace(LINK, model="serial", alpha=9.0),
            "d": replace(LINK, known=False, alpha=9.0),
        }.items()
    ]
    (row,) = summarise(cells, ["pipesd"], ["4g"])
    assert row.planning_share == pytest.approx(0.002)
    assert row.link_model == "pipelined"
    assert (row.alpha_ms, row.occupancy_ms) == (pytest.approx(70.0), pytest.approx(15.0))


def test_where_nothing_measured_the_link_nothing_is_said_of_it() -> None:
    (row,) = summarise([result("cloud")], ["cloud"], ["4g"])
    assert row.link_model is row.alpha_ms is row.occupancy_ms is None
