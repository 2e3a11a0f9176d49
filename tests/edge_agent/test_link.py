"""Settings of emulated links, and the scenarios with a name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import ConfigError
from edge_agent.bench.link import (
    FULL_PROBS_BYTES,
    MAX_CHANGES,
    SCENARIOS,
    WIRES,
    Cut,
    Link,
    RateChange,
    Scenario,
    find_scenario,
    varying_rates,
)
from tests.edge_agent.link_strategies import links


@given(links())
def test_a_link_survives_json(link: Link) -> None:
    assert Link.from_dict(json.loads(json.dumps(link.to_dict(), allow_nan=False))) == link


@given(links(), st.floats(0, 10), st.floats(0, 10), st.sampled_from(WIRES), st.text(max_size=20))
def test_a_scenario_survives_json(link, gamma, forward, wire, note) -> None:
    scenario = Scenario("mine", link, gamma, forward, wire, note)
    assert Scenario.from_dict(json.loads(json.dumps(scenario.to_dict()))) == scenario


def test_what_a_description_leaves_out_has_its_default() -> None:
    assert Link.from_dict({}) == Link()
    assert Link.from_dict({"delay_s": 1, "cuts": [{"at_s": 3}]}) == Link(
        delay_s=1.0, cuts=(Cut(3.0),)
    )
    assert Scenario.from_dict({"name": "x"}) == Scenario("x")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"delay_s": -0.001}, "delay_s"),
        ({"delay_s": math.nan}, "delay_s"),
        ({"delay_s": math.inf}, "delay_s"),
        ({"delay_s": "0.1"}, "delay_s"),
        ({"delay_s": True}, "delay_s"),
        ({"startup_s": 4_000.0}, "startup_s"),
        ({"jitter_s": -1}, "jitter_s"),
        ({"stall_s": None}, "stall_s"),
        ({"stall_probability": 1.01}, "stall_probability"),
        ({"up_bps": 0}, "up_bps"),
        ({"up_bps": -5.0}, "up_bps"),
        ({"down_bps": math.inf}, "down_bps"),
        ({"down_bps": "fast"}, "down_bps"),
        ({"rates": 5}, "rates"),
        ({"rates": [5]}, "rates"),
        ({"rates": [{"at_s": 1.0, "up_bps": 1e6}]}, "down_bps"),
        ({"rates": [{"at_s": 0.0, "up_bps": 1e6, "down_bps": 1e6}]}, "first change"),
        ({"rates": [{"at_s": 1.0, "up_bps": 1e6, "down_bps": 1e6}] * 2}, "sort by time"),
        ({"rates": [{"at_s": -1.0, "up_bps": 1e6, "down_bps": 1e6}]}, "at_s"),
        ({"rates": [{"at_s": 1.0, "up_bps": 0.0, "down_bps": 1e6}]}, "up_bps"),
        ({"rates_repeat_s": 5.0}, "nothing to repeat"),
        (
            {
                "rates": [{"at_s": 5.0, "up_bps": 1e6, "down_bps": 1e6}],
                "rates_repeat_s": 5.0,
            },
            "rates_repeat_s",
        ),
        ({"cuts": [{"at_s": 2.0}, {"at_s": 1.0}]}, "sort by time"),
        ({"cuts": [{"at_s": 2.0, "for_s": -1.0}]}, "for_s"),
        ({"cuts": [{"for_s": 1.0}]}, "at_s"),
        ({"cuts": "often"}, "cuts"),
        ({"dealy_s": 0.1}, "dealy_s"),
        ([], "no table"),
        (None, "no table"),
    ],
)
def test_a_wrong_link_is_refused_by_name(settings: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refusal:
        Link.from_dict(settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"name": 5}, "name"),
        ({"name": "x", "wire": "probs"}, "wire"),
        ({"name": "x", "gamma_floor_s": -1}, "gamma_floor_s"),
        ({"name": "x", "forward_floor_s": math.nan}, "forward_floor_s"),
        ({"name": "x", "note": 5}, "note"),
        ({"name": "x", "link": {"delay_s": -1}}, "delay_s"),
        ({"name": "x", "link": None}, "link"),
        ({"name": "x", "delay_s": 0.1}, "unknown setting 'delay_s'"),
    ],
)
def test_a_wrong_scenario_is_refused_by_name(settings: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Scenario.from_dict(settings)


def test_made_in_code_lists_and_strangers_are_refused_too() -> None:
    with pytest.raises(ConfigError, match="rates"):
        Link(rates=[RateChange(1.0, None, None)])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cuts"):
        Link(cuts=(1.0,))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no Link"):
        Scenario("x", {"delay_s": 0.1})  # type: ignore[arg-type]


def test_schedules_have_a_limit() -> None:
    Link(cuts=tuple(Cut(float(i)) for i in range(MAX_CHANGES)))
    with pytest.raises(ConfigError, match="above"):
        Link(cuts=tuple(Cut(float(i)) for i in range(MAX_CHANGES + 1)))


def test_the_named_scenarios_are_those_of_the_issue() -> None:
    assert list(SCENARIOS) == ["S1", "S2", "S3", "S4", "wifi", "4g", "far", "slow-edge", "loopback"]
    assert all(scenario.name == name for name, scenario in SCENARIOS.items())
    for name, delay, startup in (("wifi", 5, 2), ("4g", 25, 15), ("far", 80, 15)):
        link = find_scenario(name).link
        assert (link.delay_s, link.startup_s) == (delay / 1e3, startup / 1e3)
    assert find_scenario("slow-edge").link == find_scenario("4g").link
    assert find_scenario("slow-edge").gamma_floor_s == 0.030
    assert find_scenario("loopback") == Scenario("loopback", note="no emulation")
    s1 = find_scenario("S1").link
    assert (s1.up_bps, s1.down_bps) == (20e6, 200e6)
    assert find_scenario("S2").link == find_scenario("S3").link == s1
    floors = [find_scenario(f"S{i}").gamma_floor_s for i in (1, 2, 3)]
    assert floors == sorted(floors)
    for name in ("S1", "S2", "S3", "S4"):
        assert "chosen" in SCENARIOS[name].note


def test_s4_changes_every_20_seconds_within_the_papers_bounds() -> None:
    link = find_scenario("S4").link
    up = [link.up_bps, *(change.up_bps for change in link.rates)]
    down = [link.down_bps, *(change.down_bps for change in link.rates)]
    assert all(bps is not None and 10e6 <= bps <= 80e6 for bps in up)
    assert all(bps is not None and 150e6 <= bps <= 280e6 for bps in down)
    assert len(set(up)) > 30
    assert [change.at_s for change in link.rates] == [20.0 * i for i in range(1, len(up))]
    assert link.rates_repeat_s == 20.0 * len(up)


def test_drawn_rates_are_the_same_under_one_seed() -> None:
    def drawn(seed: int, steps: int = 5) -> Link:
        return varying_rates((1, 9), (10, 90), every_s=2.0, steps=steps, seed=seed)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1, steps=1).rates == ()


def test_an_unknown_scenario_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'5g'.*wifi, 4g, far"):
        find_scenario("5g")


def test_full_probabilities_are_labelled() -> None:
    plain = find_scenario("S1")
    full = plain.with_wire("full-probs")
    assert (plain.pad_bytes_per_token, full.pad_bytes_per_token) == (0, FULL_PROBS_BYTES)
    assert plain.label == "S1"
    assert full.label == "S1 [full-probs]"
    with pytest.raises(ConfigError, match="wire"):
        plain.with_wire("everything")
