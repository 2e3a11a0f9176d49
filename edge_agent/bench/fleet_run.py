"""A fleet as a whole: its processes, how far they are together, and what came out."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait

from broker.command import Stopped
from broker.errors import PipesdError
from broker.mqtt_settings import MqttSettings
from edge_agent.bench.fleet_habits import Habits
from edge_agent.bench.fleet_loop import spread
from edge_agent.bench.fleet_stats import Tally
from edge_agent.bench.fleet_worker import (
    ANSWER_S,
    LEAVE_S,
    REPORT_S,
    STOP,
    Progress,
    WorkerPlan,
    work,
)

#: Seconds that the processes have to come up before the first device connects.
_COME_UP_S = 2.0
#: Seconds beyond those for goodbyes in which a process that was told to stop must end.
_PATIENCE_S = 10.0
MAX_DEVICES, MAX_PROCESSES = 10_000, 64


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """``minutes``: None for no limit; ``habits.until`` is set from it. Times in seconds else."""

    settings: MqttSettings
    devices: int
    processes: int
    habits: Habits
    minutes: float | None
    ramp_s: float
    drain_s: float


@dataclass(slots=True)
class Moment:
    """How far the fleet is."""

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    generating: int = 0
    attached: int = 0
    connected: int = 0


@dataclass(slots=True)
class Outcome:
    """What came out. ``seconds``: from the first device's start to the last one's end.

    ``sessions_mean`` and ``sessions_most``: at a time, on a verifier. ``cpu_s``, ``peak_bytes``: of
    the fleet's own processes together. ``stopped``: it was ended early.
    """

    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    sessions_mean: float = 0.0
    sessions_most: int = 0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    stopped: bool = False


class FleetRun:
    """Use ``run`` once. ``show`` hears how far it is, about twice a second."""

    def __init__(self, plan: FleetPlan, show: Callable[[Moment], None]) -> None:
        self._plan = plan
        self._show = show
        self._pipes: dict[Connection, int] = {}
        self._latest: dict[int, Progress] = {}
        self._begin = 0.0
        self._samples = self._sampled = self._most = 0
        self._sample_due = 0.0

    def run(self) -> Outcome:
        """Until all devices are done; after a signal with what there is so far.

        Raises PipesdError when a process breaks down.
        """
        context = get_context("spawn")  # not forked: there are threads
        self._begin = time.monotonic() + _COME_UP_S
        processes = []
        try:
            for number, share in enumerate(self._shares()):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=work, args=(share, theirs), name=f"fleet-{number}", daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                self._pipes[ours] = number
            return self._follow()
        finally:
            for pipe in self._pipes:
                pipe.close()
            for process in processes:
                process.join(_PATIENCE_S)
                if process.is_alive():
                    process.kill()
                    process.join()

    def _shares(self) -> list[WorkerPlan]:
        plan = self._plan
        habits = plan.habits
        if plan.minutes is not None:
            habits = replace(habits, until=self._begin + 60.0 * plan.minutes)
        run = secrets.token_hex(3)
        names = [f"fleet-{run}-{number}" for number in range(plan.devices)]
        starts = [self._begin + after for after in spread(plan.devices, plan.ramp_s, habits.seed)]
        drain_s = math.inf if plan.minutes is None else plan.drain_s
        step = plan.processes
        return [
            WorkerPlan(plan.settings, names[first::step], starts[first::step], habits, drain_s)
            for first in range(step)
        ]

    def _follow(self) -> Outcome:
        outcome = Outcome()
        open_pipes = set(self._pipes)
        give_up = math.inf
        while open_pipes and time.monotonic() < give_up:
            try:
                ready = wait(list(open_pipes), REPORT_S)
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    if self._take(pipe, outcome):
                        open_pipes.discard(pipe)
                self._sample()
            except Stopped:
                outcome.stopped = True
                give_up = time.monotonic() + ANSWER_S + LEAVE_S + _PATIENCE_S
                for pipe in open_pipes:
                    pipe.send(STOP)
        for pipe in open_pipes:  # silent after a stop: count what is known of them
            latest = self._latest.get(self._pipes[pipe])
            if latest is not None:
                outcome.tally.counts.update(latest.counts)
        outcome.sessions_mean = self._sampled / self._samples if self._samples else 0.0
        outcome.sessions_most = self._most
        return outcome

    def _take(self, pipe: Connection, outcome: Outcome) -> bool:
        """One report; whether it was the last of its process."""
        try:
            progress = pipe.recv()
        except EOFError:
            progress = Progress(failure="it died: see whether memory ran out")
        if progress.failure is not None:
            raise PipesdError(
                f"a process of the fleet broke down ({progress.failure}): run fewer devices, or "
                "again with --verbose"
            )
        self._latest[self._pipes[pipe]] = progress
        if progress.tally is None:
            return False
        outcome.tally.merge(progress.tally)
        outcome.cpu_s += progress.cpu_s
        outcome.peak_bytes += progress.peak_bytes
        outcome.seconds = max(outcome.seconds, progress.ended_at - self._begin)
        return True

    def _sample(self) -> None:
        now = time.monotonic()
        if now < self._sample_due or now < self._begin:
            return
        self._sample_due = now + REPORT_S
        moment = Moment(now - self._begin)
        for progress in self._latest.values():
            moment.counts.update(progress.counts)
            moment.generating += progress.generating
            moment.attached += progress.attached
            moment.connected += progress.connected
        if moment.counts["done"] < self._plan.devices:
            self._samples += 1
            self._sampled += moment.attached
            self._most = max(self._most, moment.attached)
        self._show(moment)
