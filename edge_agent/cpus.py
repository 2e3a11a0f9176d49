"""How many cores a model may use on this device."""

from __future__ import annotations

import math
import os
from pathlib import Path

_SYSTEM = Path("/sys")


def default_threads(root: Path = _SYSTEM) -> int:
    """Threads for a draft model: the physical cores less one, at least 1.

    That one is for the network thread and the rest of the device: a drafting thread that loses its
    core holds up all others at the next barrier. Beside a busy process, two threads on two cores
    drafted slower than one (24 to 36 ms a token against 16 to 23). ``root``: where sysfs is.
    """
    return max(1, usable_cores(root) - 1)


def usable_cores(root: Path = _SYSTEM) -> int:
    """Physical cores that this process may run on, at least 1.

    Counts the hyperthreads of a core once, respects the process's CPU affinity and a container's
    CPU quota (cgroup v2). What the system does not tell (no Linux, no sysfs) counts as no limit.
    """
    try:
        cpus = sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1
    siblings = (
        _read(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus
    )
    # A CPU without topology counts as a core of its own.
    cores = len({mask or f"cpu{cpu}" for cpu, mask in zip(cpus, siblings, strict=True)})
    return max(1, min(cores, _quota(root)))


def _quota(root: Path) -> int:
    # "max 100000" or "150000 100000": microseconds of CPU time per period.
    limit, _, period = _read(root / "fs/cgroup/cpu.max").partition(" ")
    if limit.isdigit() and period.isdigit() and int(period) > 0:
        return math.ceil(int(limit) / int(period))
    return os.cpu_count() or 1


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
