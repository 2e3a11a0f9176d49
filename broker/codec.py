"""Messages to bytes and back: msgpack arrays ``[kind, fields...]``.

Fields that hold their default at the end of an array are left out; unknown fields after the known
ones are ignored, so that a later version may add some. A field is a scalar or an array of scalars,
nothing deeper, and no map, raw bytes or extension.

A payload above ``MAX_PAYLOAD`` bytes is refused before it is looked at. Within it nothing is
reserved on the word of a header: msgpack would make room for each array that claims to be large, so
that five kilobytes of nested headers take 80 MB; here an array grows by the items that are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from broker.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from broker.messages import (
    MAX_PROMPT,
    Accepted,
    Close,
    Closed,
    DeviceStatus,
    DraftBatch,
    Refused,
    Resync,
    SessionMessage,
    SessionOpen,
    Verdict,
    VerifierStatus,
)
from broker.sampling import Sampling
from broker.telemetry import DeviceConfig, Histogram, Telemetry

#: Bytes; a prompt of MAX_PROMPT tokens at 5 bytes each fits.
MAX_PAYLOAD = 1 << 20
#: Fields of a message, the kind included; a later version may use more than this one.
MAX_FIELDS = 32
_ARRAY_16, _ARRAY_32 = 0xDC, 0xDD

_OPEN, _ACCEPTED, _REFUSED, _DRAFT, _VERDICT, _RESYNC, _CLOSE, _CLOSED = range(1, 9)
_VERIFIER_STATUS, _DEVICE_STATUS, _TELEMETRY, _CONFIG = range(16, 20)

AnyMessage = SessionMessage | Telemetry | DeviceConfig


def _open_fields(message: SessionOpen) -> list[Any]:
    sampling = message.sampling
    fields: list[Any] = [
        message.attach,
        message.prompt,
        message.committed,
        (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed,
        ),
        message.max_tokens,
        message.vocab_hash,
        message.verify,
    ]
    if message.ask:
        fields.append(True)
    return fields


def _open_from(fields: list[Any]) -> SessionOpen:
    temperature, top_k, top_p, min_p, seed = fields[3][:5]
    for value in (top_k, seed):
        if type(value) is not int:
            raise TypeError("top_k and seed are integers")
    fields[3] = Sampling(float(temperature), top_k, float(top_p), float(min_p), seed)
    return SessionOpen(*fields[:8])


#: In the place of ``verify``: true, and the target may write on.
_GO_ON = 2


def _draft_from(fields: list[Any]) -> DraftBatch:
    if len(fields) > 5 and type(fields[5]) is int:
        if fields[5] != _GO_ON:
            raise ValueError(f"verify {fields[5]} is no way to ask")
        fields[5:] = (True, True)
        return DraftBatch(*fields)
    return DraftBatch(*fields[:6])


def _draft_fields(message: DraftBatch) -> list[Any]:
    fields: list[Any] = [message.attach, message.epoch, message.base, message.tokens]
    if message.verify:
        fields += (message.parents, _GO_ON if message.go_on else True)
    elif message.parents is not None:
        fields.append(message.parents)
    return fields


def _resync_fields(message: Resync) -> list[Any]:
    fields: list[Any] = [message.attach, message.epoch, message.have]
    if message.padding:
        fields += (message.probe, message.padding)
    elif message.probe:
        fields.append(message.probe)
    return fields


#: Verdict times go out in tenths of a millisecond: 3 bytes where a float takes 9.
_TENTHS = 10.0


def _verdict_fields(message: Verdict) -> list[Any]:
    return [
        message.attach,
        message.epoch,
        message.start,
        message.tokens,
        message.accepted,
        message.judged,
        message.finish,
        round(message.hold_ms * _TENTHS),
        round(message.forward_ms * _TENTHS),
    ]


def _verdict_from(fields: list[Any]) -> Verdict:
    for index in (7, 8):
        if len(fields) > index:
            fields[index] = fields[index] / _TENTHS
    return Verdict(*fields[:9])


def _plain(value: float) -> float:
    """As an integer where it is one: at most half the bytes."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _telemetry_fields(message: Telemetry) -> list[Any]:
    return [
        message.boot,
        message.sequence,
        message.clock,
        list(message.figures),
        [_plain(value) for value in message.figures.values()],
        message.ttft.counts,
        message.ttft.total,
        message.tpt.counts,
        message.tpt.total,
        message.version,
        message.draft,
        message.policy,
        message.machine,
        message.energy_source,
    ]


def _telemetry_from(fields: list[Any]) -> Telemetry:
    boot, sequence, clock, numbers, values, ttft, ttft_sum, tpt, tpt_sum, *texts = fields
    figures = dict(zip(numbers, values, strict=True))
    return Telemetry(
        boot,
        sequence,
        clock,
        figures,
        Histogram(ttft, ttft_sum),
        Histogram(tpt, tpt_sum),
        *texts[:5],
    )


_ENCODERS: dict[type, tuple[int, Callable[[Any], list[Any]]]] = {
    SessionOpen: (_OPEN, _open_fields),
    Accepted: (_ACCEPTED, lambda m: [m.attach, m.verifier, m.context, m.limit]),
    Refused: (_REFUSED, lambda m: [m.attach, m.reason, m.detail, m.retry_after]),
    DraftBatch: (_DRAFT, _draft_fields),
    Verdict: (_VERDICT, _verdict_fields),
    Resync: (_RESYNC, _resync_fields),
    Close: (_CLOSE, lambda m: [m.attach]),
    Closed: (_CLOSED, lambda m: [m.attach, m.reason]),
    VerifierStatus: (
        _VERIFIER_STATUS,
        lambda m: [
            m.online,
            m.version,
            m.model,
            m.vocab_hash,
            m.context,
            m.sessions,
            m.max_sessions,
        ],
    ),
    DeviceStatus: (_DEVICE_STATUS, lambda m: [m.online, m.version, m.draft]),
    Telemetry: (_TELEMETRY, _telemetry_fields),
    DeviceConfig: (
        _CONFIG,
        lambda m: [m.version, m.r1, m.r2, m.window, m.policy, m.schema],
    ),
}

_DECODERS: dict[int, Callable[[list[Any]], AnyMessage]] = {
    _OPEN: _open_from,
    _ACCEPTED: lambda f: Accepted(*f[:4]),
    _REFUSED: lambda f: Refused(*f[:4]),
    _DRAFT: _draft_from,
    _VERDICT: _verdict_from,
    _RESYNC: lambda f: Resync(*f[:5]),
    _CLOSE: lambda f: Close(*f[:1]),
    _CLOSED: lambda f: Closed(*f[:2]),
    _VERIFIER_STATUS: lambda f: VerifierStatus(*f[:7]),
    _DEVICE_STATUS: lambda f: DeviceStatus(*f[:3]),
    _TELEMETRY: _telemetry_from,
    _CONFIG: lambda f: DeviceConfig(*f[:6]),
}


def encode(message: AnyMessage) -> bytes:
    """The payload of ``message``. Raises LocalProtocolError when it exceeds ``MAX_PAYLOAD``."""
    kind, fields = _ENCODERS[type(message)]
    payload: bytes = msgpack.packb([kind, *fields(message)], use_bin_type=True)
    if len(payload) > MAX_PAYLOAD:
        raise LocalProtocolError(f"{type(message).__name__} of {len(payload)} bytes is too large")
    return payload


def _unpack(payload: bytes) -> list[Any]:
    """Kind and fields; raises whatever msgpack does, ValueError, or IndexError at a missing field.

    Arrays are taken apart here, item by item, because the unpacker is not to see any.
    """
    unpacker = msgpack.Unpacker(
        read_size=len(payload) or 1,
        max_buffer_size=MAX_PAYLOAD,
        raw=False,
        max_array_len=0,
        max_str_len=1024,
        max_bin_len=0,
        max_map_len=0,
        max_ext_len=0,
    )
    unpacker.feed(payload)
    unpack = unpacker.unpack
    number = unpacker.read_array_header()
    if number > MAX_FIELDS:
        raise ValueError(f"{number} fields where at most {MAX_FIELDS} are allowed")
    parts: list[Any] = []
    for _ in range(number):
        head = payload[unpacker.tell()]
        if head & 0xF0 == 0x90 or head in (_ARRAY_16, _ARRAY_32):
            size = unpacker.read_array_header()
            if size > MAX_PROMPT:
                raise ValueError(f"an array of {size} where at most {MAX_PROMPT} are allowed")
            parts.append([unpack() for _ in range(size)])
        else:
            parts.append(unpack())
    if unpacker.tell() != len(payload):
        raise ValueError("more bytes than the message has")
    return parts


def decode(payload: bytes) -> AnyMessage:
    """The message in ``payload``.

    Raises RemoteProtocolError for anything else; its ``cause`` is ``too_large``, ``msgpack``,
    ``unknown_kind`` or ``fields``.
    """
    if len(payload) > MAX_PAYLOAD:
        raise RemoteProtocolError(f"payload of {len(payload)} bytes", cause="too_large")
    try:
        parts = _unpack(payload)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"no msgpack message: {error}"[:200], cause="msgpack") from None
    if not parts or type(parts[0]) is not int:
        raise RemoteProtocolError("no array that begins with a kind", cause="msgpack")
    decoder = _DECODERS.get(parts[0])
    if decoder is None:
        raise RemoteProtocolError(f"unknown kind {parts[0]}", cause="unknown_kind")
    try:
        return decoder(parts[1:])
    except (
        LocalProtocolError,
        ConfigError,
        TypeError,
        ValueError,
        IndexError,
        OverflowError,
    ) as error:
        raise RemoteProtocolError(f"wrong fields: {error}"[:200], cause="fields") from None
