"""``cloud-verifier serve`` that tells where its time went: a child of ``benchmarks.throughput``.

It is run with serve's flags, and at its end prints one line of counters as the scripted verifier
does, with the seconds of each stage and the processor time of its threads.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from cloud_verifier import cli, runtime
from cloud_verifier.engine.target import Target, Work
from cloud_verifier.engine.wrapped import WrappedTarget
from cloud_verifier.runtime import VerifierRuntime
from cloud_verifier.scripted import STATS, counters

_ENGINE, _MAIN, _END = "engine", "MainThread", "until-eof"


class _Timed(WrappedTarget):
    """``target``; ``wall_s`` and ``cpu_s``: of the calling thread in its forwards."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.wall_s = self.cpu_s = 0.0

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        """As ``Target.forward``."""
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return self._target.forward(batch)
        finally:
            self.wall_s += time.perf_counter() - wall
            self.cpu_s += time.thread_time() - cpu


class TimedRuntime(VerifierRuntime):
    """Says everything when it is stopped, once."""

    def __init__(self, transport: Any, target: Target, *rest: Any, **named: Any) -> None:
        self._timed = _Timed(target)
        self._said = False
        super().__init__(transport, self._timed, *rest, **named)

    def stop(self, timeout: float = 5.0) -> None:
        """As VerifierRuntime.stop."""
        if not self._said:
            self._said = True
            found = {**counters(self), "time": self._times()}
            print(STATS + json.dumps(found), file=sys.stderr, flush=True)
        super().stop(timeout)

    def _times(self) -> dict[str, float]:
        # Threads of torch are none of Python's and are not among these.
        spent: dict[str, float] = {}
        for thread in threading.enumerate():
            if thread.ident is not None:
                clock = time.pthread_getcpuclockid(thread.ident)
                spent[thread.name] = spent.get(thread.name, 0.0) + time.clock_gettime(clock)
        engine = spent.pop(_ENGINE, 0.0)
        network = sum(s for name, s in spent.items() if name not in (_MAIN, _END))
        return {
            **{f"stage_{name}_s": round(s, 6) for name, s in self.measures.stages.items()},
            "forward_s": round(self._timed.wall_s, 6),
            "engine_beside_s": round(max(0.0, engine - self._timed.cpu_s), 6),
            "network_s": round(network, 6),
        }


def main(argv: Sequence[str]) -> int:
    """Serve with these flags; the exit code."""
    runtime.VerifierRuntime = TimedRuntime  # type: ignore[misc]
    return cli.main(["serve", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
