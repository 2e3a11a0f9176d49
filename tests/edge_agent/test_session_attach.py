"""The edge's session between verifiers: opening, refusals, moving, the link."""

from __future__ import annotations

import pytest

from broker.errors import ConfigError, ModelError, TransportError
from broker.errors import Refused as RefusedError
from broker.messages import (
    CLOSED_ERROR,
    CLOSED_MOVED,
    CLOSED_TOKEN,
    CLOSED_UNKNOWN,
    MAX_PROMPT,
    REFUSED_BUSY,
    REFUSED_PROMPT,
    REFUSED_VOCABULARY,
    Accepted,
    Close,
    Closed,
    DraftBatch,
    Refused,
    Resync,
    SessionOpen,
    Verdict,
)
from broker.sampling import Sampling
from edge_agent.core.attachment import EVEN_TRIES, MAX_ERRORS, MAX_FRUITLESS
from edge_agent.core.effects import DraftNext, Finished
from edge_agent.core.policies import pipesd, vanilla
from edge_agent.core.session import EdgeSession, State
from edge_agent.core.timing import Timing
from edge_agent.core.trigger import Thresholds
from tests.edge_agent.hand import OFTEN, PROMPT, Hand, config, opened


def refuse(hand: Hand, reason: str = REFUSED_BUSY, retry_after: float = 2.0) -> None:
    hand.receive(Refused(hand.session.attach, reason, "said so", retry_after))


def close(hand: Hand, reason: str) -> None:
    hand.receive(Closed(hand.session.attach, reason))


def error_of(hand: Hand) -> Exception:
    *_, end = hand.effects()
    assert isinstance(end, Finished)
    assert end.reason == "error"
    assert end.error is not None
    assert "\n" not in str(end.error)
    return end.error


# -- opening ------------------------------------------------------------------------------------


def test_without_a_link_it_drafts_and_waits() -> None:
    hand = Hand(max_ahead=2)
    hand.draft(1, 2)
    assert hand.idle()
    assert hand.session.get_timer() == pytest.approx(hand.now + 30.0)


def test_the_link_brings_an_open_with_all_that_the_verifier_needs() -> None:
    hand = Hand(sampling=Sampling(temperature=0.5, seed=9), verify="eager")
    hand.link(True)
    ((verifier, message),) = hand.outgoing()
    assert verifier is None
    assert message == SessionOpen(
        1, PROMPT, (), Sampling(temperature=0.5, seed=9), 50, "v", "eager"
    )


def test_open_is_repeated_with_the_same_attach_evenly_and_then_with_doubling_waits() -> None:
    hand = Hand(timing=Timing(open_timeout=1.0, max_timeout=8.0, offline_after=1000.0))
    hand.link(True)
    waits = []
    for _ in range(8):
        (message,) = hand.sent()
        assert message.attach == 1
        waits.append(hand.fire())
    assert waits == pytest.approx([1.0] * EVEN_TRIES + [2.0, 4.0, 8.0, 8.0])


def test_what_was_drafted_meanwhile_goes_out_as_a_request() -> None:
    hand = Hand(OFTEN)
    hand.link(True)
    hand.draft(1, 2, confidence=0.1)
    hand.sent()
    hand.accept("v7")
    assert hand.session.stats.triggers_token == 0  # nobody was there to be asked
    assert hand.outgoing() == [("v7", DraftBatch(1, 1, 0, (1, 2), None, True))]
    assert hand.session.awaiting


def test_of_two_replicas_the_first_has_the_session_and_the_other_is_told() -> None:
    hand = opened()
    hand.accept("v2")
    hand.accept("v1")  # a duplicate
    assert hand.outgoing() == [("v2", Close(1))]
    hand.draft(1)
    assert hand.outgoing() == [("v1", DraftBatch(1, 1, 0, (1,)))]


def test_nothing_attaches_a_session_that_never_asked() -> None:
    """Attach 0 belongs to nobody: above all not to a session that may never leave the device."""
    for hand in (Hand(), Hand(local="only")):
        before = hand.session.state
        hand.receive(Accepted(0, "v1", 1000, 50))
        hand.receive(Refused(0, REFUSED_VOCABULARY))
        assert hand.session.state is before
        assert hand.sent() == []
        assert hand.session.stats.stale == 2


def test_messages_of_an_earlier_attachment_are_stale() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    close(hand, CLOSED_MOVED)
    hand.sent()
    for message in (
        Verdict(1, 1, 0, (1, 2), 1, 1),
        Closed(1, CLOSED_ERROR),
        Accepted(1, "v1", 1000, 50),
        Refused(1, REFUSED_VOCABULARY),
        Resync(1, 1, 0),
    ):
        hand.receive(message)
    assert hand.session.state is State.OPENING
    assert hand.session.stats.stale == 5
    assert hand.sent() == []
    assert hand.effects() == []


def test_only_an_answer_to_open_counts_while_opening() -> None:
    hand = Hand()
    hand.link(True)
    hand.sent()
    hand.verdict(0, [1])
    hand.resync(0)
    close(hand, CLOSED_TOKEN)
    assert hand.session.stats.unexpected == 3
    assert hand.session.state is State.OPENING
    assert hand.session.committed == []


# -- refusals -----------------------------------------------------------------------------------


def test_busy_is_asked_again_after_the_time_that_was_said() -> None:
    hand = Hand()
    hand.link(True)
    hand.sent()
    refuse(hand, retry_after=3.0)
    assert hand.sent() == []
    assert hand.fire() == pytest.approx(3.0)
    (message,) = hand.sent()
    assert message.attach == 2
    hand.accept()
    assert hand.session.state is State.ACTIVE


def test_busy_for_too_long_is_a_refusal() -> None:
    hand = Hand()
    hand.link(True)
    while hand.session.state is not State.DONE:
        hand.sent()
        refuse(hand, retry_after=7.0)
        hand.fire()
    error = error_of(hand)
    assert isinstance(error, RefusedError)
    assert error.reason == REFUSED_BUSY
    assert hand.now == pytest.approx(130.0)


@pytest.mark.parametrize("reason", [REFUSED_VOCABULARY, REFUSED_PROMPT, "something new"])
def test_refused_for_good(reason) -> None:
    hand = Hand()
    hand.link(True)
    hand.sent()
    refuse(hand, reason, retry_after=0.0)
    error = error_of(hand)
    assert isinstance(error, RefusedError)
    assert error.reason == reason
    assert error.exit_code == 4
    assert reason in str(error)
    assert "said so" in str(error)
    assert hand.sent() == []  # it was never taken, so there is nothing to close


def test_a_refusal_by_a_second_replica_does_not_matter() -> None:
    hand = opened()
    refuse(hand, REFUSED_VOCABULARY, retry_after=0.0)
    assert hand.session.state is State.ACTIVE
    assert hand.session.stats.unexpected == 1


# -- moving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [CLOSED_UNKNOWN, CLOSED_MOVED, CLOSED_ERROR, "something new"])
def test_closed_opens_again_with_what_is_committed(reason) -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.verdict(0, [1, 2], accepted=1)
    hand.effects()
    hand.draft(3, 4)
    hand.sent()
    close(hand, reason)
    ((verifier, message),) = hand.outgoing()
    assert verifier is None
    assert (message.attach, message.committed) == (2, (1, 2))
    hand.accept("v2")
    # The draft is as good as before: sent again from the committed text on.
    assert hand.outgoing() == [("v2", DraftBatch(2, 2, 2, (3, 4), None, True))]


def test_the_draft_model_keeps_its_cache_over_a_move() -> None:
    hand = opened()
    hand.draft(1, 2)
    close(hand, CLOSED_MOVED)
    assert hand.wanted() == DraftNext(len(PROMPT) + 1, (2,), 2)
    hand.draft(3)
    assert hand.session._window.draft == [1, 2, 3]


def test_a_token_that_the_target_lacks_is_an_error() -> None:
    hand = opened()
    hand.draft(1)
    hand.sent()
    close(hand, CLOSED_TOKEN)
    error = error_of(hand)
    assert isinstance(error, RefusedError)
    assert error.reason == CLOSED_TOKEN
    assert hand.sent() == [Close(1)]


def test_errors_of_the_target_are_believed_at_the_third_time() -> None:
    hand = opened(OFTEN)
    for _ in range(MAX_ERRORS - 1):
        close(hand, CLOSED_ERROR)
        hand.sent()
        hand.accept()
    close(hand, CLOSED_ERROR)
    assert isinstance(error_of(hand), ModelError)


def test_a_committed_token_clears_the_targets_name() -> None:
    hand = opened(OFTEN)
    for start in range(2 * MAX_ERRORS):
        close(hand, CLOSED_ERROR)
        hand.sent()
        hand.accept()
        hand.draft(9, confidence=0.1)
        hand.verdict(start, [1])
        hand.effects()
    assert hand.session.state is State.ACTIVE


def test_attachments_without_a_token_slow_down_and_end() -> None:
    hand = opened(timing=Timing(open_timeout=1.0, offline_after=1000.0))
    waits = []
    while True:
        close(hand, CLOSED_UNKNOWN)
        if hand.session.state is State.DONE:
            break
        if hand.sent():
            waits.append(0.0)
        else:
            waits.append(hand.fire())
            assert len(hand.sent()) == 1
        hand.accept()
    assert waits == pytest.approx([0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    assert len(waits) == MAX_FRUITLESS
    error = error_of(hand)
    assert isinstance(error, TransportError)
    assert "attachments brought no token" in str(error)


def test_a_verifier_that_leaves_is_left() -> None:
    hand = opened(OFTEN)
    hand.session.verifier_gone("v2", hand.now)
    assert hand.session.state is State.ACTIVE
    hand.session.verifier_gone("v1", hand.now)
    assert hand.session.state is State.OPENING
    assert [message.attach for message in hand.sent()] == [2]


def test_a_silent_verifier_is_told_once_another_has_the_session() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    while hand.session.state is State.ACTIVE:
        hand.sent()
        hand.fire()
    assert [type(message) for message in hand.sent()] == [SessionOpen]
    hand.accept("v2")
    assert ("v1", Close(1)) in hand.outgoing()
    hand.session.verifier_gone("v2", hand.now)
    hand.sent()
    hand.accept("v2")  # it is back: the new attachment takes the place of the old one
    assert not any(isinstance(message, Close) for message in hand.sent())


def test_a_silent_verifier_is_told_when_nobody_else_takes_the_session() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    while hand.session.state is not State.DONE:
        hand.sent()
        hand.fire()
    assert hand.outgoing() == [("v1", Close(1))]
    assert "no verifier answered" in str(error_of(hand))


def test_a_verifier_that_has_closed_the_session_is_told_nothing() -> None:
    hand = opened()
    close(hand, CLOSED_MOVED)
    hand.sent()
    hand.accept("v2")
    assert not any(isinstance(message, Close) for message in hand.sent())


@pytest.mark.parametrize("how", ["gone", "closed"])
def test_the_wait_for_another_verifier_begins_when_the_first_is_lost(how) -> None:
    """A minute of drafting without a request is no silence of the cloud."""
    hand = opened()
    hand.now += 60.0
    if how == "gone":
        hand.session.verifier_gone("v1", hand.now)
    else:
        close(hand, CLOSED_MOVED)
    lost = hand.now
    assert len(hand.sent()) == 1
    while hand.session.state is State.OPENING:
        hand.fire()
        hand.sent()
    assert hand.now - lost == pytest.approx(30.0)


# -- the link -----------------------------------------------------------------------------------


def test_a_lost_link_repeats_the_request_when_it_is_back() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.sent()
    hand.link(False)
    hand.draft(2)
    assert hand.sent() == []
    hand.now += 3.0
    hand.link(True)
    assert hand.sent() == [DraftBatch(1, 1, 0, (1, 2), None, True), Resync(1, 1, 0)]


def test_a_link_lost_while_drafting_counts_from_its_loss() -> None:
    hand = opened()
    hand.now += 100.0
    hand.link(False)
    assert hand.session.get_timer() == pytest.approx(hand.now + 30.0)
    hand.now += 20.0
    hand.draft(1)
    assert hand.session.get_timer() == pytest.approx(hand.now + 10.0)
    hand.now += 5.0
    hand.link(True)
    assert hand.batch() == DraftBatch(1, 1, 0, (1,))
    assert hand.session.get_timer() is None


def test_a_request_without_a_link_does_not_prolong_the_wait() -> None:
    hand = opened(OFTEN)
    hand.link(False)
    hand.now += 20.0
    hand.draft(1, confidence=0.1)
    assert hand.session.get_timer() == pytest.approx(hand.now + 10.0)


@pytest.mark.parametrize(
    ("up", "words"), [(False, "no connection to the broker"), (True, "no verifier answered")]
)
def test_silence_is_an_error_that_says_who_is_missing(up, words) -> None:
    hand = Hand(timing=Timing(offline_after=5.0))
    hand.link(up)
    while hand.session.state is not State.DONE:
        hand.sent()
        hand.fire()
    error = error_of(hand)
    assert isinstance(error, TransportError)
    assert error.exit_code == 3
    assert words in str(error)
    assert "5.0 s" in str(error)
    assert hand.now == pytest.approx(105.0)


def test_a_transport_that_gave_up_ends_the_session() -> None:
    hand = opened()
    hand.session.link_failed(TransportError("bad password", 0x86), hand.now)
    assert str(error_of(hand)) == "bad password"


# -- what cannot be asked for -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ()}, "no tokens"),
        ({"prompt": (1,) * (MAX_PROMPT + 1)}, "shorten"),
        ({"max_tokens": 0}, "at least one"),
        ({"max_tokens": -3}, "at least one"),
        ({"max_tokens": 2**31}, "fewer"),
        ({"max_ahead": 0}, "1 to 512"),
        ({"max_ahead": 513}, "1 to 512"),
        ({"min_survival": -0.1}, "0 to 1"),
        ({"min_survival": float("nan")}, "0 to 1"),
        ({"local": "perhaps"}, "forbid, allow, only"),
    ],
)
def test_impossible_wishes_are_told_before_anything_runs(changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def test_a_verifier_that_lives_and_never_judges_is_left() -> None:
    hand = opened(timing=Timing(stuck_after=60.0, offline_after=1000.0))
    hand.draft(*range(1, 9))
    hand.session.trigger.thresholds = Thresholds(0.0, 1.0, 16)
    hand.draft(9)
    assert hand.session.awaiting
    asked_at = hand.now
    while hand.session.verifier == "v1":
        hand.fire()
        hand.sent()
        if hand.session.verifier == "v1":
            hand.resync(len(hand.session.committed) + 9)
            hand.sent()
    assert hand.now == pytest.approx(asked_at + 60.0)
    assert hand.session.stats.stuck == 1
    assert hand.session.state is State.OPENING


def test_a_long_verification_is_waited_for() -> None:
    hand = opened(timing=Timing(offline_after=1000.0))
    hand.session.trigger.thresholds = Thresholds(0.0, 1.0, 16)
    hand.draft(1)
    begin = hand.now
    while hand.now < begin + 100.0:
        hand.fire()
        hand.sent()
        hand.resync(1)
        hand.sent()
    hand.verdict(0, (1, 2), accepted=1)
    assert hand.session.committed == [1, 2]
    assert hand.session.stats.stuck == 0


def test_asking_first_brings_a_token_before_anything_is_drafted() -> None:
    hand = Hand(ask_first=True)
    hand.link(True)
    (message,) = hand.sent()
    assert isinstance(message, SessionOpen)
    assert message.ask
    hand.accept()
    assert hand.sent() == [], "it was asked for with the session"
    assert hand.session.awaiting
    hand.verdict(0, (7,))
    assert hand.session.committed == [7]
    assert not hand.session.awaiting


def test_a_first_token_that_is_lost_is_asked_for_again() -> None:
    hand = Hand(ask_first=True)
    hand.link(True)
    hand.sent()
    hand.accept()
    assert hand.fire() == pytest.approx(Timing().first_timeout)
    assert hand.sent() == [DraftBatch(1, 1, 0, (), None, True), Resync(1, 1, 0)]


def test_what_was_drafted_before_the_session_was_taken_is_sent_all_the_same() -> None:
    hand = Hand(ask_first=True)
    hand.link(True)
    hand.sent()
    hand.draft(1, 2)
    hand.accept()
    assert hand.batch() == DraftBatch(1, 1, 0, (1, 2), None, True)


def test_asking_first_keeps_a_draft_that_begins_with_the_token() -> None:
    hand = Hand(ask_first=True)
    hand.link(True)
    hand.sent()
    hand.accept()
    hand.sent()
    hand.draft(7, 8)
    hand.verdict(0, (7,))
    assert hand.session._window.draft == [8]
    assert hand.batch() == DraftBatch(1, 1, 1, (8,), None, False)


def test_a_policy_that_waits_does_not_ask_before_it_has_drafted() -> None:
    for policy, asks in ((vanilla(), False), (pipesd(), True)):
        session = EdgeSession(config(ask_first=True), policy=policy)
        session.set_connected(True, 0.0)
        session.messages_to_send(0.0)
        session.receive(Accepted(1, "v1", 1000, 50), 0.0)
        assert session.awaiting is asks


def test_driver_that_was_away_does_not_take_its_own_absence_for_silence() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.sent()
    hand.now += 1000.0  # the process was stopped, or its model took so long
    hand.session.handle_timer(hand.now)
    assert hand.session.state is State.ACTIVE
    assert [type(message) for message in hand.sent()] == [DraftBatch, Resync]
    hand.verdict(0, (1, 2), accepted=1)
    assert hand.session.committed == [1, 2]


def test_driver_that_was_away_before_the_link_came_up_waits_from_now_on() -> None:
    hand = Hand()
    hand.now += 40.0
    hand.session.handle_timer(hand.now)
    hand.link(True)
    assert isinstance(hand.sent()[0], SessionOpen)
    hand.accept()
    assert hand.session.state is State.ACTIVE


def test_driver_that_was_away_still_gives_up_after_the_silence_that_follows() -> None:
    hand = opened(OFTEN)
    hand.draft(1, confidence=0.1)
    hand.sent()
    hand.now += 1000.0
    back = hand.now
    hand.session.handle_timer(hand.now)
    while hand.session.finish is None:
        hand.sent()
        hand.fire()
    assert hand.now - back == pytest.approx(hand.session.timing.offline_after)
