"""One emulated device: the real session core and the real messages, over a transport of its own.

It does what ``edge_agent.generation`` does with a thread, as a state machine that a loop wakes: a
token is drafted by waiting for as long as it took when it was recorded, and what arrives meanwhile
is heard afterwards, as by a device whose one thread is in its draft model.
"""

from __future__ import annotations

import math
import random
import secrets
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from broker.clock import Clock
from broker.codec import decode, encode
from broker.errors import PipesdError, RemoteProtocolError, TransportError
from broker.messages import (
    Accepted,
    Close,
    DraftBatch,
    Verdict,
    VerifierMessage,
    VerifierStatus,
)
from broker.topics import (
    ROOT,
    VERIFIER_STATUS_ALL,
    VERIFIERS,
    down_filter,
    parse_verifier_status_topic,
    up_topic,
)
from broker.transport import ConnectionEvent, ConnectionState, Message, Transport
from edge_agent.bench.fleet_habits import Habits
from edge_agent.bench.fleet_loop import Sleeper
from edge_agent.bench.fleet_stats import SESSION_LOSSES, Tally
from edge_agent.bench.fleet_telemetry import FleetReport
from edge_agent.bench.recorded_draft import RecordedDraft
from edge_agent.core.config import SessionConfig
from edge_agent.core.effects import Commit, DraftNext, Finished
from edge_agent.core.sending import Estimates
from edge_agent.core.session import EdgeSession, State
from edge_agent.core.timing import Timing
from edge_agent.wire import arrival, publication

#: Messages that may wait while a token is drafted.
MAX_INBOX = 1024
#: Seconds after which a device whose generation failed begins the next one, at least.
FAILURE_PAUSE_S = 1.0
#: A timer of the core that has passed already is looked at again after so many seconds.
_AGAIN_S = 0.001
#: Why a generation ended that nobody wanted any more.
_HUNG_UP = "hung up"
_STATUS_PREFIX = f"{ROOT}/{VERIFIERS}/"
#: Counters of a session that are added up as they are.
_SUMMED = (
    "drafted",
    "accepted",
    "judged",
    "forwards",
    "refusals",
    *SESSION_LOSSES,
)


_News: TypeAlias = VerifierMessage | ConnectionEvent | str


class FleetDevice:
    """See the module. One thread; ``arm(device)`` is called whenever ``wake_at`` has changed.

    ``wake_at``: when ``wake`` is to be called, in the clock's seconds; infinite: only messages
    matter. ``done``: it will do nothing more.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        habits: Habits,
        tally: Tally,
        *,
        clock: Clock,
        arm: Callable[[Sleeper], None],
    ) -> None:
        self.name = name
        self.transport = transport
        self.wake_at = math.inf
        self.done = False
        self.begun = 0
        self.unanswered: str | None = None  # session that was cut while it was being opened
        self.report = FleetReport(name, transport, habits, clock, arm)
        self._habits = habits
        self._tally = tally
        self._clock = clock
        self._arm = arm
        self._random = random.Random(f"{habits.seed} {name.rpartition('-')[2]}")  # noqa: S311
        self._connected = False
        self._link_lost = False  # for good
        self._estimates = Estimates()
        # Of the running generation; ``_core`` is None between two.
        self._core: EdgeSession | None = None
        self._trace = habits.texts[0]
        self._draft = RecordedDraft(self._trace)
        self._session = ""
        self._begin = self._first = self._last = 0.0
        self._hang_up_at = math.inf
        self._tokens: list[int] = []
        self._inbox: deque[tuple[_News, float]] = deque()  # and when it came
        self._drafting: tuple[float, DraftNext, tuple[int, float, float]] | None = None
        self._asked_at: float | None = None

    @property
    def generating(self) -> bool:
        """Whether a generation runs."""
        return self._core is not None

    @property
    def tokens_so_far(self) -> int:
        """Committed tokens of the running generation."""
        return len(self._tokens) if self._core is not None else 0

    @property
    def attached(self) -> bool:
        """Whether a verifier has its session."""
        return self._core is not None and self._core.state is State.ACTIVE

    def begin(self) -> None:
        """Connect; the first generation begins once the broker has the subscriptions."""
        self.transport.subscribe(down_filter(self.name), qos=0)
        self.transport.subscribe(VERIFIER_STATUS_ALL, qos=1)
        self.report.begin()
        self.transport.start(self._on_message, self._on_event)

    def wake(self) -> None:
        """A moment that was waited for has come."""
        now = self._clock.now()
        self.wake_at = math.inf
        if self.done:
            return
        if self._core is None:
            self._start_next(now)
        else:
            if self._drafting is not None and now >= self._drafting[0]:
                (_, effect, (token, confidence, seconds)), self._drafting = self._drafting, None
                self._core.drafted(effect, token, confidence, now, seconds)
            self._turn(now)

    def cut(self, reason: str | None) -> None:
        """End what runs and begin nothing more; ``reason``: why its text is missing, None: asked.

        The transport is left to the caller, who carries on for as long as a session is
        ``unanswered``: a verifier that takes it on now is told that nobody wants it.
        """
        # What arrived while a token was drafted counts: a verifier that took the session on, or
        # the end of the text.
        self._drafting = None
        self._turn(self._clock.now())
        if self._core is not None:
            self._note_unanswered(self._core)
            self._core.cancel()
            self._publish(self._core, self._clock.now())
            if reason is None:
                self._tally.counts["cut_off"] += 1
            else:
                self._tally.counts["incomplete"] += 1
                self._tally.fail(reason)
            self._close_books(self._core)
        elif self.begun == 0 and not self.done and reason is not None:
            self._tally.counts["incomplete"] += 1
            self._tally.fail(reason)
        self.done = True
        self.wake_at = math.inf

    def _note_unanswered(self, core: EdgeSession) -> None:
        if core.state is State.OPENING and core.attach:
            self.unanswered = self._session

    # -- generations ----------------------------------------------------------------------------

    def _may_start(self, now: float) -> bool:
        habits = self._habits
        if habits.generations is not None and self.begun >= habits.generations:
            return False
        return now < habits.until and not self._link_lost

    def _start_next(self, now: float) -> None:
        if not self._may_start(now):
            self.done = True
            return
        self.begun += 1
        habits = self._habits
        policy = self.report.policy
        trace = self._trace = self._random.choice(habits.texts)
        self._draft = RecordedDraft(trace)
        config = SessionConfig(
            prompt=trace.prompt,
            sampling=trace.sampling,
            max_tokens=trace.max_tokens,
            vocab_hash=habits.vocab_hash,
            vocab_size=trace.vocab_size,
            eos_ids=trace.eos_ids,
            context=len(trace.prompt) + trace.max_tokens + policy.max_ahead + 1,
            max_ahead=policy.max_ahead,
            min_survival=policy.min_survival,
            verify=habits.verify,
            ask_first=True,
        )
        self._session = secrets.token_hex(8)
        self._tokens = []
        self._inbox.clear()
        self._drafting = self._asked_at = None
        self._begin = self._first = self._last = now
        self._hang_up_at = math.inf
        if habits.hang_up > 0.0 and self._random.random() < habits.hang_up:
            self._hang_up_at = now + self._random.uniform(0.0, habits.hang_up_s)
        self._core = EdgeSession(
            config,
            timing=Timing(offline_after=habits.patience_s),
            now=now,
            policy=policy,
            estimates=self._estimates,
        )
        self.report.started(self._core, now)
        if self._connected:
            self._core.set_connected(True, now)
        self._turn(now)

    def _turn(self, now: float) -> None:
        """One round of a device's loop: hear, mind the timer, send, begin the next draft."""
        core = self._core
        if core is None:
            return
        if self._drafting is None:
            while self._inbox:
                self._hear(core, *self._inbox.popleft(), now)
            core.handle_timer(now)
            if now >= self._hang_up_at:
                self._note_unanswered(core)
                core.cancel(_HUNG_UP)
            while True:
                self._publish(core, now)
                effect = core.next_effect()
                if isinstance(effect, Commit):
                    self._committed(effect, now)
                elif isinstance(effect, DraftNext):
                    answer = self._draft.feed(effect)
                    self._drafting = (now + answer[2], effect, answer)
                    break
                elif isinstance(effect, Finished):
                    self._finished(core, effect, now)
                    return
                else:
                    break
        if self._drafting is not None:
            self._wake_at(self._drafting[0])
        else:
            timer = core.get_timer()
            due = self._hang_up_at if timer is None else min(timer, self._hang_up_at)
            self._wake_at(max(due, now + _AGAIN_S))

    def _wake_at(self, when: float) -> None:
        if when != self.wake_at:
            self.wake_at = when
            self._arm(self)

    def _committed(self, effect: Commit, now: float) -> None:
        if not self._tokens:
            self._first = now
        else:
            self._tally.gaps.add(now - self._last)
        self._last = now
        if effect.start != len(self._tokens):
            self._tally.counts["misplaced"] += 1
        self._tokens += effect.tokens
        self.report.committed(len(effect.tokens), now)

    def _finished(self, core: EdgeSession, effect: Finished, now: float) -> None:
        tally, wanted, tokens = self._tally, self._trace.tokens, tuple(self._tokens)
        prefix = tokens == wanted[: len(tokens)]
        pause = 0.0
        if tokens == wanted and effect.error is None:
            tally.counts["generations"] += 1
            tally.tpt.add((now - self._begin) / len(tokens))
            tally.ttft.add(self._first - self._begin)
        elif not prefix:
            tally.counts["wrong"] += 1
        elif effect.reason == _HUNG_UP:
            tally.counts["hung_up"] += 1
        else:
            tally.counts["incomplete"] += 1
        if effect.error is not None:
            tally.fail(str(effect.error))
            pause = FAILURE_PAUSE_S
        self._publish(core, now)
        self._close_books(core, failed=effect.error is not None)
        if self._habits.think_s > 0.0:
            pause += self._habits.think_s * self._random.uniform(0.5, 1.5)
        if self._may_start(now + pause):
            self._wake_at(now + pause)
        else:
            self.done = True

    def _close_books(self, core: EdgeSession, *, failed: bool = False) -> None:
        counts, stats = self._tally.counts, core.stats
        for name in _SUMMED:
            counts[name] += getattr(stats, name)
        counts["tokens"] += len(self._tokens)
        self._estimates = core.sending.estimates
        self.report.ended(self._clock.now(), failed=failed)
        self._core = None
        self._drafting = None
        self._inbox.clear()

    # -- messages -------------------------------------------------------------------------------

    def _publish(self, core: EdgeSession, now: float) -> None:
        for outgoing in core.messages_to_send(now):
            message = outgoing.message
            if isinstance(message, DraftBatch) and message.verify and self._asked_at is None:
                self._asked_at = now
            try:
                topic, payload, qos = publication(self.name, self._session, outgoing)
                self.transport.publish(topic, payload, qos=qos)
            except PipesdError as error:
                if core.finish is None:
                    core.fail(error)
                return
            self.report.sent(len(payload))

    def _hear(self, core: EdgeSession, what: _News, heard_at: float, now: float) -> None:
        if isinstance(what, str):
            core.verifier_gone(what, now)
        elif isinstance(what, ConnectionEvent):
            if what.state is ConnectionState.FAILED:
                core.link_failed(TransportError(what.reason, what.reason_code), now)
            else:
                core.set_connected(what.state is ConnectionState.CONNECTED, now)
        else:
            before = len(core.committed)
            core.receive(what, now, heard_at)
            if isinstance(what, Verdict) and len(core.committed) > before:
                if self._asked_at is not None:
                    self._tally.rounds.add(now - self._asked_at)
                self._asked_at = now if core.awaiting else None

    def _note(self, what: _News) -> None:
        """Something for the running generation; heard at once unless a token is being drafted."""
        room = 2 * MAX_INBOX if isinstance(what, ConnectionEvent) else MAX_INBOX
        if len(self._inbox) >= room:
            self._tally.counts["inbox_full"] += 1
            return
        now = self._clock.now()
        self._inbox.append((what, now))
        if self._drafting is None:
            self._turn(now)

    def _on_event(self, event: ConnectionEvent) -> None:
        if event.state is ConnectionState.CONNECTED:
            self._connected = True
            self.report.connected()
        else:
            self._connected = False
            self._tally.counts["disconnects"] += 1
            self._tally.fail(f"no connection: {event.reason}")
            self._link_lost = event.state is ConnectionState.FAILED
        if self.done:
            return
        if self._core is not None:
            self._note(event)
        elif self._link_lost:
            self._tally.counts["incomplete"] += self.begun == 0
            self.done = True
        elif self._connected and self.begun == 0:
            self._wake_at(self._clock.now())

    def _on_message(self, message: Message) -> None:
        if message.topic == self.report.config_topic:
            self.report.configure(message.payload)
            return
        try:
            if message.topic.startswith(_STATUS_PREFIX):
                self._on_status(message)
                return
            session, decoded = arrival(self.name, message)
        except RemoteProtocolError:
            self._tally.counts["rejected"] += 1
            self.report.rejected += 1
            return
        if session == self.unanswered:
            self.unanswered = None
        if self._core is not None and session == self._session:
            self.report.heard(len(message.payload))
            self._note(decoded)
        elif isinstance(decoded, Accepted):
            # It ended before this answer came: the verifier need not keep a place for it.
            topic = up_topic(self.name, session, decoded.verifier)
            self.transport.publish(topic, encode(Close(decoded.attach)), qos=1)

    def _on_status(self, message: Message) -> None:
        verifier = parse_verifier_status_topic(message.topic)
        status = decode(message.payload) if message.payload else VerifierStatus(online=False)
        gone = isinstance(status, VerifierStatus) and not status.online
        if gone and not message.retain and self._core is not None:
            self._note(verifier)
