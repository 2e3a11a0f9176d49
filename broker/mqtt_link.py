"""What the MQTT driver and the MQTT library have to say to each other.

``Link`` is one connection; ``broker.mqtt`` implements it with paho. ``Listener`` is what the link
reports to, implemented by the driver. All of it happens on the network thread.
"""

from __future__ import annotations

import socket
from typing import NamedTuple, Protocol


class Loss(NamedTuple):
    """Why a connection ended, or never came to be.

    ``fatal``: trying again cannot help. ``passing``: the broker is out of reach, which ends by
    itself.
    """

    reason: str
    code: int | None = None
    fatal: bool = False
    passing: bool = False


class Link(Protocol):
    """One connection to a broker, from TCP to its loss; only the network thread touches it.

    ``loss`` is set by whoever notices. ``accepted``: the broker took the connection; then
    ``max_packet`` (bytes) and ``window`` (QoS 1 messages under way) are what it allows.
    ``pending``: subscriptions without an answer. ``own``: birth and farewell messages on their way.
    """

    loss: Loss | None
    accepted: bool
    max_packet: int
    window: int
    pending: dict[int, list[str]]
    own: set[int]

    def open(self, wake: socket.socket) -> None:
        """Connect, for at most the connect timeout. Raises OSError, UnicodeError (a bad name)."""
        ...

    def wait(self, timeout: float) -> bool:
        """Sleep until data comes or ``wake`` is readable (then True); take in what came."""
        ...

    def flush(self) -> None:
        """Give the socket what it takes, and mind the keepalive."""
        ...

    @property
    def blocked(self) -> bool:
        """The socket has not taken everything yet."""
        ...

    def publish(self, topic: str, payload: bytes, qos: int, retain: bool) -> int:
        """Send one message; its packet identifier."""
        ...

    def say(self, topic: str, payload: bytes) -> None:
        """Publish birth or farewell, retained and with this connection's mark."""
        ...

    def subscribe(self, filters: list[tuple[str, int]]) -> None: ...

    def unsubscribe(self, filters: list[str]) -> None: ...

    def disconnect(self) -> None:
        """The orderly end, after which the broker forgets the will."""
        ...

    def close(self) -> None:
        """Free everything; on a living connection the broker publishes the will."""
        ...


class Listener(Protocol):
    """What a link reports to, on the network thread."""

    def heard(self, topic: str, payload: bytes, retain: bool, mark: str | None) -> None:
        """A message came. ``mark``: of the connection whose birth or will it is, if it has one."""
        ...

    def unreadable(self) -> None:
        """A message came whose topic is not UTF-8."""
        ...

    def acknowledged(self, packet_id: int, refusal: str | None) -> None:
        """The broker answered a QoS 1 message; ``refusal`` says why it was turned down."""
        ...

    def subscribed(self) -> None:
        """No subscription is without an answer any more; messages may follow at once."""
        ...

    def filter_refused(self, topic_filter: str, refusal: str) -> None: ...
