"""What is counted and drawn of one generation."""

from __future__ import annotations

import pytest

from edge_agent.bench import watch as lanes
from edge_agent.bench.link_model import Passage
from edge_agent.bench.watch import MAX_EVENTS, PlanningTime, Span, Watch
from edge_agent.core.policies import SEND_PLANNED
from edge_agent.core.sending import Sending


def draft(watch: Watch, position: int, *, awaiting: bool, at: float = 0.0, took: float = 0.01):
    details = {"position": position, "token": 5, "confidence": 0.5, "awaiting": awaiting}
    watch("draft", at, at + took, details)


def verdict(watch: Watch, start: int, committed: int, *, lost: int = 0, at: float = 0.0, **more):
    details = {
        "start": start,
        "tokens": committed,
        "accepted": max(0, committed - 1),
        "judged": 2,
        "hold_ms": 30.0,
        "forward_ms": 20.0,
        "committed": committed,
        "lost": lost,
        **more,
    }
    watch("verdict", at, at, details)
    if lost:
        watch("rollback", at, at, {"lost": lost})


def test_proactive_tokens_are_kept_with_their_draft() -> None:
    watch = Watch()
    for position, awaiting in ((0, False), (1, False), (2, True), (3, True)):
        draft(watch, position, awaiting=awaiting)
    assert (watch.proactive, watch.kept, watch.dropped) == (2, 0, 0)
    verdict(watch, 0, 3)  # 0, 1 and the target's own at 2, which is what was drafted there
    assert (watch.proactive, watch.kept, watch.dropped) == (2, 2, 0)
    draft(watch, 4, awaiting=True)
    verdict(watch, 3, 1, lost=2)  # 3 was wrong, so 4 goes with it
    assert (watch.proactive, watch.kept, watch.dropped) == (3, 2, 1)


def test_of_what_is_rolled_back_only_the_end_is_dropped() -> None:
    watch = Watch()
    draft(watch, 0, awaiting=False)
    for position in (1, 2, 3):
        draft(watch, position, awaiting=True)
    # Eager: the verifier judged what was not asked for, and 0 to 2 were right.
    verdict(watch, 0, 4, lost=1)
    assert (watch.kept, watch.dropped) == (2, 1)


def test_a_verdict_that_came_twice_decides_nothing() -> None:
    watch = Watch()
    draft(watch, 0, awaiting=True)
    verdict(watch, 0, 0)
    assert (watch.kept, watch.dropped, watch.forwards) == (0, 0, [])


def test_bytes_and_forwards_are_those_of_drafts_and_verdicts() -> None:
    watch = Watch()
    watch("sent", 0.0, 0.1, {"kind": "SessionOpen", "tokens": 0, "verify": False, "bytes": 80})
    watch("sent", 0.1, 0.2, {"kind": "DraftBatch", "tokens": 3, "verify": True, "bytes": 14})
    verdict(watch, 0, 2)
    assert (watch.draft_messages, watch.draft_bytes, watch.sent_tokens) == (1, 14, 3)
    assert watch.forwards == [(2, 20.0)]


def test_gamma_leaves_the_prompt_out() -> None:
    watch = Watch()
    assert watch.gamma_s == 0.0
    draft(watch, 0, awaiting=False, took=2.0)
    assert watch.gamma_s == 0.0
    for took in (0.01, 0.03, 0.02):
        draft(watch, 1, awaiting=False, took=took)
    assert watch.gamma_s == pytest.approx(0.02)


def test_the_timeline_places_forwards_by_when_their_verdict_left() -> None:
    watch = Watch()
    draft(watch, 0, awaiting=False, at=10.0)
    verdict(watch, 0, 1, at=10.2)
    up = [Passage(9.0, 9.0, 9.1, 9.2, 50), Passage(10.01, 10.01, 10.03, 10.05, 50)]
    down = [
        Passage(9.5, 9.5, 9.5, 9.6, 40),
        Passage(10.06, 10.06, 10.06, 10.09, 30),  # of the acceptance
        Passage(10.1, 10.1, 10.1, 10.15, 40),
    ]
    spans = watch.timeline(10.0, up, down)
    found = {span.lane: (round(span.begin, 6), round(span.end, 6)) for span in spans}
    assert found == {
        lanes.DRAFT: (0.0, 0.01),
        lanes.UPLINK: (0.01, 0.03),
        lanes.UP_AIR: (0.03, 0.05),
        lanes.HOLD: (0.07, 0.08),
        lanes.FORWARD: (0.08, 0.1),
        lanes.DOWN: (0.1, 0.15),
        lanes.VERDICT: (0.2, 0.2),
    }
    assert spans == sorted(spans, key=lambda span: span.begin)
    assert all(isinstance(span, Span) for span in spans)


def test_the_timeline_is_bounded() -> None:
    watch = Watch()
    for position in range(MAX_EVENTS + 50):
        draft(watch, position, awaiting=False, at=position * 0.01)
    assert len(watch.timeline(0.0, [], [])) == MAX_EVENTS


def test_planning_time_counts_what_the_session_decides_with_and_changes_nothing() -> None:
    sending = Sending(SEND_PLANNED)
    ticks = iter(range(1_000))
    spent = PlanningTime(sending, clock=lambda: float(next(ticks)))
    sending.sent(0.0, 2, (1, 2))
    sending.judged((1, 2), 0.1, 0.05, 0.04)
    sending.drafted(1, 0.01)
    assert not sending.due()
    assert spent.seconds == 4.0  # a tick each
    assert sending.learnt.alpha == pytest.approx(0.05)
