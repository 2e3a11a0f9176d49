"""A line on standard error that says how far a benchmark is."""

from __future__ import annotations

import sys
import time
from types import TracebackType

#: Seconds between two lines where there is no terminal.
_QUIET_S = 15.0


class Progress:
    """Use it as a context manager; ``show`` hears the share that is done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begin = time.monotonic()
        self._due = self._begin + 1.0
        self._terminal = sys.stderr.isatty()
        self._shown = False

    def show(self, share: float) -> None:
        """Say it, if enough time has passed."""
        now = time.monotonic()
        if now < self._due or share <= 0.0:
            return
        self._due = now + (1.0 if self._terminal else _QUIET_S)
        left = (now - self._begin) * (1.0 - share) / share
        line = f"{self._what}: {100 * share:.0f} %, about {left:.0f} s left"
        end = "" if self._terminal else "\n"
        print(f"\r{line:60}" if self._terminal else line, end=end, file=sys.stderr, flush=True)
        self._shown = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown and self._terminal:
            print(file=sys.stderr, flush=True)
