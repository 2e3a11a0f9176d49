"""The tuner's decisions, with jumped time and a fleet of arithmetic."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from cloud_verifier.tuner.core.drift import Drift
from cloud_verifier.tuner.core.messages import Record, TunerSettings
from cloud_verifier.tuner.core.readings import Meter, Reading, device_class, make_reading
from cloud_verifier.tuner.core.space import (
    DEFAULT,
    LEAST,
    MOST,
    Pair,
    clamp,
    from_search,
    to_search,
)
from cloud_verifier.tuner.core.studies import (
    Told,
    again,
    budget_for,
    first_pairs,
    leaders,
    next_again,
)
from tests.cloud_verifier.tuner.world import STEP, Device, World, bowl

# -- the space ------------------------------------------------------------------------------------


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_whatever_is_clamped_is_strictly_inside(r1, r2) -> None:
    pair = clamp(r1, r2)
    assert 0.0 < LEAST <= pair.r1 <= MOST < 1.0
    assert 0.0 < LEAST <= pair.r2 <= MOST < 1.0


@pytest.mark.parametrize("values", [(0.0, 0.5), (0.5, 1.0), (math.nan, 0.5), (2.0, 0.5), (0.5, -1)])
def test_no_pair_outside_the_open_square(values) -> None:
    with pytest.raises(LocalProtocolError):
        Pair(*values)


def test_no_threshold_that_is_no_number() -> None:
    with pytest.raises(LocalProtocolError):
        clamp(math.nan, 0.5)


@given(st.floats(0.4, 0.98), st.floats(0.4, 1.0))
def test_a_point_of_the_search_and_back(r2, share) -> None:
    pair = from_search(r2, share)
    back = from_search(*to_search(pair))
    assert back.r1 == pytest.approx(pair.r1, abs=0.002)
    assert back.r2 == pytest.approx(pair.r2, abs=0.002)


def test_where_the_token_rule_never_decides_only_r1_counts() -> None:
    # C <= P, so with R1 >= R2 whatever R2 would catch R1 has caught.
    assert to_search(Pair(0.6, 0.3)) == to_search(Pair(0.6, 0.6)) == (math.sqrt(0.6), 1.0)
    assert to_search(Pair(0.3, 0.6))[1] < 1.0


# -- readings -------------------------------------------------------------------------------------

GOOD = {"committed_tokens_total": 100.0, "generation_seconds_total": 5.0, "config_version": 3.0}


def test_a_reading_takes_what_makes_sense_and_leaves_the_rest() -> None:
    values = {**GOOD, "alpha_seconds": math.nan, "gamma_seconds": -1.0, "forward_seconds": 0.03}
    reading = make_reading("pi-1", values, {"policy": "pipesd", "machine": "m", "draft": "d"})
    assert (reading.alpha, reading.gamma, reading.forward) == (None, None, 0.03)
    assert (reading.committed, reading.seconds, reading.config_version) == (100.0, 5.0, 3)
    assert reading.online


@pytest.mark.parametrize(
    ("device", "values", "cause"),
    [
        ("pi/1", GOOD, "device"),
        ("_verifiers", GOOD, "device"),
        ("", GOOD, "device"),
        ("pi-1", {"config_version": 1.0}, "absent"),
        ("pi-1", {**GOOD, "committed_tokens_total": math.nan}, "value"),
        ("pi-1", {**GOOD, "generation_seconds_total": -1.0}, "value"),
        ("pi-1", {**GOOD, "committed_tokens_total": 1e300}, "value"),
    ],
)
def test_a_reading_that_says_nothing_is_refused_with_its_cause(device, values, cause) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        make_reading(device, values)
    assert caught.value.cause == cause


def reading(committed: float, seconds: float, uptime: float | None = None) -> Reading:
    return Reading("a", 0.0, 1, committed, seconds, uptime=uptime)


def test_a_meter_measures_between_readings_and_stops_at_a_restart() -> None:
    meter = Meter(reading(100, 10, 50))
    assert meter.tpt is None
    assert meter.advance(reading(150, 12, 55))
    assert (meter.tokens, meter.seconds) == (50, 2)
    assert meter.tpt == pytest.approx(0.04)
    assert not meter.advance(reading(20, 1, 3))
    # It has caught up with its counters, but not with its uptime.
    assert not meter.advance(reading(160, 13, 5))


def test_classes_are_of_machine_draft_and_a_rough_link() -> None:
    one = Device("a", bowl(0.5, 0.5))
    first = device_class(one.reading())
    one.alpha *= 1.1
    assert device_class(one.reading()) == first
    one.alpha *= 8
    assert device_class(one.reading()) != first
    one.draft = ""
    assert device_class(one.reading()) == ""


# -- drift ----------------------------------------------------------------------------------------


def steady(value: float = 1.0) -> Drift:
    drift = Drift(0.2, 60.0)
    for now in range(5):
        assert not drift.observe("x", value, now)
    return drift


@pytest.mark.parametrize("moved", [1.3, 0.7])
def test_what_moved_and_stayed_has_drifted_in_either_direction(moved) -> None:
    drift = steady()
    assert not any(drift.observe("x", moved, 100 + now) for now in range(0, 60, 5))
    assert drift.observe("x", moved, 160)


def test_what_comes_back_has_not_drifted() -> None:
    drift = steady()
    for start in (100, 200, 300):
        assert not any(drift.observe("x", 1.3, start + now) for now in range(0, 60, 5))
        assert not drift.observe("x", 1.05, start + 60)


def test_just_below_the_threshold_does_not_interrupt_a_drift() -> None:
    drift = steady()
    assert not drift.observe("x", 1.3, 100)
    assert not drift.observe("x", 1.15, 130)
    assert drift.observe("x", 1.3, 160)


def test_to_the_other_side_begins_anew() -> None:
    drift = steady()
    assert not drift.observe("x", 1.3, 100)
    assert not drift.observe("x", 0.7, 150)
    assert not drift.observe("x", 0.7, 170)
    assert drift.observe("x", 0.7, 210)


def test_a_move_that_is_nothing_beside_the_whole_is_none() -> None:
    drift = steady(0.0003)
    assert not any(drift.observe("x", 0.0009, 100 + now, least=0.002) for now in range(0, 200, 5))


def test_few_readings_far_apart_are_not_enough() -> None:
    drift = steady()
    assert not drift.observe("x", 2.0, 100)
    assert not drift.observe("x", 2.0, 1000)
    assert drift.observe("x", 2.0, 2000)


# -- the plan of a search -------------------------------------------------------------------------


def test_a_search_begins_with_the_default_and_what_the_class_found() -> None:
    assert first_pairs([]) == [DEFAULT]
    prior = [Pair(0.1, 0.2), Pair(0.105, 0.2), Pair(0.5, 0.9), Pair(0.2, 0.9), Pair(0.9, 0.95)]
    assert first_pairs(prior) == [DEFAULT, Pair(0.1, 0.2), Pair(0.5, 0.9), Pair(0.2, 0.9)]


def test_budgets() -> None:
    assert (budget_for(16, False), budget_for(16, True), budget_for(1, True)) == (16, 8, 1)
    assert (again(3), again(8), again(16)) == (0, 3, 4)


@given(
    st.lists(
        st.tuples(st.floats(0.02, 0.98), st.floats(0.02, 1.0), st.floats(0.001, 100.0)),
        min_size=1,
        max_size=24,
    )
)
def test_leaders_are_the_pairs_that_were_told(points) -> None:
    told = [Told(from_search(r2, share), tpt) for r2, share, tpt in points]
    order = leaders(told)
    assert {pair for _, pair in order} == {one.pair for one in told}
    assert all(tpt > 0.0 and math.isfinite(tpt) for tpt, _ in order)
    assert next_again(told, order, 16) in {one.pair for one in told}


def test_one_lucky_measurement_does_not_lead() -> None:
    good, lucky = Pair(0.10, 0.20), Pair(0.80, 0.90)
    told = [Told(good, 0.050), Told(good, 0.052), Told(good, 0.051), Told(lucky, 0.048)]
    told += [Told(Pair(0.75, 0.90), 0.09), Told(Pair(0.80, 0.85), 0.09)]
    assert leaders(told)[0][1] == good


# -- one device -----------------------------------------------------------------------------------


def test_a_device_is_searched_and_settles_on_its_best() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(world.settled)
    told = world.studies.told["a", 1]
    assert len(told) == 16
    assert told[0].pair == DEFAULT
    best = world.core.devices["a"].best
    assert best is not None
    assert device.surface(best.pair) <= 1.05 * min(device.surface(one.pair) for one in told)
    world.run(30)
    assert device.pair == best.pair
    assert world.registry.records["a"].settled == best
    # A trial takes two readings: the one that acknowledges, and one 5 s later.
    assert world.clock.now() < 16 * 3 * STEP


def test_the_objective_is_measured_from_the_acknowledgement_on() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(world.settled)
    for one in world.studies.told["a", 1]:
        # Whole tokens are counted, so one of some hundred may be missing.
        assert one.tpt == pytest.approx(device.surface(one.pair), rel=0.03)


def test_no_trial_is_judged_by_fewer_tokens_than_wanted() -> None:
    world = World(Device("a", bowl(0.2, 0.5, least=0.9)), min_tokens=50)
    world.until(world.settled, 4 * 3600)
    # 5 s hold 5 tokens: each trial took ten readings or more, but for those dropped early.
    assert world.clock.now() > 12 * 45
    assert world.core.stats["complete"] + world.core.stats["early"] == 16


def test_a_clearly_bad_trial_is_dropped_early_and_told() -> None:
    def cliff(pair: Pair) -> float:
        return 0.1 if pair.r2 < 0.45 else 1.5

    world = World(Device("a", cliff), min_tokens=200)
    world.until(world.settled, 4 * 3600)
    assert world.core.stats["early"] > 0
    early = [key for key, how in world.studies.ended.items() if how == "early"]
    for _, _, number in early:
        assert world.studies.asked["a", 1][number].pair.r2 >= 0.45
    # 200 tokens at 1.5 s would be 300 s; 20 and a bit of certainty are a fraction of it.
    assert world.clock.now() < 16 * 100


def test_a_device_that_never_acknowledges_backs_off_and_others_go_on() -> None:
    deaf, fine = Device("deaf", bowl(0.2, 0.5)), Device("a", bowl(0.2, 0.5))
    deaf.listening = False
    world = World(deaf, fine)
    world.until(world.settled)
    world.run(3600)
    failed = world.core.stats["failed_no_ack"]
    assert 1 <= failed <= 12
    offered = sum(device == "deaf" for device, _ in world.published)
    assert offered <= failed * 4 + 8
    deaf.listening = True
    world.until(lambda: world.settled("deaf"), 2 * 3600)


def test_a_device_that_keeps_its_own_thresholds_is_left_alone() -> None:
    device = Device("a", bowl(0.2, 0.5))
    device.obeys = False
    world = World(device)
    world.until(lambda: world.phases.get("a") == "unsuited")
    published = world.publishes
    world.run(600)
    assert world.core.stats["disobedient"] <= 10
    assert world.publishes - published <= 10


def test_a_device_gone_in_mid_trial_fails_the_trial_and_not_the_study() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(lambda: len(world.studies.told.get(("a", 1), ())) == 5)
    world.until(lambda: world.phase("a") in ("applying", "measuring"))
    device.telling = False
    world.run(120)
    assert world.phase("a") == "away"
    assert world.core.stats["failed_gone"] == 1
    # When it comes back it finds the best so far, not the pair that was on trial.
    assert device.wanted is not None
    best = world.core.devices["a"].best
    assert best is not None
    assert device.wanted[1] == best.pair
    device.telling = True
    world.until(world.settled)
    assert len(world.studies.told["a", 1]) == 16


def test_offline_says_at_once_that_it_is_gone() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(lambda: world.phases.get("a") == "measuring")
    device.online = False
    world.run(STEP)
    assert world.phase("a") == "away"
    device.online = True
    world.until(world.settled)


def test_a_restart_fails_the_trial_and_the_next_follows() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(lambda: world.phases.get("a") == "measuring")
    device.restart()
    world.until(world.settled)
    assert world.core.stats["failed_restart"] == 1
    assert world.core.stats["restarts"] == 1
    for one in world.studies.told["a", 1]:
        assert one.tpt == pytest.approx(device.surface(one.pair), rel=0.03)


def test_another_policy_ends_the_trial_and_the_device_is_left_alone() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(lambda: world.phases.get("a") == "measuring")
    device.policy = "vanilla"
    world.run(STEP)
    assert world.phase("a") == "unsuited"
    assert world.core.stats["failed_policy"] == 1
    published = world.publishes
    world.run(600)
    assert world.publishes == published
    device.policy = "pipesd"
    world.until(world.settled)


def test_a_config_of_somebody_else_ends_the_trial() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(lambda: world.phases.get("a") == "measuring")
    device.wanted = (7, Pair(0.9, 0.9))
    world.run(STEP)
    assert world.core.stats["failed_config"] == 1
    world.until(world.settled)


def test_an_idle_device_is_not_searched_and_one_that_falls_idle_is_waited_for() -> None:
    device = Device("a", bowl(0.2, 0.5))
    device.working = False
    world = World(device, measure_s=300.0)
    world.run(600)
    assert world.phase("a") == "waiting"
    assert world.publishes == 0
    device.working = True
    world.until(lambda: world.phase("a") == "measuring")
    device.working = False
    world.run(400)
    assert world.core.stats["failed_idle"] == 1
    assert world.phase("a") == "waiting"
    device.working = True
    world.until(world.settled)


# -- pins and resets ------------------------------------------------------------------------------


def test_a_pin_ends_the_trial_and_holds_until_it_is_taken_away() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(lambda: world.phases.get("a") == "measuring")
    pin = Pair(0.33, 0.77)
    world.registry.records["a"] = Record(1, None, pin)
    world.run(600)
    assert world.phase("a") == "pinned"
    assert device.pair == pin
    assert world.core.stats["failed_pinned"] == 1
    device.wanted = (3, Pair(0.9, 0.9))  # somebody meddles
    device.alpha *= 4  # what happens meanwhile begins no search when it is free again
    world.run(200)
    assert device.pair == pin
    world.registry.records["a"] = Record(1, None, None)
    world.until(world.settled)
    assert len(world.studies.told["a", 1]) == 16


def test_a_reset_begins_a_new_search() -> None:
    world = World(Device("a", bowl(0.2, 0.5)))
    world.until(world.settled)
    world.registry.records["a"] = Record(2)
    world.run(STEP)
    world.until(world.settled)
    assert len(world.studies.told["a", 2]) == 16


def test_a_settled_device_stays_settled_over_a_restart_of_the_tuner() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(world.settled)
    world.run(60)
    later = World(device)
    later.registry = later.tuner.registry = world.registry
    later.clock.advance_to(world.clock.now())
    later.run(300)
    assert later.settled()
    assert later.publishes == 0  # what is retained says so already
    assert not later.studies.asked


# -- drift of a device ----------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.6, 0.6])
def test_a_changed_tpt_is_noticed_and_tuned_again(factor) -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(world.settled)
    world.run(400)
    before = device.surface
    device.surface = lambda pair: factor * before(Pair(pair.r2, pair.r1))
    world.until(lambda: world.core.stats["drift_tpt"] == 1, 300)
    world.until(world.settled)
    assert len(world.studies.told["a", 2]) == 16
    best = world.core.devices["a"].best
    assert best is not None
    assert best.tpt < 1.1 * factor * 0.05 * 1.2


def test_a_changed_link_is_noticed_even_where_the_tpt_stayed() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(world.settled)
    world.run(400)
    device.alpha *= 4
    world.until(lambda: world.core.stats["drift_link"] == 1, 300)
    world.until(world.settled)


def test_a_device_that_comes_back_from_another_network_is_tuned_again() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(world.settled)
    world.run(400)
    device.online = False
    world.run(30)
    device.online, device.alpha = True, 4 * device.alpha
    world.until(lambda: world.core.stats["drift_link"] == 1, 300)
    world.until(world.settled)


def test_a_steady_device_is_left_in_peace() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(world.settled)
    published = world.publishes
    world.run(4 * 3600)
    assert world.publishes == published
    assert world.core.stats["searches"] == 1


def test_a_link_that_never_rests_is_not_searched_without_end() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(world.settled)
    begin = world.clock.now()
    while world.clock.now() < begin + 4 * 3600:
        device.alpha *= 4.0 if device.alpha < 0.05 else 0.25
        world.run(120)
    # A search takes some 3 minutes and gains nothing: each pause is twice the last.
    assert world.core.stats["searches"] + world.core.stats["failed_link"] <= 14


def test_a_link_that_changes_in_a_search_begins_it_anew() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device, cooldown_s=60.0)
    world.until(lambda: len(world.studies.told.get(("a", 1), ())) == 8)
    device.alpha *= 4
    world.until(lambda: world.core.stats["drift_link"] == 1, 300)
    world.until(world.settled)
    assert len(world.studies.told["a", 2]) == 16


# -- the source, the broker and the storage away ---------------------------------------------------


def test_while_the_source_is_away_nothing_times_out_and_nothing_is_published() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(lambda: world.phases.get("a") == "measuring")
    published, world.away = world.publishes, "timeout"
    world.run(3600)
    assert world.publishes == published
    assert world.tuner.stats["source_timeout"] == 720
    assert world.phase("a") == "measuring"
    world.away = ""
    world.until(world.settled)
    assert "gone" not in world.studies.ended.values()


def test_a_clock_that_jumps_is_one_interval() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(lambda: world.phases.get("a") == "measuring")
    world.clock.advance_to(world.clock.now() + 1e6)
    world.until(world.settled)
    assert world.core.stats["failed_gone"] == world.core.stats["failed_no_ack"] == 0


def test_a_broker_that_is_away_fails_trials_slowly_and_mends() -> None:
    world = World(Device("a", bowl(0.2, 0.5)))
    world.connected = False
    world.run(3600)
    assert 1 <= world.core.stats["failed_publish"] <= 12
    assert world.publishes == 0
    world.connected = True
    world.until(world.settled, 2 * 3600)


def test_a_locked_storage_holds_everything_and_breaks_nothing() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(lambda: world.phases.get("a") == "measuring")
    published, world.registry.away = world.publishes, True
    world.run(600)
    assert world.publishes == published
    assert world.tuner.stats["storage_errors"] == 120
    world.registry.away = False
    world.until(world.settled)


def test_the_study_of_one_device_fails_and_the_others_are_tuned() -> None:
    names = [f"d{index}" for index in range(6)]
    world = World(*[Device(name, bowl(0.2, 0.5)) for name in names])
    world.studies.broken.add("d3")
    world.until(lambda: all(world.settled(name) for name in names if name != "d3"))
    assert world.phase("d3") == "waiting"
    assert world.tuner.stats["broken_studies"] > 1
    assert not world.tuner.stats["storage_errors"]
    world.studies.broken.clear()
    world.until(lambda: world.settled("d3"), 2 * 3600)


def test_a_study_that_breaks_during_a_trial_holds_nobody_up() -> None:
    names = ["a", "b", "c"]
    world = World(*[Device(name, bowl(0.2, 0.5)) for name in names])
    world.until(lambda: world.phases.get("a") == "measuring")
    world.studies.broken.add("a")
    world.until(lambda: all(world.settled(name) for name in names if name != "a"))
    assert world.phase("a") == "waiting"
    assert world.tuner.stats["broken_studies"]


def test_a_lost_lease_means_hands_off() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device)
    world.until(lambda: world.phases.get("a") == "measuring")
    world.registry.taken.add("a")
    published = world.publishes
    world.run(600)
    assert world.publishes == published
    assert not world.core.devices
    assert world.core.stats["leases_lost"] == 1
    world.registry.taken.clear()
    world.until(world.settled)


# -- many devices ---------------------------------------------------------------------------------


def test_places_bound_the_devices_searched_at_a_time() -> None:
    names = [f"d{index}" for index in range(9)]
    world = World(*[Device(name, bowl(0.2, 0.5)) for name in names], parallel=3)
    most = 0
    while not all(world.settled(name) for name in names):
        world.run(STEP)
        most = max(most, world.core.searching)
        assert world.clock.now() < 3600
    assert most == 3


def test_more_devices_than_allowed_are_counted_and_left_out() -> None:
    names = [f"d{index}" for index in range(5)]
    world = World(*[Device(name, bowl(0.2, 0.5)) for name in names], max_devices=3)
    world.run(100)
    assert len(world.core.devices) == 3
    assert world.core.stats["too_many_devices"] > 0


def test_devices_gone_for_good_are_forgotten() -> None:
    device = Device("a", bowl(0.2, 0.5))
    world = World(device, Device("b", bowl(0.2, 0.5)), forget_s=600.0)
    world.run(100)
    device.telling = False
    world.run(800)
    assert set(world.core.devices) == {"b"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_tokens": 0},
        {"guard_factor": 1.0},
        {"drift": 0.0},
        {"parallel": 0},
        {"ttl_s": math.nan},
        {"cooldown_s": -1.0},
        {"min_generations": -1},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong) -> None:
    with pytest.raises(ConfigError):
        TunerSettings(**wrong)


TROUBLE = st.sampled_from(
    ["telling", "online", "working", "listening", "obeys", "restart", "policy", "meddle", "link"]
)


@settings(max_examples=40, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.integers(0, 3), TROUBLE, st.integers(1, 12)), min_size=1, max_size=25
    ),
    worlds=st.lists(
        st.sampled_from(["source", "broker", "storage", "pin", "reset", "lease", ""]),
        min_size=1,
        max_size=25,
    ),
)
def test_whatever_happens_nothing_leaves_the_bounds_and_a_device_beside_is_tuned(
    events, worlds
) -> None:
    """World.publish asserts the bounds, MemoryStudies that no trial ends twice."""
    troubled = [Device(f"t{index}", bowl(0.3, 0.6)) for index in range(4)]
    calm = Device("calm", bowl(0.2, 0.5))
    world = World(*troubled, calm, measure_s=120.0, parallel=8)
    for (index, what, steps), around in zip(events, worlds * 25, strict=False):
        device = troubled[index]
        if what == "restart":
            device.restart()
        elif what == "policy":
            device.policy = "hsl" if device.policy == "pipesd" else "pipesd"
        elif what == "meddle":
            device.wanted = (5, Pair(0.5, 0.5))
        elif what == "link":
            device.alpha *= 3.0
        else:
            setattr(device, what, not getattr(device, what))
        known = world.registry.records.get(device.name)
        if around == "source":
            world.away = "away"
        elif around == "broker":
            world.connected = False
        elif around == "storage":
            world.registry.away = True
        elif around == "pin" and known is not None:
            pin = None if known.pin is not None else Pair(0.4, 0.8)
            world.registry.records[device.name] = Record(known.campaign, known.settled, pin)
        elif around == "reset" and known is not None:
            world.registry.records[device.name] = Record(known.campaign + 1)
        elif around == "lease":
            world.registry.taken ^= {device.name}
        world.run(steps * STEP)
        world.away, world.connected, world.registry.away = "", True, False
    world.until(lambda: world.settled("calm"), 4 * 3600)
    assert len(world.core.devices) <= 5
