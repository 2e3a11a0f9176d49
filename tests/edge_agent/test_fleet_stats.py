"""Counting a fleet: quantiles within one per cent, whatever is added, and bounded."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.bench.fleet_stats import MAX_REASONS, Histogram, Tally

TIMES = st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200)


def histogram(times) -> Histogram:
    made = Histogram()
    for seconds in times:
        made.add(seconds)
    return made


@given(TIMES, st.floats(0.01, 1.0))
def test_quantiles_are_those_of_the_times_within_one_per_cent(times, share) -> None:
    exact = float(np.quantile(times, share, method="inverted_cdf"))
    assert histogram(times).quantile(share) == pytest.approx(exact, rel=0.0101)


@given(TIMES, TIMES)
def test_merging_is_adding_all(one, other) -> None:
    both, merged = histogram(one + other), histogram(one)
    merged.merge(histogram(other))
    assert merged.count == both.count
    assert merged.largest == both.largest
    assert merged.mean == pytest.approx(both.mean)
    for share in (0.5, 0.9, 0.99):
        assert merged.quantile(share) == both.quantile(share)


def test_nothing_and_next_to_nothing() -> None:
    empty = Histogram()
    assert empty.quantile(0.5) is None
    assert empty.mean is None
    none = histogram([0.0, -1.0, 1e-9])
    assert none.count == 3
    assert none.quantile(0.99) == 1e-5
    assert none.mean == pytest.approx(1e-9 / 3)


def test_any_time_takes_one_of_so_many_buckets() -> None:
    made = histogram(10.0**exponent for exponent in range(-12, 12))
    assert len(made._buckets) <= 24
    assert made.quantile(1.0) is not None
    assert pickle.loads(pickle.dumps(made)).quantile(0.5) == made.quantile(0.5)


def test_reasons_are_bounded_also_when_added_up() -> None:
    one, other = Tally(), Tally()
    for number in range(3 * MAX_REASONS):
        one.fail(f"reason\n{number}")
        other.fail(f"another {number}")
    one.merge(other)
    assert len(one.reasons) == MAX_REASONS + 1
    assert sum(one.reasons.values()) == 6 * MAX_REASONS
    assert "reason 0" in one.reasons
