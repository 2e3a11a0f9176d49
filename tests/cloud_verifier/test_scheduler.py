"""Which sessions share the next forward: order, room, slots, and that nobody starves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker.messages import VERIFY_EAGER, DraftBatch
from cloud_verifier.core.scheduler import Limits
from cloud_verifier.core.session import VerifierSession
from tests.cloud_verifier.hand import PROMPT, Hand, attached, continuation


def test_nothing_to_do_is_no_forward() -> None:
    assert Hand().core.next_effect() is None


def test_all_sessions_with_work_share_one_forward() -> None:
    hand = attached("a", "b", "c")
    assert hand.seated(hand.forward()) == ["a", "b", "c"]


def test_who_waits_for_a_verdict_comes_first_then_the_oldest() -> None:
    hand = attached("a", "b", "c", "d")
    hand.ask("d")
    hand.now += 1.0
    hand.ask("b")
    assert hand.seated(hand.forward()) == ["d", "b", "a", "c"]


def test_a_verdict_sends_a_session_to_the_end_of_the_queue() -> None:
    hand = attached("a", "b", limits=Limits(forward_tokens=3))
    hand.ask("a")
    hand.now += 1.0
    hand.ask("b")
    first = hand.forward()
    assert hand.seated(first) == ["a"]
    hand.finish(first)
    hand.ask("a")
    assert hand.seated(hand.forward()) == ["b"]


def test_a_long_prompt_goes_in_beside_running_sessions() -> None:
    hand = attached("a", limits=Limits(forward_tokens=64, prefill_tokens=10))
    hand.run()
    hand.open("b", prompt=tuple(range(1, 100)))
    forwards = 0
    while hand.held("b").cached < 98:
        hand.ask("a")
        forward = hand.forward()
        assert hand.seated(forward) == ["a", "b"]
        assert len(forward.seats[1].plan.tokens) <= 10
        hand.finish(forward)
        forwards += 1
    assert forwards == 10
    assert len(hand.held("a").committed) == 10


def test_a_forward_takes_no_more_tokens_than_its_limit() -> None:
    hand = attached("a", "b", "c", limits=Limits(forward_tokens=7, prefill_tokens=5))
    for device in "abc":
        hand.ask(device, 1, 2, 3)
    forward = hand.forward()
    assert [len(seat.plan.tokens) for seat in forward.seats] == [5, 2]


def test_in_a_crowd_each_session_has_its_share_of_the_drafts_judged() -> None:
    hand = attached(*"abcd", limits=Limits(crowd=3, shared_drafts=7, least_drafts=2))
    hand.run()
    drafts = tuple(range(20, 30))
    hand.ask("a", *drafts)
    alone = hand.forward()
    assert [seat.plan.judged for seat in alone.seats] == [10]
    hand.finish(alone)
    for device in "bcd":
        hand.ask(device, *drafts)
    crowd = hand.forward()
    assert [seat.plan.judged for seat in crowd.seats] == [2, 2, 2]


def test_two_or_three_are_no_crowd() -> None:
    """Case 30: sessions of few and of many drafts have the verdicts that each has alone."""
    hand = attached("a", "b", "c")
    hand.run()
    for device, count in (("a", 3), ("b", 40), ("c", 45)):
        hand.ask(device, *range(20, 20 + count))
    assert [seat.plan.judged for seat in hand.forward().seats] == [3, 40, 45]


def test_asked_before_its_prefill_a_session_gets_there_by_pieces() -> None:
    hand = Hand(limits=Limits(forward_tokens=64, prefill_tokens=10))
    prompt = tuple(range(1, 36))
    hand.open("a", prompt=prompt)
    hand.ask("a", 5)
    assert hand.run() == 4
    assert hand.held("a").committed[:1] == continuation(prompt, 1)


def test_a_session_that_asks_takes_the_slot_of_the_least_recently_used() -> None:
    hand = attached("a", "b", slots=2)
    hand.run()
    hand.ask("a")
    hand.run()
    hand.open("c")
    hand.ask("c")
    hand.finish(hand.forward())
    assert hand.held("b").cached == 0
    assert hand.held("a").cached > 0
    assert hand.core.slots.evictions == 1


def test_a_mere_prefill_takes_a_free_slot_but_nobodys() -> None:
    """Else idle sessions evict each other, prefill, and evict again, for ever."""
    hand = attached("a", "b", "c", slots=2)
    assert hand.run() == 1
    assert hand.core.slots.evictions == 0
    assert hand.held("c").cached == 0
    hand.ask("c")
    assert hand.run() == 1
    assert hand.held("c").committed == continuation(PROMPT, 1)
    assert hand.core.slots.evictions == 1


def test_a_session_in_the_batch_keeps_its_slot() -> None:
    hand = attached("a", "b", "c", slots=2)
    for device in "abc":
        hand.ask(device)
        hand.now += 0.01
    first = hand.forward()
    assert hand.seated(first) == ["a", "b"]
    hand.finish(first)
    assert hand.seated(hand.forward()) == ["c"]


def test_nobody_starves_when_sessions_outnumber_slots() -> None:
    """Six sessions that always ask, two slots, prompts in pieces: all go forward alike."""
    devices = "abcdef"
    hand = Hand(limits=Limits(forward_tokens=8, prefill_tokens=4), slots=2)
    for device in devices:
        hand.open(device, prompt=tuple(range(1, 12)))
        hand.ask(device)
    for _ in range(240):
        hand.finish(hand.forward())
        for device in devices:
            if not hand.held(device).triggered:
                hand.ask(device)
    written = [len(hand.held(device).committed) for device in devices]
    assert min(written) >= 20
    # While the next one is prefilled the one before it writes on: some dozen tokens at a time.
    assert max(written) - min(written) <= 13


def test_seats_hold_distinct_slots() -> None:
    hand = attached("a", "b", "c", "d")
    for device in "abcd":
        hand.ask(device)
    slots = [seat.slot for seat in hand.forward().seats]
    assert sorted(slots) == [0, 1, 2, 3]


def test_what_nobody_waits_for_is_done_only_when_the_target_would_idle() -> None:
    hand = attached("a")
    hand.open("b", verify=VERIFY_EAGER)
    hand.run()
    hand.ask("b", 5, verify=False)
    hand.ask("a")
    first = hand.forward()
    assert hand.seated(first) == ["a"], "its verdict is not to be later for b's sake"
    hand.finish(first)
    assert hand.seated(hand.forward()) == ["b"]


def test_what_nobody_waits_for_takes_nobodys_slot() -> None:
    hand = attached("a", "b", slots=2)
    hand.run()
    hand.open("c", verify=VERIFY_EAGER)
    hand.ask("c", 5, verify=False)
    assert hand.run() == 0
    assert hand.core.slots.evictions == 0


def test_a_forward_that_nobody_waits_for_is_short_and_serves_all_in_turn() -> None:
    devices = "abcdef"
    hand = attached(*devices, slots=6, limits=Limits(unasked_tokens=2))
    for device in devices:
        hand.receive(device, DraftBatch(1, 1, 0, (), None, True, True))
    hand.finish(hand.forward())  # what was asked for
    served: list[str] = []
    for _ in range(6):
        forward = hand.forward()
        assert sum(len(seat.plan.tokens) for seat in forward.seats) == 2
        served += hand.seated(forward)
        hand.finish(forward)
    assert sorted(served) == sorted(devices * 2)


def test_a_newcomers_prefill_is_not_cut_short_by_that() -> None:
    hand = attached("a", limits=Limits(unasked_tokens=2))
    hand.receive("a", DraftBatch(1, 1, 0, (), None, True, True))
    hand.finish(hand.forward())
    hand.open("b", prompt=tuple(range(1, 50)))
    forward = hand.forward()
    assert {len(seat.plan.tokens) for seat in forward.seats} == {1, 48}


def test_many_newcomers_leave_room_for_those_who_write_already() -> None:
    """As when a replica dies: all of its sessions come at once, and have waited longest."""
    limits = Limits(forward_tokens=64, prefill_tokens=16)
    hand = attached("a", "b", slots=12, limits=limits)
    hand.run()
    newcomers = [f"n{number}" for number in range(10)]
    for place, device in enumerate(newcomers):
        hand.open(device, prompt=tuple(1 + (place + step) % 90 for step in range(100)))
        hand.ask(device)
    hand.now += 0.01
    forwards = 0
    while any(hand.held(device).behind for device in newcomers):
        for device in "ab":
            hand.ask(device)
        forward = hand.forward()
        assert {"a", "b"} <= set(hand.seated(forward))
        taken = sum(len(seat.plan.tokens) - seat.plan.choices for seat in forward.seats)
        assert taken <= limits.all_prefills
        hand.finish(forward)
        forwards += 1
    assert forwards <= 36, "they take what is theirs"


def test_newcomers_among_themselves_take_whole_forwards() -> None:
    hand = Hand(slots=12, limits=Limits(forward_tokens=64, prefill_tokens=16))
    for place in range(6):
        hand.open(f"n{place}", prompt=tuple(1 + (place + step) % 90 for step in range(100)))
    assert sum(len(seat.plan.tokens) for seat in hand.forward().seats) == 64


def test_those_who_cannot_have_a_slot_ask_nobody_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a forward takes as long to plan as there are sessions times slots."""
    hand = attached(*"abcdef", slots=2)
    hand.run()
    for device in "abcdef":
        hand.ask(device)
    asked: list[VerifierSession] = []
    evict = hand.core.slots.evict

    def noted(may_evict: Callable[[VerifierSession], bool]) -> VerifierSession | None:
        return evict(lambda owner: asked.append(owner) or may_evict(owner))  # type: ignore[func-returns-value]

    monkeypatch.setattr(hand.core.slots, "evict", noted)
    assert hand.seated(hand.forward()) == ["a", "b"]
    assert not asked


def test_huge_trees_do_not_set_the_pace_of_others() -> None:
    hand = attached("a", "b", limits=Limits(draft_tokens=4))
    hand.run()
    right = continuation(PROMPT, 40)
    hand.ask("a", *right[:20])
    wide = tuple(range(1, 60))
    hand.receive("b", DraftBatch(1, 1, 0, wide, (-1,) * len(wide), True))
    forward = hand.forward()
    assert hand.seated(forward) == ["a", "b"]
    assert [len(seat.plan.drafts) for seat in forward.seats] == [4, 4]
    hand.finish(forward)
    hand.run()
    assert hand.held("a").committed == right[:21], "the rest follows by itself"
