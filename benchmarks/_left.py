"""What a broker holds: subscriptions, connections, and topics with a retained message."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from broker.errors import TransportError
from broker.mqtt import MqttSettings, MqttTransport
from broker.transport import ConnectionEvent, ConnectionState, Message

#: Seconds without a change that count as rest; the broker counts every second.
_STILL_S = 2.2
#: What Mosquitto tells of itself each second, and what it is called here.
_SYS = {
    "$SYS/broker/subscriptions/count": "subscriptions",
    "$SYS/broker/shared_subscriptions/count": "shared",
    "$SYS/broker/clients/connected": "clients",
}


class Left:
    """What a broker holds: ``look`` at it when all is quiet, and again later, and compare."""

    def __init__(self, url: str) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._topics: set[str] = set()
        settings = MqttSettings.from_url(url, f"left-{os.getpid()}")
        self._transport = MqttTransport(settings)
        for topic in _SYS:
            self._transport.subscribe(topic)
        self._transport.subscribe("pipesd/#", qos=1)
        self._transport.start(self._on_message, self._on_event)

    def _on_event(self, event: ConnectionEvent) -> None:
        if event.state is ConnectionState.CONNECTED:
            return
        with self._lock:  # the next connection brings everything anew
            self._counts.clear()
            self._topics.clear()

    def _on_message(self, message: Message) -> None:
        with self._lock:
            name = _SYS.get(message.topic)
            if name is not None:
                self._counts[name] = int(message.payload)
            elif message.topic.endswith("/status"):
                # Nothing but statuses is retained, and an empty one clears its topic.
                (self._topics.add if message.payload else self._topics.discard)(message.topic)
            elif message.retain:
                self._topics.add(message.topic)

    def now(self) -> dict[str, Any]:
        """Subscriptions, shared ones, clients, and topics with a retained message."""
        with self._lock:
            return {**self._counts, "topics": sorted(self._topics)}

    def settled(self, timeout: float = 20.0) -> dict[str, Any]:
        """What is held when it has been the same for _STILL_S. Raises TransportError."""
        deadline = time.monotonic() + timeout
        last, since = self.now(), time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = self.now()
            if now != last or len(now) <= len(_SYS):
                last, since = now, time.monotonic()
            elif time.monotonic() - since >= _STILL_S:
                return last
        raise TransportError(f"the broker did not come to rest within {timeout:.0f} s: {last}")

    def wait_for(self, wanted: dict[str, Any], timeout: float) -> list[str]:
        """Until the same is held as ``wanted``; the differences that are left after ``timeout``."""
        deadline = time.monotonic() + timeout
        while (now := self.now()) != wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        return [
            f"{name}: {now.get(name)} instead of {value}"
            for name, value in wanted.items()
            if now.get(name) != value
        ]

    def stop(self) -> None:
        self._transport.stop()
