"""Errors, exit codes, and the last line of defence of a command."""

from __future__ import annotations

import pytest

from broker.command import Stopped, run
from broker.errors import (
    ConfigError,
    LocalProtocolError,
    ModelError,
    PipesdError,
    Refused,
    RemoteProtocolError,
    TransportError,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (TransportError("x", 0x87), 3),
        (Refused("x", "busy", 2.0), 4),
        (ModelError("x"), 1),
        (LocalProtocolError("x"), 1),
        (RemoteProtocolError("x", "fields"), 1),
    ],
)
def test_every_error_is_one_of_ours_and_knows_its_exit_code(error, code) -> None:
    assert isinstance(error, PipesdError)
    assert error.exit_code == code
    assert str(error) == "x"


def test_errors_carry_what_a_caller_decides_by() -> None:
    assert TransportError("x", 0x87).reason_code == 0x87
    assert TransportError("x").reason_code is None
    assert RemoteProtocolError("x").cause == "protocol"
    refused = Refused("x", "busy", 2.0)
    assert (refused.reason, refused.retry_after) == ("busy", 2.0)


def raising(error: BaseException):
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("bad flag: mend it"), 2, "prog: bad flag: mend it\n"),
        (TransportError("no broker"), 3, "prog: no broker\n"),
        (Refused("no place", "busy"), 4, "prog: no place\n"),
        (ModelError("broken\n\tfile"), 1, "prog: broken file\n"),
        (ZeroDivisionError("by\nzero"), 1, "prog: unexpected ZeroDivisionError: by zero (run "),
        (Stopped(), 130, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_command_ends_with_one_line_and_its_code(error, code, line, capsys) -> None:
    assert run(raising(error), "prog") == code
    captured = capsys.readouterr()
    assert captured.err.startswith(line)
    assert captured.err.count("\n") == (1 if line else 0)
    assert captured.out == ""


def test_a_command_that_works_ends_with_what_it_returns() -> None:
    assert run(lambda: 0, "prog") == 0
    assert run(lambda: 3, "prog") == 3
