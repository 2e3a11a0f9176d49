"""What a device keeps over a restart: the config that was last in force, and what its link costs.

Nothing here is needed to work: a file that a power loss has cut, that is of another version or
cannot be read is said in one line and left aside (CASES 33). A file that cannot be written is said
once. It is replaced as a whole, so a power loss leaves the old one or the new one.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from broker.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from broker.telemetry import DeviceConfig
from edge_agent.core.estimate import MAX_DELAY, MAX_WINDOW
from edge_agent.core.pipeline import LinkCost
from edge_agent.core.sending import Estimates
from edge_agent.device_config import check_config

log = logging.getLogger(__name__)

#: The form of the file that this version writes and reads.
SCHEMA = 1
#: Bytes of a file that is one of ours.
MAX_FILE = 64 << 10
#: Share by which a time must have changed to be worth writing: flash memory wears out.
WORTH = 0.2


@dataclass(frozen=True, slots=True)
class DeviceState:
    """``config``: last in force; ``estimates``: of link and models. None: nothing is known."""

    config: DeviceConfig | None = None
    estimates: Estimates | None = None

    def differs(self, other: DeviceState) -> bool:
        """Whether writing this over ``other`` is worth it."""
        mine, theirs = self.estimates, other.estimates
        if self.config != other.config or (mine is None) is not (theirs is None):
            return True
        if mine is None or theirs is None:
            return False
        if (mine.known, mine.measured) != (theirs.known, theirs.measured):
            return True
        return any(
            abs(a - b) > WORTH * max(abs(b), 1e-4)
            for a, b in zip(_times(mine), _times(theirs), strict=True)
        )


def _times(estimates: Estimates) -> tuple[float, ...]:
    link = estimates.link
    return link.occupancy, link.propagation, link.beta, estimates.gamma, estimates.forward


def default_path(device: str) -> Path:
    """Where the state of ``device`` lies unless somebody says otherwise."""
    return user_state_path("pipesd", appauthor=False) / f"device-{device}.json"


def as_json(device: str, state: DeviceState) -> str:
    """The file's content."""
    data = {
        "schema": SCHEMA,
        "device": device,
        "config": None if state.config is None else asdict(state.config),
        "estimates": None if state.estimates is None else asdict(state.estimates),
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def from_json(device: str, text: str) -> DeviceState:
    """The state in a file's content. Raises ValueError that says what is wrong with it."""
    try:
        data: Any = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"its form is {str(data.get('schema'))[:20]}, {SCHEMA} is known")
    if data.get("device") != device:
        raise ValueError(f"it is that of device {str(data.get('device'))[:64]}")
    try:
        return DeviceState(_config(data.get("config")), _estimates(data.get("estimates")))
    except (LocalProtocolError, RemoteProtocolError, ConfigError, TypeError) as error:
        raise ValueError(str(error)) from None


def _config(data: Any) -> DeviceConfig | None:
    return None if data is None else check_config(DeviceConfig(**_object(data, DeviceConfig)))


def _estimates(data: Any) -> Estimates | None:
    if data is None:
        return None
    values = _object(data, Estimates)
    link = _object(values.pop("link", None), LinkCost)
    for name, value in (*values.items(), *link.items()):
        wanted = bool if name in ("known", "measured") else (int, float)
        if isinstance(value, bool) is not (wanted is bool) or not isinstance(value, wanted):
            raise ValueError(f"{name} is of a wrong type")
        if not isinstance(value, bool) and not 0.0 <= value <= MAX_DELAY * 1e3:
            raise ValueError(f"{name} {value!r} cannot be")
    found = Estimates(link=LinkCost(**link), **values)
    counts = (found.window, found.probes)
    if any(type(count) is not int for count in counts) or not 1 <= found.window <= MAX_WINDOW:
        raise ValueError("a count of its estimates cannot be")
    return found


def _object(data: Any, form: type) -> dict[str, Any]:
    names = {field.name for field in fields(form)}
    if not isinstance(data, dict) or not set(data) <= names:
        raise ValueError(f"its {form.__name__} is none")
    return dict(data)


class StateFile:
    """One device's file. One thread writes."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self.saved = DeviceState()
        self.failures = 0  # writes that came to nothing
        self._device = device

    def load(self) -> DeviceState:
        """What it says; an empty state when there is none or it is broken. Never raises."""
        try:
            with self.path.open("rb") as file:
                raw = file.read(MAX_FILE + 1)
            if len(raw) > MAX_FILE:
                raise ValueError("it is too large")
            self.saved = from_json(self._device, raw.decode())
        except FileNotFoundError:
            self.saved = DeviceState()
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or error
            log.warning(
                "the state file %s is left aside, beginning with defaults: %s",
                self.path,
                " ".join(str(cause).split())[:200],
            )
            self.saved = DeviceState()
        return self.saved

    def save(self, state: DeviceState) -> bool:
        """Write it; whether that worked. The first failure is said. Never raises."""
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("w", encoding="utf-8") as file:
                file.write(as_json(self._device, state))
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
            _sync_folder(self.path.parent)
        except (OSError, ValueError) as error:
            self.failures += 1
            if self.failures == 1:
                cause = getattr(error, "strerror", None) or error
                log.warning(
                    "cannot write the state file %s: %s; going on without: give --state-file",
                    self.path,
                    cause,
                )
            with suppress(OSError):
                beside.unlink()
            return False
        self.saved = state
        return True


def _sync_folder(folder: Path) -> None:
    """The name of the new file, too, must survive a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
