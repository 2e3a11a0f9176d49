"""A whole replica: opening, replacing, closing, failing, draining, forgetting."""

from __future__ import annotations

import pytest

from broker.messages import (
    CLOSED_ERROR,
    CLOSED_MOVED,
    CLOSED_UNKNOWN,
    REFUSED_BUSY,
    REFUSED_PROMPT,
    REFUSED_TOKEN,
    REFUSED_VOCABULARY,
    Accepted,
    Close,
    Closed,
    DraftBatch,
    Refused,
    Resync,
    Verdict,
)
from cloud_verifier.core.scheduler import Limits
from cloud_verifier.core.session import Plan
from tests.cloud_verifier.hand import EOS, PROMPT, VOCAB, Hand, attached, continuation, next_token

TEXT = continuation(PROMPT, 20)

# -- opening ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_tokens", "limit"), [(50, 50), (500, 297)])
def test_a_session_is_taken(max_tokens, limit) -> None:
    hand = Hand()
    hand.open(max_tokens=max_tokens)
    assert hand.told() == [("a", Accepted(1, "v1", 300, limit))]
    assert hand.core.stats.opens == 1


@pytest.mark.parametrize(
    ("changes", "reason", "retry"),
    [
        ({"vocab_hash": "w"}, REFUSED_VOCABULARY, 0.0),
        ({"prompt": (1,) * 300}, REFUSED_PROMPT, 0.0),
        ({"prompt": (1,) * 200, "committed": (1,) * 100, "max_tokens": 900}, REFUSED_PROMPT, 0.0),
        ({"committed": (1,) * 50}, REFUSED_PROMPT, 0.0),
        ({"prompt": (1, VOCAB)}, REFUSED_TOKEN, 0.0),
        ({"committed": (VOCAB,)}, REFUSED_TOKEN, 0.0),
    ],
    ids=["tokenizer", "long prompt", "long text", "nothing left", "prompt id", "committed id"],
)
def test_refused_for_good(changes, reason, retry) -> None:
    """Case 27 among them: the edge has another tokenizer."""
    hand = Hand()
    hand.open(**changes)
    ((_, refused),) = hand.told()
    assert isinstance(refused, Refused)
    assert (refused.attach, refused.reason, refused.retry_after) == (1, reason, retry)
    assert refused.detail
    assert not hand.core.sessions
    assert hand.core.stats.refusals == 1


def test_the_longest_prompt_that_fits_leaves_one_place() -> None:
    hand = Hand()
    hand.open(prompt=(1,) * 299)
    assert hand.told() == [("a", Accepted(1, "v1", 300, 1))]
    hand.ask()
    hand.run()
    ((_, verdict),) = hand.told_of(Verdict)
    assert verdict.finish == "length"


def test_a_full_house_refuses_for_now_but_keeps_its_own() -> None:
    hand = attached("a", "b", max_sessions=2, busy_retry=3.0)
    hand.open("c")
    ((_, refused),) = hand.told_of(Refused)
    assert (refused.reason, refused.retry_after) == (REFUSED_BUSY, 3.0)
    hand.open("a", attach=2)
    assert hand.told_of(Accepted) == [("a", Accepted(2, "v1", 300, 50))]
    hand.receive("b", Close(1))
    hand.open("c", attach=2)
    assert hand.told_of(Accepted) == [("c", Accepted(2, "v1", 300, 50))]


def test_what_is_over_and_was_never_closed_makes_room_for_newcomers() -> None:
    """Its Close was lost, as while the broker was away; the next one need not wait for its end."""
    hand = attached("a", max_sessions=2, busy_retry=3.0)
    hand.open("b", max_tokens=1)
    hand.ask("b")
    hand.run()
    assert hand.held("b").finish is not None
    hand.told()
    hand.now += 2.0
    hand.open("c")
    assert len(hand.told_of(Refused)) == 1, "its device may still ask for the last verdict"
    hand.now += 2.0
    hand.open("c")
    assert len(hand.told_of(Accepted)) == 1
    assert sorted(key.device for key in hand.core.sessions) == ["a", "c"]
    assert hand.core.stats.expired == 1
    hand.now += 10.0
    hand.open("d")
    assert len(hand.told_of(Refused)) == 1, "who writes keeps its place"


def test_a_finished_session_that_opens_again_keeps_its_place() -> None:
    hand = attached("a", max_sessions=2, busy_retry=3.0)
    hand.open("b", max_tokens=1)
    hand.ask("b")
    hand.run()
    hand.open("b", attach=2, max_tokens=40)
    hand.now += 10.0
    hand.open("c")
    assert len(hand.told_of(Refused)) == 1
    assert hand.core.stats.expired == 0


def test_a_device_with_too_many_sessions_is_told_to_come_back() -> None:
    hand = Hand(max_sessions_per_device=2)
    for session in "abc":
        hand.open_as("greedy", session)
    hand.open_as("other", "a")
    told = hand.told()
    assert [type(message) for _, message in told] == [Accepted, Accepted, Refused, Accepted]
    refused = told[2][1]
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.retry_after) == (REFUSED_BUSY, 2.0)
    assert "2 sessions of this device" in refused.detail
    assert (hand.core.stats.device_refusals, hand.core.stats.refusals) == (1, 1)
    # Attaching again is no new session, and one that was closed makes room.
    hand.open_as("greedy", "b", attach=2)
    hand.core.receive("greedy", "a", Close(1), hand.now)
    hand.open_as("greedy", "c")
    assert [type(message) for _, message in hand.told()] == [Accepted, Accepted]
    hand.now = 1000.0
    hand.core.handle_timer(hand.now)
    assert not hand.core._devices, "nothing is kept of devices without sessions"


def test_a_repeated_open_is_accepted_again_and_changes_nothing() -> None:
    hand = attached("a")
    hand.ask("a", *TEXT[:2])
    hand.run()
    held = hand.held("a")
    hand.told()
    hand.open("a")
    assert hand.told() == [("a", Accepted(1, "v1", 300, 50))]
    assert hand.held("a") is held
    assert held.committed == TEXT[:3]


def test_an_older_open_is_stale() -> None:
    hand = Hand()
    hand.open(attach=3)
    hand.told()
    hand.open(attach=2)
    assert hand.told() == []
    assert hand.core.stats.stale_attach == 1


# -- who is meant -------------------------------------------------------------------------------


def test_messages_for_an_unknown_session_are_answered_once_each() -> None:
    hand = Hand()
    hand.receive("x", DraftBatch(4, 1, 0, (1,)))
    hand.receive("x", Resync(4, 1, 0))
    hand.receive("x", Close(4))
    assert hand.told() == [("x", Closed(4, CLOSED_UNKNOWN))] * 2
    assert hand.core.stats.unknown_sessions == 3


def test_an_attachment_that_never_arrived_is_unknown_and_an_old_one_is_stale() -> None:
    hand = Hand()
    hand.open(attach=2)
    hand.told()
    hand.receive("a", DraftBatch(1, 1, 0, (1,), None, True))
    hand.receive("a", Close(1))
    assert hand.told() == []
    hand.receive("a", DraftBatch(3, 1, 0, (1,), None, True))
    assert hand.told() == [("a", Closed(3, CLOSED_UNKNOWN))]
    assert hand.held("a").attach == 2
    assert hand.core.stats.stale_attach == 2


def test_a_token_beyond_the_vocabulary_leaves_the_verifier_alive() -> None:
    """Case 27."""
    hand = attached("a", "b")
    hand.ask("a", VOCAB)
    hand.ask("b", *TEXT[:2])
    hand.run()
    told = dict(hand.told())
    assert isinstance(told["a"], Closed)
    assert isinstance(told["b"], Verdict)
    assert told["b"].accepted == 2


# -- verdicts -----------------------------------------------------------------------------------


def test_each_session_gets_its_own_verdict() -> None:
    hand = attached("a", "b")
    hand.ask("a", *TEXT[:3])
    hand.ask("b", 1, 2)
    hand.run()
    verdicts = dict(hand.told())
    assert verdicts["a"].tokens == tuple(TEXT[:4])
    assert verdicts["b"].tokens == tuple(TEXT[:1])
    assert hand.core.stats.batch_sessions == 2
    assert hand.core.stats.committed == 5


def test_a_finished_session_frees_its_slot_and_waits_for_its_close() -> None:
    hand = attached("a", slots=1)
    hand.ask("a")
    hand.finish(hand.forward(), choose=lambda sequence: EOS)
    ((_, verdict),) = hand.told_of(Verdict)
    assert verdict.finish == "stop"
    assert len(hand.core.slots) == 0
    hand.receive("a", Resync(1, 1, 0))
    assert hand.told_of(Verdict) == [("a", verdict)]
    hand.receive("a", Close(1))
    assert not hand.core.sessions


def test_an_evicted_session_is_prefilled_when_it_asks_again() -> None:
    hand = attached("a", "b", slots=1)
    for _ in range(3):
        for device in "ab":
            hand.ask(device, *TEXT[len(hand.held(device).committed) :][:2])
            hand.run()
    assert hand.held("a").committed == hand.held("b").committed == TEXT[:9]
    assert hand.core.slots.evictions == 5


# -- replacing ----------------------------------------------------------------------------------


def test_a_new_attachment_keeps_the_cache_of_the_same_text() -> None:
    hand = attached("a")
    hand.ask("a", *TEXT[:3])
    hand.run()
    assert hand.held("a").cached == len(PROMPT) + 3
    hand.open("a", attach=2, committed=TEXT[:4])
    assert hand.held("a").cached == len(PROMPT) + 3
    hand.ask("a", attach=2)
    assert hand.forward().seats[0].plan == Plan(6, (TEXT[3],), 0, 1, 4)


@pytest.mark.parametrize(
    ("committed", "kept"),
    [(TEXT[:2], 4), ((), 2), ((50, 51, 52), 3), ((TEXT[0], 51, 52), 4)],
    ids=["shorter", "nothing", "another text", "another second token"],
)
def test_a_new_attachment_with_another_text_keeps_what_both_share(committed, kept) -> None:
    hand = attached("a")
    hand.ask("a", *TEXT[:3])
    hand.run()
    hand.open("a", attach=2, committed=committed)
    assert hand.held("a").cached == kept
    hand.ask("a", attach=2)
    hand.run()
    whole = [*PROMPT, *committed]
    assert hand.held("a").committed == [*committed, *continuation(whole, 1)]


def test_replacing_while_its_forward_runs_trusts_only_what_that_kept() -> None:
    hand = attached("a")
    hand.run()
    hand.ask("a", 1, 2, 3)  # wrong ones
    running = hand.forward()
    hand.open("a", attach=2)
    hand.ask("a", *TEXT[:2], attach=2)
    assert hand.held("a").cached == 2
    hand.finish(running)
    assert hand.told_of(Verdict) == []  # nobody is there for the old one's answer
    assert hand.core.stats.committed == 0
    hand.run()
    ((_, verdict),) = hand.told_of(Verdict)
    assert (verdict.attach, verdict.tokens) == (2, tuple(TEXT[:3]))


def test_replacing_twice_while_a_forward_runs() -> None:
    hand = attached("a", limits=Limits(prefill_tokens=2))
    running = hand.forward()
    hand.open("a", attach=2)
    hand.open("a", attach=3)
    hand.ask("a", attach=3)
    hand.finish(running)
    hand.run()
    assert hand.held("a").committed == TEXT[:1]


def test_replacing_a_session_without_a_slot() -> None:
    hand = attached("a", "b", slots=1)
    hand.ask("b")
    hand.run()
    hand.open("a", attach=2)
    hand.ask("a", attach=2)
    hand.run()
    assert hand.held("a").committed == TEXT[:1]


def test_replacing_a_finished_session_whose_slot_went_to_another() -> None:
    """The edge missed the end and opens again."""
    hand = attached("a", slots=1)
    hand.ask("a")
    hand.finish(hand.forward(), choose=lambda sequence: EOS)
    hand.open("b", prompt=(50, 51, 52, 53))
    hand.run()
    hand.open("a", attach=2)
    assert hand.held("a").cached == 0
    hand.ask("a", attach=2)
    hand.run()
    assert hand.held("a").committed == TEXT[:1]


# -- closing and failing ------------------------------------------------------------------------


def test_closing_while_its_forward_runs_drops_the_answer_and_frees_the_slot() -> None:
    hand = attached("a", "b", slots=2)
    hand.ask("a", 1, 2)
    hand.ask("b", *TEXT[:1])
    running = hand.forward()
    hand.receive("a", Close(1))
    hand.open("c")
    hand.ask("c")
    assert hand.core.next_effect() is None
    hand.finish(running)
    assert [device for device, _ in hand.told_of(Verdict)] == ["b"]
    assert hand.core.stats.verdicts == 1
    hand.run()
    assert hand.held("c").committed == TEXT[:1]


def test_closed_and_opened_anew_while_its_forward_runs() -> None:
    hand = attached("a", slots=1)
    hand.ask("a", 1, 2)
    running = hand.forward()
    hand.receive("a", Close(1))
    hand.open("a", attach=2)
    hand.finish(running)
    assert hand.held("a").committed == []
    hand.ask("a", attach=2)
    hand.run()
    assert hand.held("a").committed == TEXT[:1]


def test_a_failed_forward_hands_its_sessions_back_and_spares_the_others() -> None:
    hand = attached("a", "b", "c", limits=Limits(forward_tokens=6))
    hand.ask("a")
    hand.ask("b")
    running = hand.forward()
    assert hand.seated(running) == ["a", "b"]
    hand.core.forward_failed(running)
    assert hand.told_of(Closed) == [("a", Closed(1, CLOSED_ERROR)), ("b", Closed(1, CLOSED_ERROR))]
    assert list(hand.core.sessions) == [("c", "s")]
    assert len(hand.core.slots) == 0
    assert hand.core.stats.forward_failures == 1
    hand.ask("c")
    hand.run()
    assert hand.held("c").committed == TEXT[:1]


def test_a_failed_forward_leaves_nothing_to_who_attached_again_meanwhile() -> None:
    """After a failure the slot may hold less than was kept."""
    hand = attached("a")
    hand.ask("a", *TEXT[:3])
    hand.run()
    hand.ask("a", 1)
    running = hand.forward()
    hand.open("a", attach=2, committed=TEXT[:4])
    assert hand.held("a").cached > 0
    hand.blocks[0].clear()
    hand.core.forward_failed(running)
    assert hand.held("a").cached == 0
    assert hand.told_of(Closed) == []
    hand.ask("a", attach=2)
    hand.run()
    assert hand.held("a").committed == TEXT[:5]


def test_an_answer_of_the_wrong_length_is_the_engines_fault() -> None:
    hand = attached("a", "b")
    running = hand.forward()
    with pytest.raises(ValueError, match="1 answers for 2 seats"):
        hand.core.forward_done(running, [[]], 1.0, 0.1)
    hand.core.forward_failed(running)
    assert hand.core.next_effect() is None
    assert not hand.core.sessions


def test_an_answer_that_cannot_be_taken_in_costs_its_own_session_only() -> None:
    hand = attached("a", "b", "c")
    for device in "abc":
        hand.ask(device)
    running = hand.forward()
    text = [next_token(PROMPT)]
    faults = hand.core.forward_done(running, [text, [], text], 1.0, 0.1)
    assert [type(fault) for fault in faults] == [IndexError]
    told = hand.told()
    assert ("b", Closed(1, CLOSED_ERROR)) in told
    assert {device for device, message in told if isinstance(message, Verdict)} == {"a", "c"}
    assert {key.device for key in hand.core.sessions} == {"a", "c"}
    # Its memory is free, and it may open again.
    hand.open("b", attach=2)
    hand.ask("b", attach=2)
    hand.run()
    assert hand.held("b").committed == text


# -- draining and forgetting --------------------------------------------------------------------


def test_drain_hands_everything_back_and_takes_nothing_new() -> None:
    hand = attached("a", "b")
    hand.run()
    hand.ask("a")
    running = hand.forward()
    assert hand.seated(running) == ["a"]
    hand.core.drain()
    hand.open("c")
    idle, refused = hand.told()
    assert idle == ("b", Closed(1, CLOSED_MOVED))
    assert isinstance(refused[1], Refused)
    assert refused[1].retry_after > 0
    hand.finish(running)
    verdict, closed = hand.told()
    assert verdict[0] == "a"
    assert isinstance(verdict[1], Verdict), "the forward under way was not for nothing"
    assert closed == ("a", Closed(1, CLOSED_MOVED))
    assert hand.core.next_effect() is None
    assert hand.core.get_timer() is None


def test_a_drain_at_once_waits_for_no_forward() -> None:
    hand = attached("a", "b")
    hand.ask("a")
    running = hand.forward()
    hand.core.drain(at_once=True)
    assert dict(hand.told()) == {each: Closed(1, CLOSED_MOVED) for each in "ab"}
    hand.finish(running)
    assert hand.told() == []


def test_an_idle_session_expires_and_any_word_keeps_it() -> None:
    hand = attached("a", "b", idle_ttl=10.0)
    assert hand.core.get_timer() == pytest.approx(10.0)
    hand.now = 6.0
    hand.receive("b", Resync(1, 0, 0))
    hand.now = 10.0
    hand.core.handle_timer(hand.now)
    assert list(hand.core.sessions) == [("b", "s")]
    assert hand.core.get_timer() == pytest.approx(16.0)
    assert hand.core.stats.expired == 1
    hand.now = 15.0
    hand.open("b")
    assert hand.core.get_timer() == pytest.approx(25.0)
    hand.now = 25.0
    hand.core.handle_timer(hand.now)
    assert hand.core.get_timer() is None
    assert len(hand.core.slots) == 0


def test_expiry_while_its_forward_runs() -> None:
    hand = attached("a", idle_ttl=10.0)
    hand.ask("a")
    running = hand.forward()
    hand.now = 20.0
    hand.core.handle_timer(hand.now)
    hand.finish(running)
    assert hand.told_of(Verdict) == []
    assert hand.core.next_effect() is None


def test_messages_are_sent_once() -> None:
    hand = attached("a")
    hand.ask("a", 1)
    hand.run()
    assert len(hand.told()) == 1
    assert hand.told() == []
