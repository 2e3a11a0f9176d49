"""The real commands for tests: in this process, or in processes of their own."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.brokers import wait_until

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    "edge-agent": "edge_agent.cli",
    "cloud-verifier": "cloud_verifier.cli",
    "fleet-broker": "broker.cli",
}
#: The fields of ``--json``, in order (DESIGN.md, Commands).
FIELDS = [
    *("text", "token_ids", "finish_reason", "tokens", "ttft_ms", "tpt_ms", "drafted", "accepted"),
    *("forwards", "uplink_bytes", "downlink_bytes", "uplink_messages", "mode", "verified"),
]
#: Seconds for what takes a moment on a quiet machine.
PATIENCE = 60.0


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Of standard error."""
        return self.err.splitlines()


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without settings of this project, for commands that run in a process of their own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PIPESD_") or name == "PIPESD_CACHE_DIR"
    }
    path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(extra or {})}


def call(program: str, *arguments: str) -> Result:
    """Run a command's ``main`` in this process, leaving signals and logging as they were."""
    main = import_module(MODULES[program]).main
    root, hook = logging.getLogger(), sys.unraisablehook
    handlers, level = root.handlers[:], root.level
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    out, err = io.StringIO(), io.StringIO()
    root.handlers = []
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(arguments))
    finally:
        root.handlers = handlers
        root.setLevel(level)
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
    return Result(code, out.getvalue(), err.getvalue())


class Command:
    """A command in a process of its own; as a context manager it leaves nothing behind."""

    def __init__(
        self,
        program: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        cwd: Path | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULES[program], *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(env),
            cwd=cwd,
            start_new_session=True,
        )
        self._out: list[bytes] = []
        self._err: list[bytes] = []
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stdout, self._out), (self.process.stderr, self._err))
        ]
        for reader in self._readers:
            reader.start()
        self._seen: set[Child] = set()

    @staticmethod
    def _read(pipe: Any, parts: list[bytes]) -> None:
        while part := os.read(pipe.fileno(), 65_536):
            parts.append(part)

    @property
    def out(self) -> str:
        """Standard output so far."""
        return b"".join(self._out).decode("utf-8", "replace")

    @property
    def err(self) -> str:
        """Standard error so far."""
        return b"".join(self._err).decode("utf-8", "replace")

    def wait(self, timeout: float = PATIENCE) -> Result:
        """Its end, which must come in time."""
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(5)
        return Result(code, self.out, self.err)

    def until(self, condition: Callable[[], object], timeout: float = PATIENCE) -> None:
        """Wait for ``condition``; it must come while the command still runs."""
        wait_until(lambda: condition() or self.process.poll() is not None, timeout)
        assert condition(), f"{self.process.poll()}: {self.out[-2000:]}\n{self.err[-2000:]}"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def children(self) -> set[Child]:
        """Everything below it at present."""
        found = below(self.process.pid)
        self._seen |= found
        return found

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.children()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for child in self._seen:
            if child.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def run_command(program: str, *arguments: str, timeout: float = PATIENCE, **options: Any) -> Result:
    """Run a command in a process of its own to its end."""
    with Command(program, *arguments, **options) as command:
        return command.wait(timeout)


def error_line(result: Result, code: int, *words: str, program: str = "edge-agent") -> str:
    """Asserts that a command failed as DESIGN.md says; the line in which it says why."""
    assert result.code == code, f"{result.code}: {result.err}"
    assert result.out == "", result.out
    assert len(result.lines) == 1, result.err
    line = result.lines[0]
    assert line.startswith(f"{program}: "), line
    assert "unexpected" not in line, line
    for word in words:
        assert word in line, f"{word!r} is not in: {line}"
    return line


# ---- processes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Child:
    """A process, told from a later one with the same number by its ``start`` (clock ticks)."""

    pid: int
    start: int
    what: str

    @property
    def alive(self) -> bool:
        now = _stat(self.pid)
        return now is not None and now[2] == self.start and now[0] not in "ZX"


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State, parent and start of a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[19])


def _what(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode("utf-8", "replace")[:200]


def below(pid: int) -> set[Child]:
    """All living descendants of a process."""
    stats = {
        int(entry.name): stat
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None
    }
    found: set[int] = set()
    todo = {pid}
    while todo:
        todo = {child for child, stat in stats.items() if stat[1] in todo} - found
        found |= todo
    return {
        Child(child, stats[child][2], _what(child))
        for child in found
        if stats[child][0] not in "ZX"
    }


def still_alive(children: Iterable[Child], timeout: float = PATIENCE) -> list[Child]:
    """Those that have not ended within ``timeout`` seconds."""
    children = list(children)
    wait_until(lambda: not any(child.alive for child in children), timeout)
    return [child for child in children if child.alive]
