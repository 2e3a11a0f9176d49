"""What processes use, and how many files they may open. Reads ``/proc``; else it knows less."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from broker.errors import ConfigError

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process or several: CPU seconds, and the sum of their largest resident sizes."""

    cpu_s: float
    peak_bytes: int


def usage_of(
    words: tuple[str, ...], *, proc: Path = _PROC, root: int | None = None
) -> Usage | None:
    """Of this process's descendants whose command line holds one of ``words``; None: unknown.

    ``root``: whose descendants, None for this process's.
    """
    parents = _parents(proc)
    wanted = {os.getpid() if root is None else root}
    found: set[int] = set()
    while wanted:
        wanted = {pid for pid, parent in parents.items() if parent in wanted} - found
        found |= wanted
    cpu_s, peak, seen = 0.0, 0, False
    for pid in found:
        usage = _one(proc / str(pid), words)
        if usage is not None:
            seen = True
            cpu_s += usage.cpu_s
            peak += usage.peak_bytes
    return Usage(cpu_s, peak) if seen else None


def _parents(proc: Path) -> dict[int, int]:
    found: dict[int, int] = {}
    try:
        entries = [entry for entry in proc.iterdir() if entry.name.isdigit()]
    except OSError:
        return found
    for entry in entries:
        try:
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            found[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has ended meanwhile
    return found


def _one(folder: Path, words: tuple[str, ...]) -> Usage | None:
    try:
        line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        if not any(word in line for word in words):
            return None
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        status = (folder / "status").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError, IndexError):
        return None
    peak = 0
    for entry in status.splitlines():
        if entry.startswith("VmHWM:"):
            peak = int(entry.split()[1]) * 1024
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), peak)


def raise_file_limit(needed: int, what: str) -> None:
    """Let this process and those that it starts open ``needed`` files each.

    ``what`` names what needs them. Raises ConfigError that says how to raise the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return
    if hard != unlimited and hard < needed:
        raise ConfigError(
            f"{what} needs {needed} open files and the limit is {hard}: raise it with "
            f"ulimit -Hn {needed} as root, or run fewer devices"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
