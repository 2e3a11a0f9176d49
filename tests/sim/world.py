"""Edges and verifiers over the in-memory broker under one virtual clock: no threads, no sleeps.

The drivers here do what the real ones do (decode, feed, run effects, publish), one event at a
time, and jump from timer to timer. They also look over the cores' shoulders: a cache that does not
hold what its core believes, a committed token that the target would not have written, or an error
in a callback ends the run at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from broker.clock import VirtualClock
from broker.codec import decode
from broker.errors import ModelError, RemoteProtocolError
from broker.memory import Faults, InMemoryBroker, InMemoryTransport
from broker.messages import FINISH_LENGTH, FINISH_STOP, VerifierStatus
from broker.sampling import Sampling
from broker.topics import (
    OPEN_SHARED,
    VERIFIER_STATUS_ALL,
    down_filter,
    parse_verifier_status_topic,
    up_filter,
)
from broker.transport import ConnectionEvent, ConnectionState, Message
from cloud_verifier.core.scheduler import Limits
from cloud_verifier.core.verifier import Forward, VerifierConfig, VerifierCore
from cloud_verifier.engine.target import Work
from cloud_verifier.runtime import online_status, status_will
from cloud_verifier.wire import feed, publications
from edge_agent.core.config import SessionConfig
from edge_agent.core.effects import SOURCE_LOCAL, Commit, DraftNext, Finished
from edge_agent.core.policies import Policy
from edge_agent.core.session import EdgeSession, State
from edge_agent.core.timing import Timing
from edge_agent.core.trigger import Thresholds
from edge_agent.scripted_draft import Chooser, Oracle
from edge_agent.wire import arrival, publication

VOCAB = 64
EOS = 0
#: Timer jumps after which a run counts as endless.
MAX_STEPS = 20_000
#: What is left of the network's faults after ``World.heal``.
CALM = Faults(delay=(0.001, 0.01))


def target_token(sequence: Sequence[int], stop_share: int = 0) -> int:
    """A cheap deterministic target: the next token follows from the last three and the length.

    ``stop_share``: of 1024 places so many hold the end of the text.
    """
    mixed = len(sequence) * 2654435761
    for token in sequence[-3:]:
        mixed = (mixed ^ (token + 1)) * 2246822519 & 0xFFFFFFFF
        mixed ^= mixed >> 13
    if (mixed >> 16) % 1024 < stop_share:
        return EOS
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

    def __init__(self, slots: int, chooser: Chooser) -> None:
        self.slots: list[list[int]] = [[] for _ in range(slots)]
        self.chooser = chooser

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        results = []
        assert len({work.slot for work in batch}) == len(batch), "two sessions in one slot"
        for work in batch:
            slot = self.slots[work.slot]
            assert 0 <= work.keep <= len(slot), "the core believes in a cache that is not there"
            assert work.tokens, "a seat without tokens"
            del slot[work.keep :]
            first = len(work.tokens) - work.choices
            chosen = []
            for index, token in enumerate(work.tokens):
                slot.append(token)
                if index >= first:
                    position = work.position + index - first
                    chosen.append(self.chooser(slot, position, work.sampling))
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
    fail_forwards: int = 0  # so many of the next ones raise ModelError

    def __post_init__(self) -> None:
        self.forget_everything()
        will = status_will(self.name, online_status(self.core.config, "scripted"))
        self.transport = InMemoryTransport(self.world.broker, self.name, will=will)
        self.transport.start(self.world.guard(self._on_message), lambda event: None)
        self.transport.subscribe(OPEN_SHARED, qos=1)
        self.transport.subscribe(up_filter(self.name), qos=0)

    def forget_everything(self) -> None:
        """A process that died and came back with the same id before anybody noticed."""
        world = self.world
        self.running = None
        self.engine = ScriptedEngine(self.slots, world.chooser)
        self.core = VerifierCore(
            VerifierConfig(
                verifier=self.name,
                vocab_size=VOCAB,
                vocab_hash="v",
                context=world.context,
                eos_ids=frozenset({EOS}),
                slots=self.slots,
                max_sessions=world.max_sessions,
                idle_ttl=world.idle_ttl,
                limits=world.limits,
            )
        )

    def restart(self) -> None:
        """An orderly restart: every session is handed back first."""
        self.core.drain()
        self.work()
        self.forget_everything()

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
            try:
                choices = self._run(forward)
            except ModelError:
                self.core.forward_failed(forward)
            else:
                self.core.forward_done(forward, choices, now, self.forward_time)
        due = self.core.get_timer()
        self.core.handle_timer(now)
        if due is not None and due <= now:
            again = self.core.get_timer()
            assert again is None or again > now, "the verifier's timer stays in the past"
        self.work()

    def _run(self, forward: Forward) -> list[list[int]]:
        batch = []
        for session, slot, plan in ((seat.session, seat.slot, seat.plan) for seat in forward.seats):
            text = [*session.prompt, *session.committed]
            held = self.engine.slots[slot][: plan.keep]
            assert held == text[: plan.keep], "the slot holds another text than its session"
            batch.append(
                Work(slot, plan.keep, plan.tokens, plan.choices, plan.position, session.sampling)
            )
        if self.fail_forwards:
            # The port's contract: at most ``keep`` tokens are left of each slot.
            self.fail_forwards -= 1
            for work in batch:
                del self.engine.slots[work.slot][work.keep // 2 :]
            raise ModelError("told to fail")
        return self.engine.forward(batch)


@dataclass
class SimEdge:
    world: World
    device: str
    config: SessionConfig
    draft: Oracle
    draft_time: float
    thresholds: Thresholds
    timing: Timing
    policy: Policy | None = None
    session: EdgeSession = field(init=False)
    transport: InMemoryTransport = field(init=False)
    expected: list[int] = field(init=False)  # what the target alone writes
    text: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    finished: Finished | None = None
    drafting: tuple[DraftNext, float] | None = None
    cache: list[int] = field(default_factory=list)
    draft_fails: bool = False
    rejected: int = 0

    def __post_init__(self) -> None:
        world, config = self.world, self.config
        limit = min(config.max_tokens, world.context - len(config.prompt))
        size = len(config.prompt)
        self.expected = reference(
            config.prompt, limit, lambda s: world.chooser(s, len(s) - size, config.sampling)
        )
        self.session = EdgeSession(
            config, self.thresholds, self.timing, world.clock.now(), self.policy
        )
        self.transport = InMemoryTransport(world.broker, self.device)
        self.transport.start(world.guard(self._on_message), world.guard(self._on_event))
        self.transport.subscribe(down_filter(self.device), qos=0)
        self.transport.subscribe(VERIFIER_STATUS_ALL, qos=1)

    def _on_event(self, event: ConnectionEvent) -> None:
        up = event.state is ConnectionState.CONNECTED
        self.session.set_connected(up, self.world.clock.now())
        self.work()

    def _on_message(self, message: Message) -> None:
        now = self.world.clock.now()
        if message.topic.startswith("pipesd/1/_verifiers/"):
            status = decode(message.payload)
            assert isinstance(status, VerifierStatus)
            if not status.online and not message.retain:
                self.session.verifier_gone(parse_verifier_status_topic(message.topic), now)
        else:
            try:
                session, decoded = arrival(self.device, message)
            except RemoteProtocolError:
                self.rejected += 1
                return
            assert session == "s"
            self.session.receive(decoded, now)
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
                self._commit(effect)
            elif isinstance(effect, Finished):
                assert self.finished is None, "a session ends once"
                self.finished = effect
            else:
                if effect is not None and self.drafting is None:
                    self._check_cache(effect)
                    self.drafting = (effect, now + self.draft_time)
                return

    def _commit(self, effect: Commit) -> None:
        start, end = effect.start, effect.start + len(effect.tokens)
        assert self.finished is None, "a token after the end"
        assert start == len(self.text)
        assert len(effect.sources) == len(effect.tokens) > 0
        if SOURCE_LOCAL not in (*self.sources, *effect.sources):
            assert list(effect.tokens) == self.expected[start:end], "not what the target writes"
        self.text.extend(effect.tokens)
        self.sources.extend(effect.sources)

    def _check_cache(self, effect: DraftNext) -> None:
        assert self.session.state is not State.DONE, "drafting after the end"
        session = self.session
        whole = [*session.config.prompt, *session.committed, *session._window.draft]
        assert effect.keep <= len(self.cache), "the core believes in a cache that is not there"
        fed = self.cache[: effect.keep] + list(effect.feed)
        assert effect.feed, "nothing to feed"
        assert fed == whole[: len(fed)], "the draft model would draft after another text"
        assert len(self.config.prompt) + effect.position == len(fed)

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
            del self.cache[effect.keep :]
            if self.draft_fails:
                self.session.draft_failed(effect)
            else:
                self.cache.extend(effect.feed)
                token, confidence = self.draft(self.cache, effect.position, self.config.sampling)
                self.session.drafted(effect, token, confidence, now)
        due = self.session.get_timer()
        self.session.handle_timer(now)
        if due is not None and due <= now:
            again = self.session.get_timer()
            assert again is None or again > now, "the session's timer stays in the past"
        self.work()

    def check(self) -> None:
        """A run without local mode that went to its end: text, reason, and counts that add up."""
        assert self.finished is not None
        assert self.finished.error is None, self.finished.error
        assert self.text == self.expected == self.session.committed
        stopped = self.expected[-1] == EOS
        assert self.finished.reason == (FINISH_STOP if stopped else FINISH_LENGTH)
        stats = self.session.stats
        assert stats.accepted + stats.target_tokens == len(self.text)
        assert stats.accepted <= stats.judged
        assert stats.accepted <= stats.drafted
        assert stats.local_tokens == 0
        assert stats.contradictions == stats.out_of_range == 0


class World:
    """Everything of one simulated run; ``seed`` decides the network and the drafts.

    ``next_token``: the target. ``chooser``: the same with position and sampling, if they matter.
    """

    def __init__(
        self,
        seed: int,
        *,
        next_token: Callable[[Sequence[int]], int] = target_token,
        chooser: Chooser | None = None,
        context: int = 512,
        max_sessions: int = 64,
        idle_ttl: float = 300.0,
        limits: Limits | None = None,
        **faults: object,
    ) -> None:
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.broker = InMemoryBroker(self.clock, seed=seed, **faults)  # type: ignore[arg-type]
        self.chooser: Chooser = chooser or (
            lambda sequence, position, sampling: next_token(sequence)
        )
        self.context = context
        self.max_sessions = max_sessions
        self.idle_ttl = idle_ttl
        self.limits = limits or Limits(forward_tokens=64, prefill_tokens=8)
        self.verifiers: list[SimVerifier] = []
        self.edges: list[SimEdge] = []
        self.events: list[tuple[float, Callable[[], None]]] = []
        self.steps = 0
        self._failure: BaseException | None = None

    def guard(self, callback: Callable[[object], None]) -> Callable[[object], None]:
        """A callback whose error ends the run: a transport would only count it."""

        def guarded(argument: object) -> None:
            try:
                callback(argument)
            except Exception as error:  # noqa: BLE001 (raised again by ``step``)
                self._failure = self._failure or error

        return guarded

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
        draft: Oracle | None = None,
        draft_time: float = 0.01,
        thresholds: Thresholds | None = None,
        timing: Timing | None = None,
        sampling: Sampling | None = None,
        policy: Policy | None = None,
        **config: object,
    ) -> SimEdge:
        """``quality``: share of drafted tokens that are right, unless there is a ``draft``."""

        def guess(sequence: Sequence[int], position: int, how: Sampling) -> tuple[int, float]:
            right = self.chooser(sequence, position, how)
            if self.random.random() < quality:
                return right, 0.5 + 0.5 * self.random.random()
            wrong = 1 + (right + self.random.randrange(VOCAB - 2)) % (VOCAB - 1)
            return wrong, 0.9 * self.random.random()

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
            draft or guess,
            draft_time,
            thresholds or Thresholds(),
            timing or Timing(),
            policy,
        )
        self.edges.append(edge)
        edge.work()
        return edge

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do ``action`` at that moment."""
        self.events.append((when, action))
        self.events.sort(key=lambda event: event[0])

    def heal(self) -> None:
        """The network is good again and everybody is back on it."""
        self.broker.faults = CALM
        for actor in (*self.verifiers, *self.edges):
            self.broker.restore(actor.transport.client_id)

    def next_moment(self) -> float | None:
        """When anything happens next; None: never."""
        times = [actor.timer() for actor in (*self.verifiers, *self.edges)]
        times.append(self.broker.next_delivery())
        if self.events:
            times.append(self.events[0][0])
        return min((time for time in times if time is not None), default=None)

    def step(self, within: float = math.inf) -> bool:
        """Jump to the next moment at which anything happens.

        False when nothing ever will, or not in the next ``within`` seconds.
        """
        due = self.next_moment()
        if due is None or due > self.clock.now() + within:
            return False
        self.steps += 1
        self.clock.advance_to(due)
        now = self.clock.now()
        while self.events and self.events[0][0] <= now:
            self.events.pop(0)[1]()
        self.broker.deliver_due(now)
        for actor in (*self.verifiers, *self.edges):
            timer = actor.timer()
            if timer is not None and timer <= now:
                actor.fire()
        if self._failure is not None:
            raise self._failure
        return True

    def run(self, max_steps: int = MAX_STEPS) -> None:
        """Until every edge has finished; asserts that this happens within ``max_steps`` jumps."""
        while not all(edge.session.state is State.DONE for edge in self.edges):
            assert self.steps < max_steps, f"no end after {max_steps} jumps"
            assert self.step(), "everything waits and no timer is armed"
        for edge in self.edges:
            edge.work()
