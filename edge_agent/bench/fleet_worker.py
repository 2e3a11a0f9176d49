"""One process of a fleet: its devices, their connections, one loop, and a pipe to the parent."""

from __future__ import annotations

import math
import resource
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from broker.clock import Clock, MonotonicClock
from broker.mqtt_fleet import FleetNetwork
from broker.mqtt_settings import MqttSettings
from broker.transport import Will
from edge_agent.bench.fleet_device import FleetDevice
from edge_agent.bench.fleet_habits import Habits
from edge_agent.bench.fleet_loop import FleetLoop
from edge_agent.bench.fleet_stats import Tally
from edge_agent.runtime import device_will

#: What the parent says to end a run early.
STOP = "stop"
#: Seconds between two reports to the parent.
REPORT_S = 0.5
#: Seconds for which a process waits for a verifier's answer to sessions that were cut.
ANSWER_S = 3.0
#: Seconds in which the devices of a process say goodbye.
LEAVE_S = 10.0
NOT_IN_TIME = "it did not get to its end in time: give it longer with --drain, or fewer devices"


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The share of one process. ``settings``: of the broker; id and will are each device's own.

    ``starts``: when each device connects, on the machine's monotonic clock, in seconds.
    ``drain_s``: after ``habits.until``, or after the last start without one, so long may what runs
    still take; infinite: for ever.
    """

    settings: MqttSettings
    names: Sequence[str]
    starts: Sequence[float]
    habits: Habits
    drain_s: float = math.inf


@dataclass(slots=True)
class Progress:
    """How far a process is. Only with the last one: ``tally`` and what follows it.

    ``ended_at``: when its last device was done, on the machine's monotonic clock. ``failure``: why
    it broke down.
    """

    counts: Counter[str] = field(default_factory=Counter)
    generating: int = 0
    attached: int = 0
    connected: int = 0
    tally: Tally | None = None
    cpu_s: float = 0.0
    peak_bytes: int = 0
    ended_at: float = 0.0
    failure: str | None = None


class Starter:
    """Wakes once, to let a device connect."""

    def __init__(self, device: FleetDevice, when: float) -> None:
        self.wake_at = when
        self._device = device

    def wake(self) -> None:
        self.wake_at = math.inf
        self._device.begin()


class FleetProcess:
    """The devices of one process; ``run`` them to their end."""

    def __init__(self, plan: WorkerPlan, network: FleetNetwork, clock: Clock) -> None:
        self.tally = Tally()
        self._plan = plan
        self._network = network
        self._clock = clock
        self._loop = FleetLoop(network, clock, self.tally.late)
        self.devices: list[FleetDevice] = []
        for name, start in zip(plan.names, plan.starts, strict=True):
            settings = replace(
                plan.settings, client_id=f"device-{name}", will=_will(name), quick_ack=False
            )
            transport = network.transport(settings)
            device = FleetDevice(
                name, transport, plan.habits, self.tally, clock=clock, arm=self._loop.arm
            )
            self.devices.append(device)
            self._loop.arm(Starter(device, start))

    @property
    def now(self) -> float:
        """Seconds on its clock."""
        return self._clock.now()

    def progress(self) -> Progress:
        """How far it is."""
        found = Progress(Counter(self.tally.counts))
        for device in self.devices:
            found.counts["tokens"] += device.tokens_so_far
            found.generating += device.generating
            found.attached += device.attached
            found.connected += device.transport.connected
            found.counts["done"] += device.done
        return found

    def run(self, pipe: Connection) -> None:
        """Until all devices are done, time is over, or the parent says so or is gone."""
        plan, clock = self._plan, self._clock
        last = plan.habits.until if plan.habits.until < math.inf else max(plan.starts, default=0.0)
        deadline = last + plan.drain_s
        report_due = 0.0
        while True:
            self._loop.turn(REPORT_S)
            now = clock.now()
            if now < report_due:
                continue
            report_due = now + REPORT_S
            pipe.send(self.progress())
            if pipe.poll():
                pipe.recv()  # STOP; EOFError when the parent is gone
                self._cut(None)
                return
            if all(device.done for device in self.devices):
                self._hear_answers()
                return
            if now >= deadline:
                self._cut(NOT_IN_TIME)
                return

    def leave(self) -> None:
        """Let every device say goodbye, and add up what its connection counted."""
        for device in self.devices:
            device.report.leave()
        silent = self._network.close(LEAVE_S)
        counts = self.tally.counts
        counts["left_without_goodbye"] += silent
        for device in self.devices:
            transport = device.transport
            counts["messages_up"] += transport.messages_sent
            counts["messages_down"] += transport.messages_received
            counts["bytes_up"] += transport.bytes_sent
            counts["bytes_down"] += transport.bytes_received
            counts["reconnects"] += transport.reconnects
            counts["dropped"] += transport.dropped
            counts["callback_errors"] += transport.callback_errors

    def _cut(self, reason: str | None) -> None:
        for device in self.devices:
            if not device.done:
                device.cut(reason)
        self._hear_answers()

    def _hear_answers(self) -> None:
        until = self._clock.now() + ANSWER_S
        while self._clock.now() < until and any(device.unanswered for device in self.devices):
            self._loop.turn(0.05)


def _will(name: str) -> Will:
    """As a device's, but that nothing is left of it at the broker when it has gone."""
    return replace(device_will(name, "recorded"), farewell=b"")


def work(plan: WorkerPlan, pipe: Connection) -> None:
    """The process: runs ``plan``, tells the parent how far it is, and ends with it."""
    # Ctrl-C reaches the whole group; the parent says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if play(plan, pipe):
        pipe.close()


def play(plan: WorkerPlan, pipe: Connection) -> bool:
    """Run ``plan`` in this process; False when nobody listens any more."""
    network = FleetNetwork()
    fleet = FleetProcess(plan, network, MonotonicClock())
    try:
        fleet.run(pipe)
        ended_at = fleet.now
        fleet.leave()
        last = fleet.progress()
        last.tally, last.ended_at = fleet.tally, ended_at
    except (EOFError, BrokenPipeError):
        return False
    except Exception as error:  # noqa: BLE001 (told to the parent, which ends the run)
        last = Progress(failure=f"{type(error).__name__}: {error}")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    last.cpu_s = usage.ru_utime + usage.ru_stime
    # Kilobytes, but bytes on macOS.
    last.peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    pipe.send(last)
    return True
