"""Runs the cells of a benchmark: real models, a real broker, and links that are emulated."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from broker.errors import ConfigError, ModelError, PipesdError, TransportError
from broker.sampling import Sampling
from edge_agent.bench.cells import Cell, Result
from edge_agent.bench.contenders import Constants, Contender
from edge_agent.bench.link import Scenario
from edge_agent.bench.stations import Device, Station, steady
from edge_agent.bench.watch import PlanningTime, Span, Watch
from edge_agent.core.policies import Policy, find_policy
from edge_agent.core.timing import Timing
from edge_agent.draft import DraftModel
from edge_agent.generation import Generation, Request

#: Different floors of the forward in one run: each has a verifier with a model of its own.
MAX_FLOORS = 4
#: Times that a station whose broker or verifier has ended is started again, in one run.
MAX_RESTARTS = 5
#: Tokens written once over each link before anything is measured.
_WARM_UP = 8
#: Where ``alone`` runs; no scenario can have that name.
_BARE = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. ``prompts``: token ids by name. ``timelines``: prompts whose first repeat keeps
    its timeline. ``silence_s``: seconds of silence after which a cell has failed.
    """

    contenders: Mapping[str, Contender]
    scenarios: Mapping[str, Scenario]
    prompts: Mapping[str, tuple[int, ...]]
    constants: Constants
    sampling: Sampling
    max_tokens: int
    verify: str
    seed: int
    timelines: frozenset[str] = frozenset()
    silence_s: float = 30.0


class Runner:
    """Use it as a context manager; then ``run`` cells. ``flags``: of ``cloud-verifier serve``."""

    def __init__(
        self,
        plan: Plan,
        draft: DraftModel,
        *,
        broker: str,
        flags: Sequence[str],
        threads: int,
        note: Callable[[str], None],
    ) -> None:
        floors = {scenario.forward_floor_s for scenario in plan.scenarios.values()}
        self._bare = Scenario("bare", forward_floor_s=min(floors))
        if len(floors) > MAX_FLOORS:
            raise ConfigError(
                f"{len(floors)} different forward floors, above {MAX_FLOORS}: measure them apart"
            )
        self.plan = plan
        self.target = ""
        self.restarts = 0
        self._draft = draft
        self._note = note
        self._stations = {
            floor: Station(broker, flags, threads, floor_s=floor, note=note) for floor in floors
        }
        self._devices: dict[str, Device] = {}
        self._made = 0

    def __enter__(self) -> Runner:
        """Raises ConfigError, ModelError or TransportError when something does not come up."""
        try:
            for station in self._stations.values():
                station.start()
            for name in self.plan.scenarios:
                self._warm_up(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything that was started; idempotent."""
        for name in list(self._devices):
            self._drop(name)
        for station in self._stations.values():
            station.stop()

    def use(self, constants: Constants) -> None:
        """Run the cells with these constants from now on."""
        self.plan = replace(self.plan, constants=constants)

    # -- devices --------------------------------------------------------------------------------

    def _scenario(self, name: str) -> Scenario:
        return self._bare if name == _BARE else self.plan.scenarios[name]

    def _station(self, name: str) -> Station:
        return self._stations[self._scenario(name).forward_floor_s]

    def _connect(self, name: str, *, group: int = 0) -> Device:
        """A device in scenario ``name`` that has found its verifier; ``group``: see ``_offset``."""
        scenario = self._scenario(name)
        self._made += 1
        device = Device(
            self._station(name),
            scenario,
            self._draft,
            f"bench-{self._made}",
            offset_s=_offset(scenario, group),
            seed=self.plan.seed + group,
        )
        self._devices[name] = device
        self.target = device.meet()
        return device

    def _drop(self, name: str) -> None:
        device = self._devices.pop(name, None)
        if device is not None:
            device.close()

    def _warm_up(self, name: str) -> None:
        device = self._connect(name)
        prompt = next(iter(self.plan.prompts.values()))
        for policy in ("cloud", "pipesd"):
            for _ in device.agent.generate(
                Request(prompt, _WARM_UP, self.plan.sampling, find_policy(policy))
            ):
                pass

    def _reach(self, name: str, group: int) -> Device:
        """The device in scenario ``name``; what has ended is started again."""
        station = self._station(name)
        if not station.alive:
            if self.restarts >= MAX_RESTARTS:
                station.check()
            self.restarts += 1
            self._note("the broker or the verifier has ended: starting both again")
            for other in [n for n in self._devices if self._station(n) is station]:
                self._drop(other)
            station.start()
        if not steady(self._scenario(name).link):
            self._drop(name)
        device = self._devices.get(name)
        return device or self._connect(name, group=group)

    # -- cells ----------------------------------------------------------------------------------

    def run(self, cell: Cell, at_s: float) -> Result:
        """Run one. A cell that fails has ``error`` set; raises nothing but what ends the run."""
        identity: dict[str, Any] = {
            "policy": cell.policy,
            "scenario": cell.scenario,
            "prompt": cell.prompt,
            "repeat": cell.repeat,
            "at_s": at_s,
            "load": os.getloadavg()[0],
        }
        plan = self.plan
        group = cell.repeat * len(plan.prompts) + list(plan.prompts).index(cell.prompt)
        try:
            policy = plan.contenders[cell.policy].policy(plan.constants, cell.scenario)
            device = self._reach(cell.scenario, group)
            return self._measure(cell, plan.prompts[cell.prompt], policy, device, identity)[0]
        except (TransportError, ModelError) as error:
            # A connection in an unknown state would make the next cell fail for this one.
            self._drop(cell.scenario)
            return Result(**identity, error=_one_line(error))

    def alone(self, name: str, prompt: tuple[int, ...], policy: Policy) -> Result:
        """One generation over a link without emulation, at the full speed of the draft.

        ``name``: of the prompt, whose token ids ``prompt`` has. The least of the forward's floors
        holds. Raises PipesdError when it fails.
        """
        cell = Cell(policy.name, _BARE, name, 0)
        try:
            device = self._reach(_BARE, 0)
            result, problem = self._measure(cell, prompt, policy, device, cell._asdict())
        except (TransportError, ModelError):
            self._drop(_BARE)
            raise
        if problem is not None:
            self._station(_BARE).check()
            raise problem
        return result

    def _measure(
        self,
        cell: Cell,
        prompt: tuple[int, ...],
        policy: Policy,
        device: Device,
        identity: Mapping[str, Any],
    ) -> tuple[Result, PipesdError | None]:
        plan = self.plan
        request = Request(
            prompt,
            plan.max_tokens,
            # Another seed for each repeat: where it is greedy that changes nothing.
            replace(plan.sampling, seed=plan.sampling.seed + cell.repeat),
            policy,
            timing=timing(self._scenario(cell.scenario), policy, plan.silence_s),
            verify=plan.verify,
        )
        watch = Watch()
        before = device.link.stats()
        generation = device.agent.generate(request, watch)
        planning = PlanningTime(generation.sending)
        begin = time.monotonic()
        first = last = begin
        tokens: list[int] = []
        problem: PipesdError | None = None
        try:
            for commit in generation:
                last = time.monotonic()
                first = last if not tokens else first
                tokens += commit.tokens
        except PipesdError as error:
            problem = error
            self._drop(cell.scenario)
        problem = problem or generation.draft_error
        after = device.link.stats()
        timeline: tuple[Span, ...] = ()
        if cell.prompt in plan.timelines and cell.repeat == 0 and problem is None:
            up, down = device.link.passages_up(), device.link.passages_down()
            timeline = tuple(watch.timeline(begin, up, down))
        result = _result(
            generation,
            watch,
            **identity,
            error=None if problem is None else _one_line(problem),
            tokens=tuple(tokens),
            ttft_s=first - begin,
            total_s=last - begin,
            planning_s=planning.seconds,
            learnt=generation.sending.learnt,
            wire_up=after.bytes_up - before.bytes_up,
            wire_down=after.bytes_down - before.bytes_down,
            timeline=timeline,
        )
        return result, problem


def timing(scenario: Scenario, policy: Policy, silence_s: float) -> Timing:
    """The session's timers; patient where each token is charged as a whole distribution.

    Else a draft would be repeated while its first copy still goes up, and be charged again.
    """
    usual = Timing(offline_after=silence_s)
    if not scenario.pad_bytes_per_token or scenario.link.up_bps is None:
        return usual
    slowest = min([scenario.link.up_bps, *(r.up_bps or 1e12 for r in scenario.link.rates)])
    upload = min(60.0, policy.max_ahead * scenario.pad_bytes_per_token * 8.0 / slowest)
    return Timing(
        first_timeout=usual.first_timeout + upload,
        min_timeout=usual.min_timeout + upload,
        max_timeout=usual.max_timeout + upload,
        offline_after=silence_s + upload,
    )


def _offset(scenario: Scenario, group: int) -> float:
    """How far into its schedule of rates a link begins for the ``group``-th prompt and repeat.

    The same for every policy, and another for each prompt, so that a run sees the whole schedule.
    """
    period = scenario.link.rates_repeat_s
    if not period:
        return 0.0
    # The golden ratio spreads any number of starts evenly.
    return period * ((group * 0.618033988749895) % 1.0)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _result(generation: Generation, watch: Watch, **values: Any) -> Result:
    stats, traffic = generation.stats, generation.traffic
    known: dict[str, Any] = {
        "finish": generation.finish,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "judged": stats.judged,
        "rolled_back": stats.rolled_back,
        "forwards": stats.forwards,
        "target_tokens": stats.target_tokens,
        "timeouts": stats.timeouts,
        "resyncs": stats.resyncs,
        "draft_s": generation.draft_seconds,
        "hold_s": stats.hold_ms / 1000.0,
        "forward_s": stats.forward_ms / 1000.0,
        "gamma_s": watch.gamma_s,
        "proactive": watch.proactive,
        "kept": watch.kept,
        "dropped": watch.dropped,
        "payload_up": traffic.uplink_bytes,
        "payload_down": traffic.downlink_bytes,
        "messages_up": traffic.uplink_messages,
        "draft_payload": watch.draft_bytes,
        "draft_messages": watch.draft_messages,
        "forward_samples": tuple(watch.forwards),
        **values,
    }
    return Result(**known)
