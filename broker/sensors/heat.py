"""How hot the processor is, and whether the machine slows itself down.

Temperature: thermal zones (Linux, Documentation/ABI/testing/sysfs-class-thermal), else the hwmon of
an x86 processor. Throttling: Raspberry Pi's firmware word (``vcgencmd get_throttled``), else the
counters of ``thermal_throttle`` on Intel, else the cooling devices that slow a processor down
(Jetson, other boards).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from broker.sensors.files import Command, read_int, read_text, run_command

ROOT = Path("/")
#: Zones and cooling devices that are looked at; a big board has some thirty.
MAX_ZONES = 128
#: Processors whose throttle counters are read: one of each package is among them.
MAX_CPUS = 64
#: Degrees beyond which a sensor is broken.
COLDEST, HOTTEST = -60.0, 200.0
#: Types of thermal zones, the best first; all of the best kind are read and the hottest counts.
_ZONES = (
    re.compile(r"cpu|x86_pkg_temp", re.IGNORECASE),
    re.compile(r"^soc", re.IGNORECASE),
)
_LAST_ZONES = re.compile(r"^tj|^acpitz", re.IGNORECASE)
#: hwmon chips of x86 processors; ``temp1`` is the package's.
_CHIPS = ("coretemp", "k10temp", "zenpower")
#: Cooling devices that slow processors down. Fans cool without.
_SLOWING = re.compile(r"cpu|gpu|throttle|^processor$", re.IGNORECASE)
_FAN = re.compile(r"fan", re.IGNORECASE)

#: Bits of the firmware's word that hold now; those 16 above say that they held since the start.
UNDER_VOLTAGE = 1 << 0
SLOWED = 1 << 1 | 1 << 2 | 1 << 3  # frequency capped, throttled, soft temperature limit


def temperature_celsius(root: Path = ROOT) -> float | None:
    """Of the processor; None: no sensor. Raises OSError or ValueError when each one fails."""
    zones = [
        (read_text(zone / "type") or "", zone / "temp")
        for zone in sorted(root.glob("sys/class/thermal/thermal_zone*"))[:MAX_ZONES]
    ]
    for kind in _ZONES:
        found = _hottest([path for name, path in zones if kind.search(name)])
        if found is not None:
            return found
    chips = sorted(root.glob("sys/class/hwmon/hwmon*"))[:MAX_ZONES]
    found = _hottest([c / "temp1_input" for c in chips if read_text(c / "name") in _CHIPS])
    if found is not None:
        return found
    return _hottest([path for name, path in zones if _LAST_ZONES.search(name)])


def _hottest(paths: list[Path]) -> float | None:
    """The highest of those that can be read; files hold thousandths of degrees."""
    found: list[float] = []
    fault: Exception | None = None
    for path in paths:
        try:
            raw = read_int(path)
            if raw is None:
                continue
            celsius = raw / 1000.0
            if not COLDEST <= celsius <= HOTTEST:
                raise ValueError(f"{path}: {celsius:g} degrees")
            found.append(celsius)
        except (OSError, ValueError) as error:  # the zone of a part that is switched off
            fault = error
    if found:
        return max(found)
    if fault is not None:
        raise fault
    return None


class Throttling(NamedTuple):
    """None: the machine does not say. ``undervoltage``: the supply is too weak (Raspberry Pi)."""

    throttled: bool | None = None
    undervoltage: bool | None = None


class ThrottleReader:
    """Whether the machine is slowed down now; counters are compared with those of the last call."""

    def __init__(self, root: Path = ROOT, command: Command = run_command) -> None:
        self._root = root
        self._command = command
        self._events: int | None = None

    def read(self) -> Throttling:
        """Raises OSError or ValueError."""
        word = self._firmware_word()
        if word is not None:
            return Throttling(bool(word & SLOWED), bool(word & UNDER_VOLTAGE))
        events = self._throttle_events()
        if events is not None:
            before, self._events = self._events, events
            return Throttling(None if before is None else events > before)
        return Throttling(self._cooled())

    def _firmware_word(self) -> int | None:
        for path in self._root.glob("sys/devices/platform/soc*/soc*firmware/get_throttled"):
            return read_int(path, 16)
        said = self._command(("vcgencmd", "get_throttled"))
        if said is None:
            return None
        match = re.search(r"throttled=(0x[0-9a-fA-F]{1,8})\b", said)
        if match is None:
            raise ValueError(f"vcgencmd get_throttled said {said[:40]!r}")
        return int(match[1], 16)

    def _throttle_events(self) -> int | None:
        cpus = sorted(self._root.glob("sys/devices/system/cpu/cpu[0-9]*/thermal_throttle"))
        names = ("core_throttle_count", "package_throttle_count")
        counts = [read_int(cpu / name) for cpu in cpus[:MAX_CPUS] for name in names]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def _cooled(self) -> bool | None:
        found: bool | None = None
        for device in sorted(self._root.glob("sys/class/thermal/cooling_device*"))[:MAX_ZONES]:
            kind = read_text(device / "type") or ""
            if _SLOWING.search(kind) and not _FAN.search(kind):
                state = read_int(device / "cur_state")
                if state is not None:
                    found = bool(found) or state > 0
        return found
