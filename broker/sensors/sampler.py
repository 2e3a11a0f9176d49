"""One look at everything a machine can say; what cannot be read is left out and counted."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.clock import Clock, MonotonicClock
from broker.sensors import energy, heat, machine
from broker.sensors.files import Command, run_command

log = logging.getLogger(__name__)

#: Failures in a row after which a reader is left alone for ``RETRY_S`` seconds.
MAX_FAILURES = 3
RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Readings:
    """What one look found; None: the machine does not have it, or it could not be read.

    ``energy_joules`` (of ``energy_source``), ``cpu_seconds``, ``machine_cpu_seconds`` and
    ``throttled_seconds`` only grow; ``throttled`` and ``undervoltage`` are 0.0 or 1.0.
    """

    cpu_seconds: float | None = None
    machine_cpu_seconds: float | None = None
    resident_memory_bytes: float | None = None
    machine_memory_bytes: float | None = None
    machine_available_memory_bytes: float | None = None
    temperature_celsius: float | None = None
    throttled: float | None = None
    throttled_seconds: float | None = None
    undervoltage: float | None = None
    energy_joules: float | None = None
    energy_source: str | None = None


class _Turn:
    """Whether a reader's turn has come: one that keeps failing is asked once a minute."""

    def __init__(self) -> None:
        self.failures = 0  # in a row
        self.retry_at = 0.0

    def due(self, now: float) -> bool:
        # A clock that went back must not silence a reader for longer than the wait itself.
        waits = self.failures >= MAX_FAILURES
        return not waits or now >= self.retry_at or now < self.retry_at - RETRY_S


class Sampler:
    """Asks every reader; ``sample`` may take as long as a command does and belongs on no hot path.

    ``root``: of the tree that is read. ``watts``: of one busy core, for an estimate of energy
    where nothing measures it. ``gpu``: the work is done on a GPU, whose energy is meant then.
    ``failures`` counts by reader. One thread at a time.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        watts: float | None = None,
        gpu: bool = False,
        command: Command = run_command,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self._turns: dict[str, _Turn] = {}
        self._root = root
        self._throttle = heat.ThrottleReader(root, command)
        self._throttled_since: float | None = None
        self._throttled_seconds = 0.0
        self._energy: energy.EnergySource | None = None
        self._next_search = float("-inf")
        self._said = False
        self._candidates: dict[str, Callable[[], energy.EnergySource | None]] = {
            "ina3221": lambda: energy.find_ina3221(root),
            "pmic": lambda: energy.find_pmic(command),
            "rapl": lambda: energy.find_rapl(root, self._say_once),
            energy.ESTIMATE: lambda: energy.find_estimate(watts, root),
        }
        if gpu:
            self._candidates = {"nvml": energy.find_nvml, **self._candidates}

    def sample(self, now: float) -> Readings:
        """One look; ``now`` in seconds of a monotonic clock. Never raises."""
        root = self._root
        memory = self._ask("machine_memory", now, lambda: machine.machine_memory(root))
        throttling = self._ask("throttling", now, self._throttle.read) or heat.Throttling()
        joules = self._joules(now)
        throttled, weak = throttling.throttled, throttling.undervoltage
        return Readings(
            cpu_seconds=self._ask("cpu", now, lambda: machine.process_cpu_seconds(root)),
            machine_cpu_seconds=self._ask(
                "machine_cpu", now, lambda: machine.machine_cpu_seconds(root)
            ),
            resident_memory_bytes=self._ask(
                "memory", now, lambda: machine.resident_memory_bytes(root)
            ),
            machine_memory_bytes=memory.total if memory else None,
            machine_available_memory_bytes=memory.available if memory else None,
            temperature_celsius=self._ask(
                "temperature", now, lambda: heat.temperature_celsius(root)
            ),
            throttled=None if throttled is None else float(throttled),
            throttled_seconds=self._seconds_throttled(throttled, now),
            undervoltage=None if weak is None else float(weak),
            energy_joules=joules,
            energy_source=None if joules is None or self._energy is None else self._energy.name,
        )

    def _ask(self, name: str, now: float, read: Callable[[], Any]) -> Any:
        """What ``read`` returns; None when it fails, or is left alone because it kept failing."""
        turn = self._turns.setdefault(name, _Turn())
        if not turn.due(now):
            return None
        try:
            found = read()
        except Exception as error:  # noqa: BLE001 (a sensor must not end anything)
            self.failures[name] += 1
            turn.failures += 1
            turn.retry_at = now + RETRY_S
            level = logging.WARNING if turn.failures == MAX_FAILURES else logging.DEBUG
            log.log(level, "sensor %s: %s: its figure is left out", name, str(error)[:200])
            return None
        turn.failures = 0
        return found

    def _say_once(self, text: str) -> None:
        if not self._said:
            self._said = True
            log.warning("%s", text)

    def _joules(self, now: float) -> float | None:
        if self._energy is None and now >= self._next_search:
            self._energy = self._find_energy(now)
        source = self._energy
        if source is None:
            return None
        found: float | None = self._ask("energy", now, lambda: source.joules(now))
        return found

    def _find_energy(self, now: float) -> energy.EnergySource | None:
        """The best source there is; it stays the one, so that its figure is of one kind.

        One that is there but fails is waited for, ``MAX_FAILURES`` looks long, before a lesser one
        takes its place.
        """
        for name, find in self._candidates.items():
            found = self._ask(f"energy_{name}", now, find)
            if found is not None:
                source: energy.EnergySource = found
                log.info("energy is taken from %s", source.name)
                return source
            if 0 < self._turns[f"energy_{name}"].failures < MAX_FAILURES:
                return None
        self._next_search = now + RETRY_S
        return None

    def _seconds_throttled(self, throttled: bool | None, now: float) -> float | None:
        """Seconds between two looks that both found the machine slowed down, gaps left out."""
        since = self._throttled_since
        self._throttled_since = now if throttled else None
        if throttled is None:
            return None
        if throttled and since is not None and 0.0 <= now - since <= energy.MAX_GAP_S:
            self._throttled_seconds += now - since
        return self._throttled_seconds


class BackgroundSampler:
    """Samples every ``interval`` seconds on a thread of its own; ``latest`` never waits."""

    def __init__(
        self, sampler: Sampler, *, interval: float = 2.0, clock: Clock | None = None
    ) -> None:
        self.sampler = sampler
        self.latest = Readings()
        self._interval = interval
        self._clock = clock or MonotonicClock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)

    def start(self) -> None:
        """Begin; returns at once. Called once."""
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End; waits for a look that is being taken, ``timeout`` seconds at most. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.latest = self.sampler.sample(self._clock.now())
            self._stop.wait(self._interval)
