"""The tree of everything that this project raises on purpose.

    PipesdError
    ├── ConfigError           a flag, variable or file is wrong; the person at the keyboard mends it
    ├── TransportError        the broker cannot be reached or refused something (MQTT reason code)
    ├── LocalProtocolError    our own code asked the protocol for something illegal: a bug here
    ├── RemoteProtocolError   the other side sent something illegal: counted and dropped
    ├── Refused               the verifier will not take the session
    └── ModelError            a model file is missing, broken or unusable

Messages are one line: the cause, then how to mend it. ``exit_code`` is what a command exits with.
"""

from __future__ import annotations


class PipesdError(Exception):
    """Base of all errors raised on purpose. ``exit_code``: the exit status of a command."""

    exit_code = 1


class ConfigError(PipesdError):
    """Wrong usage or configuration; raised before anything is sent or loaded."""

    exit_code = 2


class TransportError(PipesdError):
    """The broker is out of reach, or refused; ``reason_code`` is MQTT 5's (3.2.2.2), if known."""

    exit_code = 3

    def __init__(self, message: str, reason_code: int | None = None) -> None:
        super().__init__(message)
        self.reason_code = reason_code


class LocalProtocolError(PipesdError):
    """This side broke the protocol: a bug here. Raised before anything changes."""


class RemoteProtocolError(PipesdError):
    """The other side broke the protocol. ``cause`` is a short label for a counter."""

    def __init__(self, message: str, cause: str = "protocol") -> None:
        super().__init__(message)
        self.cause = cause


class Refused(PipesdError):  # noqa: N818 (DESIGN.md names it so)
    """The verifier refused the session.

    ``reason``: one of ``broker.messages.REFUSALS``. ``retry_after``: seconds until another try is
    worth while, 0 when trying again cannot help.
    """

    exit_code = 4

    def __init__(self, message: str, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class ModelError(PipesdError):
    """A model file is missing, truncated, of a wrong kind, or does not fit."""
