"""The simulated drivers of both sides; they do what the real ones do, one event at a time.

They also look over the cores' shoulders: a cache that does not hold what its core believes, a timer
that stays in the past, or a committed token that the target would not have written is an error at
once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from broker.codec import decode
from broker.errors import ModelError, RemoteProtocolError
from broker.memory import InMemoryTransport
from broker.messages import FINISH_LENGTH, FINISH_STOP, DraftBatch, VerifierStatus
from broker.topics import (
    OPEN_SHARED,
    VERIFIER_STATUS_ALL,
    down_filter,
    parse_verifier_status_topic,
    up_filter,
)
from broker.transport import ConnectionEvent, ConnectionState, Message
from cloud_verifier.core.verifier import Forward, VerifierConfig, VerifierCore
from cloud_verifier.runtime import online_status, status_will, works_of
from cloud_verifier.wire import feed, publications
from edge_agent.core.config import SessionConfig
from edge_agent.core.effects import SOURCE_LOCAL, Commit, DraftNext, Finished
from edge_agent.core.policies import Policy
from edge_agent.core.session import EdgeSession, State
from edge_agent.core.timing import Timing
from edge_agent.core.trigger import Thresholds
from edge_agent.core.uplink import Outgoing
from edge_agent.scripted_draft import Oracle
from edge_agent.wire import arrival, publication
from tests.sim.engine import EOS, VOCAB, ScriptedEngine, reference

if TYPE_CHECKING:
    from tests.sim.world import World


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
        for seat in forward.seats:
            text = [*seat.session.prompt, *seat.session.committed]
            held = self.engine.held(seat.slot, seat.plan.path)[: seat.plan.keep]
            assert held == text[: seat.plan.keep], "the slot holds another text than its session"
        batch = works_of(forward)
        if self.fail_forwards:
            # The port's contract: at most ``keep`` tokens are left of each slot.
            self.fail_forwards -= 1
            for work in batch:
                del self.engine.slots[work.slot][work.keep // 2 :]
                self.engine.drafted.pop(work.slot, None)
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
    bushy: float = 0.0  # chance that a batch goes out as a tree around its chain
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
            config, self.thresholds, self.timing, world.clock.now(), policy=self.policy
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
                outgoing = self._with_branches(outgoing)
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

    def _with_branches(self, outgoing: Outgoing) -> Outgoing:
        """What an edge would send that drafts trees; each other one has a branch that is right."""
        batch, random = outgoing.message, self.world.random
        if not self.bushy or not isinstance(batch, DraftBatch) or not batch.tokens:
            return outgoing
        if random.random() >= self.bushy:
            return outgoing
        tokens, parents = [], []
        place = -1  # of the chain's last token
        for index, token in enumerate(batch.tokens):
            tokens.append(token)
            parents.append(place)
            before, place = place, len(tokens) - 1
            if random.random() < 0.4:
                wanted = self.expected[batch.base + index : batch.base + index + 3]
                if random.random() < 0.5:
                    wanted = [random.randrange(1, VOCAB) for _ in range(random.randrange(1, 4))]
                for each in wanted:
                    parents.append(before)
                    before = len(tokens)
                    tokens.append(each)
        bushy = replace(batch, tokens=tuple(tokens), parents=tuple(parents))
        return outgoing._replace(message=bushy)

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
        assert stats.accepted <= stats.drafted or self.bushy  # branches are not the session's
        assert stats.local_tokens == 0
        assert stats.contradictions == stats.out_of_range == 0
