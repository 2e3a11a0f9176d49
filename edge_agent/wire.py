"""Between topics with payloads and the edge's session core; shared by the driver and simulator."""

from __future__ import annotations

from typing import NamedTuple

from broker.codec import decode, encode
from broker.errors import ConfigError, RemoteProtocolError
from broker.messages import (
    Accepted,
    Closed,
    DraftBatch,
    Refused,
    Resync,
    Verdict,
    VerifierMessage,
)
from broker.topics import check_id, open_topic, parse_session_topic, up_topic
from broker.transport import Message
from edge_agent.core.uplink import Outgoing


class Publication(NamedTuple):
    topic: str
    payload: bytes
    qos: int


class Arrival(NamedTuple):
    """A decoded message and the session that it is for."""

    session: str
    message: VerifierMessage


def arrival(device: str, message: Message) -> Arrival:
    """Take one message on ``down`` apart. Raises RemoteProtocolError with its cause."""
    topic = parse_session_topic(message.topic)
    if topic.channel != "down" or topic.device != device:
        raise RemoteProtocolError("no message for this device", cause="topic")
    if message.retain:
        raise RemoteProtocolError("a retained session message", cause="retained")
    decoded = decode(message.payload)
    if not isinstance(decoded, Accepted | Refused | Verdict | Resync | Closed):
        raise RemoteProtocolError("an edge's message on down", cause="unexpected_kind")
    if isinstance(decoded, Accepted):
        try:
            check_id("verifier", decoded.verifier)
        except ConfigError:
            raise RemoteProtocolError("a verifier id that is none", cause="fields") from None
    return Arrival(topic.session, decoded)


def publication(device: str, session: str, outgoing: Outgoing) -> Publication:
    """Where and how to publish one message of the core.

    Drafts and Resync are repeated by the protocol, so they go at QoS 0.
    """
    payload = encode(outgoing.message)
    if outgoing.verifier is None:
        return Publication(open_topic(device, session), payload, 1)
    qos = 0 if isinstance(outgoing.message, DraftBatch | Resync) else 1
    return Publication(up_topic(device, session, outgoing.verifier), payload, qos)
