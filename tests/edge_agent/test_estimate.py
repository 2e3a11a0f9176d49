"""What the estimators learn from links that are known: emulated, seeded, under virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import ConfigError
from edge_agent.core.estimate import (
    MAX_UPLOADS,
    PROBE_GAP,
    PROBE_PERIOD,
    PROBE_PERIOD_MAX,
    PROBE_SOON,
    PROBES,
    SHIFT_ABOVE,
    SHIFT_BELOW,
    STALE_AFTER,
    GammaEstimator,
    LinkEstimator,
)
from edge_agent.core.pipeline import PIPELINED, SERIAL, LinkCost

WIFI = LinkCost(0.002, 0.010, 1e-6)
MOBILE = LinkCost(0.015, 0.050, 2e-6)
FAR = LinkCost(0.015, 0.160, 2e-6)
RADIO = LinkCost(0.040, 0.0005, 0.001)  # next to nothing but occupancy
FULL_20 = LinkCost(0.001, 0.020, 0.116)  # the authors' probabilities at 20 Mbps
FULL_80 = LinkCost(0.001, 0.020, 0.029)

Delay = Callable[[random.Random], float]


def jitter(mean: float) -> Delay:
    return lambda draw: draw.expovariate(1.0 / mean)


class Uplink:
    """A link that keeps order: each message waits for the one before, travels, may be held up."""

    def __init__(self, cost: LinkCost, noise: Delay | None = None, stalls: float = 0.0) -> None:
        self.cost = cost
        self.noise = noise
        self.stalls = stalls  # of one second each, per second
        self._draw = random.Random(3)
        self._free = 0.0
        self._arrived = 0.0
        self._now = 0.0

    def send(self, now: float, size: int) -> float:
        """When the answer to it is here, had it not been held."""
        self._free = max(now, self._free) + self.cost.occupancy + self.cost.beta * size
        arrival = self._free + self.cost.propagation
        if self.noise is not None:
            arrival += self.noise(self._draw)
        if self._draw.random() < self.stalls * (now - self._now):
            arrival += 1.0
        self._now = now
        self._arrived = max(self._arrived, arrival)
        return self._arrived


class Session:
    """Sends drafts at about every ``gap`` seconds and asks for every ``ask``-th to be answered."""

    def __init__(
        self,
        estimator: LinkEstimator,
        link: Uplink,
        gap: float,
        *,
        ask: int = 1,
        sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 6),
        probes: bool = True,
        ahead: int = 24,
    ) -> None:
        self.estimator = estimator
        self.link = link
        self.gap = gap
        self.ask = ask
        self.sizes = sizes
        self.probes = probes
        self.ahead = ahead
        self.now = 0.0
        self.costs: list[LinkCost] = []  # after each answer
        self._draw = random.Random(5)
        self._pending: list[tuple[float, int, float, int]] = []
        self._unverified = 0
        self._unasked = 0
        self._sent = 0

    def run(self, answers: int) -> None:
        goal = len(self.costs) + answers
        while len(self.costs) < goal:
            self.now += self.gap * self._draw.uniform(0.7, 1.3)
            self._hear()
            if self.probes:
                for size in self.estimator.probes_needed(self.now):
                    ticket = self.estimator.probe_sent(self.now, size)
                    self._expect(self.link.send(self.now, size), ticket, 0.0, 0)
            if self._unverified <= self.ahead:
                self._draft()

    def _draft(self) -> None:
        size = self._draw.choice(self.sizes)
        self._unverified += size
        self._unasked += size
        ticket = self.estimator.sent(self.now, size)
        arrival = self.link.send(self.now, size)
        self._sent += 1
        if self._sent % self.ask == 0:
            hold = round(self._draw.uniform(0.0, 0.08), 4)
            self._expect(arrival + hold, ticket, hold, self._unasked)
            self._unasked = 0

    def _expect(self, at: float, ticket: int, hold: float, tokens: int) -> None:
        heapq.heappush(self._pending, (at, ticket, hold, tokens))

    def _hear(self) -> None:
        while self._pending and self._pending[0][0] <= self.now:
            at, ticket, hold, tokens = heapq.heappop(self._pending)
            self._unverified -= tokens
            self.estimator.answered(ticket, at, hold)
            self.costs.append(self.estimator.cost)


def learned(cost: LinkCost, gap: float, answers: int = 300, **how: object) -> LinkEstimator:
    estimator = LinkEstimator()
    noise = how.pop("noise", None)
    stalls = how.pop("stalls", 0.0)
    link = Uplink(cost, noise, stalls)  # type: ignore[arg-type]
    Session(estimator, link, gap, **how).run(answers)  # type: ignore[arg-type]
    return estimator


def settled(costs: list[LinkCost], true: Callable[[LinkCost], float], within: float) -> int:
    """How many answers it took until ``true(cost)`` was right to ``within`` for good."""
    wrong = [n for n, cost in enumerate(costs, 1) if abs(true(cost) - 1.0) > within]
    return wrong[-1] if wrong else 0


# -- gamma --------------------------------------------------------------------------------------


def test_gamma_before_any_token() -> None:
    gamma = GammaEstimator(prior=0.03)
    assert gamma.gamma == 0.03
    assert not gamma.known


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=200))
def test_gamma_is_the_mean_of_the_middle_half_of_the_latest(times) -> None:
    gamma = GammaEstimator(window=64)
    for seconds in times:
        gamma.add(seconds)
    latest = sorted(times[-64:])
    cut = len(latest) // 4
    middle = latest[cut : len(latest) - cut]
    assert gamma.gamma == pytest.approx(sum(middle) / len(middle))
    assert latest[0] * (1 - 1e-12) <= gamma.gamma <= latest[-1] * (1 + 1e-12)


def test_gamma_per_token_of_several() -> None:
    gamma = GammaEstimator()
    gamma.add(0.05, tokens=5)
    assert gamma.gamma == pytest.approx(0.01)


def test_gamma_converges_and_shrugs_off_interruptions() -> None:
    draw = random.Random(1)
    gamma = GammaEstimator()
    for count in range(200):
        gamma.add(2.0 if count % 10 == 0 else draw.gauss(0.009, 0.001))
    assert gamma.known
    assert gamma.gamma == pytest.approx(0.009, rel=0.05)


def test_gamma_follows_another_speed_within_its_window() -> None:
    gamma = GammaEstimator(window=64)
    for _ in range(100):
        gamma.add(0.01)
    for _ in range(48):
        gamma.add(0.03)
    assert gamma.gamma == pytest.approx(0.03)


def test_gamma_between_two_speeds() -> None:
    """A median would jump from one to the other."""
    gamma = GammaEstimator()
    for count in range(200):
        gamma.add(0.01 if count % 2 else 0.02)
    assert gamma.gamma == pytest.approx(0.015)


@pytest.mark.parametrize("seconds", [-1e-9, math.nan, math.inf, -math.inf])
def test_gamma_rejects_impossible_times(seconds) -> None:
    gamma = GammaEstimator(prior=0.03)
    gamma.add(seconds)
    gamma.add(0.01, tokens=0)
    assert gamma.rejected == 2
    assert gamma.gamma == 0.03


# -- alpha and beta -----------------------------------------------------------------------------


def test_a_link_before_any_sample() -> None:
    estimator = LinkEstimator(LinkCost(0.03, 0.0, 0.001))
    assert estimator.cost == LinkCost(0.03, 0.0, 0.001)
    assert estimator.model == SERIAL
    assert not (estimator.known)
    assert not (estimator.beta_known)
    assert not (estimator.model_known)
    assert not estimator.fresh(0.0)


def test_one_sample_is_better_than_none() -> None:
    estimator = LinkEstimator()
    estimator.answered(estimator.sent(10.0, 4), 10.09, hold=0.05)
    assert estimator.alpha == pytest.approx(0.04)
    assert estimator.beta == 0.0
    assert estimator.cost.occupancy == estimator.alpha


def test_the_time_that_the_verifier_held_it_is_no_time_on_the_link() -> None:
    estimator = LinkEstimator()
    for count in range(40):
        hold = 0.01 * (count % 7)
        estimator.answered(estimator.sent(float(count), 3), count + 0.03 + hold, hold)
    assert estimator.alpha == pytest.approx(0.03)


@given(st.floats(0.0, 0.5), st.floats(2e-5, 0.2), st.lists(st.integers(0, 40), max_size=40))
@settings(max_examples=60)
def test_exact_times_give_exact_costs(alpha, beta, sizes) -> None:
    estimator = LinkEstimator()
    now = 0.0
    for size in [*range(1, 9), *range(1, 9), *sizes]:
        estimator.answered(estimator.sent(now, size), now + alpha + beta * size)
        now += 20.0
    assert estimator.beta_known
    assert estimator.alpha == pytest.approx(alpha, rel=1e-6, abs=1e-6)
    assert estimator.beta == pytest.approx(beta, rel=1e-6)


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_messages_of_one_size_tell_alpha_alone(seconds) -> None:
    prior = LinkCost(0.5, 0.0, 0.001)
    estimator = LinkEstimator(prior)
    for count in range(50):
        estimator.answered(estimator.sent(float(count), 5), count + seconds + 0.005)
    assert not estimator.beta_known
    assert estimator.beta == 0.001
    assert estimator.alpha == pytest.approx(seconds)


def test_a_measured_cost_model_is_kept_until_it_is_contradicted() -> None:
    """What one session measured with probes the next need not measure again."""
    estimator = LinkEstimator(LinkCost(0.015, 0.05))
    assert estimator.model == PIPELINED
    now = 0.0
    for _ in range(40):  # far apart: they say nothing about what keeps the link busy
        estimator.answered(estimator.sent(now, 2), now + 0.065)
        now += 1.0
    assert estimator.model == PIPELINED
    assert estimator.cost.occupancy == pytest.approx(0.015, rel=0.05)
    for _ in range(80):  # each waits for the whole of the one before it
        free = now
        for ticket in (estimator.sent(now, 2), estimator.sent(now, 2)):
            free += 0.065
            estimator.answered(ticket, free)
        now += 1.0
    assert estimator.cost.occupancy == pytest.approx(0.065, rel=0.1)


def test_a_prior_beta_that_cannot_be_gives_way() -> None:
    estimator = LinkEstimator(LinkCost(0.5, 0.0, 1.0))
    for count in range(50):
        estimator.answered(estimator.sent(float(count), 4), count + 0.02)
    assert estimator.alpha == 0.0
    assert estimator.beta == pytest.approx(0.005)


def test_beta_near_zero_is_zero() -> None:
    """Ids are three bytes: 1 us a token, under a jitter of 5 ms."""
    estimator = learned(MOBILE, 0.2, noise=jitter(0.005))
    assert estimator.beta == 0.0
    assert estimator.alpha == pytest.approx(0.070, rel=0.05)


@pytest.mark.parametrize("cost", [WIFI, MOBILE, FAR, RADIO, FULL_20, FULL_80])
@pytest.mark.parametrize("noise", [0.0, 0.002, 0.01])
def test_alpha_and_beta_converge_whatever_is_sent_meanwhile(cost, noise) -> None:
    """One answer in three, messages as close as the link can carry, stalls of a second."""
    gap = max(0.03, 1.4 * (cost.occupancy + 3.5 * cost.beta))
    how = {"noise": jitter(noise), "stalls": 0.02} if noise else {}
    estimator = learned(cost, gap, ask=3, **how)
    at_four = estimator.alpha + 4 * estimator.beta
    assert at_four == pytest.approx(cost.alpha + noise + 4 * cost.beta, rel=0.16)
    if cost.beta > 0.01:
        assert estimator.beta == pytest.approx(cost.beta, rel=0.05)
    assert estimator.rejected == estimator.unmatched == 0


@pytest.mark.parametrize("gap", [0.03, 0.2])
def test_stalls_hardly_move_the_estimate(gap) -> None:
    """A second among samples of 20 ms, in two of a hundred."""
    cost = LinkCost(0.004, 0.016, 1e-6)
    calm = learned(cost, gap, noise=jitter(0.002))
    stormy = learned(cost, gap, noise=jitter(0.002), stalls=0.02 / gap)
    assert stormy.alpha == pytest.approx(calm.alpha, rel=0.05)
    assert stormy.shifts == 0


@given(st.integers(0, 2**32), st.floats(0.0, 0.15))
@settings(max_examples=25, deadline=None)
def test_outliers_of_any_kind_hardly_move_the_estimate(seed, share) -> None:
    draw = random.Random(seed)
    estimator = LinkEstimator()
    now = 0.0
    for count in range(300):
        now += 30.0
        size = draw.randint(1, 8)
        seconds = 0.020 + 0.001 * size + draw.uniform(0.0, 0.001)
        if count > 8 and draw.random() < share:
            seconds = draw.choice([0.0, seconds + 1.0, 10.0 * size, draw.uniform(0.0, 20.0)])
        estimator.answered(estimator.sent(now, size), now + seconds)
    assert estimator.alpha + 4 * estimator.beta == pytest.approx(0.0245, rel=0.06)


# -- what keeps the link busy -------------------------------------------------------------------


@pytest.mark.parametrize("cost", [WIFI, MOBILE, FAR])
@pytest.mark.parametrize(("gap", "ask"), [(0.2, 1), (0.03, 3), (0.02, 2)])
def test_most_of_alpha_turns_out_to_be_propagation(cost, gap, ask) -> None:
    estimator = learned(cost, gap, ask=ask)
    assert estimator.model == PIPELINED
    assert estimator.cost.occupancy == pytest.approx(cost.occupancy, rel=0.25)
    assert estimator.cost.alpha == pytest.approx(cost.alpha, rel=0.03)


@pytest.mark.parametrize("noise", [0.0, 0.002])
@pytest.mark.parametrize(("gap", "ask"), [(0.2, 1), (0.03, 3), (0.01, 2)])
def test_a_link_that_is_nothing_but_busy_stays_serial(noise, gap, ask) -> None:
    """Also while its queue never empties, where only the pace of the answers tells its cost."""
    how = {"noise": jitter(noise)} if noise else {}
    estimator = learned(RADIO, gap, ask=ask, **how)
    assert estimator.model == SERIAL
    assert estimator.cost.propagation == 0.0
    assert estimator.cost.occupancy + 4 * estimator.beta == pytest.approx(0.044, rel=0.1)


def test_the_authors_uplink_is_never_idle_and_yet_known() -> None:
    estimator = learned(FULL_20, 0.2, ask=2)
    assert estimator.beta == pytest.approx(0.116, rel=0.02)
    assert estimator.cost.occupancy <= 0.005


@pytest.mark.parametrize("cost", [MOBILE, FAR])
@pytest.mark.parametrize("noise", [0.002, 0.005])
def test_the_cost_model_is_found_under_jitter_and_stalls(cost, noise) -> None:
    estimator = learned(cost, 0.03, answers=600, ask=3, noise=jitter(noise), stalls=0.02)
    assert estimator.model == PIPELINED
    assert estimator.cost.occupancy == pytest.approx(cost.occupancy, abs=0.012)


def test_without_messages_under_way_together_the_serial_model_stays_in_force() -> None:
    estimator = learned(MOBILE, 0.5, probes=False)
    assert estimator.model == SERIAL
    assert not estimator.model_known
    assert estimator.cost.alpha == estimator.cost.occupancy == pytest.approx(0.065, rel=0.01)


def test_the_model_in_force_does_not_flap() -> None:
    """Once known it stays, under noise as large as what there is to know."""
    estimator = LinkEstimator()
    session = Session(estimator, Uplink(WIFI, jitter(0.004)), 0.03, ask=2)
    session.run(100)
    models = []
    for _ in range(50):
        session.run(16)
        models.append(estimator.model)
    assert sum(a != b for a, b in itertools.pairwise(models)) <= 1


# -- another link -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [(MOBILE, WIFI), (WIFI, MOBILE), (FAR, WIFI), (WIFI, FAR), (MOBILE, FAR), (FULL_20, FULL_80)],
)
@pytest.mark.parametrize(("gap", "ask"), [(0.2, 1), (0.03, 3)])
@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_a_change_of_link_is_followed_within_a_few_answers(before, after, gap, ask, noise) -> None:
    estimator = LinkEstimator()
    busiest = max(cost.occupancy + 3.5 * cost.beta for cost in (before, after))
    link = Uplink(before, jitter(noise) if noise else None)
    session = Session(estimator, link, max(gap, 1.2 * busiest), ask=ask)
    session.run(300)
    session.costs.clear()
    link.cost = after
    session.run(200)

    def share(cost: LinkCost) -> float:
        return (cost.alpha + 4 * cost.beta) / (after.alpha + noise + 4 * after.beta)

    limit = SHIFT_BELOW if after.alpha + after.beta < before.alpha + before.beta else SHIFT_ABOVE
    # Those under way at the change, and those that made a queue, come on top.
    assert settled(session.costs, share, 0.2) <= limit + 8
    assert estimator.shifts == 1


def test_a_rate_that_falls_to_an_eighth_is_followed_while_the_queue_grows() -> None:
    estimator = LinkEstimator()
    link = Uplink(LinkCost(0.001, 0.020, 0.029))
    session = Session(estimator, link, 0.45, ask=3)
    session.run(300)
    session.costs.clear()
    link.cost = LinkCost(0.001, 0.020, 0.232)
    session.run(100)
    assert settled(session.costs, lambda cost: cost.beta / 0.232, 0.1) <= 32


def test_a_stall_is_no_change_of_link() -> None:
    """Ten messages wait a second and arrive at once."""
    estimator = LinkEstimator()
    link = Uplink(MOBILE, jitter(0.001))
    session = Session(estimator, link, 0.1, ahead=1000)
    session.run(200)
    before = estimator.cost
    link._arrived = session.now + 1.0
    session.run(60)
    assert estimator.shifts == 0
    assert estimator.alpha == pytest.approx(before.alpha, rel=0.05)
    assert estimator.model == PIPELINED


def test_a_drift_is_followed_within_the_window() -> None:
    estimator = LinkEstimator(window=128)
    link = Uplink(LinkCost(0.002, 0.018), jitter(0.002))
    session = Session(estimator, link, 0.1)
    session.run(200)
    for step in range(400):
        link.cost = LinkCost(0.002, 0.018 + 0.0001 * step)
        session.run(1)
    session.run(128)
    assert estimator.alpha == pytest.approx(0.062, rel=0.05)


# -- probes -------------------------------------------------------------------------------------


def test_probes_come_in_pairs_until_all_is_known() -> None:
    estimator = LinkEstimator()
    now = 0.0
    link = Uplink(MOBILE)
    pairs = []
    for _ in range(400):
        now += 0.1
        if sizes := estimator.probes_needed(now):
            pairs.append((now, sizes))
            sent = [(estimator.probe_sent(now, size), link.send(now, size)) for size in sizes]
            for ticket, at in sent:
                estimator.answered(ticket, at)
    assert [sizes for _, sizes in pairs[:4]] == list(PROBES)
    assert all(b - a >= PROBE_GAP - 1e-9 for (a, _), (b, _) in itertools.pairwise(pairs))
    assert estimator.known
    assert estimator.beta_known
    assert estimator.model_known
    assert estimator.model == PIPELINED
    assert estimator.cost.occupancy == pytest.approx(0.015, rel=0.1)
    # What follows is for freshness only: nothing else was sent.
    assert len(pairs) <= 2 * len(PROBES)


def test_probes_stop_while_everything_is_known_and_fresh() -> None:
    estimator = LinkEstimator()
    session = Session(estimator, Uplink(MOBILE), 0.03, ask=2)
    session.run(60)
    sent = estimator.probes
    assert sent <= 2 * len(PROBES)
    assert estimator.probes_needed(session.now) == ()
    assert estimator.fresh(session.now)
    later = session.now + STALE_AFTER + PROBE_PERIOD
    assert not estimator.fresh(later)
    assert len(estimator.probes_needed(later)) == 2


def test_unanswered_probes_become_rare() -> None:
    estimator = LinkEstimator()
    times = []
    now = 0.0
    while now < 7200.0:
        for size in estimator.probes_needed(now):
            estimator.probe_sent(now, size)
            times.append(now)
        now += 0.05
    rounds = [times[n] for n in range(0, len(times), 2 * len(PROBES))]
    gaps = [b - a for a, b in itertools.pairwise(rounds)]
    assert gaps[0] == pytest.approx(2 * PROBE_PERIOD, rel=0.05)
    assert all(b >= a - 0.5 for a, b in itertools.pairwise(gaps))
    assert gaps[-1] == pytest.approx(PROBE_PERIOD_MAX, rel=0.05)
    assert len(times) <= 2 * len(PROBES) * (4 + 7200 / PROBE_PERIOD_MAX)


def test_another_link_is_probed_soon() -> None:
    estimator = LinkEstimator()
    link = Uplink(MOBILE)
    session = Session(estimator, link, 0.03, ask=2)
    session.run(100)
    sent = estimator.probes
    link.cost = WIFI
    session.run(40)
    assert estimator.shifts == 1
    assert estimator.probes_needed(session.now + PROBE_SOON) != () or estimator.probes > sent


# -- what must not happen -----------------------------------------------------------------------


def test_an_answer_counts_once_and_only_to_what_was_sent() -> None:
    estimator = LinkEstimator()
    ticket = estimator.sent(0.0, 1)
    estimator.answered(ticket, 0.02)
    estimator.answered(ticket, 0.03)
    estimator.answered(ticket + 1, 0.03)
    estimator.answered(-1, 0.03)
    assert estimator.unmatched == 3
    assert estimator.alpha == pytest.approx(0.02)


def test_old_messages_are_forgotten() -> None:
    estimator = LinkEstimator()
    first = estimator.sent(0.0, 1)
    for count in range(MAX_UPLOADS):
        last = estimator.sent(0.1 * count, 1)
    estimator.answered(first, 7.0)
    assert estimator.unmatched == 1
    estimator.answered(last, 7.0)
    assert estimator.unmatched == 1


def test_a_new_connection_owes_nothing_to_the_old_one() -> None:
    estimator = LinkEstimator()
    ticket = estimator.sent(0.0, 1)
    estimator.disconnected()
    estimator.answered(ticket, 5.0)
    assert estimator.unmatched == 1
    estimator.answered(estimator.sent(6.0, 1), 6.02)
    assert estimator.alpha == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("after", "hold"),
    [(0.02, 0.03), (0.02, -1.0), (61.0, 0.0), (math.nan, 0.0), (0.02, math.nan), (math.inf, 0.0)],
)
def test_impossible_times_are_counted_and_dropped(after, hold) -> None:
    estimator = LinkEstimator(LinkCost(0.5))
    estimator.answered(estimator.sent(0.0, 1), after, hold)
    assert estimator.rejected == 1
    assert estimator.cost == LinkCost(0.5)


def test_the_resolution_of_the_holding_time_is_forgiven() -> None:
    estimator = LinkEstimator()
    estimator.answered(estimator.sent(0.0, 1), 0.0200, hold=0.0201)
    assert estimator.rejected == 0
    assert estimator.alpha == 0.0


@pytest.mark.parametrize("window", [0, -1, 4097])
def test_windows_that_cannot_be(window) -> None:
    for estimator in (GammaEstimator, LinkEstimator):
        with pytest.raises(ConfigError, match="window"):
            estimator(window=window)


EVENTS = st.lists(
    st.tuples(
        st.floats(-0.1, 5.0),  # the clock moves on, or back
        st.integers(-10, 10) | st.integers(0, 10**12),  # a size
        st.none() | st.tuples(st.integers(0, 5), st.floats(-1.0, 70.0)),  # which answer, hold
        st.sampled_from(["", "", "", "", "cut", "probe"]),
    ),
    max_size=150,
)


@given(EVENTS, st.integers(1, 16))
@settings(max_examples=150, deadline=None)
def test_nothing_that_happens_makes_a_cost_impossible(events, window) -> None:
    """No exception, no negative or endless cost, no warning of numpy, no growth."""
    estimator = LinkEstimator(window=window)
    now = 100.0
    tickets = []
    for step, size, answer, what in events:
        now += step
        if what == "cut":
            estimator.disconnected()
        elif what == "probe":
            tickets += [estimator.probe_sent(now, size) for size in estimator.probes_needed(now)]
        tickets.append(estimator.sent(now, size))
        if answer is not None:
            back, hold = answer
            estimator.answered(tickets[-1 - min(back, len(tickets) - 1)], now + 0.01, hold)
        cost = estimator.cost  # a LinkCost checks itself
        assert cost.alpha == pytest.approx(estimator.alpha)
        assert estimator.model in (SERIAL, PIPELINED)
        if estimator.model == SERIAL:
            assert cost.propagation == 0.0
        assert len(estimator._uploads) <= MAX_UPLOADS
        assert estimator._samples.count <= window


def test_the_same_events_give_the_same_estimates() -> None:
    first, second = (learned(MOBILE, 0.03, ask=3, noise=jitter(0.002)) for _ in range(2))
    assert first.cost == second.cost
    assert first.probes == second.probes
