"""Edges and verifiers over the in-memory broker under one virtual clock: no threads, no sleeps.

The drivers here do what the real ones do (decode, feed, run effects, publish), one event at a
time, and jump from timer to timer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from broker.clock import VirtualClock
from broker.errors import RemoteProtocolError
from broker.memory import InMemoryBroker, InMemoryTransport
from broker.sampling import Sampling
from broker.topics import OPEN_SHARED, down_filter, up_filter
from broker.transport import ConnectionEvent, ConnectionState, Message
from cloud_verifier.core.scheduler import Limits
from cloud_verifier.core.verifier import Forward, VerifierConfig, VerifierCore
from cloud_verifier.engine.target import Work
from cloud_verifier.wire import feed, publications
from edge_agent.core.config import SessionConfig
from edge_agent.core.effects import Commit, DraftNext, Finished
from edge_agent.core.session import EdgeSession, State
from edge_agent.core.timing import Timing
from edge_agent.core.trigger import Thresholds
from edge_agent.wire import arrival, publication

VOCAB = 64
EOS = 0
#: Timer jumps after which a run counts as endless.
MAX_STEPS = 20_000


def target_token(sequence: Sequence[int]) -> int:
    """A cheap deterministic target: the next token follows from the last three and the length."""
    mixed = len(sequence) * 2654435761
    for token in sequence[-3:]:
        mixed = (mixed ^ (token + 1)) * 2246822519 & 0xFFFFFFFF
        mixed ^= mixed >> 13
    return 1 + mixed % (VOCAB - 1)


def reference(
    prompt: Sequence[int],
    max_tokens: int,
    next_token: Callable[[Sequence[int]], int] = target_token,
) -> list[int]:
    """What the target alone would write."""
    sequence = list(prompt)
    while len(sequence) - len(prompt) < max_tokens:
        sequence.append(next_token(sequence))
        if sequence[-1] == EOS:
            break
    return sequence[len(prompt) :]


class ScriptedEngine:
    """The target in the simulation: keeps each slot's tokens, so that a wrong ``keep`` shows."""

    def __init__(self, slots: int, next_token: Callable[[Sequence[int]], int]) -> None:
        self.slots: list[list[int]] = [[] for _ in range(slots)]
        self.next_token = next_token

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        results = []
        for work in batch:
            slot = self.slots[work.slot]
            assert 0 <= work.keep <= len(slot), "the core believes in a cache that is not there"
            del slot[work.keep :]
            first = len(work.tokens) - work.choices
            chosen = []
            for index, token in enumerate(work.tokens):
                slot.append(token)
                if index >= first:
                    chosen.append(self.next_token(slot))
            results.append(chosen)
        return results


@dataclass
class SimVerifier:
    world: World
    name: str
    slots: int
    forward_time: float
    core: VerifierCore = field(init=False)
    engine: ScriptedEngine = field(init=False)
    transport: InMemoryTransport = field(init=False)
    running: tuple[Forward, float] | None = None

    def __post_init__(self) -> None:
        self.forget_everything()
        self.transport = InMemoryTransport(self.world.broker, self.name)
        self.transport.start(self._on_message, lambda event: None)
        self.transport.subscribe(OPEN_SHARED, qos=1)
        self.transport.subscribe(up_filter(self.name), qos=0)

    def forget_everything(self) -> None:
        """A process that died and came back with the same id."""
        world = self.world
        self.running = None
        self.engine = ScriptedEngine(self.slots, world.next_token)
        self.core = VerifierCore(
            VerifierConfig(
                verifier=self.name,
                vocab_size=VOCAB,
                vocab_hash="v",
                context=world.context,
                eos_ids=frozenset({EOS}),
                slots=self.slots,
                max_sessions=world.max_sessions,
                limits=Limits(forward_tokens=64, prefill_tokens=8),
            )
        )

    def _on_message(self, message: Message) -> None:
        feed(self.core, message, self.world.clock.now())
        self.work()

    def work(self) -> None:
        now = self.world.clock.now()
        for topic, payload, qos in publications(self.core, now):
            self.transport.publish(topic, payload, qos=qos)
        if self.running is None:
            forward = self.core.next_effect()
            if forward is not None:
                self.running = (forward, now + self.forward_time)

    def timer(self) -> float | None:
        times = [] if self.running is None else [self.running[1]]
        due = self.core.get_timer()
        if due is not None:
            times.append(due)
        return min(times, default=None)

    def fire(self) -> None:
        now = self.world.clock.now()
        if self.running is not None and now >= self.running[1]:
            forward, _ = self.running
            self.running = None
            batch = [
                Work(
                    seat.slot,
                    seat.plan.keep,
                    seat.plan.tokens,
                    seat.plan.choices,
                    seat.plan.position,
                    seat.session.sampling,
                )
                for seat in forward.seats
            ]
            self.core.forward_done(forward, self.engine.forward(batch), now, self.forward_time)
        self.core.handle_timer(now)
        self.work()


@dataclass
class SimEdge:
    world: World
    device: str
    config: SessionConfig
    draft_token: Callable[[Sequence[int]], tuple[int, float]]
    draft_time: float
    thresholds: Thresholds
    timing: Timing
    session: EdgeSession = field(init=False)
    transport: InMemoryTransport = field(init=False)
    text: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    finished: Finished | None = None
    drafting: tuple[DraftNext, float] | None = None
    cache: list[int] = field(default_factory=list)
    rejected: int = 0

    def __post_init__(self) -> None:
        now = self.world.clock.now()
        self.session = EdgeSession(self.config, self.thresholds, self.timing, now)
        self.transport = InMemoryTransport(self.world.broker, self.device)
        self.transport.start(self._on_message, self._on_event)
        self.transport.subscribe(down_filter(self.device), qos=0)

    def _on_event(self, event: ConnectionEvent) -> None:
        up = event.state is ConnectionState.CONNECTED
        self.session.set_connected(up, self.world.clock.now())
        self.work()

    def _on_message(self, message: Message) -> None:
        try:
            session, decoded = arrival(self.device, message)
        except RemoteProtocolError:
            self.rejected += 1
            return
        assert session == "s"
        self.session.receive(decoded, self.world.clock.now())
        self.work()

    def work(self) -> None:
        """Publish, then begin the next effect."""
        now = self.world.clock.now()
        while True:
            for outgoing in self.session.messages_to_send(now):
                topic, payload, qos = publication(self.device, "s", outgoing)
                self.transport.publish(topic, payload, qos=qos)
            effect = self.session.next_effect()
            if isinstance(effect, Commit):
                assert effect.start == len(self.text)
                self.text.extend(effect.tokens)
                self.sources.extend(effect.sources)
            elif isinstance(effect, Finished):
                self.finished = effect
            else:
                if isinstance(effect, DraftNext) and self.drafting is None:
                    self.drafting = (effect, now + self.draft_time)
                return

    def timer(self) -> float | None:
        times = [] if self.drafting is None else [self.drafting[1]]
        due = self.session.get_timer()
        if due is not None:
            times.append(due)
        return min(times, default=None)

    def fire(self) -> None:
        now = self.world.clock.now()
        if self.drafting is not None and now >= self.drafting[1]:
            effect, _ = self.drafting
            self.drafting = None
            assert effect.keep <= len(self.cache)
            del self.cache[effect.keep :]
            self.cache.extend(effect.feed)
            token, confidence = self.draft_token(self.cache)
            self.session.drafted(effect, token, confidence, now)
        self.session.handle_timer(now)
        self.work()


class World:
    """Everything of one simulated run; ``seed`` decides the network and the drafts."""

    def __init__(
        self,
        seed: int,
        *,
        next_token: Callable[[Sequence[int]], int] = target_token,
        context: int = 512,
        max_sessions: int = 64,
        **faults: object,
    ) -> None:
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.broker = InMemoryBroker(self.clock, seed=seed, **faults)  # type: ignore[arg-type]
        self.next_token = next_token
        self.context = context
        self.max_sessions = max_sessions
        self.verifiers: list[SimVerifier] = []
        self.edges: list[SimEdge] = []
        self.events: list[tuple[float, Callable[[], None]]] = []
        self.steps = 0

    def add_verifier(
        self, name: str = "v1", *, slots: int = 4, forward_time: float = 0.05
    ) -> SimVerifier:
        verifier = SimVerifier(self, name, slots, forward_time)
        self.verifiers.append(verifier)
        return verifier

    def add_edge(
        self,
        device: str = "d1",
        *,
        prompt: Sequence[int] = (5, 6, 7),
        max_tokens: int = 40,
        quality: float = 0.7,
        draft_time: float = 0.01,
        thresholds: Thresholds | None = None,
        timing: Timing | None = None,
        sampling: Sampling | None = None,
        **config: object,
    ) -> SimEdge:
        def draft_token(sequence: Sequence[int]) -> tuple[int, float]:
            right = self.next_token(sequence)
            if self.random.random() < quality:
                return right, 0.5 + 0.5 * self.random.random()
            return 1 + (right + self.random.randrange(VOCAB - 2)) % (VOCAB - 1), (
                0.9 * self.random.random()
            )

        settings: dict[str, object] = {
            "context": 4096,
            "vocab_hash": "v",
            "vocab_size": VOCAB,
            "eos_ids": frozenset({EOS}),
            **config,
        }
        edge = SimEdge(
            self,
            device,
            SessionConfig(
                prompt=tuple(prompt),
                sampling=sampling or Sampling(),
                max_tokens=max_tokens,
                **settings,  # type: ignore[arg-type]
            ),
            draft_token,
            draft_time,
            thresholds or Thresholds(),
            timing or Timing(),
        )
        self.edges.append(edge)
        edge.work()
        return edge

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do ``action`` at that moment."""
        self.events.append((when, action))
        self.events.sort(key=lambda event: event[0])

    def step(self) -> bool:
        """Jump to the next moment at which anything happens; False when nothing ever will."""
        now = self.clock.now()
        actors = [*self.verifiers, *self.edges]
        times = [actor.timer() for actor in actors]
        times.append(self.broker.next_delivery())
        if self.events:
            times.append(self.events[0][0])
        due = min((time for time in times if time is not None), default=None)
        if due is None:
            return False
        self.steps += 1
        self.clock.advance_to(due)
        now = self.clock.now()
        while self.events and self.events[0][0] <= now:
            self.events.pop(0)[1]()
        self.broker.deliver_due(now)
        for actor in actors:
            timer = actor.timer()
            if timer is not None and timer <= now:
                actor.fire()
        return True

    def run(self, max_steps: int = MAX_STEPS) -> None:
        """Until every edge has finished; asserts that this happens within ``max_steps`` jumps."""
        while not all(edge.session.state is State.DONE for edge in self.edges):
            assert self.steps < max_steps, f"no end after {max_steps} jumps"
            assert self.step(), "everything waits and no timer is armed"
        for edge in self.edges:
            edge.work()
