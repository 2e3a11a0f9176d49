"""The edge's session without a cloud: what it does alone, and how it comes back."""

from __future__ import annotations

import pytest

from broker.errors import ConfigError, ModelError, TransportError
from broker.messages import (
    FINISH_LENGTH,
    FINISH_STOP,
    REFUSED_BUSY,
    REFUSED_PROMPT,
    Close,
    DraftBatch,
    Refused,
    SessionOpen,
)
from edge_agent.core.attachment import EVEN_TRIES
from edge_agent.core.effects import SOURCE_LOCAL, Commit, Finished
from edge_agent.core.session import State
from edge_agent.core.timing import Timing
from tests.edge_agent.hand import EOS, OFTEN, PROMPT, Hand, opened


def refuse(hand: Hand, reason: str = REFUSED_BUSY, retry_after: float = 2.0) -> None:
    hand.receive(Refused(hand.session.attach, reason, "said so", retry_after))


def error_of(hand: Hand) -> Exception:
    *_, end = hand.effects()
    assert isinstance(end, Finished)
    assert end.reason == "error"
    assert end.error is not None
    assert "\n" not in str(end.error)
    return end.error


def alone(**changes: object) -> Hand:
    """A session that was attached, has committed 1 and 2, and went on alone."""
    hand = opened(OFTEN, local="allow", timing=Timing(offline_after=5.0), **changes)
    hand.draft(1, confidence=0.1)
    hand.verdict(0, [1, 2], accepted=1)
    hand.draft(3, 4)
    hand.effects()
    hand.link(False)
    hand.fire()
    assert hand.session.state is State.LOCAL
    return hand


def test_alone_it_commits_its_own_draft_at_once() -> None:
    hand = alone()
    local = (SOURCE_LOCAL,)
    assert hand.effects() == [Commit(2, (3,), local), Commit(3, (4,), local)]
    hand.draft(5)
    assert hand.effects() == [Commit(4, (5,), local)]
    assert hand.session.stats.local_tokens == 3


def test_back_with_the_cloud_everything_emitted_is_committed() -> None:
    hand = alone()
    hand.draft(5)
    hand.effects()
    hand.link(True)
    (message,) = [m for m in hand.sent() if isinstance(m, SessionOpen)]
    assert message.committed == (1, 2, 3, 4, 5)
    hand.draft(6)  # still alone
    running = hand.wanted()
    hand.accept("v2")
    assert hand.session.state is State.ACTIVE
    hand.session.drafted(running, 7, 0.9, hand.now)
    assert hand.effects() == [Commit(5, (6,), (SOURCE_LOCAL,))]
    assert hand.outgoing() == [
        ("v1", Close(1)),
        ("v2", DraftBatch(message.attach, 2, 6, (7,))),
    ]


def test_alone_it_keeps_asking_when_the_link_is_there() -> None:
    hand = Hand(OFTEN, timing=Timing(offline_after=5.0), local="allow")
    hand.link(True)
    while hand.session.state is State.OPENING:
        hand.sent()
        hand.fire()
    attach = hand.session.attach
    waits = []
    for _ in range(EVEN_TRIES + 4):
        (message,) = hand.sent()
        assert message.attach == attach
        waits.append(hand.fire())
    assert waits == pytest.approx([1.0] * EVEN_TRIES + [2.0, 4.0, 8.0, 8.0])


@pytest.mark.parametrize(
    ("changes", "token", "reason"),
    [
        ({}, EOS, FINISH_STOP),
        ({"max_tokens": 5}, 7, FINISH_LENGTH),
        ({"context": len(PROMPT) + 4}, 7, FINISH_LENGTH),
    ],
    ids=["end of text", "max_tokens", "full draft context"],
)
def test_alone_the_end_is_the_edges_to_decide(changes, token, reason) -> None:
    hand = alone(**changes)
    hand.effects()
    hand.draft(token)
    assert hand.effects()[-1] == Finished(reason)
    assert hand.session.get_timer() is None


def test_alone_with_a_drafted_end_of_text() -> None:
    hand = opened(local="allow")
    hand.draft(1, EOS)
    hand.sent()
    hand.session.link_failed(TransportError("gone"), hand.now)
    assert [type(effect) for effect in hand.effects()] == [Commit, Commit, Finished]
    assert hand.session.finish == FINISH_STOP


def test_alone_a_broken_draft_model_is_the_end() -> None:
    hand = alone()
    hand.effects()
    hand.session.draft_failed(hand.wanted())
    assert isinstance(error_of(hand), ModelError)


def test_no_draft_model_and_no_cloud_is_the_end() -> None:
    hand = opened(OFTEN, local="allow")
    hand.session.draft_failed(hand.wanted())
    hand.session.link_failed(TransportError("gone"), hand.now)
    assert isinstance(error_of(hand), ModelError)


def test_alone_a_refusal_for_good_changes_nothing() -> None:
    """The text grew too long for the target: what runs well alone goes on alone."""
    hand = alone()
    hand.effects()
    hand.link(True)
    hand.sent()
    refuse(hand, REFUSED_PROMPT, retry_after=0.0)
    assert hand.session.state is State.LOCAL
    assert hand.session.get_timer() is None
    hand.draft(5)
    assert hand.effects() == [Commit(4, (5,), (SOURCE_LOCAL,))]


def test_alone_a_transport_that_gave_up_changes_nothing() -> None:
    hand = alone()
    hand.effects()
    hand.link(True)
    hand.sent()
    hand.session.link_failed(TransportError("gone"), hand.now)
    assert hand.session.get_timer() is None
    hand.draft(5)
    assert hand.sent() == []
    assert hand.effects() == [Commit(4, (5,), (SOURCE_LOCAL,))]


def test_only_local_never_says_a_word() -> None:
    hand = Hand(OFTEN, local="only", max_tokens=3)
    for token in (1, 2, 3):
        hand.link(True)
        hand.draft(token, confidence=0.1)
        hand.link(False)
        assert hand.session.get_timer() is None
        assert hand.sent() == []
    assert hand.effects()[-1] == Finished(FINISH_LENGTH)
    assert hand.sent() == []


def test_only_local_with_a_prompt_beyond_the_draft_model_says_so() -> None:
    hand = Hand(local="only", context=len(PROMPT) - 1)
    error = error_of(hand)
    assert isinstance(error, ConfigError)
    assert "prompt of 3 tokens" in str(error)
