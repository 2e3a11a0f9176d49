"""Where messages begin and end in a stream of MQTT, however the stream is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.codec import encode
from broker.messages import Close, DraftBatch, Resync
from broker.topics import open_topic, up_topic
from edge_agent.bench.mqtt_frames import MAX_WHOLE, MqttFrames, Piece, draft_tokens

CONNECT = b"\x10\x00"
PINGREQ = b"\xc0\x00"


def packet(first: int, body: bytes) -> bytes:
    length, size = b"", len(body)
    while True:
        byte, size = size & 0x7F, size >> 7
        length += bytes([byte | (0x80 if size else 0)])
        if not size:
            return bytes([first]) + length + body


def publish(topic: str, payload: bytes, qos: int = 0, properties: bytes = b"") -> bytes:
    name = topic.encode()
    body = len(name).to_bytes(2, "big") + name
    if qos:
        body += b"\x00\x07"
    return packet(0x30 | qos << 1, body + bytes([len(properties)]) + properties + payload)


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges) if a < b]


def fed(chunks: list[bytes]) -> tuple[list[Piece], MqttFrames]:
    frames, pieces = MqttFrames(), []
    for chunk in chunks:
        pieces += frames.feed(chunk)
    return pieces, frames


PACKETS = st.lists(
    st.just(PINGREQ)
    | st.builds(packet, st.sampled_from([0x40, 0x82, 0xE0]), st.binary(max_size=300))
    | st.builds(
        publish, st.just("a/b"), st.binary(max_size=400), st.integers(0, 2), st.binary(max_size=9)
    ),
    max_size=12,
)


@given(PACKETS, st.lists(st.integers(0, 5_000), max_size=30))
def test_pieces_are_the_packets_however_the_stream_is_cut(packets, places) -> None:
    stream = CONNECT + b"".join(packets)
    pieces, frames = fed(cut(stream, places))
    assert [piece.data for piece in pieces] == [CONNECT, *packets]
    assert [piece.first for piece in pieces] == [False, *(p[0] >> 4 == 3 for p in packets)]
    assert all(piece.first == piece.last for piece in pieces)
    assert frames.rest() == b""
    assert not frames.opaque


@given(st.binary(max_size=600), st.lists(st.integers(0, 600), max_size=20))
def test_no_byte_is_lost_whatever_the_stream_is(stream, places) -> None:
    pieces, frames = fed(cut(stream, places))
    assert b"".join(piece.data for piece in pieces) + frames.rest() == stream
    assert frames.rest() == b""


@given(st.binary(max_size=600), st.lists(st.integers(0, 600), max_size=20))
def test_the_same_after_a_proper_beginning(tail, places) -> None:
    pieces, frames = fed(cut(CONNECT + tail, places))
    assert b"".join(piece.data for piece in pieces) + frames.rest() == CONNECT + tail


@pytest.mark.parametrize("first", [b"\x16\x03\x01", b"GET / HTTP/1.1", b"\x30\x02", b"\x00"])
def test_a_stream_that_is_no_mqtt_is_opaque(first: bytes) -> None:
    """TLS, for one: each run of bytes is a message."""
    pieces, frames = fed([first, b"more"])
    assert frames.opaque
    assert pieces == [Piece(first, True, True), Piece(b"more", True, True)]


def test_a_stream_that_stops_being_mqtt_is_opaque_from_there() -> None:
    broken = b"\x30\xff\xff\xff\xff\x01"  # five bytes of length
    pieces, frames = fed([CONNECT + PINGREQ + broken])
    assert frames.opaque
    assert [piece.data for piece in pieces] == [CONNECT, PINGREQ, broken]
    assert frames.feed(b"\xc0\x00") == [Piece(b"\xc0\x00", True, True)]


@pytest.mark.parametrize("start", [CONNECT, b"\x20\x03\x00\x00\x00", b"\xf0\x00"])
def test_how_either_side_may_begin(start: bytes) -> None:
    assert not fed([start])[1].opaque


def test_a_packet_above_the_limit_goes_on_as_it_comes() -> None:
    large = publish("a", bytes(3 * MAX_WHOLE))
    chunks = [CONNECT + large[:100], large[100:70_000], large[70_000:-1], large[-1:] + PINGREQ]
    pieces, frames = fed(chunks)
    assert [len(piece.data) for piece in pieces] == [2, 100, 69_900, len(large) - 70_001, 1, 2]
    assert [piece.first for piece in pieces] == [False, True, False, False, False, False]
    assert [piece.last for piece in pieces] == [False, False, False, False, True, False]
    assert frames.rest() == b""


def test_a_packet_byte_by_byte_is_looked_at_once_it_is_whole() -> None:
    whole = publish("a", bytes(20_000))
    frames = MqttFrames()
    frames.feed(CONNECT)
    for byte in whole[:-1]:
        assert frames.feed(bytes([byte])) == []
    assert frames.feed(whole[-1:]) == [Piece(whole, True, True)]


TOPIC = up_topic("device-1", "session-1", "verifier-1")


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=200),
    st.integers(0, 2),
    st.binary(max_size=20),
)
def test_drafted_tokens_are_counted(tokens, qos, properties) -> None:
    payload = encode(DraftBatch(1, 2, 3, tuple(tokens), verify=True))
    assert draft_tokens(publish(TOPIC, payload, qos, properties)) == len(tokens)


@pytest.mark.parametrize(
    "other",
    [
        publish(TOPIC, encode(Resync(1, 2, 3))),
        publish(TOPIC, encode(Close(1))),
        publish(TOPIC, encode(DraftBatch(1, 0, 0, (), verify=True))),
        publish(open_topic("device-1", "s"), encode(DraftBatch(1, 0, 0, (5,)))),
        publish("elsewhere", encode(DraftBatch(1, 0, 0, (5,)))),
        publish(TOPIC, b""),
        publish(TOPIC, b"\xc1\xff"),
        b"\x30\x02\x00\x09",
        b"\x30\x00",
        b"\x30\x04\x00\x01\xff\x00",
    ],
)
def test_anything_else_carries_no_draft(other: bytes) -> None:
    assert draft_tokens(other) == 0


@given(st.binary(max_size=100))
def test_nothing_in_a_packet_can_break_the_count(body: bytes) -> None:
    assert draft_tokens(packet(0x30, body)) == 0
    assert draft_tokens(b"\x32" + body) == 0
