"""Heavy or fragile preparation steps in a process of their own.

Converting a model takes gigabytes that should go back to the system afterwards, writes progress
bars to standard error, and native code may abort on a broken file. In a child all of that stays
there. The child ends with its parent, however the parent ends: it holds the reading end of a pipe
whose writing end only the parent has.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from broker.errors import ModelError

_TAIL_BYTES = 4000


def run_step(
    module: str,
    arguments: Sequence[str],
    what: str,
    *,
    limit_s: float = 3600.0,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run ``python -m module arguments`` and wait; the module calls ``end_with_parent`` first.

    ``what`` names the step in errors. Raises ModelError with the last line of the child's standard
    error when it fails, dies, or takes longer than ``limit_s`` seconds.
    """
    variables = {**os.environ, **(environment or {})}
    # The child must import the packages that this process runs, installed or not.
    here = str(Path(__file__).resolve().parents[1])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (here, variables.get("PYTHONPATH"))))
    lifeline, held = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=lifeline,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=variables,
        )
    except BaseException:
        os.close(held)
        raise
    finally:
        os.close(lifeline)
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    timer = threading.Timer(limit_s, expire)
    timer.daemon = True
    timer.start()
    tail = b""
    try:
        assert process.stderr is not None
        while chunk := os.read(process.stderr.fileno(), 65536):
            tail = (tail + chunk)[-_TAIL_BYTES:]
        process.wait()
    finally:
        timer.cancel()
        os.close(held)
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()
    if expired.is_set():
        raise ModelError(f"{what} took longer than {limit_s:.0f} s and was ended; try again")
    if process.returncode != 0:
        raise ModelError(f"{what} failed: {_last_line(tail, process.returncode)}")


def end_with_parent() -> None:
    """In a child of ``run_step``: end at once when the parent is gone."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _last_line(tail: bytes, status: int) -> str:
    lines = [line.strip() for line in tail.decode("utf-8", "replace").splitlines()]
    said = next((line for line in reversed(lines) if line), "")
    if status < 0:
        return f"ended by signal {-status}" + (f" after saying {said!r}" if said else "")
    return said or f"exit status {status}"
