"""What waits to be sent: the bounded queue between publishing threads and the network thread.

QoS 0 and QoS 1 messages leave in the order in which they were published, except that QoS 0 passes
QoS 1 while the broker's receive window (MQTT 5, 3.2.2.3.3) is full: a draft must not wait for the
acknowledgement of a telemetry message. Both kinds are bounded by number, and together by bytes.

A QoS 1 message that was under way each time when several connections in a row died is taken for
their killer (a broker may end the connection over a message without saying why) and given up.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

#: Connections that may die with the same oldest message under way.
MAX_DEATHS = 8


class Outgoing(NamedTuple):
    """One message on its way out. ``order``: how many were published before it."""

    order: int
    topic: str
    payload: bytes
    qos: int
    retain: bool

    @property
    def size(self) -> int:
        """Bytes that it counts for."""
        return len(self.topic) + len(self.payload)


class Outbox:
    """Thread-safe. ``offer`` is for everybody, the rest for the network thread alone."""

    def __init__(self, max_qos0: int, max_qos1: int, max_bytes: int) -> None:
        """``max_qos1`` bounds the messages not yet acknowledged, on their way or not."""
        self._max_qos0 = max_qos0
        self._max_qos1 = max_qos1
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._qos0: deque[Outgoing] = deque()
        self._qos1: deque[Outgoing] = deque()
        self._in_flight: dict[int, Outgoing] = {}
        self._bytes = 0
        self._order = 0
        self._suspect = -1  # order of the message that was oldest under way at the last loss
        self._deaths = 0

    def offer(self, topic: str, payload: bytes, qos: int, retain: bool) -> bool:
        """Queue one message; False, and nothing changed, when a limit is reached."""
        with self._lock:
            message = Outgoing(self._order, topic, payload, qos, retain)
            if self._bytes + message.size > self._max_bytes:
                return False
            if qos == 0:
                if len(self._qos0) >= self._max_qos0:
                    return False
                self._qos0.append(message)
            else:
                if len(self._qos1) + len(self._in_flight) >= self._max_qos1:
                    return False
                self._qos1.append(message)
            self._bytes += message.size
            self._order += 1
            return True

    def take(self, window_open: bool) -> Outgoing | None:
        """The next message to send, or None. ``window_open``: the broker would take QoS 1.

        A QoS 1 message stays accounted for until ``acknowledged`` or ``connection_lost``:
        ``sent`` must follow.
        """
        with self._lock:
            first1 = self._qos1[0] if self._qos1 and window_open else None
            if self._qos0 and (first1 is None or self._qos0[0].order < first1.order):
                message = self._qos0.popleft()
                self._bytes -= message.size
                return message
            return None if first1 is None else self._qos1.popleft()

    def sent(self, packet_id: int, message: Outgoing) -> None:
        """A QoS 1 message went out under this packet identifier."""
        with self._lock:
            self._in_flight[packet_id] = message

    def discard(self, message: Outgoing) -> None:
        """A taken QoS 1 message will never be sent."""
        with self._lock:
            self._bytes -= message.size

    def acknowledged(self, packet_id: int) -> bool:
        """The broker has it. False when nothing was on its way under this identifier."""
        with self._lock:
            message = self._in_flight.pop(packet_id, None)
            if message is None:
                return False
            self._bytes -= message.size
            return True

    def connection_lost(self) -> int:
        """Put what was not acknowledged back in front and forget QoS 0.

        Returns how many messages were forgotten.
        """
        with self._lock:
            forgotten = list(self._qos0)
            self._qos0.clear()
            again = list(self._in_flight.values())
            self._in_flight.clear()
            if again:
                same = again[0].order == self._suspect
                self._deaths = self._deaths + 1 if same else 1
                self._suspect = again[0].order
                if self._deaths >= MAX_DEATHS:
                    forgotten.append(again.pop(0))
            self._qos1.extendleft(reversed(again))
            self._bytes -= sum(message.size for message in forgotten)
            return len(forgotten)

    @property
    def in_flight(self) -> int:
        """QoS 1 messages sent and not acknowledged."""
        return len(self._in_flight)

    @property
    def empty(self) -> bool:
        """Nothing is queued, and nothing waits for an acknowledgement."""
        return not (self._qos0 or self._qos1 or self._in_flight)
