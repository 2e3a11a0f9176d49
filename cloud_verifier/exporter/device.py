"""What the exporter keeps of one device, and which of its messages are the newest.

Counters of a device begin anew at each start of its agent, which ``rate()`` knows how to take. It
would be fooled by a value of an earlier start that shows up once more between two of a later one:
that looks like two more restarts. So messages of an earlier boot, and older ones of the same boot,
are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from broker.exposition import FAMILIES, clean, render, sample
from broker.figures import BY_NAME, MAX_VALUE
from broker.telemetry import Telemetry

#: Boots of a device that are remembered as over.
MAX_BOOTS = 8
#: Seconds without news of a device after which any message of it is believed, whatever its boot and
#: sequence: none is ever so late, and no mistake about who came first, nor a message that somebody
#: else sent in its name, may shut a device out for good.
QUIET_S = 30.0
#: Least seconds between two changes of the labels of ``pipesd_device_info``, each of which begins
#: a new series: a device that tells something else each time would fill Prometheus.
INFO_HOLD_S = 60.0

OLD_BOOT, OLD_SEQUENCE = "old_boot", "old_sequence"

ONLINE = "pipesd_device_online"
LAST_SEEN = "pipesd_device_last_seen_timestamp_seconds"
CLOCK_OFFSET = "pipesd_device_clock_offset_seconds"
_UPTIME = BY_NAME["uptime_seconds"].number
_NOTHING = ("",) * len(FAMILIES)


@dataclass(slots=True)
class Device:
    """``name``: from the topic. Times are the exporter's monotonic seconds, ``seen_wall`` is its
    Unix time. ``texts``: the telemetry's series, one text for each of FAMILIES.

    ``online``: what the retained status says, None where it says nothing that still holds;
    it holds until ``online_until``.
    """

    name: str
    boot: str | None = None
    earlier: tuple[str, ...] = ()
    sequence: int = -1
    started: float = math.inf
    telemetry: Telemetry | None = None
    seen: float = -math.inf
    seen_wall: float = 0.0
    clock_offset: float | None = None
    texts: tuple[str, ...] = _NOTHING
    info_since: float = -math.inf
    online: bool | None = None
    online_until: float = -math.inf

    def refuse(self, telemetry: Telemetry, now: float) -> str | None:
        """Why ``telemetry`` is not the newest of this device; None: it is."""
        if self.boot is None or now - self.seen >= QUIET_S:
            return None
        if telemetry.boot == self.boot:
            return OLD_SEQUENCE if telemetry.sequence <= self.sequence else None
        if telemetry.boot in self.earlier or _start(telemetry, now) < self.started:
            return OLD_BOOT
        return None

    def take(self, telemetry: Telemetry, now: float, wall: float) -> dict[str, int]:
        """Hold ``telemetry``, which is the newest; figures that were left out, by cause."""
        if telemetry.boot != self.boot:
            if self.boot is not None:
                others = [boot for boot in self.earlier if boot != telemetry.boot]
                self.earlier = (*others, self.boot)[-MAX_BOOTS:]
            self.boot, self.started = telemetry.boot, math.inf
        # The way here only ever makes a start look later than it was.
        self.started = min(self.started, _start(telemetry, now))
        self.sequence = telemetry.sequence
        self.telemetry, self.seen, self.seen_wall = telemetry, now, wall
        texts, dropped = render(self.name, telemetry)
        if texts[-1] != self.texts[-1]:
            if now - self.info_since < INFO_HOLD_S and self.texts[-1]:
                texts = (*texts[:-1], self.texts[-1])
            else:
                self.info_since = now
        self.texts = texts
        offset = telemetry.clock - wall
        if abs(offset) <= MAX_VALUE and telemetry.clock != 0.0:
            self.clock_offset = offset
        else:
            self.clock_offset = None
            if telemetry.clock != 0.0:
                dropped = {**dropped, "clock": 1}
        return dropped

    def forget_telemetry(self) -> None:
        """Its series end; which boot and message came last is remembered."""
        self.telemetry, self.clock_offset, self.texts = None, None, _NOTHING

    def extras(self) -> tuple[str, str, str]:
        """Lines of ONLINE, LAST_SEEN and CLOCK_OFFSET, empty where there is nothing to say."""
        online = seen = offset = ""
        if self.online is not None:
            online = sample(ONLINE, self.name, int(self.online))
        if self.telemetry is not None:
            seen = sample(LAST_SEEN, self.name, self.seen_wall)
        if self.clock_offset is not None:
            offset = sample(CLOCK_OFFSET, self.name, self.clock_offset)
        return online, seen, offset


def _start(telemetry: Telemetry, now: float) -> float:
    """When this boot began at the latest, on the exporter's clock; no uptime told: just now."""
    uptime = clean({_UPTIME: telemetry.figures.get(_UPTIME, 0.0)})[0].get(_UPTIME, 0.0)
    return now - uptime
