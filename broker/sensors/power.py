"""Watts, on boards that measure power: Jetson (INA3221) and Raspberry Pi 5 (its PMIC).

Jetson. The monitors hang on I2C; their driver is ``ina3221x`` (JetPack 4) or ``ina3221`` (JetPack 5
and 6). JetPack 4 shows them as IIO devices (``rail_name_0``, ``in_power0_input`` in
mW), later ones as hwmon (``in1_label``, ``in1_input`` in mV, ``curr1_input`` in mA; Linux,
Documentation/hwmon/ina3221). A module names a rail that carries all of it (``VDD_IN``,
``POM_5V_IN``), or the rails are summed (AGX).

Raspberry Pi 5. ``vcgencmd pmic_read_adc`` prints current and voltage of each rail on two lines that
belong together by the rail's name, not by the number in brackets. ``EXT5V`` and ``BATT`` have a
voltage only. What hangs on the USB ports and on the 5 V pins is not measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from broker.sensors.files import Command, read_int, read_text, run_command

ROOT = Path("/")
#: More than any machine here draws: a reading beyond is broken.
MAX_WATTS = 20_000.0
MAX_RAILS = 32
#: Rails that carry the whole module.
_WHOLE = ("VDD_IN", "POM_5V_IN")
#: Rails that are fed from another one that is measured too, and would count twice.
_FED_FROM = {"VDDQ_VDD2_1V8AO": "VIN_SYS_5V0"}
#: Labels of what is no rail: a channel that is not connected, the sum of the shunts.
_NO_RAIL = re.compile(r"^$|^NC\b|sum of shunt", re.IGNORECASE)

_PMIC_LINE = re.compile(r"^\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=([0-9.]+)[AV]\s*$")


class Rail(NamedTuple):
    """``power`` in mW where the driver computes it; else ``volts`` (mV) times ``amperes`` (mA)."""

    name: str
    power: Path | None
    volts: Path
    amperes: Path

    def watts(self) -> float | None:
        """None: the channel is gone. Raises OSError or ValueError."""
        if self.power is not None:
            milliwatts = read_int(self.power)
            return None if milliwatts is None else milliwatts / 1e3
        volts, amperes = read_int(self.volts), read_int(self.amperes)
        if volts is None or amperes is None:
            return None
        return volts * amperes / 1e6


class Ina3221:
    """The power of a Jetson module; see the file."""

    name = "ina3221"

    def __init__(self, rails: Sequence[Rail]) -> None:
        self.rails = tuple(rails)

    @classmethod
    def find(cls, root: Path = ROOT) -> Ina3221 | None:
        """None: no such board. Raises OSError when its folders cannot be read."""
        rails: list[Rail] = []
        drivers = "sys/bus/i2c/drivers/ina3221*/*"
        for folder in sorted(root.glob(f"{drivers}/hwmon/hwmon*")):
            for label in sorted(folder.glob("in[1-3]_label")):
                number = label.name[2]
                volts, amperes = folder / f"in{number}_input", folder / f"curr{number}_input"
                off = read_int(folder / f"in{number}_enable") == 0
                if volts.exists() and amperes.exists() and not off:
                    rails.append(Rail(read_text(label) or "", None, volts, amperes))
        for folder in sorted(root.glob(f"{drivers}/iio:device*")):
            for label in sorted(folder.glob("rail_name_[0-2]")):
                number = label.name[-1]
                power = folder / f"in_power{number}_input"
                volts = folder / f"in_voltage{number}_input"
                amperes = folder / f"in_current{number}_input"
                if power.exists() or (volts.exists() and amperes.exists()):
                    found = power if power.exists() else None
                    rails.append(Rail(read_text(label) or "", found, volts, amperes))
        chosen = _those_that_count([r for r in rails if not _NO_RAIL.search(r.name)][:MAX_RAILS])
        return cls(chosen) if chosen else None

    def watts(self) -> float:
        """Raises OSError or ValueError: a sum without one of its rails would be a wrong sum."""
        total = 0.0
        for rail in self.rails:
            watts = rail.watts()
            if watts is None:
                raise ValueError(f"the rail {rail.name[:40]} has gone")
            total += watts
        return check_watts_read(total)


def _those_that_count(rails: list[Rail]) -> list[Rail]:
    for whole in _WHOLE:
        for rail in rails:
            if rail.name == whole:
                return [rail]
    names = {rail.name for rail in rails}
    return [rail for rail in rails if _FED_FROM.get(rail.name) not in names]


class Pmic:
    """The power of a Raspberry Pi 5: the sum over the rails of its PMIC."""

    name = "pmic"

    def __init__(self, command: Command = run_command) -> None:
        self._command = command

    @classmethod
    def find(cls, command: Command = run_command) -> Pmic | None:
        """None: no Raspberry Pi, or one that measures no current. Raises OSError or ValueError."""
        said = command(("vcgencmd", "pmic_read_adc"))
        return None if said is None or pmic_watts(said) is None else cls(command)

    def watts(self) -> float:
        """Raises OSError or ValueError."""
        said = self._command(("vcgencmd", "pmic_read_adc"))
        found = None if said is None else pmic_watts(said)
        if found is None:
            raise ValueError("vcgencmd pmic_read_adc named no rail")
        return check_watts_read(found)


def pmic_watts(said: str) -> float | None:
    """Watts over the rails of which current and voltage are known; None: there is none.

    Raises ValueError for numbers that are none.
    """
    values: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for line in said.splitlines()[: 4 * MAX_RAILS]:
        match = _PMIC_LINE.match(line)
        if match is not None:
            values[match[2]][match[1]] = float(match[3])
    amperes, volts = values["A"], values["V"]
    rails = amperes.keys() & volts.keys()
    return sum(amperes[rail] * volts[rail] for rail in rails) if rails else None


def check_watts_read(watts: float) -> float:
    """``watts`` itself. Raises ValueError for what no machine that runs draws, nothing included."""
    if not 0.0 < watts <= MAX_WATTS:
        raise ValueError(f"{watts:g} W is no power that a machine draws")
    return watts
