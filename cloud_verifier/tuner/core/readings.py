"""What a source tells about a device, and what passed between two such readings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from broker.errors import ConfigError, RemoteProtocolError
from broker.topics import check_device_id

#: Series that a reading is made of, without their prefix ``pipesd_device_``.
SERIES = (
    "config_version",
    "committed_tokens_total",
    "generation_seconds_total",
    "generations_total",
    "forwards_total",
    "uptime_seconds",
    "alpha_seconds",
    "gamma_seconds",
    "forward_seconds",
    "r1_ratio",
    "r2_ratio",
    "online",
    "last_seen_timestamp_seconds",
    "info",
)
_NEEDED = ("committed_tokens_total", "generation_seconds_total")
#: More in a counter is a broken sender, and beyond the whole numbers of a double.
_MAX_VALUE = 1e15
_MAX_TEXT = 200


@dataclass(frozen=True, slots=True)
class Reading:
    """One device at one moment; None: not told.

    ``seen``: the source's mark of when the device was last heard, compared for equality alone.
    ``committed``, ``generations``, ``forwards``: counts since the agent's start; ``seconds``: spent
    generating, ``uptime``: since that start. ``alpha``, ``gamma``, ``forward``: seconds.
    ``config_version``: of the config in force. ``machine``, ``draft``: make the device's class.
    """

    device: str
    seen: float
    config_version: int
    committed: float
    seconds: float
    generations: float = 0.0
    forwards: float | None = None
    uptime: float | None = None
    alpha: float | None = None
    gamma: float | None = None
    forward: float | None = None
    r1: float | None = None
    r2: float | None = None
    online: bool = True
    policy: str = ""
    machine: str = ""
    draft: str = ""


def make_reading(
    device: str, values: Mapping[str, float], labels: Mapping[str, str] | None = None
) -> Reading:
    """A reading from a device's series: by name in SERIES their values, ``labels``: of ``info``.

    A gauge that makes no sense counts as not told. Raises RemoteProtocolError, cause ``device``,
    ``absent`` or ``value``, when the device cannot be judged by what is left.
    """
    try:
        check_device_id(device)
    except ConfigError:
        raise RemoteProtocolError(f"no device id: {device[:80]!r}", cause="device") from None

    def known(name: str) -> float | None:
        value = values.get(name)
        # NaN fails the comparison.
        return value if value is not None and 0.0 <= value <= _MAX_VALUE else None

    for name in _NEEDED:
        if name not in values:
            raise RemoteProtocolError(f"{device} tells no {name}", cause="absent")
        if known(name) is None:
            raise RemoteProtocolError(f"{device}: {name} {values[name]!r}", cause="value")
    version = known("config_version") or 0.0
    labels = labels or {}
    return Reading(
        device=device,
        seen=values.get("last_seen_timestamp_seconds", math.nan),
        config_version=int(version),
        committed=values["committed_tokens_total"],
        seconds=values["generation_seconds_total"],
        generations=known("generations_total") or 0.0,
        forwards=known("forwards_total"),
        uptime=known("uptime_seconds"),
        alpha=known("alpha_seconds"),
        gamma=known("gamma_seconds"),
        forward=known("forward_seconds"),
        r1=known("r1_ratio"),
        r2=known("r2_ratio"),
        online=known("online") != 0.0,
        policy=labels.get("policy", "")[:_MAX_TEXT],
        machine=labels.get("machine", "")[:_MAX_TEXT],
        draft=labels.get("draft", "")[:_MAX_TEXT],
    )


def device_class(reading: Reading) -> str:
    """Devices of one class may learn from each other: machine, draft model, and a rough link.

    The link goes by doublings of alpha and of the draft's and target's paces. Empty: unknown.
    """
    if not reading.draft:
        return ""
    rough = [
        "-" if value is None or value <= 0.0 else str(round(math.log2(value * 1000.0)))
        for value in (reading.alpha, reading.gamma, reading.forward)
    ]
    return "|".join((reading.machine, reading.draft, *rough))


class Meter:
    """What passed since a reading. ``tokens``, ``seconds``, ``generations``, ``forwards``."""

    def __init__(self, first: Reading) -> None:
        self._first = self.last = first

    def advance(self, reading: Reading) -> bool:
        """Go on to ``reading``; False when its counters began anew, which ends the measurement."""
        last = self.last
        if reading.committed < last.committed or reading.seconds < last.seconds:
            return False
        if None not in (last.uptime, reading.uptime) and (reading.uptime or 0.0) < (
            last.uptime or 0.0
        ):
            return False
        self.last = reading
        return True

    @property
    def tokens(self) -> float:
        return self.last.committed - self._first.committed

    @property
    def seconds(self) -> float:
        return self.last.seconds - self._first.seconds

    @property
    def generations(self) -> float:
        """That ended."""
        return self.last.generations - self._first.generations

    @property
    def rounds(self) -> float:
        """Verdicts; where nobody counts them, so many as tokens come in a usual round."""
        first, last = self._first.forwards, self.last.forwards
        if first is None or last is None or last < first:
            return self.tokens / 4.0
        return last - first

    @property
    def tpt(self) -> float | None:
        """Seconds per committed token; None before there are any, or when no time passed."""
        if self.tokens <= 0.0 or self.seconds <= 0.0:
            return None
        return self.seconds / self.tokens
