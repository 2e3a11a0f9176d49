"""Joules since the first look, from the one source that a machine has.

The best first: the GPU's own counter where the target computes there (NVML), a Jetson's or a
Raspberry Pi 5's power, integrated, an x86 processor's counter (RAPL), and, only where somebody has
stated the watts of a busy core, CPU seconds times watts: an estimate, and named so. They measure
different things (a whole module, a processor package, a GPU), so figures of different sources are
not to be compared; the source is a label of the series.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from broker.sensors.files import Command, read_int, read_text, run_command
from broker.sensors.machine import process_cpu_seconds
from broker.sensors.power import Ina3221, Pmic
from broker.sensors.settings import MAX_CORE_WATTS

log = logging.getLogger(__name__)

ROOT = Path("/")
#: Seconds between two looks at a power sensor beyond which nothing is known of what lay between.
MAX_GAP_S = 30.0
MAX_ZONES = 64
#: Seconds in which hardware that runs has drawn something.
STILL_S = 1.0
#: More than one processor package or one GPU draws.
MAX_PART_WATTS = 2_000.0
ESTIMATE = "estimate"


class EnergySource(Protocol):
    """``name``: the label of the series."""

    name: str

    def joules(self, now: float) -> float | None:
        """Energy since the first call; None: it cannot be told. Raises OSError or ValueError."""
        ...


class Integrated:
    """Energy from a power sensor: the mean of two readings times the seconds between.

    Readings further apart than ``MAX_GAP_S`` add nothing: the board may have slept, and energy is
    not to be invented. ``gaps`` counts these.
    """

    def __init__(self, name: str, watts: Callable[[], float]) -> None:
        self.name = name
        self.gaps = 0
        self._watts = watts
        self._last: tuple[float, float] | None = None  # now, watts
        self._joules = 0.0

    def joules(self, now: float) -> float:
        watts = self._watts()
        if self._last is not None:
            before, past = self._last
            seconds = now - before
            if 0.0 <= seconds <= MAX_GAP_S:
                self._joules += 0.5 * (past + watts) * seconds
            else:
                self.gaps += 1
        self._last = (now, watts)
        return self._joules


class Counted:
    """Energy from hardware counters, in joules, each of which begins anew at its ``wrap``.

    ``wrap`` 0: it never does. A step that would need more than ``MAX_PART_WATTS`` is none, as when
    the counter was reset in between: it adds nothing and is counted. Counters that all stand still
    count nothing (virtual machines show such): ``joules`` raises ValueError then.
    """

    def __init__(self, name: str, counters: Callable[[], dict[str, tuple[float, float]]]) -> None:
        self.name = name
        self.gaps = 0
        self._counters = counters
        self._last: tuple[float, dict[str, tuple[float, float]]] | None = None
        self._joules = 0.0

    def joules(self, now: float) -> float:
        found = self._counters()
        if self._last is not None:
            before, past = self._last
            if found == past and now - before >= STILL_S:
                raise ValueError(f"the energy counters of {self.name} stand still")
            for key, (value, wrap) in found.items():
                if key not in past:
                    continue
                step = value - past[key][0]
                if step < 0.0:
                    step += wrap
                if 0.0 <= step <= MAX_PART_WATTS * max(now - before, 0.0):
                    self._joules += step
                else:
                    self.gaps += 1
        self._last = (now, found)
        return self._joules


class Estimate:
    """CPU seconds of this process times what a busy core draws. Not a measurement."""

    name = ESTIMATE

    def __init__(self, watts: float, root: Path = ROOT) -> None:
        self._watts = watts
        self._root = root

    def joules(self, now: float) -> float | None:  # noqa: ARG002 (the sources' surface)
        seconds = process_cpu_seconds(self._root)
        return None if seconds is None else seconds * self._watts


def find_ina3221(root: Path = ROOT) -> EnergySource | None:
    """None: no Jetson. Raises OSError or ValueError, as every ``find`` here."""
    board = Ina3221.find(root)
    if board is None:
        return None
    board.watts()
    return Integrated(board.name, board.watts)


def find_pmic(command: Command = run_command) -> EnergySource | None:
    """None: no Raspberry Pi 5."""
    board = Pmic.find(command)
    return None if board is None else Integrated(board.name, board.watts)


def find_rapl(root: Path = ROOT, say: Callable[[str], None] = log.warning) -> EnergySource | None:
    """Packages and their memory (Linux, Documentation/power/powercap); AMD's have the same names.

    ``psys`` is left out: it holds the packages. None: no such processor, counters that only root
    may read, which ``say`` is told, or that a virtual machine shows at 0.
    """
    zones: dict[str, tuple[Path, float]] = {}
    for zone in sorted(root.glob("sys/class/powercap/intel-rapl:*"))[:MAX_ZONES]:
        name = read_text(zone / "name") or ""
        if re.match(r"package|dram", name):
            wrap = read_int(zone / "max_energy_range_uj")
            if (zone / "energy_uj").exists():
                zones[zone.name] = (zone / "energy_uj", (wrap or 0) / 1e6)
    if not zones:
        return None

    def counters() -> dict[str, tuple[float, float]]:
        found = {}
        for key, (path, wrap) in zones.items():
            value = read_int(path)
            if value is not None:
                found[key] = (value / 1e6, wrap)
        if not found:
            raise ValueError("the energy counters have gone")
        return found

    try:
        if not any(value for value, _ in counters().values()):
            return None
    except PermissionError:
        path = next(iter(zones.values()))[0]
        say(f"energy: {path} is for root only: chmod it, or state --watts for an estimate")
        return None
    return Counted("rapl", counters)


def find_nvml(importer: Callable[[], Any] | None = None) -> EnergySource | None:
    """The GPUs that this process may use. None: no NVML, no GPU, or GPUs without the counter."""
    try:
        nvml = (importer or _import_nvml)()
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handles = _visible(nvml)
        for handle in handles.values():
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        log.debug("energy: no counter of a GPU: %s", error)
        return None
    if not handles:
        return None

    def counters() -> dict[str, tuple[float, float]]:
        try:
            return {
                key: (nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, 0.0)
                for key, handle in handles.items()
            }
        except nvml.NVMLError as error:
            raise ValueError(f"NVML: {error}") from None

    return Counted("nvml", counters)


def _import_nvml() -> Any:
    return importlib.import_module("pynvml")  # of nvidia-ml-py, where somebody installed it


def _visible(nvml: Any) -> dict[str, Any]:
    """Handles of the GPUs that CUDA_VISIBLE_DEVICES leaves: numbers or ids; unset: all."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        indices = range(min(nvml.nvmlDeviceGetCount(), MAX_ZONES))
        return {str(index): nvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
    found: dict[str, Any] = {}
    for part in (part.strip() for part in wanted.split(",")[:MAX_ZONES]):
        if part.isdecimal():
            found[part] = nvml.nvmlDeviceGetHandleByIndex(int(part))
        elif part.startswith(("GPU-", "MIG-")):
            found[part] = nvml.nvmlDeviceGetHandleByUUID(part)
        else:
            break  # as CUDA does: what follows a wrong one, -1 above all, is not visible
    return found


def find_estimate(watts: float | None, root: Path = ROOT) -> EnergySource | None:
    """None: nobody stated the watts of a busy core, or they are no number above 0."""
    if watts is None or not (0.0 < watts <= MAX_CORE_WATTS):
        return None
    return Estimate(watts, root)
