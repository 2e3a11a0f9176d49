"""The arithmetic of an emulated link: order, occupancy, rates, delay, stalls."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.bench.link import FULL_PROBS_BYTES, Cut, Link, RateChange, find_scenario
from edge_agent.bench.link_model import LinkModel, Passage, Rates
from tests.edge_agent.link_strategies import links

#: (seconds since the one before, bytes, whether it is a message)
TRAFFIC = st.lists(
    st.tuples(
        st.just(0.0) | st.floats(0.0, 10.0),
        st.integers(0, 300) | st.integers(0, 3_000_000),
        st.booleans(),
    ),
    max_size=40,
)


def passages(link: Link, traffic, *, seed: int = 1, start: float = 50.0, up: bool = True):
    model = LinkModel(link, seed=seed, start=start)
    lane = model.up if up else model.down
    now, crossed = start, []
    for pause, size, message in traffic:
        now += pause
        crossed.append(lane.send(now, size, message=message))
    return lane, crossed


def bits_between(link: Link, begin: float, end: float, start: float) -> float:
    """Bits that the uplink may carry from ``begin`` to ``end``, step by step through its rates."""
    steps = [(0.0, link.up_bps), *((change.at_s, change.up_bps) for change in link.rates)]
    edges = {begin, end}
    period = link.rates_repeat_s
    first = math.floor((begin - start) / period) if period else 0
    last = math.floor((end - start) / period) + 1 if period else 1
    for cycle in range(first, last):
        edges.update(start + cycle * period + at for at, _ in steps)
    total, inside = 0.0, sorted(edge for edge in edges if begin <= edge <= end)
    for left, right in itertools.pairwise(inside):
        phase = (left + right) / 2 - start
        phase = math.fmod(phase, period) if period else phase
        rate = [bps for at, bps in steps if at <= phase][-1]
        assert rate is not None
        total += rate * (right - left)
    return total


@given(links(), TRAFFIC, st.booleans())
def test_order_is_kept_and_the_lane_carries_one_thing_at_a_time(link, traffic, up) -> None:
    _, crossed = passages(link, traffic, up=up)
    for passage in crossed:
        assert passage.sent <= passage.start <= passage.departed <= passage.arrived
    for before, after in itertools.pairwise(crossed):
        assert after.start >= before.departed  # busy periods never overlap
        assert after.arrived >= before.arrived


@given(links(), TRAFFIC)
def test_a_free_lane_is_taken_at_once(link, traffic) -> None:
    _, crossed = passages(link, traffic)
    free = -math.inf
    for passage in crossed:
        assert passage.start == max(passage.sent, free)
        free = passage.departed


@given(links(rates=st.floats(1e5, 1e9)), TRAFFIC)
def test_the_rate_is_respected(link, traffic) -> None:
    """What departs took exactly the bits that its rates allow meanwhile, after its start-up."""
    _, crossed = passages(link, traffic)
    for passage, (_, size, message) in zip(crossed, traffic, strict=True):
        begin = passage.start + (link.startup_s if message else 0.0)
        if size == 0:
            assert passage.departed == begin
            continue
        carried = bits_between(link, begin, passage.departed, 50.0)
        # Seconds carry 1e-13 of rounding here, which a high rate turns into bits.
        assert carried == pytest.approx(size * 8, rel=1e-6, abs=1e9 * 1e-11)


@given(links(), TRAFFIC)
def test_each_arrival_has_a_reason(link, traffic) -> None:
    _, crossed = passages(link, traffic)
    floor = -math.inf
    for passage, (_, _, message) in zip(crossed, traffic, strict=True):
        earliest = passage.departed + link.delay_s
        slack = 1e-9
        late = link.jitter_s * message + (link.stall_s if passage.stalled else 0.0)
        assert passage.arrived >= max(earliest, floor) - slack
        assert passage.arrived <= max(earliest + late, floor) + slack
        floor = passage.arrived


@given(links(), TRAFFIC, st.integers(0, 5))
def test_the_same_seed_gives_the_same_passages(link, traffic, seed) -> None:
    assert passages(link, traffic, seed=seed)[1] == passages(link, traffic, seed=seed)[1]


@given(links(), TRAFFIC)
def test_what_is_counted(link, traffic) -> None:
    lane, crossed = passages(link, traffic)
    assert lane.messages == sum(message for _, _, message in traffic)
    assert lane.bytes == sum(size for _, size, _ in traffic)
    assert lane.stalls == sum(passage.stalled for passage in crossed)
    assert lane.busy_s == pytest.approx(math.fsum(p.departed - p.start for p in crossed))


@given(links(), TRAFFIC, st.lists(st.integers(0, 50), min_size=41, max_size=41))
def test_what_happens_to_a_message_does_not_depend_on_keepalives(link, traffic, keepalives) -> None:
    """Which messages stall is the same with and without other bytes between them."""
    messages = [(pause, size, True) for pause, size, _ in traffic]
    mixed = []
    for keepalive, item in zip(keepalives, messages, strict=False):
        mixed += [(0.0, keepalive, False), item]
    _, pure = passages(link, messages)
    _, crossed = passages(link, mixed)
    assert [p.stalled for p in crossed[1::2]] == [p.stalled for p in pure]


def test_a_schedule_shared_by_many_periods_is_cheap() -> None:
    """A huge message on a slow link: whole periods are taken at once."""
    rates = Rates([(0.0, 1e3), (0.5, 3e3)], repeat_s=1.0)
    assert rates.finish(0.0, 2e12) == pytest.approx(1e9)  # 2000 bits per second on average
    assert rates.finish(0.25, 250.0) == pytest.approx(0.5)
    assert rates.finish(0.25, 251.0) == pytest.approx(0.5 + 1 / 3e3)


def test_a_message_of_the_cellular_link() -> None:
    """15 ms of grant, 100 bytes at 20 Mbps, 25 ms under way; the next waits for the uplink only."""
    model = LinkModel(find_scenario("4g").link, start=7.0)
    first = model.up.send(7.0, 100)
    second = model.up.send(7.001, 100)
    wire = 100 * 8 / 20e6
    assert first.departed == pytest.approx(7.015 + wire)
    assert first.arrived == pytest.approx(7.040 + wire)
    assert second.start == first.departed
    assert second.arrived == pytest.approx(first.arrived + 0.015 + wire)
    assert model.up.busy_s == pytest.approx(2 * (0.015 + wire))


def test_the_downlink_has_no_start_up() -> None:
    model = LinkModel(find_scenario("4g").link)
    assert model.down.send(0.0, 0).arrived == pytest.approx(0.025)
    assert model.up.busy_until == -math.inf  # the directions do not disturb each other


def test_the_authors_distributions_take_116_ms_per_token() -> None:
    model = LinkModel(find_scenario("S1").link)
    passage = model.up.send(0.0, FULL_PROBS_BYTES, message=False)
    assert passage.departed == pytest.approx(0.116)


def test_no_emulation_takes_no_time() -> None:
    model = LinkModel(Link())
    assert model.up.send(3.0, 10**9) == Passage(3.0, 3.0, 3.0, 3.0, 10**9)


def test_a_rate_that_changes_under_a_message() -> None:
    link = Link(8e3, None, rates=(RateChange(1.0, 16e3, None), RateChange(2.0, None, None)))
    model = LinkModel(link, start=100.0)
    assert model.up.send(100.0, 2_000).departed == pytest.approx(101.5)  # 1000 bytes in each part
    assert model.up.send(101.5, 10**6).departed == pytest.approx(102.0)  # then there is no limit
    assert model.up.send(500.0, 10**6).departed == 500.0


def test_a_schedule_begins_again() -> None:
    link = Link(8e3, None, rates=(RateChange(1.0, 80e3, None),), rates_repeat_s=2.0)
    for start in (0.0, 2.0, 20.0):
        assert LinkModel(link).up.send(start, 1_000).departed == pytest.approx(start + 1.0)
        assert LinkModel(link).up.send(start + 1, 1_000).departed == pytest.approx(start + 1.1)


def test_what_is_behind_a_stall_waits_without_occupying_the_uplink() -> None:
    link = Link(delay_s=0.01, stall_probability=0.5, stall_s=1.0)
    model = LinkModel(link, seed=3)
    crossed = [model.up.send(i / 100, 50) for i in range(50)]
    stalled = [i for i, passage in enumerate(crossed) if passage.stalled]
    assert 10 < len(stalled) < 40
    first = stalled[0]
    assert crossed[first].arrived == pytest.approx(first / 100 + 1.01)
    assert crossed[first + 1].departed == pytest.approx((first + 1) / 100)
    assert crossed[first + 1].arrived >= crossed[first].arrived


def test_the_directions_draw_apart_and_seeds_differ() -> None:
    link = Link(jitter_s=1.0)
    one, other = LinkModel(link, seed=1), LinkModel(link, seed=2)
    draws = [
        [lane.send(10.0 * i, 1).arrived for i in range(10)]
        for lane in (one.up, one.down, other.up, other.down)
    ]
    assert len({tuple(row) for row in draws}) == 4


@given(links(), TRAFFIC, st.floats(0.0, 20.0))
def test_after_a_cut_the_link_is_free(link, traffic, pause) -> None:
    model = LinkModel(link, start=50.0)
    now = 50.0
    for wait, size, message in traffic:
        now += wait
        model.up.send(now, size, message=message)
    model.cut(now, for_s=0.5)
    assert -1e-6 <= model.up.busy_s <= now - 50.0 + 1e-6  # only what it was busy until then
    assert model.is_cut(now)
    assert model.is_cut(now + 0.4)
    later = now + 0.5 + pause
    assert not model.is_cut(later)
    assert model.up.send(later, 0, message=False).arrived == later + link.delay_s


def test_cuts_are_found_in_turn() -> None:
    model = LinkModel(Link(cuts=(Cut(0.0), Cut(1.0, 0.5), Cut(4.0))), start=10.0)
    assert model.next_cut(9.0) == (10.0, Cut(0.0))
    assert model.next_cut(10.0) == (11.0, Cut(1.0, 0.5))
    assert model.next_cut(11.0) == (14.0, Cut(4.0))
    assert model.next_cut(14.0) is None
