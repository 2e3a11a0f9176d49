"""A device's figures: what generations counted, added up once, and never falling."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.figures import BUCKETS, BY_NAME, BY_NUMBER, COUNTER, FIGURES
from broker.sensors import Readings
from edge_agent.core.effects import EdgeStats
from edge_agent.core.pipeline import LinkCost
from edge_agent.core.sending import Estimates
from edge_agent.core.session import State
from edge_agent.core.timing import Timing
from edge_agent.meter import Meter
from edge_agent.metrics import DeviceFigures
from tests.edge_agent.hand import QUIET, Hand, opened

GIVEN = {
    "rejected_messages_total": 1.0,
    "config_rejected_total": 2.0,
    "reconnects_total": 3.0,
    "config_version": 4.0,
    "r1_ratio": 0.35,
    "r2_ratio": 0.4,
}
READINGS = Readings(*[2.0] * 10, energy_source="rapl")
KNOWN = Estimates(LinkCost(0.01, 0.02, 0.001), 0.008, 12, known=True, forward=0.05)


def named(figures: DeviceFigures, now: float, readings: Readings | None = None) -> dict[str, float]:
    values = figures.snapshot(now, GIVEN, readings).values
    return {BY_NUMBER[number].name: value for number, value in values.items()}


def test_every_figure_of_the_table_is_known_here() -> None:
    figures = DeviceFigures(0.0)
    figures.remember(KNOWN)
    assert set(named(figures, 1.0, READINGS)) == {figure.name for figure in FIGURES}


def test_what_was_never_measured_is_absent() -> None:
    found = named(DeviceFigures(10.0), 15.0, Readings(cpu_seconds=2.5))
    assert found["cpu_seconds_total"] == 2.5
    assert found["uptime_seconds"] == 5.0
    assert found["committed_tokens_total"] == 0.0
    unknown = {"alpha_seconds", "beta_seconds", "gamma_seconds", "occupancy_seconds"}
    unknown |= {"forward_seconds", "window_tokens", "energy_joules_total", "temperature_celsius"}
    assert not unknown & set(found)


def test_a_link_that_is_only_assumed_is_no_figure() -> None:
    figures = DeviceFigures(0.0)
    figures.remember(Estimates())
    assert "alpha_seconds" not in named(figures, 1.0)
    figures.remember(KNOWN)
    found = named(figures, 1.0)
    assert found["alpha_seconds"] == pytest.approx(0.03)
    assert (found["beta_seconds"], found["occupancy_seconds"]) == (0.001, 0.01)
    assert (found["gamma_seconds"], found["window_tokens"]) == (0.008, 12.0)


def test_tokens_and_seconds_move_together_while_a_generation_runs() -> None:
    figures = DeviceFigures(100.0)
    hand = opened(QUIET)
    meter = Meter(hand.session, 100.0)
    figures.begin(meter)
    hand.draft(1, 2, 3)
    found = named(figures, 103.0)
    assert found["drafted_tokens_total"] == 3.0
    assert found["committed_tokens_total"] == found["generation_seconds_total"] == 0.0
    assert found["active_generations"] == 1.0

    hand.verdict(0, (1, 2, 9), 2)
    meter.committed(3, 104.0)
    found = named(figures, 110.0)
    assert (found["committed_tokens_total"], found["generation_seconds_total"]) == (3.0, 4.0)
    assert found["accepted_tokens_total"] + found["target_tokens_total"] == 3.0
    assert found["generations_total"] == 0.0

    meter.ended(111.0)
    figures.end(meter, 111.0)
    figures.end(meter, 111.0)  # twice is once
    found = named(figures, 120.0)
    assert (found["committed_tokens_total"], found["generation_seconds_total"]) == (3.0, 4.0)
    assert (found["generations_total"], found["active_generations"]) == (1.0, 0.0)


def test_every_counter_of_a_session_that_has_a_figure_arrives() -> None:
    figures = DeviceFigures(0.0)
    hand = opened(QUIET)
    meter = Meter(hand.session, 0.0)
    for value, field in enumerate(fields(EdgeStats), start=1):
        setattr(hand.session.stats, field.name, value)
    meter.traffic[:] = [100, 200, 300, 400]
    figures.begin(meter)
    stats = hand.session.stats
    for _ in range(2):
        found = named(figures, 1.0)
        for counter in ("drafted", "judged", "accepted", "rolled_back"):
            assert found[f"{counter}_tokens_total"] == getattr(stats, counter)
        for counter in ("target_tokens", "local_tokens", "forwards", "timeouts", "reopens"):
            assert found[f"{counter}_total"] == getattr(stats, counter)
        for rule in ("token", "sequence", "window", "end"):
            assert found[f"triggers_{rule}_total"] == getattr(stats, f"triggers_{rule}")
        assert found["refusals_total"] == stats.refusals
        assert [found[f"{way}_total"] for way in ("uplink_bytes", "downlink_bytes")] == [100, 200]
        assert [found[f"{way}_messages_total"] for way in ("uplink", "downlink")] == [300, 400]
        figures.end(meter, 1.0)


def test_times_of_each_generation_go_into_the_histograms() -> None:
    figures = DeviceFigures(0.0)
    for begun, first, last, tokens in ((0.0, 0.001, 2.0, 4), (5.0, 500.0, 500.0, 1)):
        meter = Meter(opened(QUIET).session, begun)
        figures.begin(meter)
        meter.committed(1, first)
        if tokens > 1:
            meter.committed(tokens - 1, last)
        figures.end(meter, last)
    empty = Meter(opened(QUIET).session, 0.0)
    figures.begin(empty)
    empty.failed = True
    figures.end(empty, 9.0)
    found = figures.snapshot(600.0, GIVEN)
    assert found.ttft.counts[0] == 1, "a bound belongs to its bucket"
    assert found.ttft.counts[-1] == found.tpt.counts[-1] == 1
    assert found.ttft.total == pytest.approx(495.001)
    assert found.tpt.counts[BUCKETS.index(0.5)] == 1
    assert sum(found.ttft.counts) == 2
    assert found.values[BY_NAME["generation_errors_total"].number] == 1
    assert found.values[BY_NAME["generations_total"].number] == 3


def test_time_without_the_cloud_is_counted_while_it_lasts() -> None:
    figures = DeviceFigures(0.0)
    hand = Hand(QUIET, Timing(offline_after=5.0), local="allow")
    meter = Meter(hand.session, hand.now)
    figures.begin(meter)
    hand.link(True)
    hand.link(False)
    meter.look(hand.now)
    assert named(figures, hand.now)["local_seconds_total"] == 0.0
    while hand.session.state is not State.LOCAL:
        hand.fire()
    meter.look(hand.now)
    since = hand.now
    assert named(figures, since + 2.0)["local_seconds_total"] == 2.0
    hand.now += 3.0
    hand.link(True)
    hand.sent()
    hand.accept()
    meter.look(hand.now)
    assert named(figures, hand.now + 50.0)["local_seconds_total"] == 3.0
    meter.ended(hand.now + 60.0)
    figures.end(meter, hand.now + 60.0)
    assert named(figures, hand.now + 70.0)["local_seconds_total"] == 3.0


def test_thresholds_are_those_in_force() -> None:
    figures = DeviceFigures(0.0)
    assert named(figures, 0.0)["r1_ratio"] == 0.35
    hand = opened(QUIET)
    meter = Meter(hand.session, 0.0)
    figures.begin(meter)
    assert (named(figures, 1.0)["r1_ratio"], named(figures, 1.0)["r2_ratio"]) == (0.0, 0.0)
    assert figures.snapshot(1.0, GIVEN).policy == "pipesd"
    figures.end(meter, 1.0)
    assert named(figures, 1.0)["r1_ratio"] == 0.35


def test_what_a_generation_learns_is_seen_within_a_second() -> None:
    figures = DeviceFigures(0.0)
    hand = opened(QUIET)
    meter = Meter(hand.session, 0.0)
    figures.begin(meter)
    hand.draft(1)
    for _ in range(8):
        hand.session.sending.gamma.add(0.005)
    meter.committed(1, 0.5)
    assert "gamma_seconds" not in named(figures, 0.5)
    meter.committed(1, 1.5)
    assert named(figures, 1.5)["gamma_seconds"] == pytest.approx(0.005)


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.floats(0.0, 3.0), st.booleans(), st.booleans()),
        max_size=60,
    )
)
def test_no_counter_ever_falls(steps: list[tuple[int, float, bool, bool]]) -> None:
    figures = DeviceFigures(0.0)
    running: list[Meter] = []
    now, told = 0.0, {}
    committed = 0
    for tokens, wait, begin, end in steps:
        now += wait
        if begin and len(running) < 4:
            running.append(Meter(opened(QUIET).session, now))
            figures.begin(running[-1])
        if running:
            meter = running[tokens % len(running)]
            meter.committed(tokens, now)
            committed += tokens
            if end:
                running.remove(meter)
                meter.ended(now)
                figures.end(meter, now)
        values = figures.snapshot(now, GIVEN, READINGS).values
        for number, value in values.items():
            if BY_NUMBER[number].kind == COUNTER:
                assert value >= told.get(number, 0.0)
        told = values
        assert values[BY_NAME["committed_tokens_total"].number] == committed
