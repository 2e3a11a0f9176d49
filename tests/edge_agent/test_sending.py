"""When unasked tokens go out: at once, held, or where the plan ends a message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_agent.core.pipeline import PIPELINED, LinkCost, plan
from edge_agent.core.policies import (
    SEND_AT_ONCE,
    SEND_HELD,
    SEND_PLANNED,
    find_policy,
)
from edge_agent.core.sending import MAX_PROBES, MAX_TICKETS, SLACK, Estimates, Sending
from tests.sim.world import World, reference

#: Probabilities on the wire: beta matters, so a window is worth splitting.
HEAVY = Estimates(LinkCost(0.005, 0.0, 0.02), 0.01, 8)


def test_at_once_is_always_due_and_held_never() -> None:
    for sending, due in ((SEND_AT_ONCE, True), (SEND_HELD, False)):
        out = Sending(sending)
        for _ in range(5):
            out.drafted(1, 0.01)
            assert out.due() is due


def test_planned_is_due_where_the_plan_ends_a_message() -> None:
    out = Sending(SEND_PLANNED, HEAVY)
    ends = plan(8, HEAVY.link, HEAVY.gamma, SLACK)
    assert len(ends) > 1, "a plan worth the name"
    seen = []
    for count in range(1, 17):
        out.drafted(1, None)
        if out.due():
            seen.append(count)
    assert seen == [*ends, *(8 + end for end in ends)]


def test_a_trigger_and_a_rollback_begin_the_window_anew() -> None:
    first = plan(8, HEAVY.link, HEAVY.gamma, SLACK)[0]
    for restart in (Sending.asked, Sending.rolled_back):
        out = Sending(SEND_PLANNED, HEAVY)
        for _ in range(first + 1):
            out.drafted(1, None)
        restart(out)
        assert not out.due(), "nothing is drafted yet"
        for count in range(1, first + 1):
            out.drafted(1, None)
            assert out.due() is (count == first)


def test_the_window_is_the_mean_length_of_draft_sequences() -> None:
    out = Sending(SEND_PLANNED)
    for length in (4, 8, 6):
        for _ in range(length):
            out.drafted(1, None)
        out.asked()
    assert out.estimates.window == 6


def test_a_prompt_says_nothing_about_gamma() -> None:
    out = Sending(SEND_PLANNED)
    for _ in range(8):
        out.drafted(1, 0.01)
    out.drafted(500, 3.0)
    assert out.estimates.gamma == pytest.approx(0.01)


def test_the_link_is_learnt_from_batches_and_their_verdicts() -> None:
    out = Sending(SEND_PLANNED)
    now, end = 0.0, 0
    for tokens in (1, 8, 4, 2, 6, 3) * 4:
        end += tokens
        out.sent(now, tokens, (1, end))
        out.judged((1, end), now + 0.05 + 0.03 + 0.004 * tokens, hold=0.05, forward=0.04)
        now += 1.0
    link = out.estimates.link
    assert link.alpha == pytest.approx(0.03, rel=0.1)
    assert link.beta == pytest.approx(0.004, rel=0.1)
    assert out.estimates.forward == pytest.approx(0.04)
    assert out.replans > 1


def test_a_link_is_learnt_while_requests_overlap() -> None:
    """Rule 2: under PipeSD the next request mostly goes out before the verdict on the last one."""
    out = Sending(SEND_PLANNED)
    for batch in range(40):
        sent = batch * 0.05
        out.sent(sent, 2, (1, batch))
        if batch >= 2:
            earlier = (batch - 2) * 0.05
            out.judged((1, batch - 2), earlier + 0.03 + 0.06, hold=0.06, forward=0.04)
    assert out.link.known
    assert out.estimates.link.alpha == pytest.approx(0.03, rel=0.05)


def test_what_names_no_batch_or_two_is_no_measurement() -> None:
    out = Sending(SEND_PLANNED)
    out.sent(0.0, 3, (1, 3))
    out.judged((2, 3), 0.1, 0.01, 0.0)  # of another epoch
    out.judged((1, 3), 0.1, 0.0, 0.0)  # the verifier does not know how long it held it
    out.judged((1, 3), 5.0, 0.01, 0.0)  # again
    out.sent(6.0, 3, (1, 6))
    out.sent(7.0, 3, (1, 6))  # repeated: the verdict may be on either
    out.judged((1, 6), 7.1, 0.01, 0.0)
    out.sent(8.0, 3, (1, 9))
    out.doubtful()
    out.judged((1, 9), 8.1, 0.01, 0.0)
    assert out.link.rejected == out.link.unmatched == 0
    assert not out.link.fresh(8.1)


def test_names_and_probes_are_bounded() -> None:
    out = Sending(SEND_PLANNED)
    for index in range(10 * MAX_TICKETS):
        out.sent(float(index), 1, (1, index))
    assert len(out._batches) == MAX_TICKETS


def test_probes_tell_what_keeps_the_link_busy() -> None:
    """10 ms of a grant for each message, 40 ms on the way: the second of a pair waits 10 ms."""
    out = Sending(SEND_PLANNED)
    now = 0.0
    for _ in range(40):
        free = now
        for size in out.probes(now):
            number = out.probe_sent(now, size)
            free = max(free, now) + 0.01
            out.probe_answered(number, free + 0.04)
        now += 0.1
    assert out.link.model == PIPELINED
    assert out.estimates.measured
    assert out.learnt.known
    assert out.learnt.model == PIPELINED
    assert out.learnt.probes == 8
    assert out.estimates.link.occupancy == pytest.approx(0.01, rel=0.1)
    assert out.estimates.link.alpha == pytest.approx(0.05, rel=0.05)
    assert out.probes(now) == ()


def test_an_answered_probe_counts_once_and_a_doubtful_one_never() -> None:
    out = Sending(SEND_PLANNED)
    number = out.probe_sent(0.0, 1)
    out.probe_answered(number, 0.05)
    out.probe_answered(number, 9.0)
    lost = out.probe_sent(1.0, 1)
    out.doubtful()
    out.probe_answered(lost, 9.0)
    assert out.link.unmatched == 0
    assert out.link.alpha == pytest.approx(0.05)


def test_a_measured_link_needs_no_probes_until_it_is_another() -> None:
    out = Sending(SEND_PLANNED, replace(HEAVY, measured=True))
    assert out.probes(0.0) == ()
    out.link.shifts = 1
    assert out.probes(0.0) != ()


def test_short_sessions_do_not_probe_for_ever() -> None:
    known = Estimates()
    for _ in range(20):
        out = Sending(SEND_PLANNED, known)
        for size in out.probes(0.0):
            out.probe_sent(0.0, size)  # and the session is over before an answer comes
        known = out.estimates
    assert known.probes == MAX_PROBES


@pytest.mark.parametrize("sending", [SEND_AT_ONCE, SEND_HELD])
def test_where_nothing_is_planned_nothing_is_probed(sending: str) -> None:
    assert Sending(sending).probes(0.0) == ()


def test_one_message_in_a_window_is_never_sent_before_the_trigger() -> None:
    """Token ids: beta is 0, so parting a draft gains nothing, wherever the window ends."""
    out = Sending(SEND_PLANNED, Estimates(LinkCost(0.02), 0.01, 4))
    assert out.learnt.messages == 1
    for _ in range(12):
        out.drafted(1, None)
        assert not out.due()


def test_a_backlog_is_more_than_the_link_carries_in_a_forward() -> None:
    """Probabilities on the wire, 20 ms a token; a forward of 50 ms."""
    heavy = Estimates(LinkCost(0.0, 0.0, 0.02), 0.01, 8, measured=True, forward=0.05)
    out = Sending(SEND_PLANNED, heavy)
    out.sent(0.0, 2)
    assert not out.backlogged(0.0)
    out.sent(0.0, 1)
    assert out.backlogged(0.0)
    assert not out.backlogged(0.02), "it drains"
    out.disconnected()
    assert not out.backlogged(0.0)
    ids = Sending(SEND_PLANNED, replace(heavy, link=LinkCost(0.015, 0.05)))
    for _ in range(3):
        ids.sent(0.0, 8)
    assert not ids.backlogged(0.0)
    unknown = Sending(SEND_PLANNED, replace(heavy, forward=0.0))
    unknown.sent(0.0, 100)
    assert not unknown.backlogged(0.0)


@pytest.mark.parametrize(
    ("alpha", "gamma", "forward", "idles"),
    [
        (0.001, 0.008, 0.040, False),  # asked again before a forward would be over
        (0.065, 0.008, 0.040, True),  # a far verifier
        (0.001, 0.030, 0.040, True),  # a slow device
        (0.065, 0.008, 0.500, False),  # a slow target: who asks would wait for it
        (0.065, 0.008, 0.0, False),  # nothing known of the target yet
    ],
)
def test_whether_the_target_would_idle(alpha, gamma, forward, idles) -> None:
    known = Estimates(LinkCost(alpha), gamma, measured=True, forward=forward)
    assert Sending(SEND_PLANNED, known).target_idles is idles
    unknown = replace(known, measured=False)
    assert not Sending(SEND_PLANNED, unknown).target_idles, "the link is only guessed"


@pytest.mark.parametrize("quality", [0.0, 0.7, 1.0])
def test_planned_sending_changes_no_token(quality: float) -> None:
    policy = replace(find_policy("pipesd"), sending=SEND_PLANNED)
    for seed in range(4):
        world = World(seed, delay=(0.01, 0.03), drop=0.1, reorder=0.2)
        world.add_verifier()
        edge = world.add_edge(policy=policy, quality=quality, max_tokens=60)
        world.run()
        assert edge.text == reference(edge.config.prompt, 60)
