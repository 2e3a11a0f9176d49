"""What a device does beside its generations: it tells its figures and keeps its state.

One small thread for all of it. Telemetry goes out at QoS 0 and is not repeated: counters are
absolute, so the next message makes up for a lost one. While there is no connection none is made.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from broker import __version__
from broker.clock import Clock
from broker.codec import encode
from broker.errors import PipesdError
from broker.sensors import Readings, Sampler, machine_model
from broker.telemetry import Telemetry
from broker.topics import telemetry_topic
from edge_agent.metrics import Figures
from edge_agent.state import DeviceState, StateFile, default_path

log = logging.getLogger(__name__)

#: Seconds from one look at the sensors to the next: power is integrated from them.
SAMPLE_S = 2.0
#: Seconds from one look at whether the state is worth writing to the next.
SAVE_S = 10.0
#: Seconds after a connection has come up by which its retained config must have come.
SETTLE_S = 10.0
#: Seconds that the thread may take to end; a sensor's command may hang.
END_S = 0.5
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What an agent does beside its generations; nothing of it unless it is said.

    ``telemetry_s``: seconds from one message to the next, 0: none. ``state``: the file, None: none.
    ``sampler``: of the machine's sensors, None: their figures are absent.
    """

    telemetry_s: float = 0.0
    state: Path | None = None
    sampler: Sampler | None = None


class Source(Protocol):
    """What is told about; an Agent."""

    device: str
    clock: Clock

    @property
    def connected(self) -> bool: ...
    @property
    def draft_name(self) -> str: ...
    def publish(self, topic: str, payload: bytes, qos: int) -> None: ...
    def figures_now(self, now: float, readings: Readings | None) -> Figures: ...
    def state_now(self) -> DeviceState: ...
    def config_is_due(self) -> None: ...


def compose(
    figures: Figures,
    *,
    boot: str,
    sequence: int,
    clock: float,
    draft: str,
    readings: Readings | None = None,
    machine: str = "",
) -> Telemetry:
    """One message. ``clock``: Unix seconds of the device's own clock."""
    source = readings.energy_source if readings is not None else None
    return Telemetry(
        boot,
        sequence,
        clock,
        figures.values,
        figures.ttft,
        figures.tpt,
        version=__version__,
        draft=draft[-200:],
        policy=figures.policy,
        machine=machine[:200],
        energy_source=source or "",
    )


class Reporter:
    """See the module. ``turn`` does what is due; ``start`` runs it in a thread until ``stop``.

    ``sent``, ``failed``: messages that were handed over, and that could not be.
    """

    def __init__(
        self, source: Source, upkeep: Upkeep, wall: Callable[[], float] = time.time
    ) -> None:
        self.sent = 0
        self.failed = 0
        self.boot = secrets.token_hex(8)
        self.file = None if upkeep.state is None else StateFile(upkeep.state, source.device)
        self._source = source
        self._upkeep = upkeep
        self._wall = wall
        self._machine = machine_model() or "" if upkeep.sampler is not None else ""
        self._readings: Readings | None = None
        self._tell_at = 0.0 if upkeep.telemetry_s > 0.0 else NEVER
        self._sample_at = 0.0 if upkeep.sampler is not None else NEVER
        self._save_at = 0.0 if self.file is not None else NEVER
        self._settle_at = NEVER
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; returns at once. Without anything to do there is no thread."""
        if min(self._tell_at, self._sample_at, self._save_at) < NEVER:
            self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
            self._thread.start()

    def connected(self, now: float) -> None:
        """The connection has come up: what waited for it may go out."""
        self._settle_at = now + SETTLE_S
        self._wake.set()

    def stop(self) -> None:
        """End, tell the last figures and write the state; takes END_S seconds at most."""
        self._stopping = True
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._wake.set()
        thread.join(END_S)
        if thread.is_alive():
            log.debug("the upkeep thread hangs in a sensor")
        now = self._source.clock.now()
        if self._tell_at < NEVER and self._source.connected:
            self._tell(now)
        self._save()

    def telemetry(self, now: float, sequence: int = 0) -> Telemetry:
        """The figures as they are at ``now``, with the latest look at the sensors."""
        readings = self._readings
        return compose(
            self._source.figures_now(now, readings),
            boot=self.boot,
            sequence=sequence,
            clock=self._wall(),
            draft=self._source.draft_name,
            readings=readings,
            machine=self._machine,
        )

    def turn(self, now: float) -> float:
        """Do what is due; when to come again."""
        if now >= self._sample_at and self._upkeep.sampler is not None:
            self._sample_at = now + SAMPLE_S
            self._readings = self._upkeep.sampler.sample(now)
        if now >= self._tell_at and self._source.connected:
            self._tell_at = now + self._upkeep.telemetry_s
            self._tell(now)
        if now >= self._save_at:
            self._save_at = now + SAVE_S
            self._save()
        if now >= self._settle_at:
            self._settle_at = NEVER
            self._source.config_is_due()
        # Without a connection the next message waits for one.
        tell_at = self._tell_at if self._source.connected else NEVER
        return min(tell_at, self._sample_at, self._save_at, self._settle_at)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            now = self._source.clock.now()
            try:
                due = self.turn(now)
            except Exception as error:  # noqa: BLE001 (telemetry must not end anything, itself least)
                self._count_failure(error)
                due = now + SAVE_S
            if self._stopping:
                return
            self._wake.wait(None if due == NEVER else max(0.0, due - self._source.clock.now()))

    def _tell(self, now: float) -> None:
        try:
            payload = encode(self.telemetry(now, self.sent + self.failed + 1))
            self._source.publish(telemetry_topic(self._source.device), payload, 0)
        except PipesdError as error:
            self._count_failure(error)
        else:
            self.sent += 1

    def _count_failure(self, error: Exception) -> None:
        self.failed += 1
        if self.failed == 1:
            log.warning("telemetry could not be sent: %s; others are only counted", error)

    def _save(self) -> None:
        if self.file is not None:
            state = self._source.state_now()
            if state.differs(self.file.saved):
                self.file.save(state)


def state_path(flag: str | None, device: str) -> Path | None:
    """Where ``--state-file`` says that the state lies; None: nowhere."""
    if flag == "none":
        return None
    return default_path(device) if flag is None else Path(flag)
