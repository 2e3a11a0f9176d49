"""A fleet that is played by arithmetic: devices with a surface of TPT over their thresholds.

``World`` stands for source, broker, studies and registry of a ``Tuner``; time is jumped.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from broker.clock import VirtualClock
from broker.errors import TransportError
from cloud_verifier.tuner.core.fleet import TunerCore
from cloud_verifier.tuner.core.messages import Choice, Proposal, Record, TunerSettings
from cloud_verifier.tuner.core.readings import Reading
from cloud_verifier.tuner.core.space import DEFAULT, Pair, from_search
from cloud_verifier.tuner.core.studies import Told, again, first_pairs, leaders, next_again
from cloud_verifier.tuner.database import BrokenStudyError, StudyError
from cloud_verifier.tuner.registry import Row
from cloud_verifier.tuner.service import Tuner
from cloud_verifier.tuner.sources import SourceError

Surface = Callable[[Pair], float]
STEP = 5.0


def bowl(r1: float, r2: float, least: float = 0.05) -> Surface:
    """Least seconds per token at (r1, r2), up to some three times as much far from there."""

    def surface(pair: Pair) -> float:
        return least * (1.0 + 2.0 * (pair.r1 - r1) ** 2 + 2.0 * (pair.r2 - r2) ** 2)

    return surface


class Device:
    """One agent. ``wanted``: the config that the broker retains for it."""

    def __init__(self, name: str, surface: Surface) -> None:
        self.name = name
        self.surface = surface
        self.pair = Pair(0.9, 0.9)
        self.version = 0
        self.policy, self.machine, self.draft = "pipesd", "board", "small"
        self.online = self.telling = self.working = self.listening = True
        self.obeys = True
        self.alpha, self.gamma, self.forward = 0.02, 0.01, 0.03
        self.wanted: tuple[int, Pair] | None = None
        self.history: list[tuple[float, float, Pair]] = []  # when, TPT, pair
        self.seen = 0.0
        self.restart()

    def restart(self) -> None:
        self.committed = self.seconds = self.uptime = 0.0

    def step(self, seconds: float, now: float) -> None:
        if self.listening and self.wanted is not None:
            self.version = self.wanted[0]
            if self.obeys:
                self.pair = self.wanted[1]
        self.uptime += seconds
        if self.working:
            tpt = self.surface(self.pair)
            self.seconds += seconds
            self.committed += seconds / tpt
            self.history.append((now, tpt, self.pair))
        if self.telling:
            self.seen = now

    def reading(self) -> Reading:
        return Reading(
            device=self.name,
            seen=self.seen,
            config_version=self.version,
            committed=float(int(self.committed)),
            seconds=self.seconds,
            generations=float(int(self.committed / 40)),
            forwards=float(int(self.committed / 3)),
            uptime=self.uptime,
            alpha=self.alpha,
            gamma=self.gamma,
            forward=self.forward,
            r1=self.pair.r1,
            r2=self.pair.r2,
            online=self.online,
            policy=self.policy,
            machine=self.machine,
            draft=self.draft,
        )


class MemoryStudies:
    """The plan of a search with random trials; ``broken``: devices whose study fails."""

    def __init__(self, trials: int = 16, prior: tuple[Pair, ...] = ()) -> None:
        self.trials, self.prior = trials, prior
        self.broken: set[str] = set()
        self.asked: dict[tuple[str, int], list[Proposal]] = {}
        self.told: dict[tuple[str, int], list[Told]] = {}
        self.ended: dict[tuple[str, int, int], str] = {}  # how each trial ended
        self._draw = random.Random(1)

    def ask(self, device: str, campaign: int, device_class: str) -> Proposal | Choice:
        if device in self.broken:
            raise BrokenStudyError("broken")
        key = (device, campaign)
        told, asked = self.told.setdefault(key, []), self.asked.setdefault(key, [])
        order = leaders(told)
        best = Choice(order[0][1], order[0][0], len(told)) if order else None
        if len(told) >= self.trials:
            assert best is not None
            return best
        first = first_pairs(self.prior)
        if len(told) < len(first):
            pair: Pair | None = first[len(told)]
        elif len(told) >= self.trials - again(self.trials):
            pair = next_again(told, order, self.trials)
        else:
            pair = from_search(self._draw.uniform(0.02, 0.98), self._draw.uniform(0.02, 1.0))
        assert pair is not None
        proposal = Proposal(len(asked), pair, len(told) + 1, self.trials, best)
        asked.append(proposal)
        return proposal

    def tell(
        self, device: str, campaign: int, number: int, tpt: float, tokens: float, *, early: bool
    ) -> None:
        if device in self.broken:
            raise BrokenStudyError("broken")
        assert (device, campaign, number) not in self.ended
        self.ended[device, campaign, number] = "early" if early else "complete"
        pair = self.asked[device, campaign][number].pair
        self.told[device, campaign].append(Told(pair, tpt))

    def fail(self, device: str, campaign: int, number: int, cause: str) -> None:
        assert (device, campaign, number) not in self.ended
        self.ended[device, campaign, number] = cause

    def fail_running(self, device: str, campaign: int, cause: str) -> int:
        if device in self.broken:
            raise BrokenStudyError("broken")
        return 0


class MemoryRegistry:
    """Leases for one tuner, nobody else there."""

    owner = "me"

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.away = False
        self.taken: set[str] = set()
        self.refused = 0

    def sync(self, now: float) -> dict[str, Row]:
        if self.away:
            raise StudyError("locked")
        return {
            name: Row(name, "other" if name in self.taken else self.owner, 1, "", record)
            for name, record in self.records.items()
        }

    def acquire(self, devices: list[str], now: float) -> dict[str, Record]:
        free = [name for name in devices if name not in self.taken]
        return {name: self.records.setdefault(name, Record()) for name in free}

    def release(self) -> None: ...

    def save(self, device: str, device_class: str, record: Record) -> bool:
        known = self.records[device]
        if record.campaign - known.campaign != (record.settled is None):
            return False
        self.records[device] = Record(record.campaign, record.settled, known.pin)
        return True


class World:
    """Everything around a tuner, and the tuner."""

    def __init__(self, *devices: Device, studies: MemoryStudies | None = None, **settings) -> None:
        self.devices = {device.name: device for device in devices}
        self.clock = VirtualClock()
        self.rejected: Counter[str] = Counter()
        self.queries = 0
        self.away = ""
        self.connected = True
        self.published: list[tuple[str, Pair]] = []
        self.versions = 100
        self.publishes = 0
        self.studies = studies or MemoryStudies()
        self.registry = MemoryRegistry()
        self.said: list[str] = []
        self.core = TunerCore(TunerSettings(**settings), longest_step=3 * STEP)
        self.tuner = Tuner(
            self.core,
            self,
            self.studies,
            self.registry,
            self,
            interval=STEP,
            clock=self.clock,
            say=self.said.append,
        )

    # the source

    def read(self) -> list[Reading]:
        if self.away:
            raise SourceError("away", self.away)
        return [device.reading() for device in self.devices.values() if device.telling]

    def close(self) -> None: ...

    # the configs

    def publish(self, device: str, pair: Pair, *, anew: bool) -> int:
        if not self.connected:
            raise TransportError("away")
        assert 0.0 < pair.r1 < 1.0
        assert 0.0 < pair.r2 < 1.0
        known = self.devices[device].wanted
        if known is not None and not anew and known[1] == pair:
            return known[0]
        self.publishes += 1
        self.versions += 1
        self.published.append((device, pair))
        self.devices[device].wanted = (self.versions, pair)
        return self.versions

    # time

    def run(self, seconds: float) -> None:
        until = self.clock.now() + seconds
        while self.clock.now() < until:
            self.clock.advance_to(self.clock.now() + STEP)
            for device in self.devices.values():
                device.step(STEP, self.clock.now())
            self.tuner.cycle()

    def until(self, condition: Callable[[], object], seconds: float = 3_600.0) -> None:
        end = self.clock.now() + seconds
        while not condition():
            assert self.clock.now() < end, (self.phases, self.core.stats, self.said[-5:])
            self.run(STEP)

    def phase(self, name: str) -> str:
        return self.core.devices[name].phase

    @property
    def phases(self) -> dict[str, str]:
        return {name: device.phase for name, device in self.core.devices.items()}

    def settled(self, name: str = "a") -> bool:
        return name in self.core.devices and self.phase(name) == "settled"


__all__ = ["DEFAULT", "STEP", "Device", "MemoryStudies", "World", "bowl"]
