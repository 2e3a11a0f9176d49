"""The two confidence rules of PipeSD and the window that bounds them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import ConfigError
from edge_agent.core.trigger import Thresholds, Trigger

confidences = st.floats(0.0, 1.0)


def fired(thresholds: Thresholds, values: list[float]) -> list[str | None]:
    trigger = Trigger(thresholds)
    return [trigger.observe(value) for value in values]


@pytest.mark.parametrize(
    ("thresholds", "values", "expected"),
    [
        # The product since the last trigger, at or below R1; then it begins anew.
        (Thresholds(0.5, 0.0, 99), [0.8, 0.7, 0.8, 0.7], [None, None, "sequence", None]),
        (Thresholds(0.5, 0.0, 99), [0.5, 0.5], ["sequence", "sequence"]),
        # One token at or below R2; it begins the product anew too.
        (Thresholds(0.0, 0.5, 99), [0.9, 0.5, 0.51], [None, "token", None]),
        (Thresholds(0.4, 0.5, 99), [0.9, 0.5, 0.9, 0.6], [None, "token", None, None]),
        # Both hold: the token rule is named.
        (Thresholds(0.9, 0.5, 99), [0.4], ["token"]),
        # R1 at or above R2: the sequence rule always comes first or with it.
        (Thresholds(0.6, 0.3, 99), [0.9, 0.6], [None, "sequence"]),
        # Zero turns a rule off, even for a confidence of zero.
        (Thresholds(0.0, 0.0, 3), [0.0, 0.0, 0.0, 0.0], [None, None, "window", None]),
        (Thresholds(1.0, 0.0, 99), [1.0, 1.0], ["sequence", "sequence"]),
        (Thresholds(0.0, 0.0, 1), [1.0, 1.0], ["window", "window"]),
    ],
)
def test_rules(thresholds, values, expected) -> None:
    assert fired(thresholds, values) == expected


def test_reset_begins_anew() -> None:
    trigger = Trigger(Thresholds(0.5, 0.0, 3))
    trigger.observe(0.6)
    trigger.reset()
    assert [trigger.observe(0.9) for _ in range(3)] == [None, None, "window"]


def test_held_a_rule_fires_at_release_and_no_earlier() -> None:
    trigger = Trigger(Thresholds(0.5, 0.0, 99))
    assert trigger.release() is None
    assert trigger.observe(0.4, hold=True) is None
    assert trigger.observe(0.9, hold=True) is None, "what fired is not undone"
    assert trigger.release() == "sequence"
    assert trigger.release() is None
    assert trigger.observe(0.4, hold=True) is None
    assert trigger.observe(0.9) == "sequence", "no longer held"
    trigger.observe(0.4, hold=True)
    trigger.reset()
    assert trigger.release() is None, "rolled back"


def test_thresholds_may_change_on_the_way() -> None:
    trigger = Trigger(Thresholds(0.0, 0.0, 99))
    assert trigger.observe(0.6) is None
    trigger.thresholds = Thresholds(0.5, 0.0, 99)
    assert trigger.observe(0.8) == "sequence"


@given(confidences, confidences, st.integers(1, 20), st.lists(confidences, max_size=50))
def test_the_definition(r1, r2, window, values) -> None:
    """Against the paper's two formulas, written out."""
    run: list[float] = []
    for value, rule in zip(values, fired(Thresholds(r1, r2, window), values), strict=True):
        run.append(value)
        token = r2 > 0.0 and value <= r2
        sequence = r1 > 0.0 and math.prod(run) <= r1
        assert (rule == "token") == token
        assert (rule == "sequence") == (sequence and not token)
        assert (rule is not None) == (token or sequence or len(run) >= window)
        if rule is not None:
            run.clear()


@pytest.mark.parametrize(
    "arguments",
    [
        {"r1": -0.1},
        {"r1": 1.1},
        {"r2": -1e-9},
        {"r2": float("nan")},
        {"r2": float("inf")},
        {"window": 0},
        {"window": 513},
    ],
)
def test_thresholds_outside_their_range(arguments) -> None:
    with pytest.raises(ConfigError, match="outside"):
        Thresholds(**arguments)
