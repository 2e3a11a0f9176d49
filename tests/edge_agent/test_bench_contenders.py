"""What is compared, and with which constants."""

from __future__ import annotations

import json

import pytest

from broker.errors import ConfigError
from edge_agent.bench.contenders import CONTENDERS, GROUPS, check_constants, read_constants, select
from edge_agent.core.policies import POLICIES, SEND_HELD, find_policy


def test_every_policy_competes_and_every_group_has_members() -> None:
    assert set(POLICIES) <= set(CONTENDERS)
    for group in GROUPS:
        assert select([group])
    assert [one.name for one in select(["all"])] != []
    assert len(select(["all"])) == len(CONTENDERS)


def test_names_and_groups_mix_and_nobody_competes_twice() -> None:
    names = [one.name for one in select(["cloud", "baselines", "hsl"])]
    assert names == ["cloud", "vanilla", "hsl", "edgellm"]


@pytest.mark.parametrize("names", [["pipesdd"], [""], []])
def test_unknown_names_are_refused(names) -> None:
    with pytest.raises(ConfigError, match="policy"):
        select(names)


def test_ablations_change_what_they_are_named_after() -> None:
    full = find_policy("pipesd")
    made = {name: one.policy() for name, one in CONTENDERS.items() if one.base == "pipesd"}
    assert made["pipesd"] == full
    assert made["pipesd-token-only"].thresholds.r1 == 0.0
    assert made["pipesd-token-only"].thresholds.r2 == full.thresholds.r2
    assert made["pipesd-sequence-only"].thresholds.r2 == 0.0
    assert made["pipesd-sequence-only"].thresholds.r1 == full.thresholds.r1
    fixed = made["pipesd-fixed"].thresholds
    assert (fixed.r1, fixed.r2) == (0.0, 0.0)
    assert fixed.window == find_policy("vanilla").thresholds.window
    alone = made["pipesd-no-pipeline"]
    assert not alone.proactive
    assert alone.sending == SEND_HELD
    assert alone.thresholds == full.thresholds
    for name, policy in made.items():
        assert policy.name == name
        assert not policy.stream
        assert not policy.local


def test_constants_hold_in_their_scenario_and_ablations_take_those_of_the_system() -> None:
    constants = check_constants(
        {
            "pipesd": {"4g": {"r1": 0.2, "r2": 0.3, "window": 9, "min_survival": 0.1}},
            "pipesd-token-only": {"far": {"r2": 0.9}},
        },
        "here",
    )
    tuned = CONTENDERS["pipesd"].policy(constants, "4g")
    assert (tuned.thresholds.r1, tuned.thresholds.r2, tuned.thresholds.window) == (0.2, 0.3, 9)
    assert tuned.min_survival == 0.1
    assert CONTENDERS["pipesd"].policy(constants, "wifi") == find_policy("pipesd")
    ablation = CONTENDERS["pipesd-token-only"]
    near, far = ablation.policy(constants, "4g"), ablation.policy(constants, "far")
    assert (near.thresholds.r1, near.thresholds.r2, near.thresholds.window) == (0.0, 0.3, 9)
    assert (far.thresholds.r1, far.thresholds.r2) == (0.0, 0.9)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "no table"),
        ({"nobody": {}}, "unknown policy 'nobody'"),
        ({"hsl": 3}, "no table"),
        ({"hsl": {"4g": {"r3": 1}}}, "unknown constant 'r3'"),
        ({"hsl": {"4g": {"r2": "high"}}}, "no number"),
        ({"hsl": {"4g": {"r2": True}}}, "no number"),
        ({"hsl": {"4g": {"r2": float("nan")}}}, "no number"),
        ({"hsl": {"4g": {"r2": 1.5}}}, r"r2 1.5 is outside \[0, 1\]"),
        ({"vanilla": {"4g": {"window": 2.5}}}, "no whole number"),
        ({"vanilla": {"4g": {"window": 0}}}, "window 0"),
        ({"pipesd": {"4g": {"min_survival": 2}}}, "min_survival"),
        ({"pipesd": {"4g": {"max_ahead": 0}}}, "max_ahead"),
    ],
)
def test_constants_that_cannot_be_are_named(data, words, tmp_path) -> None:
    path = tmp_path / "constants.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=words) as caught:
        read_constants(str(path))
    assert str(path) in str(caught.value)


def test_a_constants_file_that_is_none(tmp_path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_constants(str(tmp_path / "missing"))
    path = tmp_path / "broken"
    path.write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        read_constants(str(path))
