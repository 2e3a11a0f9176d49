"""Between topics with payloads and the edge's core."""

from __future__ import annotations

import contextlib
import re

import msgpack
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from broker.codec import decode, encode
from broker.errors import RemoteProtocolError
from broker.messages import (
    Accepted,
    Close,
    Closed,
    DraftBatch,
    Refused,
    Resync,
    SessionOpen,
    Verdict,
    VerifierStatus,
)
from broker.sampling import Sampling
from broker.transport import Message
from edge_agent.core.uplink import Outgoing
from edge_agent.wire import Arrival, Publication, arrival, publication
from tests.broker.message_strategies import messages

DOWN = "pipesd/1/d/s/down"
FROM_VERIFIERS = [
    Accepted(1, "v1", 100, 50),
    Refused(1, "busy", "", 2.0),
    Verdict(1, 1, 0, (5,), 0, 0),
    Resync(1, 1, 0),
    Closed(1, "moved"),
]


def cause_of(message: Message) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        arrival("d", message)
    return caught.value.cause


@pytest.mark.parametrize("message", FROM_VERIFIERS, ids=lambda m: type(m).__name__)
def test_what_verifiers_say_arrives(message) -> None:
    assert arrival("d", Message(DOWN, encode(message))) == Arrival("s", message)


@pytest.mark.parametrize(
    ("topic", "payload", "retain", "cause"),
    [
        ("pipesd/1/e/s/down", encode(Resync(1, 1, 0)), False, "topic"),
        ("pipesd/1/d/s/open", encode(Resync(1, 1, 0)), False, "topic"),
        ("pipesd/1/d/s/up/v1", encode(Resync(1, 1, 0)), False, "topic"),
        ("elsewhere", encode(Resync(1, 1, 0)), False, "topic"),
        (DOWN, encode(Resync(1, 1, 0)), True, "retained"),
        (DOWN, b"", False, "msgpack"),
        (DOWN, bytes.fromhex("9ffd74f7dd74fffdbd"), False, "msgpack"),
        (DOWN, msgpack.packb([77]), False, "unknown_kind"),
        (DOWN, bytes(2_000_000), False, "too_large"),
        (DOWN, encode(Close(1)), False, "unexpected_kind"),
        (DOWN, encode(DraftBatch(1, 1, 0, (1,))), False, "unexpected_kind"),
        (DOWN, encode(SessionOpen(1, (1,), (), Sampling(), 1, "v")), False, "unexpected_kind"),
        (DOWN, encode(VerifierStatus(True)), False, "unexpected_kind"),
        (DOWN, encode(Accepted(1, "v/+", 100, 50)), False, "fields"),
        (DOWN, encode(Accepted(1, "", 100, 50)), False, "fields"),
    ],
)
def test_what_does_not_belong_there_is_told_by_its_cause(topic, payload, retain, cause) -> None:
    assert cause_of(Message(topic, payload, retain)) == cause


@given(messages)
def test_any_message_on_down_arrives_or_is_counted(message) -> None:
    there = Message(DOWN, encode(message))
    if isinstance(message, Refused | Verdict | Resync | Closed):
        assert arrival("d", there) == Arrival("s", message)
    elif isinstance(message, Accepted):
        assume(not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", message.verifier))
        assert cause_of(there) == "fields"
    else:
        assert cause_of(there) == "unexpected_kind"


@given(st.text(max_size=30), st.binary(max_size=60), st.booleans())
def test_anything_at_all(topic, payload, retain) -> None:
    for name in (topic, DOWN):
        with contextlib.suppress(RemoteProtocolError):
            arrival("d", Message(name, payload, retain))


@pytest.mark.parametrize(
    ("verifier", "message", "topic", "qos"),
    [
        (None, SessionOpen(1, (1,), (), Sampling(), 1, "v"), "pipesd/1/d/s/open", 1),
        ("v1", DraftBatch(1, 1, 0, (1,)), "pipesd/1/d/s/up/v1", 0),
        ("v1", Resync(1, 1, 0), "pipesd/1/d/s/up/v1", 0),
        ("v2", Close(1), "pipesd/1/d/s/up/v2", 1),
    ],
)
def test_where_and_how_the_edge_publishes(verifier, message, topic, qos) -> None:
    sent = publication("d", "s", Outgoing(verifier, message))
    assert sent == Publication(topic, encode(message), qos)
    assert decode(sent.payload) == message
