"""Small files and short commands: absent is None, broken raises OSError or ValueError."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

#: Bytes read of a file: all that is wanted of the kernel's text files stands before.
MAX_BYTES = 65_536
#: Seconds that a command may take.
COMMAND_TIMEOUT = 1.0

#: Runs a command and returns what it said; None: there is no such program.
Command = Callable[[Sequence[str]], str | None]


def read_text(path: Path) -> str | None:
    """The beginning of a text file, stripped; None: there is no such file. Raises OSError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return raw.decode("utf-8", errors="replace").strip("\0 \t\r\n")


def read_int(path: Path, base: int = 10) -> int | None:
    """The whole number in a file; None: there is no such file. Raises OSError or ValueError."""
    text = read_text(path)
    if text is None:
        return None
    try:
        return int(text, base)
    except ValueError:
        raise ValueError(f"{path}: no whole number: {text[:40]!r}") from None


def run_command(argv: Sequence[str]) -> str | None:
    """What a command prints; None: there is no such program.

    Raises ValueError when it fails or takes longer than ``COMMAND_TIMEOUT`` seconds, OSError when
    it cannot be started.
    """
    program = shutil.which(argv[0])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{argv[0]} took longer than {COMMAND_TIMEOUT:g} s") from None
    if done.returncode != 0:
        raise ValueError(f"{argv[0]} ended with {done.returncode}")
    return done.stdout[:MAX_BYTES].decode("utf-8", errors="replace")
