"""One generation on the device: the thread that iterates over it drives core and draft model.

It hears messages and connection changes through an inbox that the transport's thread fills, and
publishes through the agent that it belongs to.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol

from broker.clock import Clock
from broker.errors import ModelError, PipesdError, TransportError
from broker.messages import Verdict, VerifierMessage
from broker.sampling import Sampling
from broker.transport import ConnectionEvent, ConnectionState
from edge_agent.core.config import DEFAULT_VERIFY, LOCAL_FORBID, LOCAL_ONLY, SessionConfig
from edge_agent.core.effects import Commit, DraftNext, EdgeStats, Finished
from edge_agent.core.policies import Policy, pipesd
from edge_agent.core.sending import Estimates, Sending
from edge_agent.core.session import EdgeSession, State
from edge_agent.core.timing import Timing
from edge_agent.core.trigger import Thresholds
from edge_agent.draft import Draft
from edge_agent.meter import Meter
from edge_agent.observer import Observer, receive, tell_sent
from edge_agent.wire import publication

log = logging.getLogger(__name__)

#: Messages that may wait for one generation; more means that its thread hangs in the draft model.
MAX_INBOX = 1024
#: Tokens of a prompt that the draft model evaluates between two looks at the inbox.
PREFILL_TOKENS = 32
#: Seconds for which a generation waits for the link before it begins with the draft's prefill.
LINK_PATIENCE = 0.25


class Home(Protocol):
    """What a generation needs of its agent."""

    device: str
    clock: Clock

    def publish(self, topic: str, payload: bytes, qos: int) -> None: ...
    def forget(self, generation: Generation, estimates: Estimates) -> None: ...


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. ``prompt``: token ids; the other fields as in SessionConfig.

    ``thresholds``, ``max_ahead`` and ``min_survival`` stand for those of ``policy`` where given.
    ``tunable``: what the device's remote config may set (edge_agent.device_config.TUNABLES); all
    else is as it was asked for.

    Raises ConfigError when made with values that cannot be.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    policy: Policy = field(default_factory=pipesd)
    thresholds: Thresholds | None = None
    timing: Timing = field(default_factory=Timing)
    max_ahead: int | None = None
    min_survival: float | None = None
    verify: str = DEFAULT_VERIFY
    local: str = LOCAL_FORBID
    tunable: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.config("", 1, frozenset(), 1)

    def config(
        self,
        vocab_hash: str,
        vocab_size: int,
        eos_ids: frozenset[int],
        context: int,
        policy: Policy | None = None,
    ) -> SessionConfig:
        """The session's configuration with these facts of the draft model.

        ``policy``: the one to go by where it is not the request's own.
        """
        policy = policy or self.policy
        return SessionConfig(
            prompt=self.prompt,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            vocab_hash=vocab_hash,
            vocab_size=vocab_size,
            eos_ids=eos_ids,
            context=context,
            max_ahead=policy.max_ahead if self.max_ahead is None else self.max_ahead,
            min_survival=policy.min_survival if self.min_survival is None else self.min_survival,
            verify=self.verify,
            local=LOCAL_ONLY if policy.local else self.local,
            ask_first=True,
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload bytes and messages of one generation."""

    uplink_bytes: int
    downlink_bytes: int
    uplink_messages: int
    downlink_messages: int


class Generation:
    """One running generation: iterate over it for ``Commit`` effects as they become final.

    Iterating raises the error that ended it, if one did. ``cancel`` may come from any thread.
    """

    def __init__(
        self,
        agent: Home,
        session: str,
        core: EdgeSession,
        draft: Draft,
        observer: Observer | None = None,
        *,
        request: Request | None = None,
    ) -> None:
        self.session = session
        self.request = request
        self.meter = Meter(core, agent.clock.now())
        self.finish: str | None = None
        self.dropped = 0  # messages that found the inbox full
        self.draft_seconds = 0.0
        self.driver: int | None = None  # the thread that iterates over it
        self.draft_error: ModelError | None = None
        self._agent = agent
        self._core = core
        self._draft = draft
        self._inbox: deque[tuple[float, VerifierMessage | ConnectionEvent | str]] = deque()
        self._wake = threading.Condition()
        self._cancelled: str | None = None
        self._traffic = self.meter.traffic
        self._started = False
        self._observer = observer

    @property
    def stats(self) -> EdgeStats:
        return self._core.stats

    @property
    def tokens(self) -> list[int]:
        """The committed tokens so far."""
        return list(self._core.committed)

    @property
    def verified(self) -> bool:
        """Whether the target stands for every token."""
        return self._core.stats.local_tokens == 0

    @property
    def traffic(self) -> Traffic:
        return Traffic(*self._traffic)

    @property
    def verifier(self) -> str | None:
        return self._core.verifier

    @property
    def sending(self) -> Sending:
        """What decides when drafts go out."""
        return self._core.sending

    @property
    def policy(self) -> Policy:
        """What it goes by; thresholds may have been changed since."""
        return self._core.policy

    def set_thresholds(self, thresholds: Thresholds) -> None:
        """Take other thresholds from the next drafted token on."""
        self._core.trigger.thresholds = thresholds

    def cancel(self, reason: str = "cancelled") -> None:
        """End soon: drafting stops, the verifier is told. Idempotent."""
        with self._wake:
            if self._cancelled is None:
                self._cancelled = reason
            self._wake.notify()

    def hear(self, what: VerifierMessage | ConnectionEvent | str, size: int = 0) -> None:
        """A message of ``size`` bytes, a connection event, or the id of a verifier that left."""
        with self._wake:
            # What the link does must not get lost behind a heap of messages; it is rare.
            room = 2 * MAX_INBOX if isinstance(what, ConnectionEvent) else MAX_INBOX
            if len(self._inbox) >= room:
                self.dropped += 1
                return
            if size:
                self._traffic[1] += size
                self._traffic[3] += 1
            self._inbox.append((self._agent.clock.now(), what))
            self._wake.notify()

    def __iter__(self) -> Generator[Commit, None, None]:
        if self._started:
            return
        self._started = True
        self.driver = threading.get_ident()
        try:
            yield from self._drive()
        except Exception:
            self.meter.failed = True
            raise
        finally:
            # Also when the consumer stopped listening: the verifier's place is given back.
            self._core.cancel()
            self._flush()
            self._draft.close()
            self.meter.ended(self._agent.clock.now())
            self._agent.forget(self, self._core.sending.estimates)

    def close(self) -> None:
        """Free everything of a generation that was never iterated over; idempotent."""
        self.cancel()
        if not self._started:
            for _ in self:
                pass

    # -- the driving thread ---------------------------------------------------------------------

    def _drive(self) -> Generator[Commit, None, None]:
        core, clock, meter = self._core, self._agent.clock, self.meter
        if core.state is State.OPENING:
            # The verifier's prefill shall run beside the draft's, not after it.
            self._wait(LINK_PATIENCE)
        while True:
            self._take_inbox()
            now = clock.now()
            core.handle_timer(now)
            meter.look(now)
            self._flush()
            effect = core.next_effect()
            if isinstance(effect, Commit):
                meter.committed(len(effect.tokens), clock.now())
                yield effect
            elif isinstance(effect, Finished):
                self.finish = effect.reason
                if effect.error is not None:
                    raise effect.error
                return
            elif effect is not None:
                begin = clock.now()
                try:
                    self._feed(effect)
                    if core.finish is not None:
                        continue
                    token, confidence = self._draft.propose(effect.position, core.config.sampling)
                except ModelError as error:
                    log.warning("drafting stopped: %s", error)
                    self.draft_error = error
                    core.draft_failed(effect)
                    continue
                now = clock.now()
                self.draft_seconds += now - begin
                if self._observer is not None:
                    details = {
                        "position": effect.position,
                        "token": token,
                        "confidence": confidence,
                        "awaiting": core.expecting,
                    }
                    self._observer("draft", begin, now, details)
                core.drafted(effect, token, confidence, now, now - begin)
            else:
                self._wait()

    def _feed(self, effect: DraftNext) -> None:
        """Bring the draft's cache to where ``effect`` wants it, minding the session meanwhile.

        Raises ModelError. Stops early when the session ends.
        """
        draft, feed = self._draft, effect.feed
        if draft.length > effect.keep:
            draft.rollback(effect.keep)
        if len(feed) <= PREFILL_TOKENS:
            draft.eval(feed)
            return
        for start in range(0, len(feed), PREFILL_TOKENS):
            draft.eval(feed[start : start + PREFILL_TOKENS])
            self._take_inbox()
            self._core.handle_timer(self._agent.clock.now())
            self._flush()
            if self._core.finish is not None:
                return

    def _wait(self, most: float | None = None) -> None:
        """Until something is heard, a timer is due, or ``most`` seconds have passed."""
        timer = self._core.get_timer()
        with self._wake:
            if not self._inbox and self._cancelled is None:
                wait = None if timer is None else timer - self._agent.clock.now()
                if most is not None:
                    wait = most if wait is None else min(wait, most)
                if wait is None or wait > 0:
                    self._wake.wait(wait)

    def _take_inbox(self) -> None:
        while True:
            with self._wake:
                cancelled = self._cancelled
                heard_at, what = self._inbox.popleft() if self._inbox else (0.0, None)
            if cancelled is not None:
                self._core.cancel(cancelled)
            if what is None:
                return
            now = self._agent.clock.now()
            if isinstance(what, str):
                self._core.verifier_gone(what, now)
            elif isinstance(what, ConnectionEvent):
                self._on_connection(what, now)
            elif self._observer is not None and isinstance(what, Verdict):
                receive(self._observer, self._core, what, now, heard_at)
            else:
                self._core.receive(what, now, heard_at)

    def _on_connection(self, event: ConnectionEvent, now: float) -> None:
        if event.state is ConnectionState.FAILED:
            self._core.link_failed(TransportError(event.reason, event.reason_code), now)
        else:
            self._core.set_connected(event.state is ConnectionState.CONNECTED, now)

    def _flush(self) -> None:
        for outgoing in self._core.messages_to_send(self._agent.clock.now()):
            begin = self._agent.clock.now() if self._observer is not None else 0.0
            try:
                topic, payload, qos = publication(self._agent.device, self.session, outgoing)
                self._agent.publish(topic, payload, qos)
            except PipesdError as error:
                if self._core.finish is None:
                    self._core.fail(error)
                return
            self._traffic[0] += len(payload)
            self._traffic[2] += 1
            if self._observer is not None:
                end = self._agent.clock.now()
                tell_sent(self._observer, outgoing.message, len(payload), begin, end)
