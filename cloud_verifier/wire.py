"""Between topics with payloads and the verifier's core; shared by the driver and the simulator."""

from __future__ import annotations

from typing import NamedTuple

from broker.codec import decode, encode
from broker.errors import RemoteProtocolError
from broker.messages import Close, DraftBatch, Resync, SessionOpen, Verdict
from broker.topics import down_topic, parse_session_topic
from broker.transport import Message
from cloud_verifier.core.verifier import Outgoing, SessionKey, VerifierCore


class Publication(NamedTuple):
    topic: str
    payload: bytes
    qos: int


def feed(core: VerifierCore, message: Message, now: float) -> bool:
    """Give one arrived message to the core; False when it was dropped and counted by its cause."""
    try:
        topic = parse_session_topic(message.topic)
        if message.retain:
            raise RemoteProtocolError("a retained session message", cause="retained")
        decoded = decode(message.payload)
        if topic.channel == "open":
            if not isinstance(decoded, SessionOpen):
                raise RemoteProtocolError("no SessionOpen on open", cause="unexpected_kind")
        elif topic.verifier != core.config.verifier:
            raise RemoteProtocolError("for another verifier", cause="topic")
        elif not isinstance(decoded, DraftBatch | Resync | Close):
            raise RemoteProtocolError("a verifier's message on up", cause="unexpected_kind")
    except RemoteProtocolError as error:
        core.stats.rejected[error.cause] += 1
        return False
    core.receive(topic.device, topic.session, decoded, now)
    return True


def session_of(message: Message) -> SessionKey | None:
    """Whose message it is; None where the topic is no session's."""
    try:
        topic = parse_session_topic(message.topic)
    except RemoteProtocolError:
        return None
    return SessionKey(topic.device, topic.session)


def publication(outgoing: Outgoing) -> Publication:
    """How a message goes out. Verdicts and Resync are repeated by the protocol: QoS 0."""
    device, session, message = outgoing
    qos = 0 if isinstance(message, Verdict | Resync) else 1
    return Publication(down_topic(device, session), encode(message), qos)


def publications(core: VerifierCore, now: float) -> list[Publication]:
    """What is to be published now."""
    return [publication(outgoing) for outgoing in core.messages_to_send(now)]
