"""Just enough of MQTT to see where messages begin and end in a byte stream (MQTT 5, 2.1, 3.3).

Nothing is changed and no byte is lost: the pieces joined are the stream.
"""

from __future__ import annotations

from typing import NamedTuple

from broker.codec import decode
from broker.errors import RemoteProtocolError
from broker.messages import DraftBatch, Resync
from broker.topics import parse_session_topic

#: Bytes up to which a packet is kept together; a larger one goes on as it comes.
MAX_WHOLE = 65_536

_PUBLISH = 3
#: How a stream may begin: CONNECT from a client, CONNACK or AUTH from a broker.
_FIRST_BYTES = frozenset({0x10, 0x20, 0xF0})
_MORE = 0x80  # this byte of a variable-length integer is not its last (MQTT 5, 1.5.5)
_MAX_HEADER = 5


class Piece(NamedTuple):
    """A run of bytes. ``first``, ``last``: a message (PUBLISH) begins or ends with it."""

    data: bytes
    first: bool
    last: bool


class MqttFrames:
    """Cuts one direction of a connection into pieces.

    A stream that is no MQTT (TLS, for example) is ``opaque``: each run of bytes as it came counts
    as one message, which is about right while a sender writes each message by itself.
    """

    def __init__(self) -> None:
        self.opaque = False
        self._held = bytearray()
        self._needed = 1  # bytes that must be held before looking makes sense
        self._begun = False
        self._left = 0  # bytes still to come of a large packet
        self._left_publish = False

    def feed(self, data: bytes) -> list[Piece]:
        """The pieces that ``data`` completes, in order; an incomplete packet is held back."""
        self._held += data
        if len(self._held) < self._needed:
            return []
        stream, self._held = bytes(self._held), bytearray()
        self._needed = 1
        pieces: list[Piece] = []
        at = 0
        while at < len(stream):
            if self.opaque:
                pieces.append(Piece(stream[at:], True, True))
                return pieces
            if self._left:
                end = min(len(stream), at + self._left)
                self._left -= end - at
                last = self._left_publish and not self._left
                pieces.append(Piece(stream[at:end], False, last))
                at = end
                continue
            size = self._packet_size(stream, at)
            end = at + size
            if self.opaque:
                continue
            publish = stream[at] >> 4 == _PUBLISH
            if not size or (end > len(stream) and size <= MAX_WHOLE):
                self._held += stream[at:]
                self._needed = size or len(self._held) + 1
                break
            if end > len(stream):
                self._left, self._left_publish = end - len(stream), publish
                pieces.append(Piece(stream[at:], publish, False))
                break
            pieces.append(Piece(stream[at:end], publish, publish))
            at = end
        return pieces

    def rest(self) -> bytes:
        """What is held back, when the stream has ended; it is not kept."""
        rest, self._held = bytes(self._held), bytearray()
        self._needed = 1
        return rest

    def _packet_size(self, stream: bytes, at: int) -> int:
        """Bytes of the packet at ``at``; 0 while its header is incomplete."""
        if not self._begun and stream[at] not in _FIRST_BYTES:
            self.opaque = True
            return 0
        self._begun = True
        length = 0
        for index in range(1, _MAX_HEADER):
            if at + index >= len(stream):
                return 0
            byte = stream[at + index]
            length |= (byte & 0x7F) << 7 * (index - 1)
            if not byte & _MORE:
                return 1 + index + length
        self.opaque = True  # no remaining length has five bytes: whatever this is, it is no MQTT
        return 0


def draft_tokens(packet: bytes) -> int:
    """Drafted tokens in a whole PUBLISH packet of MQTT 5: those of a DraftBatch or of a probe."""
    try:
        at, _ = _variable_integer(packet, 1)
        size = int.from_bytes(packet[at : at + 2], "big")
        topic = packet[at + 2 : at + 2 + size].decode()
        at += 2 + size
        if (packet[0] >> 1) & 3:
            at += 2  # the packet identifier, which only QoS above 0 has
        at, properties = _variable_integer(packet, at)
        if parse_session_topic(topic).channel != "up":
            return 0
        message = decode(packet[at + properties :])
    except (RemoteProtocolError, UnicodeDecodeError, IndexError):
        return 0
    if isinstance(message, Resync):
        return len(message.padding)
    return len(message.tokens) if isinstance(message, DraftBatch) else 0


def _variable_integer(packet: bytes, at: int) -> tuple[int, int]:
    """The place after the variable-length integer at ``at``, and its value. IndexError: none."""
    value = 0
    for index in range(_MAX_HEADER - 1):
        byte = packet[at + index]
        value |= (byte & 0x7F) << 7 * index
        if not byte & _MORE:
            return at + index + 1, value
    raise IndexError
