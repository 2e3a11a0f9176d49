"""A transport that goes nowhere, for generations that must not leave the device."""

from __future__ import annotations

from broker.errors import TransportError
from broker.transport import OnEvent, OnMessage


class UnconnectedTransport:
    """Implements ``Transport``; never connects and carries nothing."""

    def __init__(self) -> None:
        self.bytes_sent = self.bytes_received = 0
        self.messages_sent = self.messages_received = 0
        self.reconnects = self.dropped = self.callback_errors = 0

    def start(self, on_message: OnMessage, on_event: OnEvent) -> None:
        """Nothing will ever be heard."""

    def publish(
        self,
        topic: str,
        payload: bytes,  # noqa: ARG002
        *,
        qos: int = 0,  # noqa: ARG002
        retain: bool = False,  # noqa: ARG002
    ) -> None:
        """Raises TransportError: whoever calls this meant to stay on the device."""
        self.dropped += 1
        raise TransportError(f"nothing may leave this device, so {topic} was not published")

    def subscribe(self, topic_filter: str, *, qos: int = 0) -> None:
        """Nothing will ever arrive."""

    def unsubscribe(self, topic_filter: str) -> None:
        """Nothing was ever subscribed."""

    @property
    def connected(self) -> bool:
        return False

    def stop(self, timeout: float = 2.0) -> None:
        """Nothing to end."""
