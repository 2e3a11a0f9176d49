"""Messages to bytes and back, and what becomes of bytes that are no message."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.codec import MAX_PAYLOAD, decode, encode
from broker.errors import LocalProtocolError, RemoteProtocolError
from broker.messages import (
    FINISH_LENGTH,
    MAX_BATCH,
    MAX_PROMPT,
    Close,
    DraftBatch,
    Refused,
    Resync,
    SessionOpen,
    Verdict,
)
from broker.sampling import Sampling
from tests.broker.message_strategies import drafts, messages, verdicts

CAUSES = {"too_large", "msgpack", "unknown_kind", "fields"}


def cause_of(payload: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(payload)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 200
    assert caught.value.cause in CAUSES
    return caught.value.cause


# -- round trips --------------------------------------------------------------------------------


@given(messages)
def test_what_is_packed_comes_back(message) -> None:
    assert decode(encode(message)) == message


SCALARS = st.none() | st.booleans() | st.integers(0, 9) | st.floats() | st.text(max_size=3)


@given(messages, st.lists(SCALARS | st.lists(SCALARS, max_size=3), max_size=3))
def test_fields_of_a_later_version_are_ignored(message, extra) -> None:
    """Trailing defaults are left out, so they are written out before anything is added."""
    parts = msgpack.unpackb(encode(message), use_list=True)
    if isinstance(message, DraftBatch):
        parts += [None] * (6 - len(parts) + 1)
        parts[5] = message.parents
        parts[6] = 2 if message.go_on else message.verify
    if isinstance(message, SessionOpen):
        parts[8:] = [message.ask]
    if isinstance(message, Resync):
        parts[4:] = [message.probe, message.padding]
    assert decode(msgpack.packb([*parts, *extra])) == message


def test_sampling_may_grow_too() -> None:
    message = SessionOpen(1, (1,), (), Sampling(0.5, 3, 0.9, 0.1, 7), 5, "v")
    parts = msgpack.unpackb(encode(message), use_list=True)
    parts[4].append("new")
    assert decode(msgpack.packb(parts)) == message


@given(verdicts(), st.floats(0.0, 1e7), st.floats(0.0, 1e7))
def test_times_are_carried_in_tenths_of_a_millisecond(message, hold, forward) -> None:
    message = replace(message, hold_ms=hold, forward_ms=forward)
    again = decode(encode(message))
    assert isinstance(again, Verdict)
    assert again.hold_ms == pytest.approx(hold, abs=0.051)
    assert again.forward_ms == pytest.approx(forward, abs=0.051)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32, np.uint8])
def test_numpy_integers_are_packed_as_integers(kind) -> None:
    """Case 41."""
    values = np.array([1, 2, 200], dtype=kind)
    message = DraftBatch(1, 0, 5, values, None, True)
    assert encode(message) == encode(DraftBatch(1, 0, 5, (1, 2, 200), None, True))
    assert all(type(token) is int for token in message.tokens)
    verdict = Verdict(1, 0, 5, tuple(values), 2, 2)
    assert decode(encode(verdict)) == verdict


@pytest.mark.parametrize("tokens", [(1.0,), ("1",), (None,), (np.float32(1),), 5, ((1,),)])
def test_other_tokens_never_reach_the_packer(tokens) -> None:
    with pytest.raises(LocalProtocolError):
        DraftBatch(1, 0, 0, tokens)


# -- size ---------------------------------------------------------------------------------------

#: Late in a long generation that has rolled back often: 2 and 3 bytes where small numbers take 1.
LATE = {"attach": 3, "epoch": 200}
BASE = 2_000


@pytest.mark.parametrize(
    ("vocabulary", "most_draft", "most_verdict"), [(49_152, 35, 42), (151_936, 51, 58)]
)
def test_eight_tokens_stay_under_64_bytes(vocabulary, most_draft, most_verdict) -> None:
    """DESIGN.md. The largest ids of two vocabularies (3 and 5 bytes each)."""
    ids = tuple(vocabulary - 1 - index for index in range(8))
    draft = DraftBatch(**LATE, base=BASE, tokens=ids, verify=True)
    verdict = Verdict(
        **LATE, start=BASE, tokens=ids, accepted=7, judged=8, hold_ms=412.3, forward_ms=65.1
    )
    assert len(encode(draft)) == most_draft < 64
    assert len(encode(verdict)) == most_verdict < 64


def test_what_is_not_needed_is_not_sent() -> None:
    plain = len(encode(DraftBatch(1, 0, 0, (1,))))
    assert plain == 7
    assert len(encode(DraftBatch(1, 0, 0, (1,), None, True))) == plain + 2
    assert len(encode(DraftBatch(1, 0, 0, (1,), None, True, True))) == plain + 2
    assert len(encode(Resync(1, 2, 3))) == 5
    assert len(encode(Resync(1, 2, 3, 4))) == 6
    assert len(encode(Close(1))) == 3


def test_the_longest_prompt_fits_and_more_is_refused_here() -> None:
    most = (151_935,) * MAX_PROMPT
    message = SessionOpen(1, most, (), Sampling(), 10, "v")
    assert decode(encode(message)) == message
    with pytest.raises(LocalProtocolError, match="too large"):
        encode(replace(message, committed=most))


def test_the_longest_verdict_fits() -> None:
    tokens = tuple(range(MAX_BATCH + 1))
    verdict = Verdict(1, 0, 0, tokens, MAX_BATCH, MAX_BATCH, FINISH_LENGTH)
    assert decode(encode(verdict)) == verdict


# -- bytes that are no message ------------------------------------------------------------------

HUGE = bytes.fromhex("9ffd74f7dd74fffdbd")


@pytest.mark.parametrize(
    ("payload", "cause"),
    [
        (b"", "msgpack"),
        (HUGE, "msgpack"),  # case 41
        (b"\xdd\xff\xff\xff\xff\x01\x01\x01\x01", "msgpack"),  # an array of 4 G entries
        (b"\xdc\xff\xff\x01\x01\x01\x01\x01\x01", "msgpack"),
        (b"\xdf\xff\xff\xff\xff\x01\x01\x01\x01", "msgpack"),  # a map
        (b"\xdb\xff\xff\xff\xff\x01\x01\x01\x01", "msgpack"),  # a text
        (b"\xc6\xff\xff\xff\xff\x01\x01\x01\x01", "msgpack"),  # bytes
        (b"\xc9\xff\xff\xff\xff\x01\x01\x01\x01", "msgpack"),  # an extension
        (b"\x91" * 1_000 + b"\x01", "msgpack"),  # nested
        (b"\x91" * 100_000 + b"\x01", "msgpack"),
        (b"\x90" * 10, "msgpack"),  # more than one value
        (b"\x90", "msgpack"),
        (b"\x01", "msgpack"),
        (b"\x80", "msgpack"),
        (b"\x92\xc3\x01", "msgpack"),  # true is no kind
        (b"\x92\xa1\xff\x01", "msgpack"),  # no UTF-8
        (msgpack.packb([1.0, 1]), "msgpack"),
        (msgpack.packb([4, 1, {}]), "fields"),
        (msgpack.packb([4, 1, {1: 2}]), "msgpack"),
        (msgpack.packb([4, 1, b"x"]), "msgpack"),
        (msgpack.packb([99, 1]), "unknown_kind"),
        (msgpack.packb([0]), "unknown_kind"),
        (msgpack.packb([-4, 1, 1, 1, [1]]), "unknown_kind"),
        (msgpack.packb([4]), "fields"),
        (msgpack.packb([4, 1, 1, 1]), "fields"),
        (msgpack.packb([4, 1, 1, 1, 5]), "fields"),
        (msgpack.packb([4, 1, 1, 1, [[1]]]), "msgpack"),  # no array in an array's array
        (msgpack.packb([4, *[1] * 40]), "msgpack"),
        (b"\x95\x04\x01\x01\x01", "msgpack"),  # a field is missing
        (msgpack.packb([4, 1, 1, 1, [2**31]]), "fields"),
        (msgpack.packb([4, 1, 1, 1, [-1]]), "fields"),
        (msgpack.packb([4, 1, 1, 1, []]), "fields"),
        (msgpack.packb([4, 1, 1, 1, [1] * (MAX_BATCH + 1)]), "fields"),
        (msgpack.packb([4, 1, 1, 1, [1, 2], [0, 0]]), "fields"),
        (msgpack.packb([4, 1, 1, 1, [1], None, 1]), "fields"),
        (msgpack.packb([4, True, 1, 1, [1]]), "fields"),
        (msgpack.packb([4, 1, -1, 1, [1]]), "fields"),
        (msgpack.packb([4, 1, 1.5, 1, [1]]), "fields"),
        (msgpack.packb([4, 2**63, 1, 1, [1]]), "fields"),
        (msgpack.packb([5, 1, 1, 1, [], 0, 0]), "fields"),
        (msgpack.packb([5, 1, 1, 1, [7], 2, 1]), "fields"),
        (msgpack.packb([5, 1, 1, 1, [7], 0, 0, "maybe"]), "fields"),
        (msgpack.packb([5, 1, 1, 1, [7], 0, 0, None, "x"]), "fields"),
        (msgpack.packb([5, 1, 1, 1, [7], 0, 0, None, -1]), "fields"),
        (msgpack.packb([5, 1, 1, 1, [7], 0, 0, None, float("nan")]), "fields"),
        (msgpack.packb([5, 1, 1, 1, [7], 0, 0, None, 2**63]), "fields"),
        (msgpack.packb([1, 1, [1], [], 5, 9, "v", "eager"]), "fields"),
        (msgpack.packb([1, 1, [1], [], [], 9, "v", "eager"]), "fields"),
        (msgpack.packb([1, 1, [1], [], ["a", 0, 1, 0, 0], 9, "v"]), "fields"),
        (msgpack.packb([1, 1, [1], [], [-1, 0, 1, 0, 0], 9, "v"]), "fields"),
        (msgpack.packb([1, 1, [1], [], [1, 0, 1, 0, -5], 9, "v"]), "fields"),
        (msgpack.packb([1, 1, [1], [], [1, 0.5, 1, 0, 0], 9, "v"]), "fields"),
        (msgpack.packb([1, 1, [], [], [0, 0, 1, 0, 0], 9, "v"]), "fields"),
        (msgpack.packb([1, 1, [1], [], [0, 0, 1, 0, 0], 0, "v"]), "fields"),
        (msgpack.packb([1, 1, [1], [], [0, 0, 1, 0, 0], 9, "v" * 65]), "fields"),
        (msgpack.packb([1, 1, [1], [], [0, 0, 1, 0, 0], 9, "v", "never"]), "fields"),
        (msgpack.packb([2, 1, 5, 10, 10]), "fields"),
        (msgpack.packb([3, 1, "busy", "", "soon"]), "fields"),
        (msgpack.packb([3, 1, "busy", "", 1e9]), "fields"),
        (msgpack.packb([8, 1, None]), "fields"),
        (msgpack.packb([16, 1]), "fields"),
        (msgpack.packb([17, None]), "fields"),
    ],
)
def test_bad_bytes_are_an_error_with_its_cause(payload, cause) -> None:
    assert cause_of(payload) == cause


def survives(payload: bytes) -> None:
    """It is a message or a counted error, nothing else."""
    cause = None
    try:
        packed = encode(decode(payload))
    except RemoteProtocolError as error:
        cause = error.cause
    if cause is None:
        assert encode(decode(packed)) == packed
    else:
        assert cause in CAUSES


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_random_bytes(payload) -> None:
    survives(payload)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


@given(st.integers(0, 20), st.lists(VALUES, max_size=9))
@settings(max_examples=200, deadline=None)
def test_random_fields(kind, fields) -> None:
    """Well-formed msgpack of any shape."""
    survives(msgpack.packb([kind, *fields]))


@given(drafts() | verdicts(), st.data())
def test_damaged_messages(message, data) -> None:
    payload = bytearray(encode(message))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(payload))


def memory_of(payload: bytes) -> int:
    """Bytes that decoding takes at its worst."""
    tracemalloc.start()
    try:
        cause_of(payload)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


CLAIM = b"\xdd\x00\x01\xff\xff"  # an array just below the limit


@pytest.mark.parametrize(
    "payload",
    [
        HUGE,
        b"\xdd\xff\xff\xff\xff\x01\x01\x01\x01",
        CLAIM + b"\x01\x01\x01\x01",
        b"\x92\x04" + CLAIM + b"\x01\x01",
        b"\xdf\xff\xff\xff\xff\x01\x01\x01\x01",
    ],
)
def test_nine_bytes_take_next_to_nothing(payload) -> None:
    """Case 41: whatever they claim to hold."""
    assert len(payload) == 9
    cause_of(payload)  # what the first call imports is not meant
    assert memory_of(payload) < 60_000  # the unpacker itself


@pytest.mark.parametrize(
    "payload",
    [
        CLAIM * 1_000,
        b"\x92\x04" + CLAIM * 1_000,
        b"\x92\x01" + CLAIM + CLAIM * 1_000,
        CLAIM + (b"\x97" + b"\x90" * 7) * 100_000,
        b"\x92\x01" + CLAIM + (b"\x97" + b"\x90" * 7) * 100_000,
    ],
    ids=["nested", "nested in a field", "nested in an array", "many empty", "many in a field"],
)
def test_headers_reserve_nothing(payload) -> None:
    """msgpack alone would take 80 kB for each of them, before a single item is there."""
    assert memory_of(payload) < 200_000 + 2 * len(payload)


def test_ten_megabytes_are_not_looked_at() -> None:
    payload = bytes(10_000_000)
    assert memory_of(payload) < 10_000
    assert cause_of(payload) == "too_large"
    assert cause_of(b"\x90" + bytes(MAX_PAYLOAD)) == "too_large"


def test_a_message_of_the_other_kind_in_the_right_shape_is_itself() -> None:
    """The codec does not know who may say what; the wire modules do."""
    assert decode(msgpack.packb([6, 1, 2, 3])) == Resync(1, 2, 3)
    assert decode(msgpack.packb([3, 1, "busy"])) == Refused(1, "busy")
