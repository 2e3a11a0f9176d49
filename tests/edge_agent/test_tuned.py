"""``--tune``: what it asks for, what it finds, and what a resumed run keeps of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError
from edge_agent.bench.contenders import CONTENDERS, check_constants
from edge_agent.bench.grids import grid_of
from edge_agent.bench.html import page
from edge_agent.bench.link import Cut, Link, Scenario, find_scenario
from edge_agent.bench.prompts import BUILT_IN, TUNING, BenchPrompt
from edge_agent.bench.tuned import (
    BUDGET,
    QUICK_PROMPTS,
    Wish,
    constants_in,
    find_constants,
    lines_of,
    rows_of,
    to_tune,
    wish_of,
)
from edge_agent.cli import build_parser
from tests.edge_agent.bench_results import settings
from tests.edge_agent.bench_traces import random_trace

TRACES = [random_trace(seed) for seed in range(3)]
COMPARED = BUILT_IN[:3]


def wish(*flags: str, compared: Sequence[BenchPrompt] = COMPARED) -> Wish | None:
    return wish_of(build_parser().parse_args(["bench", *flags]), compared)


# -- the flags ----------------------------------------------------------------------------------


def test_nothing_is_tuned_unasked() -> None:
    assert wish() is None


def test_built_in_prompts_of_their_own_are_tuned_on() -> None:
    assert wish("--tune", "grid") == Wish(BUDGET, TUNING)
    assert wish("--tune", "grid", "--tune-budget", "3", "--quick") == Wish(
        3, TUNING[:QUICK_PROMPTS]
    )


def test_a_built_in_prompt_that_is_compared_is_left_out() -> None:
    compared = [BenchPrompt("mine", f" {TUNING[0].text.replace(' ', '  ')} ")]
    assert wish("--tune", "grid", compared=compared) == Wish(BUDGET, TUNING[1:])
    with pytest.raises(ConfigError, match="--tune-prompts"):
        wish("--tune", "grid", compared=TUNING)


def test_a_file_of_prompts_is_read_as_the_other(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "One"}\n{"prompt": "Two", "chat": true}\n')
    found = wish("--tune", "grid", "--tune-prompts", str(path), "--raw")
    assert found is not None
    assert found.prompts == (
        BenchPrompt("line 1", "One", False),
        BenchPrompt("line 2", "Two", True),
    )


def test_prompts_that_are_compared_are_refused(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [{"prompt": "Something else."}, {"prompt": COMPARED[1].text + "\n", "id": "again"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigError, match=r"--tune-prompts .*p\.jsonl: 'again' is also compared"):
        wish("--tune", "grid", "--tune-prompts", str(path))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tune-budget", "9"], "--tune-budget without --tune grid"),
        (["--tune-prompts", "x"], "--tune-prompts without --tune grid"),
        (["--tune", "grid", "--tune-budget", "0"], "--tune-budget 0"),
        (["--tune", "grid", "--tune-budget", "1000000"], "--tune-budget 1000000"),
        (["--tune", "grid", "--tune-prompts", "missing"], "cannot read --tune-prompts missing"),
    ],
)
def test_wrong_wishes_are_named(flags, words) -> None:
    with pytest.raises(ConfigError, match=words):
        wish(*flags)


# -- what is found ------------------------------------------------------------------------------


def test_only_what_has_constants_and_is_not_given_is_tuned() -> None:
    known = {"vanilla": {"4g": {"window": 3}}}
    assert to_tune(["vanilla", "cloud", "local", "hsl"], ["4g", "far"], known) == [
        ("vanilla", "far"),
        ("hsl", "4g"),
        ("hsl", "far"),
    ]
    # An ablation is tuned in its own right, though its base is given.
    assert to_tune(["pipesd-fixed"], ["4g"], {"pipesd": {"4g": {}}}) == [("pipesd-fixed", "4g")]


def found(
    policies: Sequence[str], scenarios: Sequence[Scenario], known: Any = None, **options: Any
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, Any]]:
    return find_constants(
        TRACES,
        policies,
        scenarios,
        known or {},
        wish=Wish(6, TUNING[:2]),
        verify="triggered",
        processes=1,
        **options,
    )


def test_every_policy_is_granted_as_many_candidates_and_given_constants_stay() -> None:
    told: list[tuple[int, int]] = []
    known = {"vanilla": {"wifi": {"window": 3}}}
    constants, account = found(
        ["pipesd", "vanilla", "hsl", "cloud", "local"],
        [find_scenario("wifi"), find_scenario("far")],
        known,
        report=lambda done, total, what, left: told.append((done, total)),
    )
    assert known == {"vanilla": {"wifi": {"window": 3}}}
    assert set(constants) == {"pipesd", "vanilla", "hsl"}
    assert constants["vanilla"]["wifi"] == {"window": 3}
    assert check_constants(constants, "found") == constants
    assert account["prompts"] == [TUNING[0].name, TUNING[1].name]
    assert {
        (policy, scenario): one["tried"]
        for policy, by_scenario in account["found"].items()
        for scenario, one in by_scenario.items()
    } == {
        ("pipesd", "wifi"): 6,
        ("pipesd", "far"): 6,
        ("vanilla", "far"): 6,
        ("hsl", "wifi"): 6,
        ("hsl", "far"): 6,
    }
    assert told == [(n, 30) for n in range(1, 31)]
    json.dumps(account)


def test_a_link_with_cuts_is_tuned_without_them() -> None:
    cut = Scenario("cut", Link(delay_s=0.01, cuts=(Cut(1.0, 0.5),)))
    constants, _ = found(["vanilla"], [cut])
    assert constants["vanilla"]["cut"]["window"] >= 1


# -- what a results file keeps ------------------------------------------------------------------


def header(constants: Any, account: Any, policies: Sequence[str]) -> dict[str, Any]:
    """As a run with these constants writes it."""
    import dataclasses

    made = {
        name: {
            scenario: dataclasses.asdict(CONTENDERS[name].policy(constants, scenario))
            for scenario in ("wifi", "far")
        }
        for name in policies
    }
    made["hsl"] = {"all": made["hsl"]["wifi"]}
    data = settings(
        policies=made,
        scenarios={name: find_scenario(name).to_dict() for name in ("wifi", "far")},
    ).to_dict()
    whole = {"settings": data, "tuning": account, "environment": {}, "started": "now"}
    return json.loads(json.dumps(whole))  # type: ignore[no-any-return]


def test_the_constants_of_a_tuned_run_come_back() -> None:
    policies = ["pipesd", "pipesd-token-only", "vanilla", "hsl", "cloud"]
    constants, account = found(policies, [find_scenario("wifi"), find_scenario("far")])
    constants["hsl"]["far"] = constants["hsl"]["wifi"]
    again = constants_in(header(constants, account, policies), "run.jsonl")
    assert again == constants
    for name in policies:
        for scenario in ("wifi", "far"):
            one = CONTENDERS[name]
            assert one.policy(again, scenario) == one.policy(constants, scenario)


def test_a_run_without_tuning_has_none(tmp_path) -> None:
    whole = header({}, None, ["vanilla", "hsl"])
    with pytest.raises(ConfigError, match=r"run\.jsonl: that run was not tuned"):
        constants_in(whole, "run.jsonl")
    assert lines_of(whole) == rows_of(whole, "wifi") == []


@pytest.mark.parametrize(
    "policies", [{"slow": {}}, {"vanilla": {}}, {"vanilla": {"all": {}}}, {"vanilla": 3}, [1]]
)
def test_a_header_without_constants_is_refused(policies) -> None:
    whole = header({}, {"found": {}}, ["vanilla", "hsl"])
    whole["settings"]["policies"] = policies
    with pytest.raises(ConfigError, match=r"run\.jsonl"):
        constants_in(whole, "run.jsonl")


def test_the_reports_name_what_was_found(tmp_path: Path) -> None:
    policies = ["pipesd", "vanilla", "hsl"]
    constants, account = found(policies, [find_scenario("wifi"), find_scenario("far")])
    whole = header(constants, account, policies)
    assert lines_of(whole) == [
        "constants: of 6 candidates for each policy and scenario the best on 2 other texts"
    ]
    rows = {policy: words for policy, words, _, _ in rows_of(whole, "far")}
    assert rows["vanilla"] == f"window {constants['vanilla']['far']['window']}"
    for name in grid_of("pipesd"):
        assert f"{name} {constants['pipesd']['far'][name]:g}" in rows["pipesd"]
    from edge_agent.bench.summary import summarise
    from tests.edge_agent.bench_results import result

    results = [result(policy, "far") for policy in policies]
    html = page(whole, summarise(results, policies, ["far"]), results, ["same"], planned=3)
    assert "<h3>Constants</h3>" in html
    assert rows["pipesd"] in html
