"""The fleet as its telemetry and statuses tell it: bounded, without clock, thread or socket.

Counters of devices pass through as they are. So neither a restart of a device (an ordinary reset
of a counter) nor one of the exporter (nothing was kept here that matters) makes a jump. What names
a device is the topic, which a broker's access rules can confine; a name inside a payload is data.

Series of a device leave when it was silent for ``ttl`` seconds, and come back with it. Whether it
is online is what the broker retains, and holds as long as the broker can be asked: a device that
sends no telemetry is still seen. Of one that is offline nothing is left after ``ttl`` seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from broker.codec import AnyMessage, decode
from broker.errors import RemoteProtocolError
from broker.exposition import Family, join, label_value
from broker.figures import GAUGE
from broker.messages import DeviceStatus, VerifierStatus
from broker.telemetry import Telemetry
from broker.topics import VERIFIERS, parse_device_topic, parse_verifier_status_topic
from cloud_verifier.exporter.device import CLOCK_OFFSET, LAST_SEEN, ONLINE, Device

TTL_S = 60.0
MAX_DEVICES = 10_000
MAX_VERIFIERS = 256
#: Seconds for which a verifier that left is shown as offline: long enough for an alert.
VERIFIER_TTL_S = 600.0
#: Bytes; of telemetry and statuses the longest is below a tenth of it.
MAX_PAYLOAD = 1 << 16
#: Least seconds between two looks for what has expired when messages ask for it.
_SCAN_S = 1.0

EXTRAS = (
    Family(ONLINE, GAUGE, "1 while the device is connected to the broker, 0 after it left."),
    Family(LAST_SEEN, GAUGE, "When telemetry came last, by the clock of the exporter."),
    Family(CLOCK_OFFSET, GAUGE, "The device's clock less the exporter's, way included."),
)
VERIFIER_FAMILIES = (
    Family("pipesd_fleet_verifier_online", GAUGE, "1 while the verifier is there, 0 after it."),
    Family("pipesd_fleet_verifier_sessions", GAUGE, "Sessions that it holds, as it says."),
    Family("pipesd_fleet_verifier_max_sessions", GAUGE, "Sessions that it would hold."),
)


@dataclass(slots=True)
class Verifier:
    """Its last status; what is offline is forgotten at ``until``."""

    status: VerifierStatus
    until: float = math.inf


class Entry(NamedTuple):
    """One device as it is now. ``age``: seconds since its telemetry came, which is None where
    there is none; ``clock_offset`` in seconds."""

    name: str
    telemetry: Telemetry | None
    age: float | None
    online: bool | None
    clock_offset: float | None


class Snapshot(NamedTuple):
    """What one scrape shows; texts that nothing changes any more, so no lock is needed."""

    texts: list[Sequence[str]]
    extras: list[Sequence[str]]
    verifiers: list[Sequence[str]]

    def text(self) -> str:
        """Exposition format 0.0.4."""
        return "".join(
            (
                join(self.texts),
                _joined(EXTRAS, self.extras),
                _joined(VERIFIER_FAMILIES, self.verifiers),
            )
        )


def _joined(families: Sequence[Family], rows: list[Sequence[str]]) -> str:
    parts = []
    for family, texts in zip(families, zip(*rows, strict=True), strict=False):
        body = "".join(texts)
        if body:
            parts += [family.header, body]
    return "".join(parts)


@dataclass
class FleetTable:
    """Devices and verifiers; ``now`` is monotonic seconds, ``wall`` Unix seconds, both passed in.

    ``messages`` counts what came by channel, ``dropped`` what was left out by cause (messages, and
    single figures of messages), ``expired`` devices that fell silent. Not thread-safe.
    """

    ttl: float = TTL_S
    max_devices: int = MAX_DEVICES
    messages: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    devices: dict[str, Device] = field(default_factory=dict)
    verifiers: dict[str, Verifier] = field(default_factory=dict)
    _gone: dict[str, Device] = field(default_factory=dict)
    _scanned: float = -math.inf

    def receive(self, topic: str, payload: bytes, retain: bool, now: float, wall: float) -> None:
        """Take in one MQTT message. Never raises: what is wrong is counted by cause."""
        try:
            self._receive(topic, payload, retain, now, wall)
        except RemoteProtocolError as error:
            self.dropped[error.cause] += 1

    def link_lost(self, now: float) -> None:
        """The broker is away: what it said of who is online ends with the time to live."""
        for device in self.devices.values():
            if device.online_until == math.inf:
                device.online_until = now + self.ttl
        for verifier in self.verifiers.values():
            verifier.until = min(verifier.until, now + self.ttl)

    def expire(self, now: float) -> None:
        """Forget what is over; looks at every device."""
        self._scanned = now
        for device in list(self.devices.values()):
            if device.telemetry is not None and now - device.seen >= self.ttl:
                device.forget_telemetry()
                self.expired += 1
            if now >= device.online_until:
                device.online = None
            if device.telemetry is None and device.online is None:
                self._retire(device)
        for name in [name for name, held in self.verifiers.items() if now >= held.until]:
            del self.verifiers[name]

    def snapshot(self, now: float) -> Snapshot:
        """What a scrape shows at ``now``."""
        self.expire(now)
        devices = self.devices.values()
        return Snapshot(
            [device.texts for device in devices if device.telemetry is not None],
            [device.extras() for device in devices],
            [_verifier_texts(name, held.status) for name, held in self.verifiers.items()],
        )

    @property
    def with_telemetry(self) -> int:
        """Devices whose telemetry is held."""
        return sum(device.telemetry is not None for device in self.devices.values())

    def entries(self, now: float) -> list[Entry]:
        """Every device at ``now``, in no order."""
        self.expire(now)
        return [
            Entry(
                device.name,
                device.telemetry,
                None if device.telemetry is None else now - device.seen,
                device.online,
                device.clock_offset,
            )
            for device in self.devices.values()
        ]

    def statuses(self, now: float) -> dict[str, VerifierStatus]:
        """The last status of every verifier at ``now``."""
        self.expire(now)
        return {name: held.status for name, held in self.verifiers.items()}

    # ---- by topic -------------------------------------------------------------------------

    def _receive(self, topic: str, payload: bytes, retain: bool, now: float, wall: float) -> None:
        if topic.startswith(f"pipesd/1/{VERIFIERS}/"):
            self.messages["verifier_status"] += 1
            self._verifier(parse_verifier_status_topic(topic), payload, now)
            return
        name, channel = parse_device_topic(topic)
        if channel == "status":
            self.messages["status"] += 1
            self._status(name, payload, now)
        elif channel == "telemetry":
            self.messages["telemetry"] += 1
            if retain:
                # It would come back after every reconnect, whatever became of the device.
                raise RemoteProtocolError("telemetry is not retained", cause="retained")
            message = _decoded(payload)
            if not isinstance(message, Telemetry):
                raise RemoteProtocolError("no telemetry", cause="wrong_kind")
            self._telemetry(name, message, now, wall)
        else:
            raise RemoteProtocolError(f"nothing to hear on {channel}", cause="topic")

    def _telemetry(self, name: str, telemetry: Telemetry, now: float, wall: float) -> None:
        held = self.devices.get(name) or self._gone.get(name)
        if held is not None and (cause := held.refuse(telemetry, now)) is not None:
            self.dropped[cause] += 1
            return
        device = self._admit(name, now)
        self.dropped.update(device.take(telemetry, now, wall))

    def _status(self, name: str, payload: bytes, now: float) -> None:
        held = self.devices.get(name)
        if not payload:
            if held is not None:
                held.online, held.online_until = None, -math.inf
            return
        status = _decoded(payload)
        if not isinstance(status, DeviceStatus):
            raise RemoteProtocolError("no status of a device", cause="wrong_kind")
        if status.online:
            held = self._admit(name, now)
            held.online, held.online_until = True, math.inf
        elif held is not None and held.online is not False:
            # One that is retained from long ago makes no device.
            held.online, held.online_until = False, now + self.ttl

    def _verifier(self, name: str, payload: bytes, now: float) -> None:
        if not payload:
            self.verifiers.pop(name, None)
            return
        status = _decoded(payload)
        if not isinstance(status, VerifierStatus):
            raise RemoteProtocolError("no status of a verifier", cause="wrong_kind")
        held = self.verifiers.get(name)
        if held is None:
            if not status.online:
                return
            if len(self.verifiers) >= MAX_VERIFIERS:
                self._scan(now)
            if len(self.verifiers) >= MAX_VERIFIERS:
                raise RemoteProtocolError("too many verifiers", cause="too_many_verifiers")
            held = self.verifiers[name] = Verifier(status)
        left = held.status.online and not status.online
        held.status = status
        if status.online:
            held.until = math.inf
        elif left:
            held.until = now + VERIFIER_TTL_S

    # ---- limits ---------------------------------------------------------------------------

    def _admit(self, name: str, now: float) -> Device:
        """The device of that name. Raises RemoteProtocolError when there is no room for it."""
        device = self.devices.get(name)
        if device is not None:
            return device
        if len(self.devices) >= self.max_devices:
            self._scan(now)
        if len(self.devices) >= self.max_devices:
            raise RemoteProtocolError("too many devices", cause="too_many_devices")
        device = self._gone.pop(name) if name in self._gone else Device(name)
        self.devices[name] = device
        return device

    def _scan(self, now: float) -> None:
        if now - self._scanned >= _SCAN_S:
            self.expire(now)

    def _retire(self, device: Device) -> None:
        """Out of the scrape; what tells late messages from new ones is kept for a while longer."""
        del self.devices[device.name]
        if device.boot is not None:
            self._gone[device.name] = device
            if len(self._gone) > self.max_devices:
                del self._gone[next(iter(self._gone))]


def _decoded(payload: bytes) -> AnyMessage:
    if len(payload) > MAX_PAYLOAD:
        raise RemoteProtocolError(f"payload of {len(payload)} bytes", cause="too_large")
    return decode(payload)


def _verifier_texts(name: str, status: VerifierStatus) -> tuple[str, str, str]:
    label = f'{{verifier="{label_value(name)}"}}'
    online, sessions, most = (family.name for family in VERIFIER_FAMILIES)
    if not status.online:
        return f"{online}{label} 0\n", "", ""
    return (
        f"{online}{label} 1\n",
        f"{sessions}{label} {status.sessions}\n",
        f"{most}{label} {status.max_sessions}\n",
    )
