"""The relay on real sockets, with an echo server behind it: times, and what is carried.

Times are compared with generous bounds, and only medians of them: the machine does other things.
"""

from __future__ import annotations

import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator

import pytest

from broker.codec import encode
from broker.messages import DraftBatch
from broker.topics import up_topic
from edge_agent.bench.crossing import MAX_QUEUED_BYTES
from edge_agent.bench.link import Link
from edge_agent.bench.relay import EmulatedLink
from tests.brokers import wait_until
from tests.edge_agent.echo import MESSAGE, Dial, Echo, receive, round_trips
from tests.edge_agent.test_mqtt_frames import CONNECT, PINGREQ, publish

#: Seconds that a busy machine may add to a median.
SLACK = 0.05


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def dial() -> Iterator[Dial]:
    dialler = Dial()
    yield dialler
    dialler.close()


# ---- times ----------------------------------------------------------------------------------


def test_a_round_trip_takes_the_delay_twice(echo: Echo, dial: Dial) -> None:
    with EmulatedLink("127.0.0.1", echo.port, Link(delay_s=0.02)) as relay:
        taken = statistics.median(round_trips(dial(relay), MESSAGE, 15))
    assert 0.04 <= taken < 0.04 + SLACK


def test_no_emulation_adds_next_to_nothing(echo: Echo, dial: Dial) -> None:
    with EmulatedLink("127.0.0.1", echo.port, Link()) as relay:
        taken = statistics.median(round_trips(dial(relay), MESSAGE, 50))
        assert taken < 0.02
        assert relay.stats().late_p99_s == 0.0


def test_timers_are_far_better_than_a_millisecond_on_a_machine_at_rest(
    echo: Echo, dial: Dial
) -> None:
    """On a busy one still of that order; epoll alone would be late by up to 1 ms at rest."""
    with EmulatedLink("127.0.0.1", echo.port, Link(delay_s=0.005)) as relay:
        round_trips(dial(relay), MESSAGE, 60)
        stats = relay.stats()
    assert 0.0 < stats.late_median_s < 0.01
    assert stats.late_median_s <= stats.late_p99_s


def test_each_message_costs_start_up_and_occupies_the_uplink(echo: Echo, dial: Dial) -> None:
    """Ten messages in one segment are ten messages; the way back costs nothing."""
    with EmulatedLink("127.0.0.1", echo.port, Link(startup_s=0.02)) as relay:
        client = dial(relay)
        begin = time.monotonic()
        client.sendall(MESSAGE * 10)
        assert receive(client, 10 * len(MESSAGE)) == MESSAGE * 10
        taken = time.monotonic() - begin
        crossed, stats = relay.passages_up(), relay.stats()
    assert 0.2 <= taken < 0.2 + 10 * SLACK
    assert len(crossed) == stats.messages_up == stats.messages_down == 10
    assert stats.busy_up_s == pytest.approx(0.2)
    assert stats.busy_down_s == 0.0
    for index, passage in enumerate(crossed):
        assert passage.sent == crossed[0].sent
        assert passage.departed == pytest.approx(crossed[0].sent + 0.02 * (index + 1))
        assert passage.arrived == passage.departed
        assert passage.size == len(MESSAGE)


def test_a_message_in_many_segments_costs_one_start_up(echo: Echo, dial: Dial) -> None:
    with EmulatedLink("127.0.0.1", echo.port, Link(startup_s=0.02)) as relay:
        client = dial(relay)
        for at in range(0, len(MESSAGE), 10):
            client.sendall(MESSAGE[at : at + 10])
        assert receive(client, len(MESSAGE)) == MESSAGE
        large = publish("a/b", random.Random(1).randbytes(400_000))
        client.sendall(large)
        assert receive(client, len(large)) == large
        crossed, stats = relay.passages_up(), relay.stats()
    assert stats.messages_up == 2
    assert stats.busy_up_s == pytest.approx(0.04)
    assert [passage.size for passage in crossed] == [len(MESSAGE), len(large)]


def test_keepalives_and_acknowledgements_cost_their_bytes_only(echo: Echo, dial: Dial) -> None:
    puback = b"\x40\x02\x00\x01"
    with EmulatedLink("127.0.0.1", echo.port, Link(up_bps=1e6, startup_s=60.0)) as relay:
        client = dial(relay)
        client.sendall((PINGREQ + puback) * 20)
        assert receive(client, 120) == (PINGREQ + puback) * 20
        stats = relay.stats()
    assert stats.messages_up == 0
    assert stats.bytes_up == len(CONNECT) + 120
    assert stats.busy_up_s == pytest.approx(stats.bytes_up * 8 / 1e6)


def test_rates_up_and_down_are_apart(echo: Echo, dial: Dial) -> None:
    body = publish("a/b", bytes(40_000))
    seconds = len(body) * 8 / 1e6
    for link, up, down in (
        (Link(up_bps=2e6), seconds / 2, 0.0),
        (Link(down_bps=2e6), 0.0, seconds / 2),
        (Link(up_bps=4e6, down_bps=2e6), seconds / 4, seconds / 2),
    ):
        with EmulatedLink("127.0.0.1", echo.port, link) as relay:
            taken = min(round_trips(dial(relay), body, 2))
            busy = relay.stats()
        # By pieces the way back overlaps the way there; whole it cannot be faster than either.
        assert max(up, down) * 0.99 <= taken < up + down + 4 * SLACK
        assert busy.busy_up_s == pytest.approx(2 * up, rel=0.01)
        assert busy.busy_down_s == pytest.approx(2 * down, rel=0.01)


def test_passages_are_told_in_the_clock_that_was_given(echo: Echo, dial: Dial) -> None:
    class Shifted:
        def now(self) -> float:
            return time.monotonic() - 1e6

    clock = Shifted()
    with EmulatedLink("127.0.0.1", echo.port, Link(delay_s=0.02), clock=clock) as relay:
        begin = clock.now()
        taken = round_trips(dial(relay), MESSAGE, 3)
        (passage, *_), (back, *_) = relay.passages_up(), relay.passages_down()
    assert begin <= passage.sent <= passage.arrived <= back.sent <= back.arrived <= clock.now()
    assert passage.arrived - passage.sent == pytest.approx(0.02)
    assert min(taken) >= 0.04


# ---- what is carried -------------------------------------------------------------------------


def test_nothing_is_lost_changed_or_reordered_by_jitter_and_stalls(echo: Echo, dial: Dial) -> None:
    draw = random.Random(5)
    messages = [publish("a/b", draw.randbytes(draw.randrange(200))) for _ in range(300)]
    link = Link(5e6, 5e6, 0.002, 0.0002, 0.01, stall_probability=0.02, stall_s=0.05)
    with EmulatedLink("127.0.0.1", echo.port, link, seed=11) as relay:
        client = dial(relay)
        for message in messages:
            client.sendall(message)
        expected = b"".join(messages)
        assert receive(client, len(expected)) == expected
        stats, crossed = relay.stats(), relay.passages_up()
    assert stats.messages_up == stats.messages_down == len(crossed) == 300
    assert 0 < stats.stalls < 60
    assert (stats.lost, stats.errors, stats.opaque) == (0, 0, 0)
    assert [p.arrived for p in crossed] == sorted(p.arrived for p in crossed)
    assert [p.size for p in crossed] == [len(message) for message in messages]


def test_what_is_no_mqtt_goes_through_unchanged(echo: Echo, dial: Dial) -> None:
    with EmulatedLink("127.0.0.1", echo.port, Link(startup_s=0.01)) as relay:
        client = dial(relay, greeting=b"")
        for _ in range(3):
            client.sendall(b"\x16\x03\x01" + MESSAGE)
            assert receive(client, 3 + len(MESSAGE)) == b"\x16\x03\x01" + MESSAGE
        stats = relay.stats()
    assert stats.opaque == 2  # one for each direction
    assert stats.messages_up == 3
    assert stats.busy_up_s == pytest.approx(0.03)


def test_full_probabilities_are_charged_and_not_sent(echo: Echo, dial: Dial) -> None:
    """(the authors' wire) Three tokens take as long as three distributions; the bytes are ours."""
    payload = encode(DraftBatch(1, 0, 0, (7, 8, 9)))
    message = publish(up_topic("d", "s", "v"), payload)
    with EmulatedLink(
        "127.0.0.1", echo.port, Link(up_bps=80e6), pad_bytes_per_token=290_000
    ) as relay:
        client = dial(relay)
        taken = round_trips(client, message, 2)
        client.sendall(MESSAGE)
        receive(client, len(MESSAGE))
        stats, crossed = relay.stats(), relay.passages_up()
    assert min(taken) >= 3 * 290_000 * 8 / 80e6
    assert stats.padding_bytes == 6 * 290_000
    assert stats.bytes_up == stats.bytes_down == len(CONNECT) + 2 * len(message) + len(MESSAGE)
    assert [p.size for p in crossed] == [len(message) + 870_000] * 2 + [len(MESSAGE)]


def test_a_sender_is_held_back_when_too_much_is_under_way(dial: Dial) -> None:
    """32 MB towards a server that does not read: the relay keeps about a megabyte of them."""
    server = Echo(silent=True)
    total = 32_000_000
    data = random.Random(2).randbytes(total - 2)
    with EmulatedLink("127.0.0.1", server.port, Link()) as relay:
        client = dial(relay, greeting=b"")

        def send() -> None:
            client.sendall(b"\x16\x03" + data)
            client.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        assert wait_until(lambda: relay.stats().held_back >= 1)
        stats = relay.stats()
        # The kernel's buffers hold some megabytes of what the relay has passed on.
        assert stats.bytes_up < total - MAX_QUEUED_BYTES
        assert sender.is_alive()
        server.connections[0].settimeout(10)
        assert receive(server.connections[0], total + 1) == b"\x16\x03" + data
        sender.join(10)
        assert not sender.is_alive()
        assert relay.stats().errors == 0
    server.close()


def test_a_slow_link_holds_back_too(echo: Echo, dial: Dial) -> None:
    with EmulatedLink("127.0.0.1", echo.port, Link(up_bps=1e6)) as relay:
        client = dial(relay)
        client.setblocking(False)
        handed, give_up = 0, time.monotonic() + 10
        while relay.stats().held_back == 0 and time.monotonic() < give_up:
            try:
                handed += client.send(MESSAGE * 1_000)
            except BlockingIOError:
                time.sleep(0.001)
        stats = relay.stats()
    assert stats.held_back >= 1
    # Pieces of 60 bytes meet the limit on their number first; one read comes on top.
    assert stats.bytes_up <= MAX_QUEUED_BYTES + 262_144 + 70_000
    assert stats.messages_up < stats.bytes_up / len(MESSAGE) + 1


def test_half_a_connection_is_one(echo: Echo, dial: Dial) -> None:
    with EmulatedLink("127.0.0.1", echo.port, Link(delay_s=0.02)) as relay:
        client = dial(relay)
        client.sendall(MESSAGE + b"\x30\x7f\x00")  # ends within a packet
        client.shutdown(socket.SHUT_WR)
        assert receive(client, 10_000) == MESSAGE + b"\x30\x7f\x00"
        assert wait_until(lambda: echo.ended == 1)
        assert wait_until(lambda: not relay._crossings)
