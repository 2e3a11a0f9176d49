"""The response timer: as RFC 6298 has it, within its limits whatever it is fed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.timing import ResponseTimer, Timing

TIMING = Timing(first_timeout=1.0, min_timeout=0.1, max_timeout=8.0)


def test_before_any_sample() -> None:
    assert ResponseTimer(TIMING).timeout == 1.0


def test_one_sample_is_trusted_with_half_of_it_as_deviation() -> None:
    timer = ResponseTimer(TIMING)
    timer.sample(0.2)
    assert timer.timeout == pytest.approx(0.2 + 4 * 0.1)


def test_later_samples_are_smoothed() -> None:
    timer = ResponseTimer(TIMING)
    timer.sample(0.2)
    timer.sample(0.4)
    deviation = 0.1 + 0.25 * (0.2 - 0.1)
    mean = 0.2 + 0.125 * 0.2
    assert timer.timeout == pytest.approx(mean + 4 * deviation)


def test_steady_answers_end_near_the_least() -> None:
    timer = ResponseTimer(TIMING)
    for _ in range(200):
        timer.sample(0.01)
    assert timer.timeout == TIMING.min_timeout


def test_silence_doubles_and_a_sign_of_life_ends_that() -> None:
    timer = ResponseTimer(TIMING)
    waits = []
    for _ in range(6):
        waits.append(timer.timeout)
        timer.back_off()
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    timer.answered()
    assert timer.timeout == 1.0
    timer.back_off()
    timer.sample(0.1)
    assert timer.timeout == pytest.approx(0.3)


@given(st.lists(st.floats(0.0, 1e4) | st.none(), max_size=100))
def test_a_time_out_stays_within_its_limits(events) -> None:
    timer = ResponseTimer(TIMING)
    for seconds in events:
        if seconds is None:
            timer.back_off()
        else:
            timer.sample(seconds)
        assert TIMING.min_timeout <= timer.timeout <= TIMING.max_timeout
