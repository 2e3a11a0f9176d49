"""Topic names and the ids inside them.

    pipesd/1/<device>/<session>/open | up/<verifier> | down
    pipesd/1/<device>/status | telemetry | config
    pipesd/1/_verifiers/<verifier>/status

Everything a device publishes lies below its own id, so a broker pattern such as ``pipesd/1/%u/#``
confines it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from broker.errors import ConfigError, RemoteProtocolError

ROOT = "pipesd/1"
VERIFIERS = "_verifiers"
SHARE_GROUP = "verifiers"
ID_RULE = "1 to 64 of A-Z a-z 0-9 _ -"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)

#: Every new session, split among the replicas (MQTT 5, 4.8.2: shared subscriptions).
OPEN_SHARED = f"$share/{SHARE_GROUP}/{ROOT}/+/+/open"
#: The retained status of every verifier.
VERIFIER_STATUS_ALL = f"{ROOT}/{VERIFIERS}/+/status"
#: What every device tells of itself, and what it is told; a device alone has three parts before.
DEVICE_STATUS_ALL = f"{ROOT}/+/status"
TELEMETRY_ALL = f"{ROOT}/+/telemetry"
CONFIG_ALL = f"{ROOT}/+/config"


def check_id(what: str, value: str) -> str:
    """Return ``value`` if it can stand in a topic.

    ``what`` names it in the error, for example ``--device-id``. Raises ConfigError.
    """
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise ConfigError(f"{what} {value!r} cannot be part of a topic: use {ID_RULE}")
    return value


def check_device_id(value: str, what: str = "--device-id") -> str:
    """As check_id; a device id also must not begin with ``_``, which is kept for the system."""
    check_id(what, value)
    if value.startswith("_"):
        raise ConfigError(f"{what} {value!r} begins with _, which is reserved: choose another")
    return value


def open_topic(device: str, session: str) -> str:
    return f"{ROOT}/{device}/{session}/open"


def up_topic(device: str, session: str, verifier: str) -> str:
    return f"{ROOT}/{device}/{session}/up/{verifier}"


def down_topic(device: str, session: str) -> str:
    return f"{ROOT}/{device}/{session}/down"


def down_filter(device: str) -> str:
    """The one subscription of a device."""
    return f"{ROOT}/{device}/+/down"


def up_filter(verifier: str) -> str:
    """The one subscription of a verifier for its running sessions."""
    return f"{ROOT}/+/+/up/{verifier}"


def status_topic(device: str) -> str:
    return f"{ROOT}/{device}/status"


def telemetry_topic(device: str) -> str:
    return f"{ROOT}/{device}/telemetry"


def config_topic(device: str) -> str:
    return f"{ROOT}/{device}/config"


def verifier_status_topic(verifier: str) -> str:
    return f"{ROOT}/{VERIFIERS}/{verifier}/status"


class SessionTopic(NamedTuple):
    """A parsed topic of a session. ``channel``: open, up or down; ``verifier`` only with up."""

    device: str
    session: str
    channel: str
    verifier: str | None


def parse_session_topic(topic: str) -> SessionTopic:
    """Take a session's topic apart. Raises RemoteProtocolError (cause ``topic``)."""
    parts = topic.split("/")
    if len(parts) in (5, 6) and parts[0] == "pipesd" and parts[1] == "1":
        device, session, channel = parts[2:5]
        verifier = parts[5] if len(parts) == 6 else None
        ids = [device, session] if verifier is None else [device, session, verifier]
        if (
            all(_ID.fullmatch(part) for part in ids)
            and not device.startswith("_")
            and (channel == "up") == (verifier is not None)
            and channel in ("open", "up", "down")
        ):
            return SessionTopic(device, session, channel, verifier)
    raise RemoteProtocolError(f"no session topic: {topic[:120]!r}", cause="topic")


def parse_verifier_status_topic(topic: str) -> str:
    """The verifier's id in its status topic. Raises RemoteProtocolError (cause ``topic``)."""
    parts = topic.split("/")
    if (
        len(parts) == 5
        and parts[:3] == ["pipesd", "1", VERIFIERS]
        and parts[4] == "status"
        and _ID.fullmatch(parts[3])
    ):
        return parts[3]
    raise RemoteProtocolError(f"no verifier status topic: {topic[:120]!r}", cause="topic")


class DeviceTopic(NamedTuple):
    """A parsed topic of a device itself. ``channel``: status, telemetry or config."""

    device: str
    channel: str


def parse_device_topic(topic: str) -> DeviceTopic:
    """Take a device's own topic apart. Raises RemoteProtocolError (cause ``topic``)."""
    parts = topic.split("/")
    if (
        len(parts) == 4
        and parts[:2] == ["pipesd", "1"]
        and _ID.fullmatch(parts[2])
        and not parts[2].startswith("_")
        and parts[3] in ("status", "telemetry", "config")
    ):
        return DeviceTopic(parts[2], parts[3])
    raise RemoteProtocolError(f"no topic of a device: {topic[:120]!r}", cause="topic")
