"""The short forms of ``benchmarks.chaos`` and ``benchmarks.churn``: processes, kills, pauses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.brokers import MOSQUITTO, require
from tests.commands import ROOT, clean_environment

pytestmark = pytest.mark.slow

#: Seconds: far more than they take, so that a busy machine fails nobody.
PATIENCE = 400.0


def benchmark(name: str, *flags: str) -> dict[str, Any]:
    """Run ``python -m benchmarks.NAME`` and return what it reports; it must have succeeded."""
    require("mosquitto", MOSQUITTO is not None)
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *flags, "--json"],
        capture_output=True,
        timeout=PATIENCE,
        cwd=ROOT,
        env=clean_environment(),
        check=False,
    )
    said = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, said[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_deaths_and_pauses_change_no_text() -> None:
    """A replica and the broker are killed, a replica is stopped for a second."""
    faults = ["kill-replica", "kill-broker", "pause-replica"]
    flags = ["--rounds", "3", "--devices", "4", "--texts", "1", "--max-tokens", "120"]
    data = benchmark("chaos", *flags, "--pause", "1", "--faults", ",".join(faults))
    assert data["bad_rounds"] == []
    assert data["texts"] == 12
    assert set(data["faults"]) == set(faults)
    assert data["longest_gap_s"] > 0.0


def test_sessions_without_end_leave_nothing() -> None:
    data = benchmark("churn", "--sessions", "300", "--devices", "12", "--kills", "1")
    assert data["wrong"] == []
    assert data["sessions"] >= 300
    assert data["vanished_devices"] == 6
    assert data["sessions_left"] == data["slots_left"] == 0
    assert data["hung_up"] > 0
    assert data["written"] > 0


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("chaos", "--rounds 0", "--rounds is 1"),
        ("chaos", "--faults kill-all", "no 'kill-all'"),
        ("chaos", "--pair smollm2", "--traces"),
        ("churn", "--sessions 1", "--sessions is 10"),
    ],
)
def test_wrong_flags(name: str, flags: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *flags.split()],
        capture_output=True,
        timeout=PATIENCE,
        cwd=ROOT,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr.decode()
