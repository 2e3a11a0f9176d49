"""What every test may use."""

from __future__ import annotations

import pytest

pytest_plugins = ["tests.brokers"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules",
        type=int,
        default=2_000,
        metavar="N",
        help="random schedules of tests/sim/test_protocol.py (2000; 10000 before a release)",
    )
