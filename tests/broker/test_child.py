"""Preparation steps in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from broker.child import run_step
from broker.errors import ModelError

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0

STEP = """
import os, sys, time
from pathlib import Path
from broker.child import end_with_parent

end_with_parent()
what = sys.argv[1]
if what == "write":
    Path(sys.argv[2]).write_text(os.environ.get("EXTRA", ""))
elif what == "noise":
    print("x" * 1_000_000, file=sys.stderr)
    print("a broken file", file=sys.stderr)
    sys.exit(3)
elif what == "raise":
    raise ValueError("no such architecture")
elif what == "abort":
    os.abort()
elif what == "sleep":
    Path(sys.argv[2]).write_text(str(os.getpid()))
    time.sleep(600)
"""


@pytest.fixture
def where(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "a_step.py").write_text(STEP)
    return {"PYTHONPATH": str(tmp_path)}


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_step_runs_with_arguments_and_environment(tmp_path: Path, where: dict[str, str]) -> None:
    goal = tmp_path / "out"
    run_step("a_step", ["write", str(goal)], "writing", environment={**where, "EXTRA": "here"})
    assert goal.read_text() == "here"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("noise", "converting x failed: a broken file"),
        ("raise", "converting x failed: ValueError: no such architecture"),
    ],
)
def test_a_failure_is_one_line(what: str, message: str, where: dict[str, str]) -> None:
    with pytest.raises(ModelError) as caught:
        run_step("a_step", [what], "converting x", environment=where)
    assert str(caught.value) == message


def test_an_abort_does_not_reach_us(where: dict[str, str]) -> None:
    with pytest.raises(ModelError, match=f"ended by signal {signal.SIGABRT.value}"):
        run_step("a_step", ["abort"], "converting x", environment=where)


def test_a_step_that_takes_too_long_is_ended(tmp_path: Path, where: dict[str, str]) -> None:
    note = tmp_path / "pid"
    with pytest.raises(ModelError, match="took longer than 3 s"):
        run_step("a_step", ["sleep", str(note)], "converting x", limit_s=3, environment=where)
    assert not note.exists() or not alive(int(note.read_text()))


def test_a_step_ends_with_a_killed_parent(tmp_path: Path, where: dict[str, str]) -> None:
    note = tmp_path / "pid"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from broker.child import run_step; "
            "run_step('a_step', ['sleep', sys.argv[1]], 'sleeping')",
            str(note),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), where["PYTHONPATH"]))},
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (note.exists() and note.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child = int(note.read_text())
        assert alive(child)
        parent.send_signal(signal.SIGKILL)
        while alive(child):
            assert time.monotonic() < deadline, "the child outlived its parent"
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
