"""A fleet by a virtual clock: real session cores, real messages, one real verifier core.

The devices are those of the fleet load tool and draft in their recorded times; links have a fixed
delay. What a forward answers and how long it takes an ``Engine`` says: a real target, timed, or the
recorded texts with times from a table. Devices cost the verifier no processor time here, as in the
field, where they have processors of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from broker.clock import VirtualClock
from broker.errors import LocalProtocolError
from broker.memory import InMemoryBroker, InMemoryTransport
from broker.topics import OPEN_SHARED, up_filter
from broker.transport import Message
from cloud_verifier.core.scheduler import Limits
from cloud_verifier.core.stats import VerifierStats
from cloud_verifier.core.verifier import Forward, VerifierConfig, VerifierCore
from cloud_verifier.engine.target import Target
from cloud_verifier.runtime import works_of
from cloud_verifier.wire import feed, publications
from edge_agent.bench.fleet_device import FleetDevice
from edge_agent.bench.fleet_habits import Habits
from edge_agent.bench.fleet_loop import FleetLoop, spread
from edge_agent.bench.fleet_stats import Histogram, Tally
from edge_agent.bench.fleet_worker import Starter
from edge_agent.bench.traces import Trace
from edge_agent.core.policies import Policy

VOCAB_HASH = "recorded"
_VERIFIER = "virtual"
#: Turns of the loop in one virtual second after which a run counts as endless.
_MAX_TURNS = 200_000

#: Seconds of a forward of so many sessions and tokens.
Seconds = Callable[[int, int], float]


class Engine(Protocol):
    """What runs the forwards."""

    def run(self, forward: Forward) -> tuple[Sequence[Sequence[int]], float]:
        """The choices for each seat, and the seconds that it took."""
        ...


class RealEngine:
    """A real target, by the clock of the machine."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def run(self, forward: Forward) -> tuple[Sequence[Sequence[int]], float]:
        """See Engine."""
        works = works_of(forward)
        begin = time.perf_counter()
        choices = self._target.forward(works)
        return choices, time.perf_counter() - begin


class TableEngine:
    """The recorded texts, in the seconds that a table gives.

    After a draft that is not the text's the real target would choose something else; nobody looks
    at what is chosen there.
    """

    def __init__(self, texts: Sequence[Trace], seconds: Seconds) -> None:
        self._texts = {trace.prompt: trace.tokens for trace in texts}
        self._seconds = seconds

    def run(self, forward: Forward) -> tuple[Sequence[Sequence[int]], float]:
        """See Engine."""
        choices: list[list[int]] = []
        for seat in forward.seats:
            text = self._texts[seat.session.prompt]
            places = range(seat.plan.position, seat.plan.position + seat.plan.choices)
            choices.append([text[min(place, len(text) - 1)] for place in places])
        tokens = sum(len(seat.plan.tokens) for seat in forward.seats)
        return choices, self._seconds(len(forward.seats), tokens)


@dataclass(frozen=True, slots=True)
class Scene:
    """What runs. ``delay_s``: one way, in seconds; ``verify``: where the policy does not say.

    ``memory``: of a real target, (block_tokens, total_blocks); None: as much as is wanted.
    """

    texts: Sequence[Trace]
    policy: Policy
    devices: int
    verify: str = "auto"
    delay_s: float = 0.002
    limits: Limits = field(default_factory=Limits)
    context: int = 512
    memory: tuple[int, int] | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """Of the measured time. ``seconds``: virtual; ``stats``: what the verifier counted in it."""

    seconds: float
    tally: Tally
    stats: VerifierStats

    @property
    def tokens_per_s(self) -> float:
        """Committed tokens of all sessions together."""
        return self.stats.committed / self.seconds

    @property
    def tpt_s(self) -> float:
        """Median over the generations of seconds per token, the wait for the first included."""
        return self.tally.tpt.quantile(0.5) or math.inf

    def per_forward(self, name: str) -> float:
        """A counter of the verifier divided by its forwards."""
        return float(getattr(self.stats, name)) / max(1, self.stats.forwards)

    def per_verdict(self, name: str) -> float:
        """A counter of the verifier divided by its verdicts."""
        return float(getattr(self.stats, name)) / max(1, self.stats.verdicts)


def at_hand(texts: Sequence[Trace]) -> list[Trace]:
    """The same texts, drafted in no time."""
    return [
        replace(trace, gammas=(0.0,) * len(trace.gammas), prompt_seconds=0.0) for trace in texts
    ]


def _ignore(_: object) -> None:
    pass


class _Replica:
    """The verifier: one forward at a time, messages between."""

    def __init__(
        self, broker: InMemoryBroker, clock: VirtualClock, config: VerifierConfig, engine: Engine
    ) -> None:
        self.core = VerifierCore(config)
        self.due = math.inf
        self._clock = clock
        self._engine = engine
        self._running: tuple[Forward, Sequence[Sequence[int]], float] | None = None
        self._transport = InMemoryTransport(broker, "verifier")
        self._transport.subscribe(OPEN_SHARED, qos=1)
        self._transport.subscribe(up_filter(config.verifier), qos=0)
        self._transport.start(self._on_message, _ignore)

    def _on_message(self, message: Message) -> None:
        feed(self.core, message, self._clock.now())
        self._publish()

    def _publish(self) -> None:
        for topic, payload, qos in publications(self.core, self._clock.now()):
            self._transport.publish(topic, payload, qos=qos)

    def end(self) -> None:
        """End the forward that is due."""
        now = self._clock.now()
        if self._running is not None and now >= self.due:
            (forward, choices, seconds), self._running = self._running, None
            self.due = math.inf
            self.core.forward_done(forward, choices, now, seconds)
            self._publish()

    def begin(self) -> None:
        """Begin a forward, if none runs and there is something to do."""
        if self._running is None and (begun := self.core.next_effect()) is not None:
            choices, seconds = self._engine.run(begun)
            self._running = begun, choices, seconds
            self.due = self._clock.now() + seconds


class _Network:
    """What the fleet's loop takes for its network: turns the clock to whatever comes next."""

    def __init__(self, broker: InMemoryBroker, clock: VirtualClock, replica: _Replica) -> None:
        self._broker = broker
        self._clock = clock
        self._replica = replica

    def poll(self, timeout: float) -> None:
        """See edge_agent.bench.fleet_loop."""
        now, delivery = self._clock.now(), self._broker.next_delivery()
        # Whatever else happens at this moment comes first: the forward takes all that are ready.
        if timeout > 0.0 and (delivery is None or delivery > now):
            self._replica.begin()
        moments = [now + timeout, self._replica.due]
        if delivery is not None:
            moments.append(delivery)
        self._clock.advance_to(min(moments))
        self._broker.deliver_due(self._clock.now())
        self._replica.end()


def run(
    scene: Scene,
    engine: Engine,
    *,
    warm_s: float,
    measured_s: float,
    exact: bool = True,
    progress: Callable[[float], object] | None = None,
) -> Seen:
    """Let the devices generate again and again; what was seen in ``measured_s`` after ``warm_s``.

    Devices begin spread over ``warm_s``. ``progress`` hears the share that is done. Raises
    LocalProtocolError for a text that is incomplete, or with ``exact`` another one than recorded.
    """
    clock = VirtualClock()
    broker = InMemoryBroker(clock, scene.seed, delay=(scene.delay_s, scene.delay_s))
    first = scene.texts[0]
    block_tokens, total_blocks = scene.memory or (0, 0)
    config = VerifierConfig(
        verifier=_VERIFIER,
        vocab_size=first.vocab_size,
        vocab_hash=VOCAB_HASH,
        context=scene.context,
        eos_ids=first.eos_ids,
        slots=scene.devices,
        block_tokens=block_tokens,
        total_blocks=total_blocks,
        max_sessions=2 * scene.devices,
        idle_ttl=math.inf,
        limits=scene.limits,
    )
    replica = _Replica(broker, clock, config, engine)
    habits = Habits(
        texts=tuple(scene.texts),
        policy=scene.policy,
        vocab_hash=VOCAB_HASH,
        verify=scene.verify,
        until=math.inf,
        seed=scene.seed,
    )
    tally = Tally()
    loop = FleetLoop(_Network(broker, clock, replica), clock, tally.late)
    for number, start in enumerate(spread(scene.devices, 0.8 * warm_s, scene.seed)):
        name = f"device-{number}"
        transport = InMemoryTransport(broker, name)
        device = FleetDevice(name, transport, habits, tally, clock=clock, arm=loop.arm)
        loop.arm(Starter(device, start))
    end = warm_s + measured_s
    hear = _ignore if progress is None else lambda now: progress(now / end)
    _turn_until(loop, clock, warm_s, hear)
    before, began = replace(replica.core.stats), clock.now()
    tally.tpt, tally.ttft, tally.rounds = Histogram(), Histogram(), Histogram()
    _turn_until(loop, clock, end, hear)
    seconds = clock.now() - began
    if tally.counts["incomplete"] or (exact and tally.counts["wrong"]):
        said = ", ".join(tally.reasons) or "record the texts again, with this precision"
        raise LocalProtocolError(
            f"{tally.counts['wrong']} texts were wrong, {tally.counts['incomplete']} incomplete of "
            f"{tally.counts['generations']}: {said}"
        )
    return Seen(seconds, tally, _difference(replica.core.stats, before))


def _turn_until(
    loop: FleetLoop, clock: VirtualClock, end: float, hear: Callable[[float], object]
) -> None:
    limit = int(_MAX_TURNS * (end - clock.now() + 1.0))
    for turn in range(limit):
        now = clock.now()
        if now >= end:
            return
        if turn % 64 == 0:
            hear(now)
        loop.turn(end - now)
    raise LocalProtocolError("the virtual fleet turns without getting on: report it")


def _difference(after: VerifierStats, before: VerifierStats) -> VerifierStats:
    found = VerifierStats()
    for name in type(after).__dataclass_fields__:
        value = getattr(after, name)
        if isinstance(value, int | float):
            setattr(found, name, value - getattr(before, name))
    return found
