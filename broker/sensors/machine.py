"""CPU time and memory of this process and of the machine, and what machine it is.

From procfs (proc(5)); sizes in bytes, times in seconds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from broker.sensors.files import read_text

ROOT = Path("/")
MAX_MODEL = 100
#: What firmware says where its maker filled in nothing.
_BLANKS = ("", "to be filled by o.e.m.", "system product name", "default string", "none")


def process_cpu_seconds(root: Path = ROOT) -> float | None:
    """User and system time of this process, children left out. Raises OSError or ValueError."""
    text = read_text(root / "proc/self/stat")
    if text is None:
        return None
    fields = text[text.rindex(")") + 1 :].split()  # the name before may hold anything
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds(root: Path = ROOT) -> float | None:
    """Seconds in which the machine's processors were busy, summed. Raises OSError, ValueError."""
    text = read_text(root / "proc/stat")
    if text is None:
        return None
    name, *fields = text.splitlines()[0].split() if text else [""]
    if name != "cpu" or len(fields) < 7:
        raise ValueError("proc/stat does not begin with the sum over all processors")
    times = [int(field) for field in fields[:8]]
    busy = sum(times) - times[3] - times[4]  # idle, and idle while the disk worked
    return busy / os.sysconf("SC_CLK_TCK")


def resident_memory_bytes(root: Path = ROOT) -> float | None:
    """What this process holds in memory. Raises OSError or ValueError."""
    text = read_text(root / "proc/self/statm")
    if text is None:
        return None
    fields = text.split()
    if len(fields) < 2:
        raise ValueError("proc/self/statm has no resident size")
    return float(int(fields[1]) * os.sysconf("SC_PAGE_SIZE"))


class Memory(NamedTuple):
    """The machine's, in bytes; ``available``: what a program could still get without swapping."""

    total: float | None
    available: float | None


def machine_memory(root: Path = ROOT) -> Memory:
    """Raises OSError or ValueError."""
    text = read_text(root / "proc/meminfo")
    found: dict[str, float] = {}
    for line in (text or "").splitlines():
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            amount, unit = value.split()
            if unit != "kB":
                raise ValueError(f"proc/meminfo: {name} in {unit}")
            found[name] = int(amount) * 1024.0
    return Memory(found.get("MemTotal"), found.get("MemAvailable"))


def machine_model(root: Path = ROOT) -> str | None:
    """The board or computer as its firmware names it, else its processor; None: it does not say.

    At most ``MAX_MODEL`` printable characters. Never raises.
    """
    for find in (_device_tree, _dmi, _processor):
        try:
            found = find(root)
        except (OSError, ValueError):
            continue
        clean = "".join(c if c.isprintable() else " " for c in found or "")
        clean = " ".join(clean.split())[:MAX_MODEL].strip()
        if clean:
            return clean
    return None


def _device_tree(root: Path) -> str | None:
    return read_text(root / "proc/device-tree/model") or read_text(
        root / "sys/firmware/devicetree/base/model"
    )


def _dmi(root: Path) -> str | None:
    name = read_text(root / "sys/class/dmi/id/product_name")
    vendor = read_text(root / "sys/class/dmi/id/sys_vendor")
    if name is None or name.lower() in _BLANKS:
        return None
    return name if vendor is None or vendor.lower() in _BLANKS else f"{vendor} {name}"


def _processor(root: Path) -> str | None:
    text = read_text(root / "proc/cpuinfo") or ""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    # A Raspberry Pi whose device tree a container hides names itself behind its processors.
    return found.get("Model") or found.get("model name") or found.get("Hardware")
