"""A broker in memory, with seeded faults and a virtual clock: for tests and simulation only.

Everything happens in the caller's thread. Publishing only schedules; ``deliver_due`` runs the
callbacks of what is due, and what those publish waits for the next call, so that two peers that
answer each other at once cannot hold it for ever. The same seed and the same calls give the same
deliveries. Nothing reconnects by itself: ``cut`` and ``restore`` are the test's.

Faults (of what the subscriber gets, so by the lower of both QoS): QoS 0 may be dropped, duplicated
and overtaken; QoS 1 may be duplicated and delayed, but neither lost nor overtaken.
"""

from __future__ import annotations

import heapq
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from broker.clock import VirtualClock
from broker.errors import LocalProtocolError, TransportError
from broker.filters import check_topic, levels_match, matches, parse_filter
from broker.subscriptions import SubscriptionTable
from broker.transport import ConnectionEvent, ConnectionState, Message, OnEvent, OnMessage, Will

log = logging.getLogger(__name__)

#: Messages on their way to one client, and retained topics.
MAX_IN_FLIGHT, MAX_RETAINED = 10_000, 10_000
#: An overtaken message or a duplicate comes up to so many times the longest delay later, taken to
#: be at least a hundredth of a second.
_SPREAD, _LEAST_DELAY = 4.0, 0.01

_Item = Message | ConnectionEvent | Will
_Argument = TypeVar("_Argument")


@dataclass(frozen=True)
class Faults:
    """Probabilities of each fault, and the shortest and longest delay in seconds."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if not all(0.0 <= chance <= 1.0 for chance in (self.drop, self.duplicate, self.reorder)):
            raise LocalProtocolError("a fault's probability is outside 0 to 1")
        if not 0.0 <= self.delay[0] <= self.delay[1]:
            raise LocalProtocolError("delay needs 0 <= shortest <= longest")

    @property
    def spread(self) -> float:
        """Seconds by which an overtaken message is late, at most."""
        return _SPREAD * max(self.delay[1], _LEAST_DELAY)


class InMemoryBroker:
    """See the module. Counters: ``delivered``, ``dropped``, ``duplicated``, ``reordered``, and
    ``overflowed``, messages lost because a limit was reached.

    ``faults`` may be replaced at any time and holds for what is published from then on.
    """

    def __init__(
        self,
        clock: VirtualClock,
        seed: int,
        *,
        drop: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        delay: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.faults = Faults(drop, duplicate, reorder, delay)
        self.delivered = self.dropped = self.duplicated = self.reordered = self.overflowed = 0
        self._clock = clock
        self._random = random.Random(seed)  # noqa: S311  (a simulation, repeatable on purpose)
        self._order = 0
        # (due, order, client, the connection it belongs to if any, what to deliver)
        self._heap: list[tuple[float, int, InMemoryTransport, int | None, _Item]] = []
        self._clients: dict[str, InMemoryTransport] = {}
        self._cut: dict[str, InMemoryTransport] = {}
        self._table: SubscriptionTable[InMemoryTransport] = SubscriptionTable()
        self._retained: dict[str, Message] = {}

    def next_delivery(self) -> float | None:
        """When something is due next, in the clock's seconds; None when nothing is on its way."""
        return self._heap[0][0] if self._heap else None

    def deliver_due(self, now: float) -> int:
        """Deliver everything due at ``now``; how many callbacks that were.

        What the callbacks publish is left for the next call, even where it is due at once.
        """
        heap, until, count = self._heap, self._order, 0
        while heap and heap[0][0] <= now and heap[0][1] < until:
            _, _, client, connection, item = heapq.heappop(heap)
            count += client._arrive(connection, item)
        self.delivered += count
        return count

    def cut(self, client_id: str, will_delay: float = 0.0) -> None:
        """The client's connection dies without a goodbye; its will follows after ``will_delay``.

        A delay that ends after ``restore`` is the late will of a half-open connection.
        """
        client = self._clients.pop(client_id, None)
        if client is not None:
            self._cut[client_id] = client
            self._leave(client, will_delay)
            client._lost(ConnectionEvent(ConnectionState.DISCONNECTED, "the connection was lost"))

    def restore(self, client_id: str) -> None:
        """Let a client that was cut connect again."""
        client = self._cut.pop(client_id, None)
        if client is not None:
            self._admit(client)

    # ---- for the transport ----------------------------------------------------------------

    def _admit(self, client: InMemoryTransport) -> None:
        """Connect a client soon; another one with its id loses the connection for good."""
        rival = self._clients.get(client.client_id)
        if rival is not None:
            self._leave(rival, 0.0)
            rival._lost(
                ConnectionEvent(
                    ConnectionState.FAILED,
                    f"another client uses the id {client.client_id!r}: give each its own id",
                    0x8E,
                )
            )
        self._clients[client.client_id] = client
        event = ConnectionEvent(ConnectionState.CONNECTED)
        self._push(self._clock.now(), client, client._connection, event)

    def _part(self, client: InMemoryTransport) -> None:
        """An orderly goodbye: no will."""
        if self._clients.get(client.client_id) is client:
            del self._clients[client.client_id]
        if self._cut.get(client.client_id) is client:
            del self._cut[client.client_id]
        self._unsubscribe_all(client)

    def _leave(self, client: InMemoryTransport, will_delay: float) -> None:
        self._unsubscribe_all(client)
        if client.will is not None and client._connected:
            self._push(self._clock.now() + will_delay, client, None, client.will)

    def _subscribe(self, client: InMemoryTransport, topic_filter: str, qos: int) -> None:
        turn = self._random.randrange(1_000) if topic_filter.startswith("$share/") else 0
        parsed = self._table.add(client, topic_filter, qos, turn)
        if parsed.group is not None:
            return  # no retained messages for shared subscriptions (MQTT 5, 4.8.2)
        for message in list(self._retained.values()):
            if levels_match(parsed.levels, message.topic.split("/")):
                self._schedule(client, message, qos)

    def _unsubscribe_all(self, client: InMemoryTransport) -> None:
        for topic_filter in [*client._filters, *client._own_filters]:
            self._table.remove(client, topic_filter)

    def _accept(self, topic: str, payload: bytes, qos: int, retain: bool) -> None:
        """A message reached the broker: keep it if asked to, schedule it for each subscriber."""
        if retain:
            if not payload:
                self._retained.pop(topic, None)
            elif topic in self._retained or len(self._retained) < MAX_RETAINED:
                self._retained[topic] = Message(topic, payload, True)
            else:
                self.overflowed += 1
        message = Message(topic, payload)
        for client, granted in self._table.recipients(topic):
            self._schedule(client, message, min(qos, granted))

    def _schedule(self, client: InMemoryTransport, message: Message, qos: int) -> None:
        faults, chance = self.faults, self._random.random
        if client._in_flight >= MAX_IN_FLIGHT:
            self.overflowed += 1
            return
        if qos == 0 and faults.drop and chance() < faults.drop:
            self.dropped += 1
            return
        now = self._clock.now()
        shortest, longest = faults.delay
        due = now + (self._random.uniform(shortest, longest) if longest else 0.0)
        if qos == 0 and faults.reorder and chance() < faults.reorder:
            # It does not move the mark behind which the following ones queue: they overtake it.
            self.reordered += 1
            late = due + self._random.uniform(0.0, faults.spread)
            self._send(late, client, message)
        else:
            due = client._last_due = max(due, client._last_due)
            self._send(due, client, message)
        if faults.duplicate and chance() < faults.duplicate:
            self.duplicated += 1
            self._send(due + self._random.uniform(0.0, faults.spread), client, message)

    def _send(self, due: float, client: InMemoryTransport, message: Message) -> None:
        client._in_flight += 1
        self._push(due, client, client._connection, message)

    def _push(
        self, due: float, client: InMemoryTransport, connection: int | None, item: _Item
    ) -> None:
        heapq.heappush(self._heap, (due, self._order, client, connection, item))
        self._order += 1


class InMemoryTransport:
    """A ``Transport`` to an ``InMemoryBroker``: for tests and simulation only.

    ``start`` and ``broker.restore`` connect at the next ``deliver_due``. Callbacks run inside
    ``deliver_due``, one at a time. ``max_queued``: QoS 1 messages kept while not connected;
    ``max_payload`` in bytes.
    """

    def __init__(
        self,
        broker: InMemoryBroker,
        client_id: str,
        *,
        will: Will | None = None,
        max_queued: int = 1_000,
        max_payload: int = 1024 * 1024,
    ) -> None:
        self.bytes_sent = self.bytes_received = 0
        self.messages_sent = self.messages_received = 0
        self.reconnects = self.dropped = self.callback_errors = 0
        self.client_id = client_id
        self.will = will
        self._broker = broker
        self._max_queued = max_queued
        self._max_payload = max_payload
        self._queue: deque[tuple[str, bytes, bool]] = deque()
        self._filters: dict[str, int] = {}
        # The transport listens to its own status, to overwrite a late will.
        self._own_filters = [will.topic] if will is not None and will.birth is not None else []
        self._connected = False
        self._connection = 0  # counts connections: what was sent to an earlier one is lost
        self._connections_up = 0
        self._last_due = 0.0
        self._in_flight = 0
        self._on_message: OnMessage | None = None
        self._on_event: OnEvent | None = None
        self._ended: str | None = None
        self._logged: set[str] = set()

    def start(self, on_message: OnMessage, on_event: OnEvent) -> None:
        """See Transport."""
        if self._on_message is not None or self._ended is not None:
            raise LocalProtocolError("a transport starts only once")
        self._on_message, self._on_event = on_message, on_event
        self._broker._admit(self)

    def publish(self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False) -> None:
        """See Transport."""
        check_topic(topic)
        _check_qos(qos)
        if self._ended is not None:
            raise TransportError(self._ended)
        if len(payload) > self._max_payload:
            raise TransportError(
                f"a payload of {len(payload)} bytes is above the limit of "
                f"{self._max_payload} bytes: send less, or raise the limit",
                0x95,
            )
        if self._connected:
            self._send(topic, payload, qos, retain)
        elif qos == 0:
            self.dropped += 1
        elif len(self._queue) >= self._max_queued:
            raise TransportError(
                "the queue of unsent messages is full: the broker is away or too slow", 0x97
            )
        else:
            self._queue.append((topic, payload, retain))

    def subscribe(self, topic_filter: str, *, qos: int = 0) -> None:
        """See Transport."""
        parse_filter(topic_filter)
        _check_qos(qos)
        self._filters[topic_filter] = qos
        if self._connected:
            self._broker._subscribe(self, topic_filter, qos)

    def unsubscribe(self, topic_filter: str) -> None:
        """See Transport."""
        if self._filters.pop(topic_filter, None) is not None and self._connected:
            self._broker._table.remove(self, topic_filter)

    @property
    def connected(self) -> bool:
        """See Transport."""
        return self._connected

    def stop(self, timeout: float = 2.0) -> None:  # noqa: ARG002  (nothing to wait for here)
        """See Transport."""
        if self._ended is None and self._connected and self.will and self.will.farewell is not None:
            self._send(self.will.topic, self.will.farewell, 1, True)
        self._ended = self._ended or "the transport was stopped: make another one"
        self._connected = False
        self._connection += 1
        self._on_event = None
        self._queue.clear()
        self._broker._part(self)

    # ---- for the broker -------------------------------------------------------------------

    def _arrive(self, connection: int | None, item: _Item) -> int:
        """Take what is due; how many callbacks that called."""
        if isinstance(item, Will):
            self._broker._accept(item.topic, item.payload, 1, True)
            return 0
        if isinstance(item, Message):
            self._in_flight -= 1
            return self._take(item) if connection == self._connection else 0
        if connection is not None:
            if connection != self._connection:
                return 0
            self._go_up()
        return self._call(self._on_event, item)

    def _go_up(self) -> None:
        self._connected = True
        self._last_due = 0.0
        self.reconnects = self._connections_up
        self._connections_up += 1
        for topic_filter in self._own_filters:
            self._broker._subscribe(self, topic_filter, 0)
        for topic_filter, qos in self._filters.items():
            self._broker._subscribe(self, topic_filter, qos)
        self._be_born()
        while self._queue:
            topic, payload, retain = self._queue.popleft()
            self._send(topic, payload, 1, retain)

    def _be_born(self) -> None:
        if self.will is not None and self.will.birth is not None:
            self._broker._accept(self.will.topic, self.will.birth, 1, True)

    def _take(self, message: Message) -> int:
        if self._own_filters and message.topic == self._own_filters[0]:
            late_will = self.will is not None and message.payload == self.will.payload
            if late_will and not message.retain:
                self._be_born()
            if not any(matches(name, message.topic) for name in self._filters):
                return 0
        self.messages_received += 1
        self.bytes_received += len(message.payload)
        return self._call(self._on_message, message)

    def _send(self, topic: str, payload: bytes, qos: int, retain: bool) -> None:
        self.messages_sent += 1
        self.bytes_sent += len(payload)
        self._broker._accept(topic, payload, qos, retain)

    def _lost(self, event: ConnectionEvent) -> None:
        """The connection is gone; tell it at the next ``deliver_due``."""
        if event.state is ConnectionState.FAILED:
            self._ended = event.reason
        self._connected = False
        self._connection += 1
        self._broker._push(self._broker._clock.now(), self, None, event)

    def _call(self, callback: Callable[[_Argument], None] | None, argument: _Argument) -> int:
        if callback is None:
            return 0
        try:
            callback(argument)
        except Exception as error:
            self.callback_errors += 1
            kind = type(error).__name__
            if kind not in self._logged and len(self._logged) < 100:
                self._logged.add(kind)
                log.exception("%s: a callback raised", self.client_id)
        return 1


def _check_qos(qos: int) -> None:
    if qos not in (0, 1):
        raise LocalProtocolError(f"QoS {qos} is not offered: use 0 or 1")
