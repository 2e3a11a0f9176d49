"""Files that a benchmark writes beside its results: whole or not at all, and checked beforehand."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from broker.errors import ConfigError


def check_writable(path: str | Path) -> None:
    """Before the work, not after it; what is there stays. Raises ConfigError."""
    goal = _goal(path)
    try:
        part = _part(goal)
        with part.open("wb"):
            pass
        part.unlink()
        if goal.exists():
            with goal.open("ab"):
                pass
    except OSError as error:
        raise _unwritable(path, error) from None


def check_output(path: Path) -> None:
    """``check_writable`` for what ``--out`` names. Raises ConfigError."""
    existed = path.exists()
    try:
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}: choose --out") from None


def replace_file(path: str | Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a new file and put that in the place of ``path``.

    Whatever ends it, ``path`` is the old file or the new one. Raises ConfigError.
    """
    goal = _goal(path)
    part = _part(goal)
    try:
        write(part)
        os.replace(part, goal)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def write_json(path: str | Path, data: object) -> None:
    """``data`` as JSON for people. Raises ConfigError."""
    text = json.dumps(data, indent=1) + "\n"
    replace_file(path, lambda part: part.write_text(text, encoding="utf-8"))


def _goal(path: str | Path) -> Path:
    # A link stays one, and a device is never replaced by a file.
    goal = Path(path).resolve()
    if goal.exists() and not goal.is_file():
        raise ConfigError(f"{path} is no regular file: give another")
    return goal


def _part(goal: Path) -> Path:
    # In the same folder, or it could not take the other's place at once.
    return goal.with_name(f"{goal.name}.part-{os.getpid()}")


def _unwritable(path: str | Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error.strerror}): give another")
