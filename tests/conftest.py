"""What every test may use."""

from __future__ import annotations

import atexit
import os
import tempfile

import pytest

# Read once, when the first module brings OpenMP in: torch's threads sleep while they wait for each
# other, instead of taking the cores from whatever else a test runs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What devices keep over a restart is not what those of whoever runs the tests have kept.
_state = tempfile.TemporaryDirectory(prefix="pipesd-state-")
os.environ["XDG_STATE_HOME"] = _state.name
atexit.register(_state.cleanup)

pytest_plugins = ["tests.brokers"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules",
        type=int,
        default=2_000,
        metavar="N",
        help="random schedules of tests/sim/test_protocol.py (2000; 10000 before a release)",
    )
