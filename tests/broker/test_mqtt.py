"""What the MQTT transport does beyond the contract: limits, refusals, brokers that misbehave."""

from __future__ import annotations

import itertools
import logging
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.errors import TransportError
from broker.mqtt import MqttSettings, MqttTransport, PahoLink
from broker.outbox import MAX_DEATHS
from broker.transport import ConnectionState, Message, Will
from tests.broker.scripted_broker import (
    CONNECT,
    PINGREQ,
    PUBLISH,
    SUBSCRIBE,
    Connection,
    ScriptedBroker,
    packet_id,
    polite,
)
from tests.brokers import MosquittoBroker, Peer, free_port, require, wait_until

CONNECTED, DISCONNECTED, FAILED = (
    ConnectionState.CONNECTED,
    ConnectionState.DISCONNECTED,
    ConnectionState.FAILED,
)

Dial = Callable[..., Peer]


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Make peers with short back-offs; all are stopped afterwards."""
    peers: list[Peer] = []

    def make(url: str, *filters: str, client_id: str = "", **options: Any) -> Peer:
        client_id = client_id or f"dial-{len(peers)}-{time.monotonic_ns()}"
        options = {"backoff_min": 0.01, "backoff_max": 0.02, **options}
        transport = MqttTransport(MqttSettings.from_url(url, client_id, **options))
        for topic_filter in filters:
            transport.subscribe(topic_filter)
        peers.append(Peer(transport, client_id))
        return peers[-1].start()

    yield make
    for peer in peers:
        peer.transport.stop(0.3)


# ---- sockets ------------------------------------------------------------------------------


def test_nagle_is_off(mosquitto: MosquittoBroker, dial: Dial) -> None:
    """(20)"""
    peer = dial(mosquitto.url)
    assert wait_until(lambda: peer.transport.connected)
    live = peer.transport._link._socket  # type: ignore[attr-defined]
    assert live.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_no_thread_or_descriptor_is_left(mosquitto: MosquittoBroker, dial: Dial) -> None:
    peer = dial(mosquitto.url)
    assert wait_until(lambda: peer.transport.connected)
    thread = peer.transport._thread  # type: ignore[attr-defined]
    live = peer.transport._link._socket  # type: ignore[attr-defined]
    peer.transport.stop()
    assert not thread.is_alive()
    assert live.fileno() == -1


def test_stop_does_not_wait_for_a_hanging_broker(dial: Dial) -> None:
    with ScriptedBroker(lambda *_: None) as silent:
        peer = dial(silent.url)
        assert wait_until(lambda: silent.connections)
        peer.transport.publish("a", b"x", qos=1)
        begin = time.monotonic()
        peer.transport.stop(0.4)
        assert time.monotonic() - begin < 1.0


# ---- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0x86, 0x87, 0x85])
def test_refused_credentials_are_final(dial: Dial, code: int) -> None:
    def refuse(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        connection.send(0x20, bytes([0, code, 0]))

    with ScriptedBroker(refuse) as broker:
        peer = dial(broker.url)
        assert wait_until(lambda: peer.events)
        assert peer.states == [FAILED]
        assert peer.events[0].reason_code == code
        assert "user name" in peer.events[0].reason
        with pytest.raises(TransportError):
            peer.transport.publish("a", b"x")
        assert len(broker.connections) == 1


def test_wrong_password_on_mosquitto(tmp_path: Path, dial: Dial) -> None:
    require("mosquitto_passwd", shutil.which("mosquitto_passwd") is not None)
    passwords = tmp_path / "passwords"
    subprocess.run(
        ["mosquitto_passwd", "-c", "-b", str(passwords), "pi", "secret"],
        check=True,
        capture_output=True,
    )
    lines = f"password_file {passwords}\n"
    port = free_port()
    config = f"listener {port} 127.0.0.1\nallow_anonymous false\nuser root\n{lines}"
    with MosquittoBroker(tmp_path, port=port, config=config) as broker:
        good = dial(broker.url.replace("://", "://pi:secret@"))
        assert wait_until(lambda: good.transport.connected)
        for url in (broker.url.replace("://", "://pi:wrong@"), broker.url):
            bad = dial(url)
            assert wait_until(lambda: bad.events)  # noqa: B023
            assert bad.states == [FAILED]
            assert "secret" not in bad.events[0].reason


def test_busy_broker_is_tried_again(dial: Dial) -> None:
    def busy_twice(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        if kind == CONNECT and connection.number < 2:
            connection.send(0x20, b"\0\x89\0")
        else:
            polite(connection, kind, flags, body)

    with ScriptedBroker(busy_twice) as broker:
        peer = dial(broker.url)
        assert wait_until(lambda: peer.transport.connected)
        assert peer.states == [DISCONNECTED, CONNECTED]
        assert peer.events[0].reason_code == 0x89


def test_refused_subscription_is_counted_and_logged(
    dial: Dial, caplog: pytest.LogCaptureFixture
) -> None:
    def deny(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        if kind == 8:
            connection.send(0x90, body[:2] + b"\0\x87")
        elif kind == PUBLISH:
            connection.send(0x40, packet_id(flags, body) + b"\x87\0")
        else:
            polite(connection, kind, flags, body)

    with ScriptedBroker(deny) as broker:
        peer = dial(broker.url, "secret/#")
        assert wait_until(lambda: peer.transport.connected)
        assert "secret/#" in caplog.text
        peer.transport.publish("other", b"x", qos=1)
        assert wait_until(lambda: peer.transport.refused == 2)  # type: ignore[attr-defined]
        assert "access rules" in caplog.text


def test_takeover_three_times_is_final(dial: Dial) -> None:
    """(9) On a broker that says why: DISCONNECT with reason 0x8E."""

    def kick(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        polite(connection, kind, flags, body)
        if kind == CONNECT:
            connection.send(0xE0, b"\x8e\0")
            connection.close()

    with ScriptedBroker(kick) as broker:
        peer = dial(broker.url, client_id="pi-7")
        assert wait_until(lambda: FAILED in peer.states)
        assert len(broker.connections) == 3
        assert peer.events[-1].reason_code == 0x8E
        assert "another client uses the id 'pi-7'" in peer.events[-1].reason


# ---- limits -------------------------------------------------------------------------------


def test_limit_of_the_broker_is_respected(tmp_path: Path, dial: Dial) -> None:
    """(17) Mosquitto announces its packet limit; what is larger never leaves."""
    with MosquittoBroker(tmp_path, "max_packet_size 2000") as broker:
        listener = dial(broker.url, "a/#")
        early = dial("mqtt://127.0.0.1:1", client_id="early")  # not connected, limit unknown
        early.transport.publish("a/b", b"x" * 3_000, qos=1)
        speaker = dial(broker.url)
        assert wait_until(lambda: speaker.transport.connected and listener.transport.connected)
        with pytest.raises(TransportError, match="3000 bytes") as raised:
            speaker.transport.publish("a/b", b"x" * 3_000)
        assert raised.value.reason_code == 0x95
        speaker.transport.publish("a/b", b"y" * 1_800)
        assert wait_until(lambda: listener.payloads == [b"y" * 1_800])
        assert speaker.states == [CONNECTED]


def test_queued_message_above_the_limit_is_dropped_not_resent(dial: Dial) -> None:
    def small(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        if kind == CONNECT:
            connection.accept(b"\x27" + (500).to_bytes(4, "big"))  # Maximum Packet Size
        else:
            polite(connection, kind, flags, body)

    with ScriptedBroker(small) as broker:
        transport = MqttTransport(MqttSettings.from_url(broker.url, "queue"))
        transport.publish("a", b"x" * 600, qos=1)
        transport.publish("a", b"ok", qos=1)
        peer = Peer(transport, "queue").start()
        assert wait_until(lambda: broker.connections and broker.connections[0].publishes())
        assert broker.connections[0].publishes() == [b"ok"]
        assert transport.dropped == 1
        assert peer.states == [CONNECTED]
        transport.stop(0.5)


def test_receive_window_of_the_broker_is_kept(dial: Dial) -> None:
    """A broker that allows two QoS 1 messages under way ends the connection at the third."""
    most = 0
    waiting: list[bytes] = []

    def slow(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        nonlocal most
        if kind == CONNECT:
            connection.accept(b"\x21\0\x02")  # Receive Maximum
        elif kind == PUBLISH and flags & 6:
            waiting.append(packet_id(flags, body))
            most = max(most, len(waiting))
            if len(waiting) == 2 or len(connection.received) == 12:
                while waiting:
                    connection.send(0x40, waiting.pop(0))
        else:
            polite(connection, kind, flags, body)

    with ScriptedBroker(slow) as broker:
        transport = MqttTransport(MqttSettings.from_url(broker.url, "window"))
        for number in range(11):
            transport.publish("a", b"%d" % number, qos=1)
        Peer(transport, "window").start()
        assert wait_until(lambda: broker.connections and len(broker.connections[0].received) >= 12)
        assert most == 2
        assert broker.connections[0].publishes() == [b"%d" % number for number in range(11)]
        transport.stop(0.5)


def test_backlog_of_a_thousand_does_not_upset_mosquitto(
    mosquitto: MosquittoBroker, dial: Dial
) -> None:
    """Sent all at once it would exceed the receive window, and be sent again for ever."""
    listener = dial(mosquitto.url, "backlog/#")
    assert wait_until(lambda: listener.transport.connected)
    transport = MqttTransport(MqttSettings.from_url(mosquitto.url, "backlog"))
    sent = [b"%04d" % number for number in range(1_000)]
    for payload in sent:
        transport.publish("backlog/x", payload, qos=1)
    speaker = Peer(transport, "backlog").start()
    assert wait_until(lambda: len(listener.messages) >= 1_000)
    assert listener.payloads == sent
    assert speaker.states == [CONNECTED]
    transport.stop()


def test_broker_that_stops_reading_blocks_nobody(dial: Dial) -> None:
    """QoS 0 beyond the bound is dropped and counted, and ``publish`` returns at once."""
    deaf: list[bool] = []

    def stop_reading(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        polite(connection, kind, flags, body)
        if kind == PUBLISH:
            deaf.append(True)
            wait_until(lambda: not deaf, 20)

    with ScriptedBroker(stop_reading) as broker:
        peer = dial(broker.url, max_queued_qos0=100)
        assert wait_until(lambda: peer.transport.connected)
        peer.transport.publish("a", b"x")
        assert wait_until(lambda: deaf)
        slowest = 0.0
        for _ in range(400):
            begin = time.monotonic()
            peer.transport.publish("a", b"y" * 100_000)
            slowest = max(slowest, time.monotonic() - begin)
            if peer.transport.dropped > 10:
                break
        assert peer.transport.dropped > 10
        assert slowest < 0.5
        assert peer.transport.connected
        deaf.clear()


def test_message_that_kills_connections_is_given_up(dial: Dial) -> None:
    """A broker may end the connection over one message without a word (rumqttd: too large)."""

    def allergic(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        if kind == PUBLISH and b"poison" in body:
            connection.close()
        else:
            polite(connection, kind, flags, body)

    with ScriptedBroker(allergic) as broker:
        peer = dial(broker.url)
        for payload in (b"before", b"poison", b"after"):
            peer.transport.publish("a", payload, qos=1)
        assert wait_until(lambda: peer.transport.dropped == 1)
        assert wait_until(lambda: broker.connections[-1].publishes() == [b"after"])
        assert len(broker.connections) <= MAX_DEATHS + 2


# ---- brokers that misbehave ------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="another protocol"),
        pytest.param(bytes(range(255, 0, -1)) * 4, id="noise"),
        pytest.param(b"\x20\x03\0\0", id="a packet cut short"),
        pytest.param(b"\x20\xff\xff\xff\xff\xff", id="an endless length"),
        pytest.param(b"\x20\x03\0\0\0" + b"\x30\x02\xff\xff", id="a topic longer than the packet"),
        pytest.param(b"\x20\x03\0\0\0" + b"\x30\x05\0\x01a\xff\xff", id="broken properties"),
        pytest.param(b"\x20\x03\0\0\0" + b"\xf0\0", id="an unknown packet"),
        pytest.param(b"\x20\x03\0\0\0" + b"\xe0\x01\x77", id="an unknown reason"),
        pytest.param(b"\x20\x03\0\x77\0", id="an unknown refusal"),
        pytest.param(b"\x20\x02\0\x05", id="a refusal of MQTT 3"),
        pytest.param(b"", id="nothing at all"),
    ],
)
def test_garbage_ends_the_connection_not_the_thread(dial: Dial, answer: bytes) -> None:
    def rude(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        if connection.number >= 2:
            polite(connection, kind, flags, body)
        elif kind == CONNECT:
            connection.raw(answer)
            connection.close()

    with ScriptedBroker(rude) as broker:
        peer = dial(broker.url, connect_timeout=0.5)
        assert wait_until(lambda: FAILED in peer.states or len(broker.connections) >= 3)
        if FAILED not in peer.states:
            assert wait_until(lambda: peer.transport.connected)
        assert DISCONNECTED in peer.states or FAILED in peer.states
        assert all(event.reason for event in peer.events if event.state is not CONNECTED)


def test_message_with_a_broken_topic_is_dropped(dial: Dial) -> None:
    def odd(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        polite(connection, kind, flags, body)
        if kind == 8:
            connection.raw(b"\x30\x06\0\x02\xff\xfe\0x")
            connection.raw(b"\x30\x06\0\x02ab\0y")

    with ScriptedBroker(odd) as broker:
        peer = dial(broker.url, "#")
        assert wait_until(lambda: peer.messages)
        assert peer.payloads == [b"y"]
        assert peer.states == [CONNECTED]
        assert peer.transport.dropped == 1


def test_what_has_come_is_taken_in_together(dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    """One packet for each look at the socket would let a burst wait behind as many looks."""
    count = 640
    looks = 0
    real = PahoLink.wait

    def wait(link: PahoLink, timeout: float) -> bool:
        nonlocal looks
        looks += 1
        return real(link, timeout)

    def burst(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        polite(connection, kind, flags, body)
        if kind == SUBSCRIBE:
            messages = (b"\x30\x07\0\x02ab\0" + n.to_bytes(2, "big") for n in range(count))
            connection.raw(b"".join(messages))

    monkeypatch.setattr(PahoLink, "wait", wait)
    with ScriptedBroker(burst) as broker:
        peer = dial(broker.url, "#")
        assert wait_until(lambda: len(peer.messages) == count)
        assert peer.payloads == [n.to_bytes(2, "big") for n in range(count)]
        assert looks < count / 4


def test_an_answer_to_what_came_with_the_subscription_is_sent() -> None:
    """The link is up before it is heard: QoS 0 would be dropped otherwise."""

    def quick(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        if kind != SUBSCRIBE:
            polite(connection, kind, flags, body)
            return
        suback = b"\x90\x04" + body[:2] + b"\0\0"
        connection.raw(suback + b"\x30\x06\0\x02ab\0y")

    with ScriptedBroker(quick) as broker:
        peer = Peer(MqttTransport(MqttSettings.from_url(broker.url, "quick")), "quick")
        states: list[list[ConnectionState]] = []

        def reply(message: Message) -> None:
            states.append(peer.states)
            peer.transport.publish("answer", b"a")

        peer.reply = reply
        peer.transport.subscribe("ab")
        peer.start()
        try:
            assert wait_until(lambda: states)
            assert states == [[CONNECTED]]
            assert wait_until(lambda: b"a" in broker.connections[-1].publishes())
            assert peer.transport.dropped == 0
        finally:
            peer.transport.stop(0.3)


def test_silent_broker_is_an_outage(dial: Dial) -> None:
    with ScriptedBroker(lambda *_: None) as silent:
        peer = dial(silent.url, connect_timeout=0.2)
        assert wait_until(lambda: len(silent.connections) >= 2)
        assert peer.states == [DISCONNECTED]
        assert "does not answer" in peer.events[0].reason


def test_broker_that_vanished_is_noticed(dial: Dial) -> None:
    """No FIN, no RST: only the keepalive tells, within two of its periods."""

    def vanish(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        if connection.number > 0 or kind != PINGREQ:
            polite(connection, kind, flags, body)

    with ScriptedBroker(vanish) as broker:
        peer = dial(broker.url, keepalive=1)
        assert wait_until(lambda: peer.transport.connected)
        begin = time.monotonic()
        assert wait_until(lambda: peer.states == [CONNECTED, DISCONNECTED, CONNECTED])
        assert time.monotonic() - begin < 4.0


def test_stop_at_any_moment(mosquitto: MosquittoBroker) -> None:
    """Right after the start, too: it ends, and what was published with QoS 1 goes out first."""
    listener = Peer(MqttTransport(MqttSettings.from_url(mosquitto.url, "any")), "any")
    listener.transport.subscribe("any/#", qos=1)
    listener.start()
    assert wait_until(lambda: listener.transport.connected)
    for number in range(20):
        transport = MqttTransport(MqttSettings.from_url(mosquitto.url, f"any-{number}"))
        peer = Peer(transport, "").start()
        time.sleep(0.0005 * number)
        transport.publish("any/x", b"%d" % number, qos=1)
        transport.stop()
        told = list(peer.events)
        assert not transport._thread.is_alive()  # type: ignore[union-attr]
        assert peer.events == told
    assert wait_until(lambda: len(listener.messages) >= 20)
    assert [int(payload) for payload in listener.payloads] == list(range(20))
    listener.transport.stop()


def test_name_that_is_no_name(dial: Dial) -> None:
    for host in ("a..b", "no-such-host.invalid"):
        peer = dial(f"mqtt://{host}", connect_timeout=2.0)
        assert wait_until(lambda: peer.events)  # noqa: B023
        assert peer.states == [DISCONNECTED]
        assert peer.events[0].reason


def test_an_outage_is_logged_once(dial: Dial, caplog: pytest.LogCaptureFixture) -> None:
    """(5)"""
    caplog.set_level(logging.INFO, "broker.mqtt")
    port = free_port()
    peer = dial(f"mqtt://127.0.0.1:{port}")
    assert wait_until(lambda: peer.events)
    time.sleep(0.3)
    assert caplog.text.count("refused") == 1
    assert f"mqtt://127.0.0.1:{port}" in caplog.text


def test_back_off_grows_and_is_spread() -> None:
    """Ten attempts of a hundred agents at 0.05 s and doubling: nobody hammers the broker."""
    accepted: list[float] = []

    def refuse(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        accepted.append(time.monotonic())
        connection.close()

    with ScriptedBroker(refuse) as broker:
        settings = MqttSettings.from_url(broker.url, "back", backoff_min=0.05, backoff_max=0.4)
        peer = Peer(MqttTransport(settings), "back").start()
        assert wait_until(lambda: len(accepted) >= 5)
        peer.transport.stop()
    gaps = [later - earlier for earlier, later in itertools.pairwise(accepted)]
    for gap, longest in zip(gaps, (0.05, 0.1, 0.2, 0.4), strict=False):
        assert longest / 2 <= gap < longest + 0.3


def test_farewell_that_is_not_acknowledged_leaves_the_will(dial: Dial) -> None:
    """Stop may not end with DISCONNECT then: the broker would forget the will."""

    def lazy(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        if kind != PUBLISH or b"bye" not in body:
            polite(connection, kind, flags, body)

    with ScriptedBroker(lazy) as broker:
        peer = dial(broker.url, will=Will("s", b"dead", birth=b"here", farewell=b"bye"))
        assert wait_until(lambda: peer.transport.connected)
        peer.transport.stop(0.3)
        kinds = [kind for kind, _, _ in broker.connections[0].received]
        assert broker.connections[0].publishes() == [b"here", b"bye"]
        assert 14 not in kinds
