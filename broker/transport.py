"""The transport port: what a driver may expect of whatever carries its messages.

Delivery contract, held by ``tests/contract/test_transport.py`` for every implementation:

* ``publish`` never waits for the network. It hands the message to a bounded queue or raises.
* QoS 0 messages may be lost, and only while the connection is down may they be lost in numbers;
  on a connection that stays up they arrive once, in order. While the connection is down QoS 0
  messages are dropped and counted (``dropped``): the session protocol repeats what matters, and a
  stale draft helps nobody.
* QoS 1 messages published while connected or not arrive at least once after (re)connection, in
  order, unless the bounded queue is full: then ``publish`` raises TransportError.
* Subscriptions are part of the transport's state: they are made again after every reconnect.
  Messages that the broker held meanwhile are not guaranteed.
* ``on_message`` and ``on_event`` are called from the transport's own thread, one at a time. They
  must return quickly. What they raise is counted (``callback_errors``), logged, and goes no
  further.
* ``start`` returns at once; connecting and reconnecting go on until ``stop``. A broker that is
  not there is an event, never an exception. What can never get better (bad credentials, another
  client with the same id taking the connection again and again) is the event ``FAILED``, after
  which the transport no longer tries.
* ``stop`` publishes ``farewell`` if one was given (MQTT drops the will on a clean disconnect),
  flushes for at most its timeout and is idempotent.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class ConnectionState(enum.Enum):
    """CONNECTED, DISCONNECTED (trying again), FAILED (given up: see ``reason``)."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    FAILED = "failed"


@dataclass(frozen=True)
class ConnectionEvent:
    """A change of the connection. ``reason_code`` is MQTT 5's where there was one."""

    state: ConnectionState
    reason: str = ""
    reason_code: int | None = None


@dataclass(frozen=True)
class Message:
    """One message as it arrived. ``payload`` in bytes; ``retain``: it was kept by the broker."""

    topic: str
    payload: bytes
    retain: bool = False


@dataclass(frozen=True)
class Will:
    """What the broker publishes when the connection dies without a goodbye (MQTT 5, 3.1.2.5).

    ``birth``, if given, is published retained to the same topic after every connection, so that a
    will that comes late (the network switched before the old keepalive ended) is overwritten. The
    transport also listens to the topic and repeats ``birth`` when it hears its own late will.
    ``farewell`` is published retained by ``stop``.
    """

    topic: str
    payload: bytes
    birth: bytes | None = None
    farewell: bytes | None = None


OnMessage = Callable[[Message], None]
OnEvent = Callable[[ConnectionEvent], None]


class Transport(Protocol):
    """A connection to the broker; see the delivery contract above.

    Counters (plain ints, read at any time): ``bytes_sent``, ``bytes_received`` (payload bytes),
    ``messages_sent``, ``messages_received``, ``reconnects``, ``dropped``, ``callback_errors``.
    """

    bytes_sent: int
    bytes_received: int
    messages_sent: int
    messages_received: int
    reconnects: int
    dropped: int
    callback_errors: int

    def start(self, on_message: OnMessage, on_event: OnEvent) -> None:
        """Begin connecting; returns at once. Raises LocalProtocolError when started twice."""
        ...

    def publish(self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False) -> None:
        """Hand one message over.

        Raises TransportError when the payload is above the limit (reason code 0x95, packet too
        large), when the queue of unsent QoS 1 messages is full (0x97, quota exceeded), or after
        ``stop`` or FAILED. The link stays up in every case.
        """
        ...

    def subscribe(self, topic_filter: str, *, qos: int = 0) -> None:
        """Subscribe now and after every reconnect; may be called before the connection is up."""
        ...

    def unsubscribe(self, topic_filter: str) -> None: ...

    @property
    def connected(self) -> bool: ...

    def stop(self, timeout: float = 2.0) -> None:
        """Say goodbye and end; at most ``timeout`` seconds."""
        ...
