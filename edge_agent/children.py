"""Child processes of a demo that end with it, however it ends.

Each holds the reading end of a pipe as its standard input; the writing end is ours alone, so it
closes even when this process is killed. Standard error is kept to a bounded tail for messages.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

TAIL_LINES = 20
_PREFIX, _SHARED = "PIPESD_", ("PIPESD_CACHE_DIR",)


def _environment(threads: int) -> dict[str, str]:
    """Ours without the settings: those are this command's, and reach a child by its flags alone."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_PREFIX) or name in _SHARED
    }
    return {**ours, "OMP_NUM_THREADS": str(threads)}


class Child:
    """One child; ``on_line`` hears each line of its standard error (from a thread of its own)."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        threads: int,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C goes to the whole group; the child shall end when we say so, after us.
            start_new_session=True,
            env=_environment(threads),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            if not line:
                continue
            self._tail.append(line)
            if self._on_line is not None:
                self._on_line(line)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def last_line(self) -> str:
        """Of its standard error; the very last one once it has ended."""
        if not self.alive:
            self._reader.join(2.0)
        return self._tail[-1] if self._tail else "it said nothing"

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send it a signal; nothing happens when it has ended."""
        self._process.send_signal(number)

    def tell(self, line: str) -> None:
        """Write ``line`` to its standard input; nothing happens when it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def ask(self, line: str) -> str:
        """Write ``line`` and return all of standard output; the child has ended then.

        Its standard input stays open meanwhile, so that it ends with us if we do not live so long.
        """
        assert self._process.stdout is not None
        self.tell(line)
        output = self._process.stdout.read()
        self._process.wait()
        self._reader.join(2.0)
        return output.decode("utf-8", "replace")

    def stop(self, timeout: float = 5.0) -> None:
        """Close its standard input, then ask, then kill; idempotent."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for action in (None, process.terminate, process.kill):
            if action is not None:
                action()
            try:
                process.wait(timeout)
                break
            except subprocess.TimeoutExpired:
                continue
        if process.stdout is not None:
            process.stdout.close()
