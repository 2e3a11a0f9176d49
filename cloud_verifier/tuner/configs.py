"""The retained configs of the devices: what the broker holds, and how a new one goes there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from broker.codec import decode, encode
from broker.errors import PipesdError, RemoteProtocolError, TransportError
from broker.messages import MAX_POSITION
from broker.telemetry import DeviceConfig
from broker.topics import CONFIG_ALL, config_topic, parse_device_topic
from broker.transport import ConnectionEvent, ConnectionState, Message, Transport
from cloud_verifier.tuner.core.space import Pair, clamp

log = logging.getLogger(__name__)

#: Devices whose config is remembered.
MAX_CONFIGS = 100_000


class Configs:
    """Follows every device's retained config and writes new ones. Thread-safe.

    ``on_event``: connection changes, from the transport's thread. ``rejected``: configs heard that
    could not be read; ``publishes``: sent.
    """

    def __init__(
        self, transport: Transport, on_event: Callable[[ConnectionEvent], None] | None = None
    ) -> None:
        self.rejected = self.publishes = self.overflowed = 0
        self.transport = transport
        self._on_event = on_event
        self._lock = threading.Lock()
        self._configs: dict[str, DeviceConfig] = {}
        # Of these the ones that this connection has told of: a broker that begins anew may have
        # lost what it retained, and then only the versions still mean something.
        self._retained: set[str] = set()
        self._told = False

    def start(self) -> None:
        """Begin connecting; returns at once."""
        self.transport.subscribe(CONFIG_ALL, qos=1)
        self.transport.start(self._on_message, self._changed)

    def stop(self, timeout: float = 2.0) -> None:
        """Send what is under way and leave the broker."""
        self.transport.stop(timeout)

    @property
    def connected(self) -> bool:
        return self.transport.connected

    def known(self, device: str) -> DeviceConfig | None:
        """What was retained last for the device, as far as it was heard."""
        with self._lock:
            return self._configs.get(device)

    def publish(self, device: str, pair: Pair, *, anew: bool) -> int:
        """Tell the device to work with ``pair``; the version that it will acknowledge.

        ``anew``: under a new version, even if the broker retains it already. The pair is clamped
        once more: nothing outside (0, 1) leaves here, whoever asks. Raises TransportError.
        """
        pair = clamp(pair.r1, pair.r2)
        if not (0.0 < pair.r1 < 1.0 and 0.0 < pair.r2 < 1.0):
            raise AssertionError(f"thresholds {pair} outside (0, 1)")
        if not self.transport.connected:
            # A trial that waits in a queue would be measured against nothing.
            raise TransportError("the broker is away")
        with self._lock:
            known = self._configs.get(device)
            stands = known is not None and (known.r1, known.r2) == (pair.r1, pair.r2)
            if known is not None and stands and device in self._retained and not anew:
                return known.version
            version = 1 if known is None or known.version >= MAX_POSITION else known.version + 1
            config = DeviceConfig(version, pair.r1, pair.r2)
            if known is not None:
                # The search is over the thresholds alone.
                config = DeviceConfig(version, pair.r1, pair.r2, known.window, known.policy)
            self.transport.publish(config_topic(device), encode(config), qos=1, retain=True)
            self.publishes += 1
            self._keep(device, config)
        return version

    def clear(self, device: str) -> None:
        """Take the retained config away: the device goes back to its own defaults."""
        with self._lock:
            self.transport.publish(config_topic(device), b"", qos=1, retain=True)
            self.publishes += 1

    def _keep(self, device: str, config: DeviceConfig) -> None:
        if device not in self._configs and len(self._configs) >= MAX_CONFIGS:
            self.overflowed += 1
            return
        self._configs[device] = config
        self._retained.add(device)

    def _on_message(self, message: Message) -> None:
        try:
            topic = parse_device_topic(message.topic)
            config = decode(message.payload) if message.payload else None
            if config is not None and not isinstance(config, DeviceConfig):
                raise RemoteProtocolError("no config", cause="unexpected_kind")
        except (RemoteProtocolError, PipesdError):
            self.rejected += 1
            return
        with self._lock:
            if config is not None:
                self._keep(topic.device, config)
            else:
                self._configs.pop(topic.device, None)
                self._retained.discard(topic.device)

    def _changed(self, event: ConnectionEvent) -> None:
        if event.state is not ConnectionState.CONNECTED:
            with self._lock:
                self._retained.clear()
        if event.state is ConnectionState.DISCONNECTED and not self._told:
            self._told = True
            log.warning("the broker is away (%s): trials wait", event.reason)
        elif event.state is ConnectionState.CONNECTED:
            self._told = False
        if self._on_event is not None:
            self._on_event(event)
