"""What the packaging tests share: this tree as a wheel, and processes that see no tree at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("broker", "cloud_verifier", "edge_agent")
_METADATA = ("pyproject.toml", "README.md", "LICENSE")


def clean_environment() -> dict[str, str]:
    """This environment without what would lend the checkout, or its settings, to a child."""
    leaks = ("PYTHON", "PIPESD_", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(leaks)}
    kept["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    return kept


def run(*command: str | Path, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    """The finished process of a command that is expected to work; its output on failure."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd="/",
        env=clean_environment(),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stderr[-3000:]}"
    return done


@lru_cache(maxsize=1)
def wheel(base: Path) -> Path:
    """The wheel of the working tree, built once below ``base`` from a copy of the sources.

    A copy, since setuptools leaves its build folders beside what it builds, and packs what an
    earlier build left there.
    """
    source = base / "source"
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in _METADATA:
        shutil.copy2(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "-qq")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", base / "wheel", source)
    (built,) = (base / "wheel").glob("pipesd-*.whl")
    return built
