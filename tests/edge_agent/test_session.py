"""The edge's session while it is attached: drafts, triggers, verdicts, losses, the end."""

from __future__ import annotations

import pytest

from broker.messages import (
    FINISH_LENGTH,
    FINISH_STOP,
    VERIFY_EAGER,
    VERIFY_TRIGGERED,
    Close,
    DraftBatch,
    Resync,
)
from edge_agent.core.config import VERIFY_AHEAD, VERIFY_AUTO
from edge_agent.core.effects import SOURCE_ACCEPTED, SOURCE_TARGET, Commit, DraftNext, Finished
from edge_agent.core.pipeline import LinkCost
from edge_agent.core.policies import SEND_HELD, Policy
from edge_agent.core.sending import Estimates
from edge_agent.core.session import State
from edge_agent.core.timing import Timing
from edge_agent.core.trigger import Thresholds
from tests.edge_agent.hand import EOS, OFTEN, PROMPT, VOCAB, Hand, opened

#: Asks at each doubtful token, and sends nothing before.
HELD = Policy("held", OFTEN, sending=SEND_HELD, ask_again=1)

# -- sending ------------------------------------------------------------------------------------


def test_drafts_go_out_at_once_without_a_request() -> None:
    hand = opened()
    hand.draft(1)
    assert hand.batch() == DraftBatch(1, 1, 0, (1,))
    hand.draft(2)
    assert hand.batch() == DraftBatch(1, 1, 1, (2,))
    assert not hand.session.awaiting
    assert hand.session.get_timer() is None


def test_a_trigger_asks_with_everything_unsent_in_one_batch() -> None:
    """Rule 1 of the paper: what the window would have split goes out whole."""
    hand = opened(OFTEN)
    hand.draft(1, 2)
    hand.draft(3, confidence=0.5)
    assert hand.batch() == DraftBatch(1, 1, 0, (1, 2, 3), None, True)
    assert hand.session.awaiting
    assert hand.session.stats.triggers_token == 1


@pytest.mark.parametrize(
    ("thresholds", "confidences", "rule"),
    [
        (Thresholds(r1=0.0, r2=0.5, window=9), (0.9, 0.5), "token"),
        (Thresholds(r1=0.5, r2=0.0, window=9), (0.8, 0.7, 0.8), "sequence"),
        (Thresholds(r1=0.0, r2=0.0, window=3), (0.1, 0.1, 0.1), "window"),
    ],
)
def test_each_rule_asks_at_its_token(thresholds, confidences, rule) -> None:
    hand = opened(thresholds)
    for token, confidence in enumerate(confidences, start=1):
        assert not hand.session.awaiting
        hand.draft(token, confidence=confidence)
    assert hand.session.awaiting
    assert getattr(hand.session.stats, f"triggers_{rule}") == 1
    assert hand.batch().verify


def test_drafting_goes_on_while_a_verdict_is_awaited_up_to_max_ahead() -> None:
    """Rule 2: what comes meanwhile is held back until the verdict or the next trigger."""
    hand = opened(policy=HELD, max_ahead=4)
    hand.draft(1, confidence=0.1)
    assert hand.batch().verify
    hand.draft(2, 3)
    assert hand.sent() == []
    hand.draft(4, confidence=0.1)
    assert hand.batch() == DraftBatch(1, 1, 1, (2, 3, 4), None, True)
    assert hand.idle()  # four unverified tokens are all that may be
    hand.verdict(0, [1, 2], accepted=1)
    hand.effects()
    assert hand.wanted().position == 4


def test_eager_sends_what_it_drafts_while_it_waits() -> None:
    hand = opened(OFTEN, verify=VERIFY_EAGER)
    hand.draft(1, confidence=0.1)
    assert hand.batch().verify
    hand.draft(2)
    assert hand.batch() == DraftBatch(1, 1, 1, (2,))


def test_a_further_request_carries_as_much_as_the_policy_says() -> None:
    policy = Policy("x", OFTEN, sending=SEND_HELD, ask_again=3)
    hand = opened(policy=policy)
    hand.draft(1, confidence=0.1)
    assert hand.batch().tokens == (1,)
    hand.draft(2, confidence=0.1)
    hand.draft(3)
    assert hand.sent() == []
    hand.verdict(0, [1, 2], accepted=1)
    assert hand.batch() == DraftBatch(1, 1, 2, (3,), None, True), "it asks once that is answered"
    hand.draft(4, confidence=0.1)
    hand.draft(5)
    assert hand.sent() == []
    hand.draft(6)
    assert hand.batch() == DraftBatch(1, 1, 3, (4, 5, 6), None, True), "or when it has so much"


def test_ahead_lets_the_target_write_on_after_each_request() -> None:
    hand = opened(OFTEN, verify=VERIFY_AHEAD)
    assert hand.open_message.verify == VERIFY_TRIGGERED, "what that means is the edge's affair"
    hand.draft(1, confidence=0.1)
    assert hand.batch() == DraftBatch(1, 1, 0, (1,), None, True, True)
    hand.verdict(0, [1, 2], accepted=1)
    hand.verdict(2, [3])  # nobody asked for this one
    assert hand.effects()[-1] == Commit(2, (3,), (SOURCE_TARGET,))
    assert hand.session.get_timer() is None, "and nobody waits for the next"


def test_auto_lets_it_where_the_way_is_longer_than_a_forward() -> None:
    for alpha, may in ((0.2, True), (0.001, False)):
        known = Estimates(LinkCost(alpha), 0.001, measured=True, forward=0.05)
        hand = opened(OFTEN, verify=VERIFY_AUTO, estimates=known)
        hand.draft(1, confidence=0.1)
        assert hand.batch().go_on is may


def test_while_the_target_writes_on_a_hopeless_draft_pauses_too() -> None:
    hand = opened(OFTEN, verify=VERIFY_AHEAD, min_survival=0.3)
    hand.draft(1, confidence=0.1)
    hand.batch()
    hand.verdict(0, [1, 2], accepted=1)
    hand.effects()
    hand.draft(3, confidence=0.6)
    hand.draft(4, confidence=0.4)  # fires; and 0.24 of hope
    assert hand.batch().verify
    hand.verdict(2, [3, 4], accepted=1)
    hand.effects()
    hand.draft(5, confidence=0.51)
    hand.draft(6, confidence=0.51)
    assert hand.next_draft() is None


def test_a_request_brings_the_probes_that_are_due() -> None:
    hand = opened(OFTEN, policy=Policy("x", OFTEN))
    hand.draft(1, confidence=0.1)
    batch, *probes = hand.sent()
    assert isinstance(batch, DraftBatch)
    assert [(probe.probe, len(probe.padding)) for probe in probes] == [(1, 1), (2, 8)]
    hand.now += 0.03
    hand.receive(Resync(1, 1, 1, probe=2))
    hand.receive(Resync(1, 1, 1, probe=1))
    hand.receive(Resync(1, 1, 1, probe=99))  # nobody asked
    assert hand.sent() == [], "an answer to a probe lacks nothing"
    assert hand.session.sending.link.probes == 2
    assert hand.session.sending.link.unmatched == 0
    assert hand.session.sending._probes == {}


def test_a_hopeless_draft_pauses_until_the_verdict() -> None:
    hand = opened(policy=HELD, min_survival=0.3)
    hand.draft(1, confidence=0.4)
    hand.batch()
    hand.draft(2, confidence=0.6)  # 0.24 of hope for both
    assert hand.idle()
    hand.verdict(0, [1], accepted=1)  # one right, one asked for is still missing
    hand.effects()
    assert hand.wanted().position == 2


def test_at_once_is_at_once_while_a_verdict_is_awaited_too() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    assert hand.batch().verify
    hand.draft(2)
    assert hand.batch() == DraftBatch(1, 1, 1, (2,))


def test_a_rule_that_fired_for_what_is_committed_meanwhile_asks_for_nothing() -> None:
    hand = opened(verify=VERIFY_AHEAD, policy=Policy("x", OFTEN, sending=SEND_HELD))
    hand.draft(1, confidence=0.1)
    assert hand.batch().verify
    hand.draft(2, confidence=0.1)  # with too little to ask again
    hand.draft(3)
    hand.verdict(0, [1, 2, 3], accepted=1)  # the target wrote the rest by itself
    assert hand.sent() == []
    assert not hand.session.awaiting


def test_what_was_held_back_goes_out_after_the_verdict() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.batch()
    hand.draft(2, 3)
    hand.verdict(0, [1, 2], accepted=1)
    assert hand.batch() == DraftBatch(1, 1, 2, (3,))
    assert not hand.session.awaiting


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, (1, 2, EOS)),
        ({"max_tokens": 4}, (1, 2, 3)),  # the last one is the target's in any case
        ({"max_ahead": 3}, (1, 2, 3)),
        ({"context": len(PROMPT) + 2}, (1, 2, 3)),
    ],
    ids=["end of text", "max_tokens", "max_ahead", "draft context"],
)
def test_when_no_more_can_be_drafted_the_session_asks(changes, tokens) -> None:
    hand = opened(**changes)
    hand.draft(*tokens)
    assert hand.next_draft() is None
    assert hand.batch() == DraftBatch(1, 1, 0, tokens, None, True)
    assert hand.session.stats.triggers_end == 1
    assert hand.sent() == []  # asks once


def test_the_verifiers_limit_ends_drafting() -> None:
    hand = opened(limit=3)
    hand.draft(1, 2)
    assert hand.next_draft() is None
    assert hand.batch().verify


def test_a_broken_draft_model_leaves_the_targets_own_tokens() -> None:
    hand = opened()
    hand.session.draft_failed(hand.wanted())
    for position in range(3):
        assert hand.batch() == DraftBatch(1, 1, position, (), None, True)
        hand.verdict(position, [50 + position])
        hand.effects()
    assert hand.session.committed == [50, 51, 52]


def test_a_draft_beyond_the_vocabulary_counts_as_a_broken_model() -> None:
    hand = opened()
    hand.draft(VOCAB)
    assert hand.batch() == DraftBatch(1, 1, 0, (), None, True)
    assert hand.next_draft() is None


# -- verdicts -----------------------------------------------------------------------------------


def test_full_acceptance_commits_and_keeps_the_rest() -> None:
    hand = opened(OFTEN)
    hand.draft(1, 2, 3, 4)
    hand.batch()
    hand.draft(5, confidence=0.1)
    hand.batch()
    hand.verdict(0, [1, 2, 3], accepted=3)
    sources = (SOURCE_ACCEPTED,) * 3
    assert hand.effects() == [Commit(0, (1, 2, 3), sources)]
    assert hand.session.awaiting  # up to position 5 was asked for
    hand.verdict(3, [4, 5, 6], accepted=2)
    assert hand.effects() == [Commit(3, (4, 5, 6), (*sources[:2], SOURCE_TARGET))]
    assert not hand.session.awaiting
    stats = hand.session.stats
    assert (stats.accepted, stats.target_tokens, stats.rolled_back) == (5, 1, 0)
    assert stats.forwards == 2


def test_a_rejection_rolls_back_and_raises_the_epoch() -> None:
    hand = opened(OFTEN)
    hand.draft(1, 2, 3)
    hand.draft(4, confidence=0.1)
    hand.batch()
    hand.draft(5)
    hand.verdict(0, [1, 9], accepted=1)
    assert hand.effects() == [Commit(0, (1, 9), (SOURCE_ACCEPTED, SOURCE_TARGET))]
    assert not hand.session.awaiting
    assert hand.session.stats.rolled_back == 4
    # The cache holds the prompt and 1 to 4 (the 5th was being proposed): 1 stays, 9 is new.
    assert hand.wanted() == DraftNext(len(PROMPT) + 1, (9,), 2)
    hand.draft(6)
    assert hand.batch() == DraftBatch(1, 2, 2, (6,))


def test_a_verdict_that_ends_where_was_asked_leaves_the_request_open() -> None:
    """The verifier owes one token beyond what was asked for."""
    hand = opened(OFTEN)
    hand.draft(1, 2)
    hand.draft(3, confidence=0.1)
    hand.sent()
    hand.verdict(0, [1, 2, 3], accepted=2)
    assert hand.session.awaiting
    assert hand.session.get_timer() == pytest.approx(hand.now + 1.0)
    hand.verdict(3, [4])
    assert not hand.session.awaiting


def test_an_answer_that_a_rollback_overtook_is_dropped() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.sent()
    running = hand.wanted()
    hand.verdict(0, [7])
    hand.effects()
    again = hand.wanted()
    assert again is not running
    hand.session.drafted(running, 2, 0.9, hand.now)
    assert hand.session.stats.drafted == 1
    hand.draft(8)
    assert hand.batch() == DraftBatch(1, 2, 1, (8,))


def test_an_answer_for_a_place_that_the_target_filled_is_dropped() -> None:
    """No rollback: the bonus token stands where the draft model was just proposing."""
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.sent()
    running = hand.wanted()
    hand.verdict(0, [1, 2], accepted=1)
    hand.effects()
    hand.session.drafted(running, 2, 0.9, hand.now)
    assert hand.session._window.draft == []
    # What the dropped proposal fed to the model stays in its cache.
    assert hand.wanted() == DraftNext(len(PROMPT) + 1, (2,), 2)


def test_a_duplicate_verdict_changes_nothing() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.sent()
    hand.verdict(0, [1, 2], accepted=1)
    hand.effects()
    hand.verdict(0, [1, 2], accepted=1)
    hand.verdict(0, [1])
    assert hand.effects() == []
    assert hand.session.stats.duplicates == 2
    assert hand.session.stats.accepted == 1


def test_an_overlapping_verdict_adds_what_is_new() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.sent()
    hand.verdict(0, [1, 2], accepted=1)
    hand.verdict(0, [1, 2, 3, 4], accepted=3)
    assert hand.session.committed == [1, 2, 3, 4]
    assert hand.effects()[-1] == Commit(2, (3, 4), (SOURCE_ACCEPTED, SOURCE_TARGET))


def test_a_gap_is_asked_for_once_per_time_out() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.sent()
    hand.verdict(5, [6])
    hand.verdict(5, [6])
    assert hand.sent() == [Resync(1, 1, 0)]
    assert hand.session.stats.gaps == 2
    hand.now += 2.0
    hand.verdict(5, [6])
    assert hand.sent() == [Resync(1, 1, 0)]
    assert hand.session.committed == []


@pytest.mark.parametrize(
    "bad",
    [
        lambda hand: hand.verdict(0, [3]),
        lambda hand: hand.verdict(2, [VOCAB]),
        lambda hand: hand.verdict(2, [5] * 49),
    ],
    ids=["contradiction", "token out of range", "beyond the limit"],
)
def test_an_impossible_verdict_makes_the_session_attach_anew(bad) -> None:
    """Ignoring it alone would not do: the verifier would repeat it for ever."""
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.verdict(0, [1, 2], accepted=1)
    hand.sent()
    hand.effects()
    bad(hand)
    assert hand.effects() == []
    (message,) = hand.sent()
    assert (message.attach, message.committed) == (2, (1, 2))
    stats = hand.session.stats
    assert stats.contradictions + stats.out_of_range == 1


def test_a_verifier_that_never_makes_sense_is_given_up() -> None:
    hand = opened(OFTEN)
    for _ in range(20):
        if hand.session.state is State.DONE:
            break
        hand.draft(1, confidence=0.1) if not hand.session.awaiting else None
        hand.verdict(0, [VOCAB])
        if hand.session.state is State.OPENING:
            if not hand.sent():
                hand.fire()
            hand.accept()
    (end,) = hand.effects()
    assert "9 attachments brought no token" in str(end.error)


@pytest.mark.parametrize("finish", [FINISH_STOP, FINISH_LENGTH])
def test_finish_ends_the_session_and_closes_it_there(finish) -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.sent()
    hand.verdict(0, [1, 2], accepted=1, finish=finish)
    assert hand.effects() == [
        Commit(0, (1, 2), (SOURCE_ACCEPTED, SOURCE_TARGET)),
        Finished(finish),
    ]
    assert hand.sent() == [Close(1)]
    assert hand.idle()
    assert hand.session.get_timer() is None
    hand.verdict(2, [3])
    assert hand.idle()


def test_time_of_the_verdict_feeds_the_time_out() -> None:
    hand = opened(OFTEN, timing=Timing(first_timeout=1.0, min_timeout=0.1))
    hand.draft(1, confidence=0.1)
    hand.sent()
    hand.now += 0.2
    hand.verdict(0, [1, 2], accepted=1)
    hand.effects()
    hand.draft(3, confidence=0.1)
    hand.sent()
    assert hand.session.get_timer() == pytest.approx(hand.now + 0.2 + 4 * 0.1)


# -- losses -------------------------------------------------------------------------------------


def test_silence_repeats_the_draft_then_asks_for_verdicts() -> None:
    hand = opened(OFTEN)
    hand.draft(1, 2)
    hand.sent()
    hand.draft(3, confidence=0.1)
    assert hand.batch().base == 2
    assert hand.fire() == pytest.approx(1.0)
    assert hand.sent() == [DraftBatch(1, 1, 0, (1, 2, 3), None, True), Resync(1, 1, 0)]
    assert hand.fire() == pytest.approx(2.0)


def test_four_silences_in_a_row_move_the_session() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.sent()
    waits = [hand.fire() for _ in range(3)]
    assert waits == pytest.approx([1.0, 2.0, 4.0])
    hand.sent()
    assert hand.session.state is State.ACTIVE
    assert hand.fire() == pytest.approx(8.0)
    (message,) = hand.sent()
    assert message.attach == 2
    assert hand.session.state is State.OPENING
    hand.accept("v2")
    told, batch = hand.outgoing()
    assert told == ("v1", Close(1))
    assert batch == ("v2", DraftBatch(2, 2, 0, (1,), None, True))


def test_a_verifier_that_answers_resync_is_waited_for() -> None:
    """A long forward is no silence, but the waits grow to their limit."""
    hand = opened(OFTEN, timing=Timing(max_timeout=8.0))
    hand.draft(1, confidence=0.1)
    waits = []
    for _ in range(12):
        hand.sent()
        waits.append(hand.fire())
        hand.resync(1)  # everything is here
    assert waits[3:] == pytest.approx([8.0] * 9)
    assert hand.session.state is State.ACTIVE
    assert hand.session.stats.reopens == 0


@pytest.mark.parametrize(
    ("have", "epoch", "resent"),
    [
        (3, 1, None),  # it has everything and only says that it lives
        (1, 1, (2, 3)),
        (0, 1, (1, 2, 3)),
        (3, 0, (1, 2, 3)),  # of another epoch: it has nothing of this one
    ],
)
def test_resync_while_waiting_resends_what_is_missing(have, epoch, resent) -> None:
    hand = opened(OFTEN)
    hand.draft(1, 2)
    hand.draft(3, confidence=0.1)
    hand.sent()
    hand.resync(have, epoch)
    if resent is None:
        assert hand.sent() == []
    else:
        assert hand.batch() == DraftBatch(1, 1, 3 - len(resent), resent, None, True)
    assert hand.sent() == []


def test_resync_without_a_request_resends_without_one() -> None:
    hand = opened()
    hand.draft(1, 2)
    hand.sent()
    hand.resync(1)
    assert hand.batch() == DraftBatch(1, 1, 1, (2,))


def test_a_late_resync_from_before_a_verdict_is_ignored() -> None:
    hand = opened(OFTEN)
    hand.draft(1, 2)
    hand.draft(3, confidence=0.1)
    hand.sent()
    hand.verdict(0, [1, 2], accepted=2)
    hand.effects()
    hand.resync(1)
    assert hand.sent() == []
    assert hand.session.awaiting


# -- the end ------------------------------------------------------------------------------------


def test_cancel_closes_once() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.sent()
    hand.session.cancel("stop")
    hand.session.cancel()
    assert hand.sent() == [Close(1)]
    assert hand.effects() == [Finished("stop")]
    assert hand.idle()
    assert hand.session.finish == "stop"


def test_nothing_is_drafted_after_the_end() -> None:
    hand = opened()
    running = hand.wanted()
    hand.session.cancel()
    hand.effects()
    assert hand.next_draft() is None
    hand.session.drafted(running, 1, 0.1, hand.now)
    hand.session.draft_failed(running)
    hand.verdict(0, [1])
    hand.link(False)
    hand.session.handle_timer(hand.now + 1000.0)
    assert hand.sent() == [Close(1)]
    assert hand.idle()


def test_an_unopened_session_is_cancelled_without_a_word() -> None:
    hand = Hand()
    hand.session.cancel()
    assert hand.sent() == []
    assert hand.effects() == [Finished("cancelled")]


def test_planned_messages_go_out_while_a_verdict_is_awaited_if_they_will_be_kept() -> None:
    """Rule 2 of the paper; what a verdict drops would stand before the next request."""
    heavy = Estimates(LinkCost(0.001, 0.0, 0.02), 0.02, 8, measured=True)
    for confidence, sent in ((0.9, True), (0.45, False)):
        hand = opened(policy=Policy("x", OFTEN), estimates=heavy)
        hand.draft(1, confidence=0.5)  # asks; and half of the hope is gone
        assert hand.batch().verify
        hand.verdict(0, (1, 2), accepted=1)
        hand.effects()
        hand.draft(3, confidence=0.5)
        hand.sent()
        hand.verdict(2, (3,), accepted=1)  # one is still to come
        hand.effects()
        assert hand.session.awaiting
        went = False
        for token in (4, 5):
            hand.draft(token, confidence=confidence)
            went |= bool(hand.sent())
        assert went is sent


def test_while_the_target_writes_on_nothing_joins_a_queue_on_the_uplink() -> None:
    heavy = Estimates(LinkCost(0.001, 0.0, 0.1), 0.02, 8, measured=True, forward=0.05)
    hand = opened(verify=VERIFY_AHEAD, policy=Policy("x", OFTEN, ask_again=1), estimates=heavy)
    hand.draft(1, confidence=0.1)
    assert hand.batch().go_on
    hand.draft(2, confidence=0.1)
    hand.draft(3, confidence=0.9)
    assert hand.sent() == [], "the first one is still on its way for a tenth of a second"
    hand.now += 0.06
    hand.draft(4, confidence=0.9)
    assert hand.batch() == DraftBatch(1, 1, 1, (2, 3, 4), None, True, True)
