"""Many MQTT connections on one thread: for load tools, where a thread per device would not do.

Each ``FleetTransport`` is a ``Transport`` like ``MqttTransport``, with a connection, a client id, a
will and subscriptions of its own, and the same rules for reconnecting, queueing and saying goodbye
(it is the same driver). What differs is who turns the crank: ``FleetNetwork.poll``, on the caller's
thread, which is also where all callbacks come from. Only the TCP and TLS handshakes, which block,
run on a few threads of the network; so at most that many connections are being opened at a time,
and a broker's backlog does not overflow.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import queue
import random
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from typing import Any

from broker.errors import LocalProtocolError
from broker.mqtt import PahoLink
from broker.mqtt_driver import SESSION_TAKEN_OVER, MqttDriver, _reason
from broker.mqtt_link import Listener, Loss
from broker.mqtt_settings import MqttSettings
from broker.transport import ConnectionState, OnEvent, OnMessage

log = logging.getLogger(__name__)

#: Seconds between two looks at a share of the connections (keepalive, handshakes, farewells).
_SWEEP_S = 0.05
#: Looks in which every connection has had its turn: once a second.
_SWEEPS = 20
#: Handshakes at a time.
CONNECTORS = 2
#: Descriptors that one connection takes, and those of a network beside them.
FILES_PER_DEVICE, FILES_BESIDE = 1, 16


class FleetLink(PahoLink):
    """A paho connection without a selector of its own."""

    def __init__(
        self, settings: MqttSettings, tls: ssl.SSLContext | None, listener: Listener, mark: str
    ) -> None:
        super().__init__(settings, tls, listener, mark)
        self._selector.close()
        # One that takes no descriptor: it is never waited with.
        self._selector = selectors.SelectSelector()  # type: ignore[assignment]

    @property
    def socket(self) -> Any:
        """What to wait for; None before ``open``."""
        return self._socket


class FleetTransport(MqttDriver):
    """One device's connection; made by ``FleetNetwork.transport``. Used from its thread alone."""

    def __init__(
        self, network: FleetNetwork, settings: MqttSettings, tls: ssl.SSLContext | None
    ) -> None:
        def make_link(listener: Listener, mark: str) -> FleetLink:
            return FleetLink(settings, tls, listener, mark)

        self._network = network
        super().__init__(settings, make_link)
        self._close_pipe()  # nobody else's thread has to be woken
        self.gone = False  # stopped, or given up for good
        self.opening = False
        self.watched: Any = None  # its socket in the network's selector
        self.wants_write = False
        self._attempt = 0
        self._patience = math.inf
        self._started = False
        self._jitter = random.Random(settings.client_id)  # noqa: S311 (spreads reconnects)

    # -- the port -------------------------------------------------------------------------------

    def start(self, on_message: OnMessage, on_event: OnEvent) -> None:
        """See the port; the callbacks come from within ``FleetNetwork.poll``."""
        if self._started or self._stop_at is not None:
            raise LocalProtocolError("a transport starts only once")
        self._started = True
        self._on_message = on_message
        self._on_event = on_event
        self._network.connect_at(self, 0.0)

    def stop(self, timeout: float = 2.0) -> None:
        """Begin to say goodbye and return: it goes on in ``FleetNetwork.poll`` until ``gone``."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + timeout
        self._ended = self._ended or "the transport was stopped: make another one"
        self._stopped.set()
        if self._link is None and not self.opening:
            self.gone = True
        self._wake()

    def heard(self, topic: str, payload: bytes, retain: bool, mark: str | None) -> None:
        """See Listener; after ``stop`` nobody is called any more."""
        if self._stop_at is None:
            super().heard(topic, payload, retain, mark)

    def _wake(self) -> None:
        self._network.touch(self)

    # -- the network ----------------------------------------------------------------------------

    def new_link(self) -> FleetLink:
        """A fresh connection, not opened yet."""
        self._link_filters, self._link_version = {}, -1
        self._birth_due = self._farewell_said = False
        self._up_since: float | None = None
        link = self._make_link(self, self._rivals.new_link(self._taken_over))
        assert isinstance(link, FleetLink)
        return link

    def opened(self, link: FleetLink, error: Exception | None) -> None:
        """The handshakes are over, one way or the other."""
        self.opening = False
        if error is None and self.gone:
            link.close()
            return
        self._link = link
        self._patience = time.monotonic() + self._settings.connect_timeout
        if error is not None:
            self._end_link(link, _loss_of(error))
            return
        self._network.watch(self, link.socket)
        self.step(time.monotonic())

    def ready(self, readable: bool, now: float) -> None:
        """The socket is readable, or writable again."""
        link = self._link
        if not isinstance(link, FleetLink):
            return
        if readable:
            try:
                link.read()
            except Exception as error:  # noqa: BLE001 (whatever a broker sends, the loop lives)
                link.loss = _loss_of(error)
        self.step(now)

    def step(self, now: float) -> None:
        """Do what can be done now: subscribe, send, keep alive, say goodbye, notice a loss."""
        link = self._link
        self._network.settled(self)
        if not isinstance(link, FleetLink):
            return
        try:
            loss = self._advance(link, now)
        except Exception as error:  # noqa: BLE001 (as above)
            loss = _loss_of(error)
        if loss is not None:
            self._end_link(link, loss)
        elif link.blocked != self.wants_write:
            self._network.want_write(self, link.blocked)

    def _advance(self, link: FleetLink, now: float) -> Loss | None:
        if link.loss is None:
            if self._stop_at is not None and self._goodbye(link, now, self._stop_at):
                return Loss("stopped")
            if not self._up and now >= self._patience:
                return Loss("the broker does not answer the MQTT handshake", passing=True)
        self._move(link)
        return link.loss

    def _end_link(self, link: FleetLink, loss: Loss) -> None:
        """The connection is over: what is kept goes back into the queue, and what comes next."""
        self._loss = loss
        was_up, self._up = self._up, False
        self._link = None
        self._network.unwatch(self)
        link.close()
        self._drop(self._outbox.connection_lost())
        self._taken_over = loss.code == SESSION_TAKEN_OVER and not loss.fatal
        if self._taken_over and self._rivals.taken_over(time.monotonic()):
            loss = self._loss = self._rival_loss()
        if self._stopped.is_set():
            self.gone = True
        elif loss.fatal:
            self._ended = loss.reason
            self.gone = True
            self._tell(ConnectionState.FAILED, loss)
        else:
            self._tell_outage(loss)
            now, limits = time.monotonic(), self._settings
            if was_up and self._up_since is not None:
                self._attempt *= now - self._up_since < limits.stable_after
            pause = min(limits.backoff_max, limits.backoff_min * 2.0**self._attempt)
            self._attempt = min(self._attempt + 1, 30)
            # Jitter: a fleet that lost its broker together must not return in one wave.
            self._network.connect_at(self, now + pause * self._jitter.uniform(0.5, 1.0))


class FleetNetwork:
    """See the module. One thread at a time; ``close`` it."""

    def __init__(self, connectors: int = CONNECTORS) -> None:
        self._selector = selectors.DefaultSelector()
        self._transports: list[FleetTransport] = []
        self._touched: dict[FleetTransport, None] = {}
        self._due: list[tuple[float, int, FleetTransport]] = []  # when to connect
        self._order = itertools.count()
        self._tls: dict[Any, ssl.SSLContext] = {}
        # At most one entry for each transport in either.
        self._jobs: queue.SimpleQueue[tuple[FleetTransport, FleetLink] | None]
        self._jobs = queue.SimpleQueue()
        self._results: deque[tuple[FleetTransport, FleetLink, Exception | None]] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        self._sweep_at = 0
        self._sweep_due = 0.0
        self._threads = [
            threading.Thread(target=self._connect, name=f"connect-{number}", daemon=True)
            for number in range(connectors)
        ]
        for thread in self._threads:
            thread.start()

    def transport(self, settings: MqttSettings) -> FleetTransport:
        """A connection of its own for one device. Raises ConfigError for TLS files."""
        tls = None
        if settings.tls is not None:
            tls = self._tls.get(settings.tls)
            if tls is None:
                tls = self._tls[settings.tls] = settings.tls.context()
        made = FleetTransport(self, settings, tls)
        self._transports.append(made)
        return made

    @property
    def transports(self) -> list[FleetTransport]:
        """All that were made."""
        return list(self._transports)

    def poll(self, timeout: float) -> None:
        """Carry messages both ways; wait for at most ``timeout`` seconds for something to come."""
        self._flush()
        wait = 0.0 if self._results else max(0.0, min(timeout, _SWEEP_S))
        for key, mask in self._selector.select(wait):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake_receiver.recv(4_096)
            else:
                key.data.ready(bool(mask & selectors.EVENT_READ), time.monotonic())
        while self._results:
            transport, link, error = self._results.popleft()
            transport.opened(link, error)
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            transport = heapq.heappop(self._due)[2]
            if not transport.gone:
                transport.opening = True
                self._jobs.put((transport, transport.new_link()))
        self._sweep(now)
        self._flush()

    def close(self, timeout: float = 5.0) -> int:
        """Say goodbye for all, in at most ``timeout`` seconds; how many did not get it said."""
        for transport in self._transports:
            transport.stop(timeout)
        deadline = time.monotonic() + timeout + 0.2
        while time.monotonic() < deadline and not all(one.gone for one in self._transports):
            self.poll(_SWEEP_S)
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(1.0)
        left = sum(not one.gone for one in self._transports)
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()
        return left

    # -- what the transports ask for ------------------------------------------------------------

    def touch(self, transport: FleetTransport) -> None:
        """It has something to send."""
        self._touched[transport] = None

    def settled(self, transport: FleetTransport) -> None:
        """It is about to send what it has."""
        self._touched.pop(transport, None)

    def connect_at(self, transport: FleetTransport, when: float) -> None:
        heapq.heappush(self._due, (when, next(self._order), transport))

    def watch(self, transport: FleetTransport, opened: Any) -> None:
        transport.watched = opened
        transport.wants_write = False
        self._selector.register(opened, selectors.EVENT_READ, transport)

    def unwatch(self, transport: FleetTransport) -> None:
        opened, transport.watched = transport.watched, None
        if opened is not None:
            self._selector.unregister(opened)

    def want_write(self, transport: FleetTransport, wanted: bool) -> None:
        if transport.watched is not None:
            transport.wants_write = wanted
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
            self._selector.modify(transport.watched, events, transport)

    # -- inside ---------------------------------------------------------------------------------

    def _flush(self) -> None:
        if self._touched:
            now = time.monotonic()
            for transport in list(self._touched):
                transport.step(now)

    def _sweep(self, now: float) -> None:
        if now < self._sweep_due:
            return
        self._sweep_due = now + _SWEEP_S
        count = len(self._transports)
        share = -(-count // _SWEEPS)
        for index in range(self._sweep_at, self._sweep_at + share):
            self._transports[index % count].step(now)
        self._sweep_at = (self._sweep_at + share) % count if count else 0

    def _connect(self) -> None:
        """A connecting thread."""
        while (job := self._jobs.get()) is not None:
            transport, link = job
            error: Exception | None = None
            try:
                link.open(self._wake_receiver)
            except Exception as problem:  # noqa: BLE001 (told to the transport)
                error = problem
            self._results.append((transport, link, error))
            with contextlib.suppress(OSError):  # a full pipe wakes as well
                self._wake_sender.send(b"\0")


def _loss_of(error: Exception) -> Loss:
    if isinstance(error, OSError | UnicodeError):
        passing = isinstance(error, OSError) and not isinstance(error, ssl.SSLError)
        return Loss(_reason(error), passing=passing)
    log.debug("the connection broke", exc_info=error)
    return Loss(f"the broker sent something that is not MQTT 5 ({type(error).__name__})")
