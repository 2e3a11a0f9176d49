"""How much memory K/V may take: what people write, what a machine has, what follows from both."""

from __future__ import annotations

import re
from pathlib import Path

from broker.errors import ConfigError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def parse_size(text: str) -> int:
    """Bytes of ``512M``, ``2G``, ``1.5GiB`` or a plain number; units are powers of 1024.

    Raises ConfigError for anything else, and below one byte.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found and len(text) <= 32 else 0
    if size < 1:
        raise ConfigError(f"--kv-budget {text[:32]!r} is no size: write it like 512M or 2G")
    return size


def format_size(count: int) -> str:
    """``count`` bytes in the largest unit of which it has one, rounded up so that it suffices."""
    for unit in "GM":
        if count >= _UNITS[unit]:
            return f"{-(-count * 10 // _UNITS[unit]) / 10:g}{unit}"
    return f"{-(-count // 1024)}K"


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that this process could still take: of the machine or of its container.

    None where neither can be told.
    """
    known: list[int] = []
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text("ascii"), re.MULTILINE)
        known += [int(found[1]) * 1024] if found else []
    except (OSError, ValueError):
        pass
    try:
        limit = int((cgroup / "memory.max").read_text("ascii"))
        used = int((cgroup / "memory.current").read_text("ascii"))
        # Pages of files count as used there and are given back on demand.
        cached = re.search(
            r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text("ascii"), re.MULTILINE
        )
        known.append(max(0, limit - used + (int(cached[1]) if cached else 0)))
    except (OSError, ValueError):  # "max" is no number: no limit
        pass
    return min(known, default=None)


def blocks_for(
    budget: int | None,
    *,
    block_bytes: int,
    context_blocks: int,
    max_slots: int,
    available: int | None,
) -> int:
    """Blocks of ``block_bytes`` bytes within ``budget`` bytes, no more than the slots could use.

    Without a budget: as many as the slots could use, at most a quarter of the ``available`` bytes,
    since replicas side by side each find the same ones, and at least one context. Raises
    ConfigError for a budget in which one context does not fit.
    """
    most = max_slots * context_blocks
    if budget is None:
        if available is None:
            return most
        return max(context_blocks, min(most, available // 4 // block_bytes))
    if budget < context_blocks * block_bytes:
        raise ConfigError(
            f"--kv-budget {format_size(budget)} holds no session of the whole context: give "
            f"{format_size(context_blocks * block_bytes)} at least, or a smaller --context"
        )
    taken = min(most, budget // block_bytes)
    if available is not None and taken * block_bytes > available:
        raise ConfigError(
            f"--kv-budget {format_size(budget)} takes {format_size(taken * block_bytes)} where "
            f"{format_size(available)} are available: lower it"
        )
    return taken
