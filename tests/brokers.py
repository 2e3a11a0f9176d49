"""Brokers for tests: Mosquitto and the embedded one on free ports, a relay to cut connections,
and one small harness over which the transport contract runs on every broker, in memory or real.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.clock import VirtualClock
from broker.embedded import EmbeddedBroker
from broker.memory import InMemoryBroker, InMemoryTransport
from broker.mqtt import MqttSettings, MqttTransport
from broker.transport import ConnectionEvent, ConnectionState, Message, Transport, Will

MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def require(service: str, present: bool) -> None:
    """Skip with the service's name, or fail where CI promises to have everything."""
    if not present:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{service} is not installed here, and CI must have it")
        pytest.skip(f"{service} is not installed")


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], object], timeout: float = 10.0) -> bool:
    """Whether ``condition`` came true in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
    return True


class MosquittoBroker:
    """One Mosquitto; ``lines`` are added to a configuration that listens on ``port``."""

    def __init__(
        self, folder: Path, lines: str = "", *, port: int = 0, config: str | None = None
    ) -> None:
        require("mosquitto", MOSQUITTO is not None)
        self.port = port or free_port()
        self.url = f"mqtt://127.0.0.1:{self.port}"
        self._folder = folder
        self._config = folder / f"mosquitto-{self.port}.conf"
        self._log = folder / f"mosquitto-{self.port}.log"
        user = "user root\n" if os.geteuid() == 0 else ""
        self._config.write_text(
            config
            or f"listener {self.port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n"
            f"{user}{lines}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> MosquittoBroker:
        assert MOSQUITTO is not None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [MOSQUITTO, "-c", str(self._config)], stdout=log, stderr=log, cwd=self._folder
            )
        ready = wait_until(lambda: self._listens() or not self.alive, 10)
        assert ready, "mosquitto does not listen"
        assert self.alive, f"mosquitto did not start: {self._log.read_text()[-800:]}"
        return self

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
            self._process = None

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def __enter__(self) -> MosquittoBroker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class Relay:
    """A TCP relay in front of a broker, to cut and to freeze connections."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._frozen: list[socket.socket] = []
        self.open = True  # whether new connections are let through
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self.open:
                near.close()
                continue
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                near.close()
                continue
            self.accepted += 1
            for end in (near, far):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((near, far))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        with self._lock:
            if sink in self._frozen or source in self._frozen:
                return
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End every connection that runs through here, on both sides."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def half_open(self) -> None:
        """The client's side ends; the broker's side stays open, as after a change of network."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            self._frozen.extend(far for _, far in pairs)
        for near, _ in pairs:
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()
        with self._lock:
            for end in self._frozen:
                end.close()


class Peer:
    """A transport with everything that it was told."""

    def __init__(self, transport: Transport, client_id: str) -> None:
        self.transport = transport
        self.client_id = client_id
        self.messages: list[Message] = []
        self.events: list[ConnectionEvent] = []
        self.reply: Callable[[Message], None] | None = None

    def start(self) -> Peer:
        self.transport.start(self._on_message, self.events.append)
        return self

    def _on_message(self, message: Message) -> None:
        self.messages.append(message)
        if self.reply is not None:
            self.reply(message)

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]

    @property
    def states(self) -> list[ConnectionState]:
        return [event.state for event in self.events]


class Harness:
    """What a contract test needs of a broker. ``lacks`` names what this broker cannot do."""

    name = ""
    real = True
    lacks: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.root = f"t{secrets.token_hex(4)}"
        self._peers: list[Peer] = []

    def peer(
        self,
        *filters: str,
        qos: int = 0,
        client_id: str = "",
        will: Will | None = None,
        relayed: bool = False,
        started: bool = True,
        **settings: Any,
    ) -> Peer:
        """A peer that subscribes to ``filters``; unless told otherwise started, and connected."""
        client_id = client_id or f"c-{secrets.token_hex(4)}"
        peer = Peer(self._transport(client_id, will, relayed, settings), client_id)
        self._peers.append(peer)
        for topic_filter in filters:
            peer.transport.subscribe(topic_filter, qos=qos)
        if started:
            peer.start()
            assert self.until(lambda: peer.transport.connected), f"{peer.events}"
        return peer

    def topic(self, name: str) -> str:
        """A topic that no other test uses."""
        return f"{self.root}/{name}"

    def until(self, condition: Callable[[], object], timeout: float = 10.0) -> bool:
        """Let things happen until ``condition`` holds; False when the time is over."""
        raise AssertionError

    def settle(self) -> None:
        """Let everything arrive that is still under way."""
        raise AssertionError

    def cut(self, peer: Peer) -> None:
        """End the connection of a relayed peer; it may not come back before ``restore``."""
        raise AssertionError

    def restore(self, peer: Peer) -> None:
        raise AssertionError

    def half_open(self, peer: Peer) -> None:
        """The peer loses its connection and comes back before the broker noticed."""
        raise AssertionError

    def close(self) -> None:
        for peer in self._peers:
            peer.transport.stop(0.5)

    def _transport(
        self, client_id: str, will: Will | None, relayed: bool, settings: dict[str, Any]
    ) -> Transport:
        raise AssertionError


class MemoryHarness(Harness):
    name = "memory"
    real = False

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.broker = InMemoryBroker(self.clock, seed=7, delay=(0.0005, 0.002))

    def _transport(
        self, client_id: str, will: Will | None, relayed: bool, settings: dict[str, Any]
    ) -> Transport:
        return InMemoryTransport(self.broker, client_id, will=will, **settings)

    def until(self, condition: Callable[[], object], timeout: float = 10.0) -> bool:
        end = self.clock.now() + timeout
        while not condition():
            due = self.broker.next_delivery()
            if due is None or due > end:
                return False
            self.clock.advance_to(due)
            self.broker.deliver_due(self.clock.now())
        return True

    def settle(self) -> None:
        self.until(lambda: False, 5.0)

    def cut(self, peer: Peer) -> None:
        self.broker.cut(peer.client_id)

    def restore(self, peer: Peer) -> None:
        self.broker.restore(peer.client_id)

    def half_open(self, peer: Peer) -> None:
        self.broker.cut(peer.client_id, will_delay=1.0)
        self.broker.restore(peer.client_id)


class RealHarness(Harness):
    """Over a broker that listens on a port; relayed peers go through a relay of their own."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self.relays: dict[str, Relay] = {}

    def _transport(
        self, client_id: str, will: Will | None, relayed: bool, settings: dict[str, Any]
    ) -> Transport:
        url = self.url
        if relayed:
            relay = self.relays[client_id] = Relay(self.port)
            url = f"mqtt://127.0.0.1:{relay.port}"
        options: dict[str, Any] = {"backoff_min": 0.05, "backoff_max": 0.2, **settings}
        return MqttTransport(MqttSettings.from_url(url, client_id, will=will, **options))

    def until(self, condition: Callable[[], object], timeout: float = 10.0) -> bool:
        return wait_until(condition, timeout)

    def settle(self) -> None:
        time.sleep(0.15)

    def cut(self, peer: Peer) -> None:
        self.relays[peer.client_id].open = False
        self.relays[peer.client_id].cut()

    def restore(self, peer: Peer) -> None:
        self.relays[peer.client_id].open = True

    def half_open(self, peer: Peer) -> None:
        self.relays[peer.client_id].half_open()

    def close(self) -> None:
        super().close()
        for relay in self.relays.values():
            relay.close()


class EmbeddedHarness(RealHarness):
    name = "embedded"
    lacks = frozenset({"will after takeover"})


class MosquittoHarness(RealHarness):
    name = "mosquitto"


def start_broker(name: str, folder: Path, port: int = 0) -> MosquittoBroker | EmbeddedBroker:
    """A real broker of one's own, on ``port`` or a free one."""
    if name == "mosquitto":
        return MosquittoBroker(folder, port=port).start()
    require("iotcore", importlib.util.find_spec("iotcore") is not None)
    return EmbeddedBroker(port=port).start()


@pytest.fixture(scope="session")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MosquittoBroker]:
    """A Mosquitto that all tests share; use topics and client ids of your own."""
    # Tests that publish at full speed would otherwise overrun what it keeps for a slow subscriber.
    lines = "max_queued_messages 100000"
    with MosquittoBroker(tmp_path_factory.mktemp("mosquitto"), lines) as broker:
        yield broker


@pytest.fixture(scope="session")
def embedded() -> Iterator[EmbeddedBroker]:
    """An embedded broker that all tests share."""
    require("iotcore", importlib.util.find_spec("iotcore") is not None)
    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture(params=["memory", "embedded", "mosquitto"])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """Every implementation of the transport in turn."""
    if request.param == "memory":
        made: Harness = MemoryHarness()
    elif request.param == "embedded":
        made = EmbeddedHarness(request.getfixturevalue("embedded").url)
    else:
        made = MosquittoHarness(request.getfixturevalue("mosquitto").url)
    yield made
    made.close()


@pytest.fixture(params=["embedded", "mosquitto"])
def real_harness(request: pytest.FixtureRequest) -> Iterator[RealHarness]:
    """Both real brokers in turn, for what needs sockets or threads."""
    broker = request.getfixturevalue(request.param)
    made = (EmbeddedHarness if request.param == "embedded" else MosquittoHarness)(broker.url)
    yield made
    made.close()
