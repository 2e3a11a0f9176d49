"""The delivery contract of ``broker.transport``, on every implementation.

The numbers in brackets are those of the project's list of cases that have broken such systems.
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path

import pytest

from broker.errors import LocalProtocolError, TransportError
from broker.mqtt import MqttSettings, MqttTransport
from broker.transport import ConnectionState, Message, Will
from tests.brokers import (
    Harness,
    Peer,
    RealHarness,
    free_port,
    start_broker,
    wait_until,
)

CONNECTED, DISCONNECTED, FAILED = (
    ConnectionState.CONNECTED,
    ConnectionState.DISCONNECTED,
    ConnectionState.FAILED,
)


def first_of_each(payloads: list[bytes]) -> list[bytes]:
    """Without the repetitions that QoS 1 may bring."""
    return list(dict.fromkeys(payloads))


def numbered(count: int) -> list[bytes]:
    return [b"%05d" % number for number in range(count)]


# ---- delivery -------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1])
def test_messages_arrive_once_and_in_order(harness: Harness, qos: int) -> None:
    topic = harness.topic("a/b")
    listener = harness.peer(topic, qos=qos)
    speaker = harness.peer()
    sent = numbered(500)
    for payload in sent:
        speaker.transport.publish(topic, payload, qos=qos)
    assert harness.until(lambda: len(listener.messages) >= len(sent))
    harness.settle()
    assert listener.payloads == sent
    assert all(message == Message(topic, message.payload) for message in listener.messages)


def test_counters_count_payload_bytes(harness: Harness) -> None:
    topic = harness.topic("count")
    listener, speaker = harness.peer(topic), harness.peer()
    for _ in range(3):
        speaker.transport.publish(topic, b"12345")
    speaker.transport.publish(topic, b"", qos=1)
    assert harness.until(lambda: len(listener.messages) == 4)
    # Counted once it is sent, so that the listener may be sooner.
    assert harness.until(lambda: speaker.transport.messages_sent == 4)
    assert speaker.transport.bytes_sent == 15
    assert (listener.transport.messages_received, listener.transport.bytes_received) == (4, 15)
    assert speaker.transport.dropped == 0
    assert speaker.transport.reconnects == 0


def test_one_hears_oneself(harness: Harness) -> None:
    topic = harness.topic("self")
    peer = harness.peer(topic)
    peer.transport.publish(topic, b"hello")
    assert harness.until(lambda: peer.payloads == [b"hello"])


def test_wildcards(harness: Harness) -> None:
    plus = harness.peer(harness.topic("+/down"))
    hash_ = harness.peer(harness.topic("d/#"))
    speaker = harness.peer()
    for name in ("s1/down", "s2/down", "s1/up", "s1/down/x", "d", "d/1", "d/1/2"):
        speaker.transport.publish(harness.topic(name), name.encode())
    assert harness.until(lambda: len(plus.messages) >= 2 and len(hash_.messages) >= 3)
    harness.settle()
    assert plus.payloads == [b"s1/down", b"s2/down"]
    assert hash_.payloads == [b"d", b"d/1", b"d/1/2"]


def test_subscribe_and_unsubscribe_while_connected(harness: Harness) -> None:
    topic = harness.topic("late")
    listener, speaker = harness.peer(), harness.peer()
    listener.transport.subscribe(topic)

    def heard() -> bool:
        speaker.transport.publish(topic, b"x")
        return bool(listener.messages)

    assert harness.until(heard)
    listener.transport.unsubscribe(topic)
    harness.settle()
    before = len(listener.messages)
    speaker.transport.publish(topic, b"y")
    harness.settle()
    assert len(listener.messages) == before


def test_empty_and_binary_payloads(harness: Harness) -> None:
    topic = harness.topic("bytes")
    listener, speaker = harness.peer(topic), harness.peer()
    payloads = [b"", bytes(range(256)), b"\0" * 70_000]
    for payload in payloads:
        speaker.transport.publish(topic, payload, qos=1)
    assert harness.until(lambda: listener.payloads == payloads)


# ---- what the broker keeps ------------------------------------------------------------------


def test_retained_message_reaches_late_subscribers_until_cleared(harness: Harness) -> None:
    topic = harness.topic("kept")
    watcher, speaker = harness.peer(topic), harness.peer()
    for payload in (b"old", b"new"):
        speaker.transport.publish(topic, payload, qos=1, retain=True)
    assert harness.until(lambda: watcher.payloads == [b"old", b"new"])
    # To those who were there it is news like any other.
    assert [message.retain for message in watcher.messages] == [False, False]
    late = harness.peer(harness.topic("+"))
    assert harness.until(lambda: late.messages)
    assert late.messages == [Message(topic, b"new", True)]
    speaker.transport.publish(topic, b"", qos=1, retain=True)
    assert harness.until(lambda: len(watcher.messages) == 3)
    later = harness.peer(topic)
    harness.settle()
    assert later.messages == []


def test_will_is_spoken_when_the_connection_dies(harness: Harness) -> None:
    topic = harness.topic("status")
    watcher = harness.peer(topic)
    frail = harness.peer(will=Will(topic, b"offline"), relayed=True)
    harness.cut(frail)
    assert harness.until(lambda: watcher.payloads == [b"offline"])
    late = harness.peer(topic)
    assert harness.until(lambda: late.messages == [Message(topic, b"offline", True)])


def test_birth_and_farewell(harness: Harness) -> None:
    topic = harness.topic("status")
    watcher = harness.peer(topic)
    will = Will(topic, b"offline", birth=b"online", farewell=b"bye")
    peer = harness.peer(will=will, relayed=True)
    assert harness.until(lambda: watcher.payloads == [b"online"])
    harness.cut(peer)
    assert harness.until(lambda: watcher.payloads == [b"online", b"offline"])
    harness.restore(peer)
    assert harness.until(lambda: watcher.payloads == [b"online", b"offline", b"online"])
    peer.transport.stop()
    assert harness.until(lambda: len(watcher.messages) == 4)
    harness.settle()
    assert watcher.payloads[3:] == [b"bye"], "no will after a goodbye"
    late = harness.peer(topic)
    assert harness.until(lambda: late.messages == [Message(topic, b"bye", True)])
    assert peer.messages == [], "what the transport hears for itself is not the caller's"


def test_goodbye_without_farewell_speaks_no_will(harness: Harness) -> None:
    topic = harness.topic("status")
    watcher = harness.peer(topic)
    peer = harness.peer(will=Will(topic, b"offline"))
    peer.transport.stop()
    harness.settle()
    assert watcher.messages == []


def test_late_own_will_does_not_leave_the_device_offline(harness: Harness) -> None:
    """(18) The network switched; the broker noticed the old connection's death afterwards."""
    topic = harness.topic("status")
    watcher = harness.peer(topic)
    peer = harness.peer(will=Will(topic, b"offline", birth=b"online"), relayed=True)
    assert harness.until(lambda: watcher.payloads == [b"online"])
    harness.half_open(peer)
    assert harness.until(
        lambda: b"offline" in watcher.payloads and watcher.payloads[-1] == b"online"
    )
    harness.settle()
    late = harness.peer(topic)
    assert harness.until(lambda: late.messages)
    assert late.messages == [Message(topic, b"online", True)]
    assert peer.transport.connected


def test_will_heard_while_connected_is_answered_with_birth(harness: Harness) -> None:
    """(18) However late it comes."""
    topic = harness.topic("status")
    harness.peer(will=Will(topic, b"offline", birth=b"online"))
    watcher, speaker = harness.peer(topic), harness.peer()
    assert harness.until(lambda: watcher.payloads == [b"online"])
    speaker.transport.publish(topic, b"offline", qos=1, retain=True)
    assert harness.until(lambda: watcher.payloads == [b"online", b"offline", b"online"])


def test_own_status_can_be_listened_to_as_well(harness: Harness) -> None:
    topic = harness.topic("status")
    peer = harness.peer(topic, will=Will(topic, b"offline", birth=b"online"))
    assert harness.until(lambda: b"online" in peer.payloads)


def test_will_works_after_a_takeover(harness: Harness) -> None:
    if "will after takeover" in harness.lacks:
        pytest.skip(f"{harness.name}: a takeover makes the broker forget the new will")
    topic = harness.topic("status")
    watcher = harness.peer(topic)
    peer = harness.peer(will=Will(topic, b"offline", birth=b"online"), relayed=True)
    harness.half_open(peer)
    assert harness.until(lambda: watcher.payloads[-2:] == [b"offline", b"online"])
    harness.settle()
    del watcher.messages[:]
    harness.cut(peer)
    assert harness.until(lambda: watcher.payloads == [b"offline"])


# ---- shared subscriptions ---------------------------------------------------------------------


def test_shared_subscription_gives_each_message_to_exactly_one(harness: Harness) -> None:
    shared = f"$share/verifiers/{harness.topic('+/open')}"
    members = [harness.peer(shared, qos=1) for _ in range(3)]
    outsider = harness.peer(harness.topic("+/open"), qos=1)
    speaker = harness.peer()
    sent = numbered(60)
    for number, payload in enumerate(sent):
        speaker.transport.publish(harness.topic(f"s{number % 7}/open"), payload, qos=1)
    assert harness.until(lambda: len(outsider.messages) >= 60)
    assert harness.until(lambda: sum(len(member.messages) for member in members) >= 60)
    harness.settle()
    got = sorted(payload for member in members for payload in member.payloads)
    assert got == sent
    assert all(len(member.messages) >= 10 for member in members), "and they share the work"


def test_shared_subscription_after_a_member_left_or_died(harness: Harness) -> None:
    shared = f"$share/verifiers/{harness.topic('+/open')}"
    leaves, dies, stays = (harness.peer(shared, qos=1, relayed=True) for _ in range(3))
    speaker = harness.peer()
    leaves.transport.stop()
    harness.cut(dies)
    harness.settle()
    sent = numbered(30)
    for payload in sent:
        speaker.transport.publish(harness.topic("s/open"), payload, qos=1)
    assert harness.until(lambda: len(stays.messages) >= 30)
    harness.settle()
    assert stays.payloads == sent
    assert leaves.messages == []
    assert dies.messages == []


# ---- before, between and after connections ------------------------------------------------------


def test_publish_before_connected(harness: Harness) -> None:
    """(3) QoS 1 is delivered, QoS 0 is dropped and counted; neither hangs."""
    topic = harness.topic("early")
    listener = harness.peer(topic, qos=1)
    early = harness.peer(started=False)
    for payload in numbered(50):
        early.transport.publish(topic, payload, qos=1)
    early.transport.publish(topic, b"draft", qos=0)
    assert not early.transport.connected
    assert early.transport.dropped == 1
    early.start()
    assert harness.until(lambda: len(listener.messages) >= 50)
    harness.settle()
    assert first_of_each(listener.payloads) == numbered(50)


def test_connected_means_subscribed(harness: Harness) -> None:
    """Whoever answers to CONNECTED is heard: no message falls between connection and SUBACK."""
    topic = harness.topic("ready")
    speaker = harness.peer()
    for attempt in range(5):
        listener = harness.peer(topic)
        payload = b"%d" % attempt
        speaker.transport.publish(topic, payload)
        assert harness.until(lambda p=listener, b=payload: p.payloads == [b]), attempt
        assert listener.states == [CONNECTED]


def test_full_queue_is_an_error_that_names_it(harness: Harness) -> None:
    away = harness.peer(started=False, max_queued=10)
    topic = harness.topic("queue")
    for _ in range(10):
        away.transport.publish(topic, b"x", qos=1)
    with pytest.raises(TransportError, match="queue") as raised:
        away.transport.publish(topic, b"x", qos=1)
    assert raised.value.reason_code == 0x97
    listener = harness.peer(topic, qos=1)
    away.start()
    assert harness.until(lambda: len(listener.messages) == 10)
    away.transport.publish(topic, b"again", qos=1)
    assert harness.until(lambda: listener.payloads[-1] == b"again")


def test_too_large_is_a_local_error_and_the_link_stays_up(harness: Harness) -> None:
    """(17)"""
    topic = harness.topic("large")
    listener = harness.peer(topic, max_payload=2_000_000)
    speaker = harness.peer(max_payload=1_000)
    for qos in (0, 1):
        with pytest.raises(TransportError, match="1001 bytes") as raised:
            speaker.transport.publish(topic, b"x" * 1_001, qos=qos)
        assert raised.value.reason_code == 0x95
    speaker.transport.publish(topic, b"y" * 1_000)
    assert harness.until(lambda: listener.payloads == [b"y" * 1_000])
    assert speaker.transport.connected
    assert speaker.states == [CONNECTED]


def test_largest_payload_passes(harness: Harness) -> None:
    topic = harness.topic("large")
    listener, speaker = harness.peer(topic, qos=1), harness.peer()
    speaker.transport.publish(topic, b"z" * 1024 * 1024, qos=1)
    assert harness.until(lambda: [len(p) for p in listener.payloads] == [1024 * 1024])


@pytest.mark.parametrize("topic", ["", "a/+/b", "a/#", "x\0y"])
def test_illegal_topics_are_refused_before_anything_is_sent(harness: Harness, topic: str) -> None:
    peer = harness.peer()
    with pytest.raises(LocalProtocolError):
        peer.transport.publish(topic, b"x")
    harness.settle()
    assert peer.transport.connected
    assert peer.transport.messages_sent == 0


@pytest.mark.parametrize("topic_filter", ["", "a/#/b", "a+/b", "$share/g", "$share//x"])
def test_illegal_filters_are_refused(harness: Harness, topic_filter: str) -> None:
    peer = harness.peer()
    with pytest.raises(LocalProtocolError):
        peer.transport.subscribe(topic_filter)
    harness.settle()
    assert peer.transport.connected


def test_start_twice_and_stop_twice(harness: Harness) -> None:
    peer = harness.peer()
    with pytest.raises(LocalProtocolError):
        peer.start()
    peer.transport.stop()
    peer.transport.stop()
    assert not peer.transport.connected
    for qos in (0, 1):
        with pytest.raises(TransportError, match="stopped"):
            peer.transport.publish(harness.topic("x"), b"x", qos=qos)
    never = harness.peer(started=False)
    never.transport.stop()
    with pytest.raises(LocalProtocolError):
        never.start()


def test_no_callback_after_stop(harness: Harness) -> None:
    topic = harness.topic("after")
    peer, speaker = harness.peer(topic, relayed=True), harness.peer()
    peer.transport.stop()
    told = list(peer.events)
    speaker.transport.publish(topic, b"x", qos=1)
    harness.cut(peer)
    harness.settle()
    assert peer.messages == []
    assert peer.events == told


def test_stop_flushes_what_was_published(harness: Harness) -> None:
    topic = harness.topic("flush")
    listener, speaker = harness.peer(topic, qos=1), harness.peer()
    for payload in numbered(200):
        speaker.transport.publish(topic, payload, qos=1)
    speaker.transport.stop(5.0)
    assert harness.until(lambda: len(listener.messages) >= 200)
    assert first_of_each(listener.payloads) == numbered(200)


def test_cut_in_the_middle(harness: Harness) -> None:
    """(1) QoS 1 goes on after the reconnection, in order; QoS 0 is dropped meanwhile, counted."""
    topic = harness.topic("cut")
    listener = harness.peer(topic, qos=1)
    speaker = harness.peer(relayed=True)
    sent = numbered(300)
    for payload in sent[:100]:
        speaker.transport.publish(topic, payload, qos=1)
    harness.cut(speaker)
    assert harness.until(lambda: not speaker.transport.connected)
    for payload in sent[100:200]:
        speaker.transport.publish(topic, payload, qos=1)
    speaker.transport.publish(topic, b"stale", qos=0)
    assert speaker.transport.dropped >= 1
    harness.restore(speaker)
    assert harness.until(lambda: speaker.transport.connected)
    for payload in sent[200:]:
        speaker.transport.publish(topic, payload, qos=1)
    assert harness.until(lambda: listener.payloads[-1:] == sent[-1:])
    assert first_of_each(listener.payloads) == sent
    assert speaker.transport.reconnects == 1
    assert speaker.states == [CONNECTED, DISCONNECTED, CONNECTED]
    assert speaker.events[1].reason


def test_subscriptions_are_back_after_a_cut(harness: Harness) -> None:
    topic = harness.topic("back")
    listener, speaker = harness.peer(topic, relayed=True), harness.peer()
    listener.transport.subscribe(harness.topic("gone"))
    listener.transport.unsubscribe(harness.topic("gone"))
    harness.cut(listener)
    assert harness.until(lambda: not listener.transport.connected)
    harness.restore(listener)
    assert harness.until(lambda: listener.states[-2:] == [DISCONNECTED, CONNECTED])
    speaker.transport.publish(harness.topic("gone"), b"no")
    speaker.transport.publish(topic, b"yes")
    assert harness.until(lambda: listener.messages)
    harness.settle()
    assert listener.payloads == [b"yes"]


# ---- callbacks ----------------------------------------------------------------------------------


def test_callbacks_that_raise_are_counted_and_the_loop_lives(harness: Harness) -> None:
    """(6)"""
    topic = harness.topic("raise")
    peer = harness.peer(topic, started=False, relayed=True)
    speaker = harness.peer()
    heard: list[bytes] = []
    states: list[ConnectionState] = []

    def on_message(message: Message) -> None:
        heard.append(message.payload)
        raise KeyError("in a message callback")

    def on_event(event: object) -> None:
        states.append(event.state)  # type: ignore[attr-defined]
        raise ValueError("in an event callback")

    peer.transport.start(on_message, on_event)
    assert harness.until(lambda: peer.transport.connected)
    for payload in (b"1", b"2"):
        speaker.transport.publish(topic, payload, qos=1)
    assert harness.until(lambda: heard == [b"1", b"2"])
    harness.cut(peer)
    assert harness.until(lambda: states == [CONNECTED, DISCONNECTED])
    harness.restore(peer)
    assert harness.until(lambda: peer.transport.connected)
    speaker.transport.publish(topic, b"3")
    assert harness.until(lambda: heard == [b"1", b"2", b"3"])
    assert harness.until(lambda: peer.transport.callback_errors == 6)


def test_publish_subscribe_and_stop_inside_callbacks(harness: Harness) -> None:
    """(8) A callback may use its own transport."""
    ping, pong, end = (harness.topic(name) for name in ("ping", "pong", "end"))
    echo = harness.peer(ping, qos=1, started=False)

    def reply(message: Message) -> None:
        echo.transport.publish(pong, message.payload, qos=1)
        if message.payload == b"2":
            echo.transport.subscribe(end)
        if message.topic == end:
            echo.transport.stop()

    echo.reply = reply
    echo.start()
    speaker = harness.peer(pong, qos=1)
    assert harness.until(lambda: echo.transport.connected)
    for payload in (b"1", b"2"):
        speaker.transport.publish(ping, payload)
    assert harness.until(lambda: speaker.payloads == [b"1", b"2"])

    def ended() -> bool:
        speaker.transport.publish(end, b"end")
        return not echo.transport.connected

    assert harness.until(ended)
    assert echo.transport.callback_errors == 0


def test_second_client_with_the_same_id(harness: Harness) -> None:
    """(9) One of the two gives up with a clear reason; the other one keeps the connection.

    Real brokers never say why they close (Mosquitto 2.0.11, rumqttd 0.20): birth and will tell.
    """
    topic = harness.topic("status")
    will = Will(topic, b"offline", birth=b"online")
    name = f"twin-{harness.root}"
    twins = [harness.peer(client_id=name, will=will, started=False) for _ in range(2)]
    twins[0].start()
    assert harness.until(lambda: twins[0].transport.connected)
    twins[1].start()
    assert harness.until(lambda: any(FAILED in twin.states for twin in twins), 20)
    loser, winner = sorted(twins, key=lambda twin: FAILED not in twin.states)
    failure = loser.events[-1]
    assert failure.state is FAILED
    assert failure.reason_code == 0x8E
    assert name in failure.reason
    with pytest.raises(TransportError, match="another client"):
        loser.transport.publish(topic, b"x", qos=1)
    assert harness.until(lambda: winner.transport.connected)
    harness.settle()
    assert winner.transport.connected
    assert FAILED not in winner.states
    assert loser.transport.reconnects + winner.transport.reconnects <= 12


# ---- sockets and threads -----------------------------------------------------------------


def test_round_trip_is_far_below_a_delayed_acknowledgement(real_harness: RealHarness) -> None:
    """(20) Also where each ping is answered by several packets in a row."""
    ping, pong = real_harness.topic("ping"), real_harness.topic("pong")
    echo, speaker = real_harness.peer(ping), real_harness.peer(pong)

    def reply(message: Message) -> None:
        for _ in range(3):
            echo.transport.publish(pong, message.payload)

    echo.reply = reply
    arrived = threading.Semaphore(0)
    speaker.reply = lambda message: arrived.release()
    times = []
    for _ in range(60):
        begin = time.perf_counter()
        speaker.transport.publish(ping, b"x" * 40)
        for _ in range(3):
            assert arrived.acquire(timeout=5)
        times.append(time.perf_counter() - begin)
    assert statistics.median(times) < 0.010


def test_eight_publishers_and_a_replying_callback(real_harness: RealHarness) -> None:
    """(8) For two seconds at full speed: no deadlock, nothing of QoS 1 lost."""
    ask, answer = real_harness.topic("ask"), real_harness.topic("answer")
    echo = real_harness.peer(ask, qos=1, max_queued=100_000)

    def reply(message: Message) -> None:
        if message.payload:
            echo.transport.publish(answer, message.payload, qos=1)

    echo.reply = reply
    speaker = real_harness.peer(answer, qos=1, max_queued=200)
    sent: list[list[bytes]] = [[] for _ in range(8)]
    end = time.monotonic() + 2.0

    def publish(own: list[bytes], number: int) -> None:
        while time.monotonic() < end:
            payload = b"%d-%d" % (number, len(own))
            try:
                speaker.transport.publish(ask, payload, qos=1)
            except TransportError:  # the queue is full: go on when it has room
                time.sleep(0.002)
            else:
                own.append(payload)
                speaker.transport.publish(ask, b"", qos=0)

    threads = [
        threading.Thread(target=publish, args=(own, number)) for number, own in enumerate(sent)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    wanted = {payload for own in sent for payload in own}
    assert len(wanted) > 200
    assert wait_until(lambda: len(speaker.messages) >= len(wanted), 20)
    assert set(speaker.payloads) == wanted
    for number, own in enumerate(sent):
        mine = [p for p in first_of_each(speaker.payloads) if p.startswith(b"%d-" % number)]
        assert mine == own, "each thread's messages keep their order"


def test_keepalive_holds_while_the_caller_is_busy(real_harness: RealHarness) -> None:
    """(7) Nobody but the network thread is needed to keep a connection alive."""
    topic = real_harness.topic("busy")
    peer = real_harness.peer(topic, keepalive=1)
    time.sleep(2.5)  # a verification that takes two and a half keepalives
    assert peer.states == [CONNECTED]
    peer.transport.publish(topic, b"still here")
    assert wait_until(lambda: peer.payloads == [b"still here"])


@pytest.mark.parametrize("name", ["embedded", "mosquitto"])
def test_broker_restarted_and_agent_started_first(name: str, tmp_path: Path) -> None:
    """(4, 5) It waits for the broker, says so once, connects; and finds it again."""
    port = free_port()
    peers = []
    for client_id in ("one", "two"):
        settings = MqttSettings.from_url(
            f"mqtt://127.0.0.1:{port}", client_id, backoff_min=0.05, backoff_max=0.1
        )
        peer = Peer(MqttTransport(settings), client_id)
        peer.transport.subscribe("to/+")
        peers.append(peer.start())
    one, two = peers
    assert wait_until(lambda: one.events and two.events)
    time.sleep(0.5)  # several attempts
    assert one.states == [DISCONNECTED]
    assert "refused" in one.events[0].reason
    try:
        for attempt in range(2):
            broker = start_broker(name, tmp_path, port)
            assert wait_until(lambda: one.transport.connected and two.transport.connected)
            one.transport.publish("to/two", b"%d" % attempt)
            assert wait_until(lambda: two.payloads[-1:] == [b"%d" % attempt])  # noqa: B023
            broker.stop()
            assert wait_until(lambda: not one.transport.connected)
        assert wait_until(lambda: one.states.count(DISCONNECTED) == 3)
        assert one.states == [DISCONNECTED, CONNECTED] * 2 + [DISCONNECTED]
        assert one.transport.reconnects == 1
    finally:
        broker.stop()
        begin = time.monotonic()
        for peer in peers:
            peer.transport.stop(2.0)
        assert time.monotonic() - begin < 2.0, "without a broker there is nothing to wait for"
