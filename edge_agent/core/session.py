"""One generation on the edge, as a pure state machine (docs/protocol.md).

The driver feeds messages, timers, connection changes and drafted tokens in, each with ``now`` in
seconds, and carries out what comes back: ``messages_to_send``, ``next_effect``, ``get_timer``.
Nothing here reads a clock, sleeps, sends or runs a model.

    OPENING --Accepted--> ACTIVE --finish--> DONE
       ^  `--silence, local allowed--> LOCAL --Accepted--> ACTIVE
       `---- Closed, silence ---- ACTIVE

In OPENING, ACTIVE and LOCAL the draft model runs; only in ACTIVE drafts are sent; only in LOCAL
they are committed without a verdict.
"""

from __future__ import annotations

import enum
from collections import deque

from broker.errors import ConfigError, LocalProtocolError, ModelError, PipesdError
from broker.errors import Refused as RefusedError
from broker.messages import (
    CLOSED_ERROR,
    CLOSED_TOKEN,
    FINISH_LENGTH,
    FINISH_STOP,
    VERIFY_MODES,
    VERIFY_TRIGGERED,
    Accepted,
    Close,
    Closed,
    Refused,
    Resync,
    SessionOpen,
    Verdict,
    VerifierMessage,
)
from edge_agent.core.attachment import Attachment, Next, refused_error
from edge_agent.core.config import (
    LOCAL_FORBID,
    LOCAL_ONLY,
    SessionConfig,
)
from edge_agent.core.effects import (
    SOURCE_ACCEPTED,
    SOURCE_LOCAL,
    SOURCE_TARGET,
    Commit,
    DraftNext,
    EdgeStats,
    Effect,
    Finished,
)
from edge_agent.core.policies import Policy
from edge_agent.core.sending import Estimates, Sending
from edge_agent.core.timing import Timing
from edge_agent.core.trigger import Thresholds, Trigger
from edge_agent.core.uplink import Outgoing, Uplink
from edge_agent.core.window import APPLIED, DUPLICATE, GAP, DraftWindow

#: Seconds by which a timer may be late before the driver counts as having been away.
LATE = 1.0


class State(enum.Enum):
    OPENING = "opening"
    ACTIVE = "active"
    LOCAL = "local"
    DONE = "done"


class EdgeSession:
    """See the module. One thread at a time."""

    def __init__(
        self,
        config: SessionConfig,
        thresholds: Thresholds | None = None,
        timing: Timing | None = None,
        now: float = 0.0,
        *,
        policy: Policy | None = None,
        estimates: Estimates | None = None,
    ) -> None:
        self.config = config
        self.timing = timing or Timing()
        self.policy = policy or Policy("pipesd", thresholds or Thresholds())
        self.trigger = Trigger(self.policy.thresholds)
        self.sending = Sending(self.policy.sending, estimates)
        self.stats = EdgeStats()
        self.finish: str | None = None
        self._window = DraftWindow(config.prompt)
        self._state = State.LOCAL if config.local == LOCAL_ONLY else State.OPENING
        self._at = Attachment(self.timing, now)
        self._limit = config.max_tokens
        self._verify = self.policy.verify or config.verify
        self._draft_broken = False
        self._opening_asks = False  # the latest SessionOpen wanted a token too
        self._up = Uplink(
            self.policy,
            self._verify,
            window=self._window,
            sending=self.sending,
            attachment=self._at,
            stats=self.stats,
            pad_token=config.vocab_size - 1,  # its id is as long as any
        )
        self._effects: deque[Commit | Finished] = deque()
        if self._state is State.LOCAL:
            self._check_alone()

    # -- what the driver asks -------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._state

    @property
    def verifier(self) -> str | None:
        """The replica that has the session; None while none has."""
        return self._at.verifier

    @property
    def attach(self) -> int:
        return self._at.attach

    @property
    def committed(self) -> list[int]:
        """The final tokens so far."""
        return self._window.committed

    @property
    def awaiting(self) -> bool:
        """Whether a verification has been asked for and not been answered."""
        return self._up.asked is not None

    @property
    def expecting(self) -> bool:
        """Whether a verdict may come that nobody need ask for any more."""
        return self.awaiting or self._up.going_on

    @property
    def _waiting(self) -> bool:
        """Whether a silence of ``offline_after`` means that the cloud is out of reach."""
        if self._state is State.ACTIVE:
            return self.awaiting or not self._at.connected
        return self._state is State.OPENING

    def get_timer(self) -> float | None:
        """When ``handle_timer`` wants to be called, in the caller's seconds; None: not at all."""
        if self._state is State.DONE or self.config.local == LOCAL_ONLY:
            return None
        times = []
        if self._at.deadline is not None and self._at.connected:
            times.append(self._at.deadline)
        if self._waiting:
            times.append(self._at.offline_at)
        if self._state is State.ACTIVE and self.awaiting:
            times.append(self._up.asked_at + self.timing.stuck_after)
        return min(times, default=None)

    def messages_to_send(self, now: float) -> list[Outgoing]:
        """Everything that is to be published now, in order; each exactly once."""
        self._pump(now)
        return self._up.take()

    def next_effect(self) -> Effect | None:
        """The next thing to do, or None. A DraftNext stays outstanding until it is answered."""
        if self._effects:
            return self._effects.popleft()
        if self._state is State.DONE:
            return None
        if self._window.drafting or self._may_draft():
            return self._window.next_draft()
        return None

    # -- what the driver reports ----------------------------------------------------------------

    def set_connected(self, connected: bool, now: float) -> None:
        """The link to the broker came up or went down."""
        if connected == self._at.connected or self._state is State.DONE:
            return
        if not connected:
            if not self._waiting:
                self._at.begin_wait(now)
            self._at.connected = False
            self.sending.disconnected()
            return
        self._at.connected = True
        # Whatever was on the old connection is gone: ask at once instead of waiting for a timer.
        if self._state is State.ACTIVE:
            if self.awaiting:
                self._up.repeat(now, self._limit)
        elif self.config.local != LOCAL_ONLY:
            self._open(now)

    def drafted(
        self,
        effect: DraftNext,
        token: int,
        confidence: float,
        now: float,
        seconds: float | None = None,
    ) -> None:
        """The draft model's answer, which took ``seconds`` where the driver knows.

        One for an effect that a rollback overtook is dropped.
        """
        if not self._window.answered(effect) or self._state is State.DONE:
            return
        if not 0 <= token < self.config.vocab_size:
            self.draft_failed(effect)
            return
        self.stats.drafted += 1
        if self._state is State.LOCAL:
            self._commit_local(token)
            self._check_alone()
            return
        self._window.append(token, confidence)
        self.sending.drafted(len(effect.feed), seconds)
        self._fire(self.trigger.observe(confidence, hold=not self._up.may_ask(now)), now)

    def _fire(self, rule: str | None, now: float) -> None:
        if rule is not None and self._state is State.ACTIVE:
            self.stats.count_trigger(rule)
            self.trigger.asked(self._window.position)
            self._ask(now)

    def draft_failed(self, effect: DraftNext) -> None:
        """The draft model failed: go on with the target's own tokens alone."""
        self._window.abandon(effect)
        self._draft_broken = True
        self._check_alone()

    def cancel(self, reason: str = "cancelled") -> None:
        """End here: the driver found a stop string, or nobody listens any more."""
        if self._state is not State.DONE:
            self._end(reason, None)

    def fail(self, error: PipesdError) -> None:
        """End with ``error``: something outside the session makes going on impossible."""
        if self._state is not State.DONE:
            self._end("error", error)

    def link_failed(self, error: PipesdError, now: float) -> None:
        """The transport gave up for good: an error, unless going on alone is allowed."""
        self._at.connected = False
        if self._state is State.DONE or self._state is State.LOCAL:
            return
        if self.config.local == LOCAL_FORBID:
            self.fail(error)
        else:
            self._go_local(now)

    def verifier_gone(self, verifier: str, now: float) -> None:
        """A verifier's status says offline: do not wait for its silence."""
        if self._state is State.ACTIVE and verifier == self.verifier:
            self._reopen(now)

    def handle_timer(self, now: float) -> None:
        """Call at or after ``get_timer()``."""
        timer = self.get_timer()
        if timer is None or now < timer:
            return
        if now > timer + LATE and not self._returned(now):
            return
        if self._waiting and now >= self._at.offline_at:
            self._give_up(now)
            return
        if self.awaiting and now >= self._up.asked_at + self.timing.stuck_after:
            self.stats.stuck += 1
            self._reopen(now)
            return
        self._at.deadline = None
        self.stats.timeouts += 1
        if self._state is not State.ACTIVE:
            self._open(now)
            return
        if self._at.answer_overdue():
            self._reopen(now)
        else:
            self._at.response.back_off()
            self._up.repeat(now, self._limit)

    def _returned(self, now: float) -> bool:
        """The driver was away (a stopped process, a long model call): whether to ask again now.

        Nobody listened meanwhile, so that silence says nothing about the cloud.
        """
        self._at.begin_wait(now)
        self._up.driver_returned(now)
        return self._at.connected and self._at.deadline is not None and now >= self._at.deadline

    def receive(self, message: VerifierMessage, now: float, heard_at: float | None = None) -> None:
        """A message of this session's ``down`` topic.

        ``heard_at``: when it arrived, where the driver was busy until ``now``.
        """
        heard_at = now if heard_at is None else heard_at
        if self._state is State.DONE:
            return
        if message.attach != self.attach or self.attach == 0:
            # Of an earlier attachment, or nothing was ever asked.
            self.stats.stale += 1
            return
        if isinstance(message, Accepted):
            self._on_accepted(message, now)
        elif isinstance(message, Refused):
            self._on_refused(message, now)
        elif self._state is not State.ACTIVE:
            self.stats.unexpected += 1
        elif isinstance(message, Closed):
            self._at.sign_of_life(now)
            self._on_closed(message, now)
        elif isinstance(message, Verdict):
            self._at.sign_of_life(now)
            self._on_verdict(message, now, heard_at)
        else:
            self._at.sign_of_life(now)
            self._on_resync(message, now, heard_at)

    # -- attaching ------------------------------------------------------------------------------

    def _open(self, now: float) -> None:
        attach = self._at.open(now)
        # Alone the text grows on: what is asked for now would be out of date when it comes.
        first = self.config.ask_first and self.policy.proactive
        self._opening_asks = first and self._state is not State.LOCAL
        if self._at.connected:
            message = SessionOpen(
                attach=attach,
                prompt=self.config.prompt,
                committed=tuple(self.committed),
                sampling=self.config.sampling,
                max_tokens=self.config.max_tokens,
                vocab_hash=self.config.vocab_hash,
                verify=self._verify if self._verify in VERIFY_MODES else VERIFY_TRIGGERED,
                ask=self._opening_asks,
            )
            self._up.put(message, None)

    def _reopen(self, now: float) -> None:
        """Attach to whichever replica answers; drafts stay, they are as good as before."""
        if not self._waiting:
            self._at.begin_wait(now)
        self.stats.reopens += 1
        self._up.detached()
        self._state = State.OPENING
        step = self._at.lost(now)
        if step is Next.GIVE_UP:
            self._give_up(now)
        elif step is Next.OPEN:
            self._open(now)

    def _on_accepted(self, message: Accepted, now: float) -> None:
        if self._state is State.ACTIVE:
            if message.verifier != self.verifier:
                # Two replicas may answer a repeated open; the first has the session.
                self.stats.unexpected += 1
                self._up.put(Close(self.attach), message.verifier)
            return
        self._state = State.ACTIVE
        self._close_left(message.verifier)
        self._at.accepted(message.verifier, now)
        self._limit = min(self.config.max_tokens, message.limit)
        self._window.new_verifier()
        self.trigger.rolled_back()
        if self._window.draft:
            self._ask(now)
        elif self._opening_asks:
            self._up.asked_by_opening(now)

    def _close_left(self, verifier: str | None) -> None:
        """Another replica has the session, or none any more: a silent one need not keep it."""
        left, self._at.left = self._at.left, None
        if left is not None and left[0] != verifier:
            self._up.put(Close(left[1]), left[0])

    def _on_refused(self, message: Refused, now: float) -> None:
        if self._state is State.ACTIVE:
            self.stats.unexpected += 1
            return
        self.stats.refusals += 1
        if message.retry_after > 0.0:
            self._at.busy(message, now)
            return
        self._at.refused()
        if self._state is not State.LOCAL:  # there it goes on alone as before, and asks no more
            self.fail(refused_error(message))

    def _on_closed(self, message: Closed, now: float) -> None:
        if message.reason == CLOSED_TOKEN:
            error = "the verifier's vocabulary lacks a drafted token: use a draft of its family"
            self.fail(RefusedError(error, message.reason))
            return
        if message.reason == CLOSED_ERROR and self._at.target_failed():
            self.fail(ModelError("the target failed on this session: see the verifier's log"))
            return
        self._reopen(now)
        self._at.left = None  # it has forgotten the session itself

    def _give_up(self, now: float) -> None:
        if self.config.local == LOCAL_FORBID:
            self.fail(self._at.why_given_up(now))
            return
        self._go_local(now)

    def _go_local(self, now: float) -> None:
        self._at.detach()
        self._up.detached()
        self._state = State.LOCAL
        for token in self._window.clear_draft():
            self._commit_local(token)
        self._check_alone()
        if self.finish is None:
            self._open(now)

    # -- verdicts -------------------------------------------------------------------------------

    def _on_verdict(self, verdict: Verdict, now: float, heard_at: float) -> None:
        end = verdict.start + len(verdict.tokens)
        if max(verdict.tokens) >= self.config.vocab_size or end > self._limit:
            self.stats.out_of_range += 1
            self._reopen(now)  # it would only say so again
            return
        outcome = self._window.apply(verdict)
        if outcome.kind != APPLIED:
            if outcome.kind == GAP:
                self.stats.gaps += 1
                self._up.send_resync(now, only_once=True)
            elif outcome.kind == DUPLICATE:
                self.stats.duplicates += 1
            else:
                self.stats.contradictions += 1
                self._reopen(now)
            return
        self._at.progress()
        accepted, own = outcome.accepted, len(outcome.fresh) - outcome.accepted
        self.stats.count_verdict(verdict, accepted, own)
        if self.policy.adapt_r1:
            self.trigger.adapt(verdict.judged, accepted, verdict.start + verdict.judged)
        if outcome.lost is not None:
            self.stats.rolled_back += outcome.lost
            self.sending.rolled_back()
            self._up.drop_request()
            self.trigger.rolled_back()
        sources = (SOURCE_ACCEPTED,) * accepted + (SOURCE_TARGET,) * own
        self._effects.append(Commit(outcome.start, outcome.fresh, sources))
        if verdict.finish is not None:
            self._end(verdict.finish, None)
            return
        judged = (verdict.epoch, verdict.start + verdict.judged)
        hold, forward = verdict.hold_ms / 1000.0, verdict.forward_ms / 1000.0
        self.sending.judged(judged, heard_at, hold, forward)
        asked = self._up.asked
        if asked is not None and end > asked:
            self._up.answered(now)
            rule = self.trigger.release()
            if self._window.draft:  # else what it fired for is committed
                self._fire(rule, now)
        elif asked is not None:
            self._up.answered_in_part(now)

    def _on_resync(self, message: Resync, now: float, heard_at: float) -> None:
        """The verifier lacks something of the draft, or lacks nothing and says that it lives."""
        if message.probe:
            self.sending.probe_answered(message.probe, heard_at)
            return
        if message.epoch != self._window.epoch:
            self._window.resend_from(0)
        elif message.have < len(self.committed):
            return  # it was sent before a verdict that has arrived since
        else:
            self._window.resend_from(message.have)
        if self.awaiting and self._window.has_unsent:
            # Something was lost, so the long waits of a busy verifier are out of place.
            self._at.response.answered()
            self._up.repeat_draft(now, self._limit)

    # -- sending --------------------------------------------------------------------------------

    def _pump(self, now: float) -> None:
        """Send what is drafted; ask where nothing else would ever bring a verdict."""
        if self._state is not State.ACTIVE or not self._at.connected:
            return
        if not self.awaiting and not self._window.drafting and not self._may_draft():
            self.stats.count_trigger("end")
            self._ask(now)
        else:
            self._up.send_unasked(now)

    def _ask(self, now: float) -> None:
        if self._state is not State.ACTIVE:
            return
        if not self.awaiting and not self._waiting:
            self._at.begin_wait(now)
        self._up.ask(now, self._limit)

    # -- drafting and the end -------------------------------------------------------------------

    def _may_draft(self) -> bool:
        window = self._window
        if self._state is State.DONE or self._draft_broken or self.policy.stream:
            return False
        if self.awaiting and not self.policy.proactive:
            return False
        # The last token of all is the target's own, whatever is drafted there.
        last = self._limit if self._state is State.LOCAL else self._limit - 1
        if window.position >= last or len(window.draft) >= self.config.max_ahead:
            return False
        if window.length > self.config.context:
            return False
        if self.expecting and window.survival < self.config.min_survival:
            return False  # a verdict is on its way that will most likely drop it
        return not (window.draft and window.draft[-1] in self.config.eos_ids)

    def _commit_local(self, token: int) -> None:
        if self._state is State.DONE:
            return
        self._effects.append(Commit(len(self.committed), (token,), (SOURCE_LOCAL,)))
        self._window.commit_local(token)
        self.stats.local_tokens += 1
        if token in self.config.eos_ids:
            self._end(FINISH_STOP, None)
        elif len(self.committed) >= self._limit:
            self._end(FINISH_LENGTH, None)

    def _check_alone(self) -> None:
        """In local mode only a draft brings the next token: end where none can come."""
        if self._state is not State.LOCAL:
            return
        if self._draft_broken:
            self.fail(ModelError("the draft model failed and no verifier is in reach: start one"))
        elif self._window.length <= self.config.context:
            return
        elif self.committed:
            self._end(FINISH_LENGTH, None)
        else:
            size, room = self._window.length, self.config.context
            self.fail(
                ConfigError(
                    f"the prompt of {size} tokens is longer than the draft model's context of "
                    f"{room}: shorten it, or start a verifier"
                )
            )

    def _end(self, reason: str, error: PipesdError | None) -> None:
        if self._state is State.DONE:
            raise LocalProtocolError("a session ends once")
        if self._state is State.ACTIVE:
            self._up.put(Close(self.attach), self.verifier)
        elif self._at.connected:
            self._close_left(None)
        self._state = State.DONE
        self.finish = reason
        self._up.drop_request()
        self._effects.append(Finished(reason, error))
