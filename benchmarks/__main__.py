"""Run the benchmarks one after another: ``python -m benchmarks [NAME ...]``.

Those that take many minutes (LONG) run only when they are named.

Each runs in a process of its own, so that none measures what another left behind. Exit code 1 when
one of them fails (a mark missed or an error), 2 for an unknown name.
"""

from __future__ import annotations

import pkgutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LONG = ("autotuner", "capacity", "chaos", "churn", "throughput", "tuning_live")


def names() -> list[str]:
    """The benchmarks: every module here that does not begin with an underscore."""
    found = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(module.name for module in found if not module.name.startswith("_"))


def main(arguments: Sequence[str]) -> int:
    """Run those named, or all; the exit code."""
    known = names()
    unknown = [name for name in arguments if name not in known]
    if unknown:
        print(f"benchmarks: no {unknown[0]}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for name in arguments or [name for name in known if name not in LONG]:
        print(f"\n== {name} ==", flush=True)
        started = time.monotonic()
        code = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode
        print(f"-- {name}: {time.monotonic() - started:.0f} s, exit code {code}", flush=True)
        if code != 0:
            failed.append(name)
    if failed:
        print(f"\nbenchmarks: {', '.join(failed)} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
