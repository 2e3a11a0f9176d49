"""How connections through the relay end, and what it does when something is wrong."""

from __future__ import annotations

import gc
import logging
import os
import socket
import statistics
import struct
import threading
from collections.abc import Iterator

import pytest

from broker.errors import LocalProtocolError, TransportError
from edge_agent.bench.link import Cut, Link
from edge_agent.bench.relay import MAX_CONNECTIONS, EmulatedLink
from edge_agent.bench.relay_stats import MAX_LOG
from tests.brokers import free_port, wait_until
from tests.edge_agent.echo import MESSAGE, Dial, Echo, ended, receive, round_trips
from tests.edge_agent.test_mqtt_frames import CONNECT, publish


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


def test_the_end_of_either_side_reaches_the_other(dial: Dial) -> None:
    server = Echo(silent=True)
    with EmulatedLink("127.0.0.1", server.port, Link(delay_s=0.02)) as relay:
        first = dial(relay, greeting=b"")
        assert wait_until(lambda: len(server.connections) == 1)
        server.connections[0].close()
        assert ended(first)
        second = dial(relay, greeting=b"")
        assert wait_until(lambda: len(server.connections) == 2)
        second.sendall(CONNECT + MESSAGE)
        second.close()
        server.connections[1].settimeout(10)
        assert receive(server.connections[1], 1_000) == CONNECT + MESSAGE
        first.close()
        server.connections[1].close()
        assert wait_until(lambda: not relay._crossings)
        assert relay.stats().errors == 0
    server.close()


def test_in_another_network_connections_end_and_new_ones_meet_its_link(
    echo: Echo, dial: Dial
) -> None:
    with EmulatedLink("127.0.0.1", echo.port, Link()) as relay:
        old = dial(relay)
        assert statistics.median(round_trips(old, MESSAGE, 5)) < 0.15
        relay.become(Link(delay_s=0.1))
        assert ended(old)
        assert min(round_trips(dial(relay), MESSAGE, 3)) >= 0.2


def test_a_peer_that_says_its_end_and_then_resets_is_no_error_of_the_relay(dial: Dial) -> None:
    """As a broker does that is killed while the agent's last bytes are under way."""
    server = Echo(silent=True)
    with EmulatedLink("127.0.0.1", server.port, Link(delay_s=0.02)) as relay:
        client = dial(relay, greeting=b"")
        assert wait_until(lambda: len(server.connections) == 1)
        peer = server.connections[0]
        peer.shutdown(socket.SHUT_WR)
        assert ended(client)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(peer.detach())
        client.close()
        assert wait_until(lambda: not relay._crossings)
        assert relay.stats().errors == 0
    server.close()


def test_a_cut_ends_both_sides_and_what_was_under_way(echo: Echo, dial: Dial) -> None:
    with EmulatedLink("127.0.0.1", echo.port, Link(delay_s=0.4)) as relay:
        client = dial(relay)
        client.sendall(MESSAGE * 3)
        assert wait_until(lambda: relay.stats().messages_up == 3)
        relay.cut()
        assert ended(client)
        assert wait_until(lambda: echo.ended == 1)
        stats = relay.stats()
        assert (stats.cuts, stats.lost, stats.refused) == (1, 3, 0)
        assert relay.passages_up() == []
        again = dial(relay)  # at once, and nothing of the old connection comes
        again.sendall(MESSAGE)
        assert receive(again, len(MESSAGE)) == MESSAGE


def test_a_link_that_is_down_turns_connections_away(echo: Echo, dial: Dial) -> None:
    with EmulatedLink("127.0.0.1", echo.port, Link()) as relay:
        relay.cut(for_s=1.0)
        assert wait_until(lambda: relay.stats().cuts == 1)
        assert ended(dial(relay, greeting=b""))
        assert relay.stats().refused == 1
        assert wait_until(lambda: not relay._model.is_cut(relay.clock.now()))
        assert statistics.median(round_trips(dial(relay), MESSAGE, 3)) < 1.0


def test_cuts_come_as_planned(echo: Echo, dial: Dial) -> None:
    link = Link(cuts=(Cut(0.0), Cut(30.0), Cut(30.3), Cut(9_000.0)))
    with EmulatedLink("127.0.0.1", echo.port, link, offset_s=29.8) as relay:
        assert ended(dial(relay, greeting=b""))
        assert relay.stats().cuts >= 1
        assert wait_until(lambda: relay.stats().cuts == 2)
        assert relay.clock.now() - relay._model._start >= 30.3 - 1e-3


def test_without_a_broker_the_connection_ends_and_later_ones_may_work(dial: Dial) -> None:
    port = free_port()
    with EmulatedLink("127.0.0.1", port, Link()) as relay:
        assert ended(dial(relay, greeting=b""))
        assert wait_until(lambda: relay.stats().refused == 1)
        assert not relay._crossings
        server = Echo(port=port)
        assert round_trips(dial(relay), MESSAGE, 1)
        server.close()


def test_connections_have_a_limit(echo: Echo, dial: Dial) -> None:
    with EmulatedLink("127.0.0.1", echo.port, Link()) as relay:
        clients = [dial(relay) for _ in range(MAX_CONNECTIONS)]
        assert ended(dial(relay, greeting=b""))
        assert relay.stats().refused == 1
        clients[0].close()
        assert wait_until(lambda: len(relay._crossings) < MAX_CONNECTIONS)
        assert round_trips(dial(relay), MESSAGE, 1)


def test_neither_thread_nor_descriptor_is_left(echo: Echo) -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    relay = EmulatedLink("localhost", echo.port, Link(delay_s=5.0)).start()
    clients = [socket.create_connection(("127.0.0.1", relay.port)) for _ in range(3)]
    for client in clients:
        client.sendall(CONNECT + MESSAGE)
    assert wait_until(lambda: relay.stats().messages_up == 3)
    assert wait_until(lambda: relay.stats().connections == 3)
    relay.close()
    relay.close()
    assert not relay._thread.is_alive()
    relay.cut()  # nothing happens any more
    for client in clients:
        client.settimeout(10)
        assert ended(client)
        client.close()
    assert wait_until(lambda: echo.ended == 3)
    gc.collect()
    if before is not None:
        # The kernel numbers anew, so only the count tells.
        assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= len(before))
    assert relay.stats().lost == 3


def test_a_relay_starts_once(echo: Echo) -> None:
    relay = EmulatedLink("127.0.0.1", echo.port, Link())
    relay.close()  # never started: nothing to close
    with relay, pytest.raises(LocalProtocolError):
        relay.start()
    with pytest.raises(LocalProtocolError):
        relay.start()


@pytest.mark.parametrize(
    "what", ["asyncio.SelectorEventLoop.create_server", "edge_agent.bench.relay.fine_loop"]
)
def test_no_port_or_descriptor_to_listen_with(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = EmulatedLink("127.0.0.1", 1, Link())

    def none_left(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(what, none_left)
    with pytest.raises(TransportError, match="cannot listen"):
        relay.start()
    relay.close()


def test_a_fault_in_the_relay_is_counted_and_does_not_end_it(
    echo: Echo, dial: Dial, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with EmulatedLink("127.0.0.1", echo.port, Link()) as relay:
        with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
            broken.setattr("edge_agent.bench.mqtt_frames.MqttFrames.feed", lambda *_: 1 / 0)
            client = dial(relay, greeting=b"")
            client.sendall(CONNECT)
            assert ended(client)
            assert wait_until(lambda: relay.stats().errors >= 1)
        assert round_trips(dial(relay), MESSAGE, 1)


def test_logs_are_bounded_and_say_what_they_dropped(echo: Echo, dial: Dial) -> None:
    many = MAX_LOG + 500
    with EmulatedLink("127.0.0.1", echo.port, Link()) as relay:
        client = dial(relay)
        small = publish("a", b"")
        reader = threading.Thread(target=receive, args=(client, many * len(small)), daemon=True)
        reader.start()
        client.sendall(small * many)
        reader.join(30)
        assert not reader.is_alive()
        assert len(relay.passages_up()) == len(relay.passages_down()) == MAX_LOG
        assert relay.stats().not_logged == 1_000
        assert relay.stats().messages_up == many
