"""Case 41: whatever anybody publishes, it is counted, and no session takes harm."""

from __future__ import annotations

from random import Random

import msgpack

from broker.codec import MAX_PAYLOAD, encode
from broker.messages import (
    Accepted,
    Close,
    Closed,
    DeviceStatus,
    DraftBatch,
    Refused,
    Resync,
    SessionOpen,
    Verdict,
    VerifierStatus,
)
from broker.mqtt import MqttSettings, MqttTransport
from broker.sampling import Sampling
from broker.topics import down_topic, open_topic, up_topic, verifier_status_topic
from broker.transport import ConnectionState
from edge_agent.draft import DraftModel
from edge_agent.scripted_draft import sometimes_right
from tests.brokers import wait_until
from tests.system import (
    PATIENCE,
    PROMPT,
    VOCAB,
    Device,
    PacedTarget,
    Replica,
    chooser,
    continuation,
    scripted_draft,
)

UP = [ConnectionState.CONNECTED]


def mostly_right() -> DraftModel:
    return scripted_draft(sometimes_right(chooser(), VOCAB, 0.8, seed=3))


def junk() -> list[bytes]:
    """Payloads that no honest client sends."""
    random = Random(41)
    sampling = Sampling()
    whole = encode(SessionOpen(1, PROMPT, (), sampling, 5, "scripted"))
    return [
        b"",
        bytes.fromhex("9ffd74f7dd74fffdbd"),
        b"\xdd\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff" + b"\x91" * 100,
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x81\x01" * 2000,
        b"\xc1",
        b"\x90",
        b"\x91\x01",
        b"\x92\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\xc7\x05\x01hello",
        b"\x92\x04\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
        whole[:-5],
        whole + b"\x00",
        b"plain text",
        "žluťoučký kůň".encode(),
        random.randbytes(MAX_PAYLOAD),
        b"\x00" * MAX_PAYLOAD,
        *(random.randbytes(random.randrange(1, 64)) for _ in range(300)),
        *(
            msgpack.packb([kind, *[field] * 9])
            for kind in range(20)
            for field in (-1, "x", None, [])
        ),
        msgpack.packb([4, 1, 0, 2**63, [1, 2], None, True]),
        msgpack.packb([4, 1, 0, 0, [-1], None, True]),
        msgpack.packb([4, 1, 0, 0, [2**40], None, True]),
        msgpack.packb([4, 1, 0, 0, list(range(5000)), None, True]),
        msgpack.packb([4, 1, 0, 0, [1, 2], [5, 6], True]),
        msgpack.packb([5, 1, 0, 0, [], 0, 0]),
        msgpack.packb([5, 1, 0, 0, [1], 7, 3]),
        msgpack.packb([1, 1, [], [], [0, 0, 1, 0, 0], 5, "scripted"]),
        msgpack.packb([1, 1, [1], [], [float("nan"), 0, 1, 0, 0], 5, "scripted"]),
        msgpack.packb([1, 1, [1], [], [0, 0, 1, 0, 2**64 - 1, 9], 0, "scripted"]),
        msgpack.packb([1, 1, [1], [], [0, 0, 1, 0], 5, "scripted"]),
        msgpack.packb({"kind": 4}),
    ]


def misplaced() -> list[bytes]:
    """Sound messages of other attachments, for the wrong side or about nothing; all harmless."""
    return [
        encode(message)
        for message in (
            Accepted(77, "elsewhere", 100, 100),
            Refused(77, "busy", "no", 1.0),
            Verdict(77, 0, 0, (1, 2, 3), 1, 2),
            Closed(77, "unknown"),
            Resync(0, 9, 9),
            DraftBatch(0, 3, 0, (1, 2), None, True),
            Close(0),
            DeviceStatus(True, "1", "x"),
            VerifierStatus(True, "1", "x"),
        )
    ]


def test_junk_is_counted_and_harms_no_session(url: str) -> None:
    """Case 41: on every topic of a running session, and of sessions and devices that are none."""
    with (
        Replica(url, PacedTarget(seconds=0.002)) as replica,
        Device(url, mostly_right()) as device,
    ):
        running = device.run(max_tokens=100_000)
        assert running.reached(5)
        session = running.generation.session
        vandal = MqttTransport(
            MqttSettings.from_url(
                url,
                "vandal",
                max_payload=12 << 20,
                max_queued_bytes=512 << 20,
                max_queued=100_000,
            )
        )
        vandal.start(lambda message: None, lambda event: None)
        try:
            assert wait_until(lambda: vandal.connected)
            topics = [
                open_topic(device.name, session),
                up_topic(device.name, session, replica.name),
                down_topic(device.name, session),
                open_topic("ghost", "none"),
                up_topic("ghost", "none", replica.name),
                down_topic(device.name, "none"),
                verifier_status_topic("ghost"),
            ]
            payloads = junk()
            for topic in topics:
                for payload in (*payloads, *misplaced()):
                    vandal.publish(topic, payload, qos=1)
                vandal.publish(topic, b"x" * (10 << 20), qos=1)
            # What only looks like topics of a session.
            for topic in (
                "pipesd/1/_ghost/none/open",
                "pipesd/1/ gh ost/none/open",
                f"pipesd/1/ghost/{'x' * 65}/open",
                f"pipesd/1/{device.name}/no ne/down",
            ):
                vandal.publish(topic, payloads[1], qos=1)
            vandal.publish(down_topic(device.name, session), payloads[1], qos=1, retain=True)
            vandal.publish(down_topic(device.name, session), b"", qos=1, retain=True)
            harm = 2 * len(payloads)
            assert wait_until(lambda: sum(replica.core.stats.rejected.values()) >= harm, PATIENCE)
            assert wait_until(lambda: sum(device.agent.rejected.values()) >= harm, PATIENCE)
        finally:
            vandal.stop()
        assert running.reached(len(running.tokens) + 50)
        running.generation.cancel()
        tokens = running.wait()
        assert tokens == continuation(PROMPT, len(tokens))
        assert running.generation.verified
        assert running.generation.stats.reopens == 0
        assert device.transport.states == replica.transport.states == UP
        assert device.transport.callback_errors == replica.transport.callback_errors == 0
        for counted in (replica.core.stats.rejected, device.agent.rejected):
            assert {"msgpack", "fields", "unknown_kind", "unexpected_kind", "topic"} <= set(counted)
        # And everything goes on as before.
        assert device.write(max_tokens=30) == continuation(PROMPT, 30)


def test_a_retained_message_is_no_answer(url: str) -> None:
    """A session message that somebody had the broker keep reaches whoever subscribes later."""
    name = "late"
    keeper = MqttTransport(MqttSettings.from_url(url, "keeper"))
    keeper.start(lambda message: None, lambda event: None)
    topic = down_topic(name, "old")
    try:
        assert wait_until(lambda: keeper.connected)
        keeper.publish(topic, encode(Accepted(1, "v", 5, 5)), qos=1, retain=True)
        with Replica(url, PacedTarget()), Device(url, mostly_right(), name) as device:
            assert wait_until(lambda: device.agent.rejected["retained"] == 1)
            assert device.write(max_tokens=30) == continuation(PROMPT, 30)
    finally:
        keeper.publish(topic, b"", qos=1, retain=True)
        keeper.stop()
