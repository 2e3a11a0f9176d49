"""When unasked tokens go out: at once, held, or where the plan ends a message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_agent.core.pipeline import LinkCost, plan
from edge_agent.core.policies import (
    SEND_AT_ONCE,
    SEND_HELD,
    SEND_PLANNED,
    find_policy,
)
from edge_agent.core.sending import SLACK, Estimates, Sending
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


def test_the_link_is_learnt_from_requests_and_their_verdicts() -> None:
    out = Sending(SEND_PLANNED)
    now = 0.0
    for tokens in (1, 8, 4, 2, 6, 3) * 4:
        out.sent(now, tokens, request=True)
        out.answered(now + 0.05 + 0.03 + 0.004 * tokens, hold=0.05)
        now += 1.0
    link = out.estimates.link
    assert link.alpha == pytest.approx(0.03, rel=0.1)
    assert link.beta == pytest.approx(0.004, rel=0.1)
    assert out.replans > 1


def test_a_second_answer_to_one_request_is_ignored() -> None:
    out = Sending(SEND_PLANNED)
    out.sent(0.0, 3, request=True)
    out.answered(0.1, 0.0)
    out.answered(5.0, 0.0)
    assert out.link.unmatched == 0


@pytest.mark.parametrize("quality", [0.0, 0.7, 1.0])
def test_planned_sending_changes_no_token(quality: float) -> None:
    policy = replace(find_policy("pipesd"), sending=SEND_PLANNED)
    for seed in range(4):
        world = World(seed, delay=(0.01, 0.03), drop=0.1, reorder=0.2)
        world.add_verifier()
        edge = world.add_edge(policy=policy, quality=quality, max_tokens=60)
        world.run()
        assert edge.text == reference(edge.config.prompt, 60)
