"""Between topics with payloads and the verifier's core."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.codec import decode, encode
from broker.messages import (
    CLOSED_TOKEN,
    CLOSED_UNKNOWN,
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
from broker.transport import Message
from cloud_verifier.wire import Publication, feed, publications
from tests.broker.message_strategies import messages
from tests.cloud_verifier.hand import VOCAB, Hand, attached

OPEN = "pipesd/1/d/s/open"
UP = "pipesd/1/d/s/up/v1"
DOWN = "pipesd/1/d/s/down"
OPENED = SessionOpen(1, (1, 2), (), Sampling(), 5, "v")


def said(hand: Hand) -> list[Publication]:
    return publications(hand.core, hand.now)


def test_an_open_is_answered_to_its_device() -> None:
    hand = Hand()
    assert feed(hand.core, Message(OPEN, encode(OPENED)), 0.0)
    assert said(hand) == [Publication(DOWN, encode(Accepted(1, "v1", 300, 5)), 1)]


def test_a_round() -> None:
    hand = Hand()
    feed(hand.core, Message(OPEN, encode(OPENED)), 0.0)
    said(hand)
    assert feed(hand.core, Message(UP, encode(DraftBatch(1, 1, 0, (7,), None, True))), 0.0)
    hand.run()
    ((topic, payload, qos),) = said(hand)
    assert (topic, qos) == (DOWN, 0)
    assert isinstance(decode(payload), Verdict)
    assert feed(hand.core, Message(UP, encode(Close(1))), 0.0)
    assert not hand.core.sessions


@pytest.mark.parametrize(
    ("topic", "payload", "retain", "cause"),
    [
        ("elsewhere", encode(OPENED), False, "topic"),
        ("pipesd/1/_d/s/open", encode(OPENED), False, "topic"),
        ("pipesd/1/d/s/up/v2", encode(Close(1)), False, "topic"),
        (DOWN, encode(Close(1)), False, "topic"),
        (OPEN, encode(OPENED), True, "retained"),
        (OPEN, encode(Close(1)), False, "unexpected_kind"),
        (UP, encode(OPENED), False, "unexpected_kind"),
        (UP, encode(Verdict(1, 1, 0, (5,), 0, 0)), False, "unexpected_kind"),
        (UP, encode(Accepted(1, "v1", 1, 1)), False, "unexpected_kind"),
        (UP, b"\xc1", False, "msgpack"),
        (UP, bytes.fromhex("9ffd74f7dd74fffdbd"), False, "msgpack"),
        (UP, msgpack.packb([42, 1]), False, "unknown_kind"),
        (UP, msgpack.packb([4, 1, 1, 1, []]), False, "fields"),
        (UP, bytes(10_000_000), False, "too_large"),
    ],
)
def test_what_does_not_belong_there_is_counted_and_dropped(topic, payload, retain, cause) -> None:
    """Case 41 among them: the process lives, and the session beside it does not notice."""
    hand = attached("a")
    assert not feed(hand.core, Message(topic, payload, retain), 0.0)
    assert dict(hand.core.stats.rejected) == {cause: 1}
    assert said(hand) == []
    hand.ask("a")
    hand.run()
    assert len(hand.told_of(Verdict)) == 1


def test_a_token_beyond_the_vocabulary_is_answered_where_it_came_from() -> None:
    """Case 27."""
    hand = Hand()
    feed(hand.core, Message(OPEN, encode(OPENED)), 0.0)
    said(hand)
    feed(hand.core, Message(UP, encode(DraftBatch(1, 1, 0, (VOCAB,)))), 0.0)
    assert said(hand) == [Publication(DOWN, encode(Closed(1, CLOSED_TOKEN)), 1)]


@given(messages, st.sampled_from([OPEN, UP, DOWN]))
def test_any_message_anywhere_leaves_the_verifier_alive(message, topic) -> None:
    hand = Hand(context=40)
    feed(hand.core, Message(topic, encode(message)), 0.0)
    for _, payload, _ in said(hand):
        assert isinstance(decode(payload), Accepted | Refused | Closed)
    hand.run()


@given(st.lists(messages, max_size=8))
def test_any_messages_of_one_session_leave_the_verifier_alive(several) -> None:
    hand = Hand(context=80)
    feed(hand.core, Message(OPEN, encode(OPENED)), 0.0)
    for message in several:
        feed(hand.core, Message(UP, encode(message)), 0.0)
    hand.run(200)
    for _, payload, _ in said(hand):
        decode(payload)


@given(st.text(max_size=30), st.binary(max_size=60), st.booleans())
def test_anything_at_all(topic, payload, retain) -> None:
    hand = Hand()
    for name in (topic, OPEN, UP):
        feed(hand.core, Message(name, payload, retain), 0.0)
    assert sum(hand.core.stats.rejected.values()) + hand.core.stats.unknown_sessions >= 1


def test_the_causes_that_are_counted_are_a_fixed_set() -> None:
    """Else a counter grows with what strangers write."""
    hand = Hand()
    for number in range(200):
        feed(hand.core, Message(UP, bytes([0x91, number])), 0.0)
        feed(hand.core, Message(f"x{number}", b""), 0.0)
    assert len(hand.core.stats.rejected) <= 4


def test_an_unknown_session_is_told_with_care_for_delivery() -> None:
    hand = Hand()
    feed(hand.core, Message(UP, encode(Resync(1, 1, 0))), 0.0)
    assert said(hand) == [Publication(DOWN, encode(Closed(1, CLOSED_UNKNOWN)), 1)]
