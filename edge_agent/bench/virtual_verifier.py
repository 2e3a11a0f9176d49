"""A verifier that knows the text, for replays: the wire's other end without a target model.

It answers one session as the real one does (docs/protocol.md): a forward takes everything pending,
commits what is right and one token more; drafts that begin with what was committed stay valid. A
test holds it to the real core, commit by commit.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from broker.messages import (
    CLOSED_UNKNOWN,
    FINISH_LENGTH,
    FINISH_STOP,
    VERIFY_EAGER,
    VERIFY_STREAM,
    Accepted,
    Close,
    Closed,
    DraftBatch,
    EdgeMessage,
    Resync,
    SessionOpen,
    Verdict,
    VerifierMessage,
)
from edge_agent.bench.traces import Trace

#: The id that it answers with.
VERIFIER_ID = "replayed"
#: Tokens that prompt and text may have together; a trace's text never reaches it.
CONTEXT = 1 << 30
#: As the real one's (its Limits and its session's constants).
FORWARD_TOKENS, PREFILL_TOKENS, UNASKED_TOKENS = 1024, 256, 32
MAX_PENDING, MAX_ROUNDS, MAX_REPEATS, RESYNC_INTERVAL = 1024, 64, 32, 0.25
MAX_ARRIVALS, MAX_UNHEARD, REPEAT_INTERVAL = 64, 64, 0.1


class Judge(Protocol):
    """What a replay needs of a verifier; ``now`` in seconds."""

    def receive(self, message: EdgeMessage, now: float) -> None:
        """A message of the session arrived."""
        ...

    def messages_to_send(self, now: float) -> list[VerifierMessage]:
        """Everything that goes out now, each exactly once."""
        ...

    def begin_forward(self) -> int | None:
        """The tokens of a forward that begins now; None: one runs, or there is nothing to do."""
        ...

    def end_forward(self, now: float, seconds: float) -> None:
        """The forward that runs is done; it took ``seconds``."""
        ...


class VirtualVerifier:
    """See the module. Implements ``Judge``."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._session: _Session | None = None
        self._running: tuple[_Session, int, int, list[int] | None] | None = None
        self._outbox: list[VerifierMessage] = []

    def receive(self, message: EdgeMessage, now: float) -> None:
        """See Judge."""
        held = self._session
        if isinstance(message, SessionOpen):
            if held is not None and message.attach < held.attach:
                return
            if held is None or message.attach > held.attach:
                held = self._session = self._take(message)
            self._outbox.append(Accepted(held.attach, VERIFIER_ID, CONTEXT, held.limit))
        elif held is None or message.attach > held.attach:
            if not isinstance(message, Close):
                self._outbox.append(Closed(message.attach, CLOSED_UNKNOWN))
        elif message.attach == held.attach:
            if isinstance(message, DraftBatch):
                held.receive_draft(message, now)
            elif isinstance(message, Resync):
                held.receive_resync(message, now)
            else:
                self._session = None

    def messages_to_send(self, now: float) -> list[VerifierMessage]:  # noqa: ARG002
        """See Judge."""
        messages, self._outbox = self._outbox, []
        if self._session is not None and self._session.outbox:
            messages += self._session.outbox
            self._session.outbox = []
        return messages

    def begin_forward(self) -> int | None:
        """See Judge."""
        session = self._session
        if self._running is not None or session is None:
            return None
        plan = session.plan()
        if plan is None:
            return None
        keep, tokens, drafts = plan
        self._running = (session, keep, tokens, drafts)
        return tokens

    def end_forward(self, now: float, seconds: float) -> None:
        """See Judge."""
        assert self._running is not None
        (session, keep, tokens, drafts), self._running = self._running, None
        if session is not self._session:
            return
        if drafts is None:
            session.cached = keep + tokens
        else:
            session.judge(keep + tokens - len(drafts), drafts, now, seconds)

    def _take(self, opened: SessionOpen) -> _Session:
        session = _Session(self._trace, opened)
        if self._session is not None:
            # Both hold the same text; what a running forward is writing does not count.
            session.cached = min(self._session.cached, self._session.length, session.length - 1)
            if self._running is not None and self._running[0] is self._session:
                session.cached = min(session.cached, self._running[1])
        return session


class _Session:
    """One attachment; the order of its methods is that of the real session."""

    def __init__(self, trace: Trace, opened: SessionOpen) -> None:
        self.attach = opened.attach
        self.limit = opened.max_tokens
        self.cached = 0
        self.outbox: list[VerifierMessage] = []
        self._trace = trace
        self._text = trace.tokens
        self._prompt = len(opened.prompt)
        self._committed = len(opened.committed)
        self._eager = opened.verify == VERIFY_EAGER
        self._stream = opened.verify == VERIFY_STREAM
        self._finish: str | None = None
        self._epoch = 0
        self._dead = False
        self._pending: list[int] = []
        self._arrivals: deque[tuple[int, float]] = deque(maxlen=MAX_ARRIVALS)
        self._running: tuple[int, float | None] = (0, None)  # epoch and arrival of what is judged
        self._first_asked = self._committed if opened.ask else -1
        self._verify_to = self._first_asked
        self._heard_to = self._committed
        self._go_on = False
        self._rounds: deque[Verdict] = deque(maxlen=MAX_ROUNDS)
        self._last_resync = (-1, -1, 0.0)
        self._last_repeat = (-1, 0.0)

    @property
    def length(self) -> int:
        """Prompt and committed tokens."""
        return self._prompt + self._committed

    @property
    def _triggered(self) -> bool:
        if self._finish is not None:
            return False
        return self._stream or self._verify_to >= self._committed

    def plan(self) -> tuple[int, int, list[int] | None] | None:
        """Cached tokens kept, tokens of the forward, and the drafts in it (None: mere prefill)."""
        if self._finish is not None:
            return None
        budget = min(FORWARD_TOKENS, PREFILL_TOKENS)
        if self._may_go_on and not self._triggered:
            budget = min(budget, UNASKED_TOKENS)
        missing = self.length - self.cached
        if missing > budget or not (self._triggered or self._may_go_on):
            fed = min(budget, missing - 1)
            return (self.cached, fed, None) if fed > 0 else None
        room = min(self.limit - self._committed - 1, budget - missing)
        drafts = self._pending[:room]
        end = self._committed + len(drafts)
        arrived = next((at for last, at in self._arrivals if last == end), None)
        self._running = self._epoch, arrived
        return self.cached, missing + len(drafts), drafts

    @property
    def _may_go_on(self) -> bool:
        if self._go_on and self._committed < self._heard_to + MAX_UNHEARD:
            return True
        return self._eager and bool(self._pending)

    def judge(self, cached: int, drafts: list[int], now: float, seconds: float) -> None:
        """Commit the right ones of ``drafts`` and one more; ``cached`` without the drafts."""
        start, text = self._committed, self._text
        accepted = 0
        for token, right in zip(drafts, text[start : start + len(drafts)], strict=False):
            if token != right:
                break
            accepted += 1
        fresh = text[start : start + accepted + 1]
        if fresh[-1] in self._trace.eos_ids:
            self._finish = FINISH_STOP
        elif start + len(fresh) >= self.limit:
            self._finish = FINISH_LENGTH
        judged = min(len(drafts), len(fresh)) if self._finish else len(drafts)
        self._committed = start + len(fresh)
        self.cached = 0 if self._finish else cached + accepted  # a finished one gives its slot back
        epoch, arrived = self._running
        hold = now - arrived if arrived is not None and epoch == self._epoch else 0.0
        overlap = min(len(self._pending), len(fresh))
        if tuple(self._pending[:overlap]) == fresh[:overlap]:
            del self._pending[:overlap]
        else:
            self._kill_epoch()
        verdict = Verdict(
            self.attach,
            self._epoch,
            start,
            fresh,
            accepted,
            judged,
            self._finish,
            hold * 1000.0,
            seconds * 1000.0,
        )
        self._rounds.append(verdict)
        self.outbox.append(verdict)

    def receive_draft(self, batch: DraftBatch, now: float) -> None:
        """Draft tokens, perhaps with a trigger."""
        if batch.epoch < self._epoch or self._finish is not None:
            return
        if batch.epoch > self._epoch:
            self._adopt(batch.epoch)
        elif self._dead:
            return
        tokens = batch.trunk()
        end = self._committed + len(self._pending)
        if batch.base > end:
            self._ask_resync(end, now)
            return
        if not self._append(batch.base, tokens):
            return
        asked = batch.base + len(tokens)
        self._arrivals.append((asked, now))
        self._heard_to = max(self._heard_to, min(asked, self._committed + len(self._pending)))
        if batch.verify:
            self._go_on = batch.go_on
        if batch.verify and asked >= self._committed:
            self._verify_to = max(self._verify_to, asked)

    def _append(self, base: int, tokens: tuple[int, ...]) -> bool:
        if base < self._committed:
            known = self._text[base : min(self._committed, base + len(tokens))]
            if tokens[: len(known)] != known:
                self._kill_epoch()
                return False
            tokens = tokens[len(known) :]
            base = self._committed
        offset = base - self._committed
        overlap = tuple(self._pending[offset : offset + len(tokens)])
        if tokens[: len(overlap)] != overlap:
            return False
        room = MAX_PENDING - len(self._pending)
        self._pending.extend(tokens[len(overlap) :][:room])
        return True

    def receive_resync(self, message: Resync, now: float) -> None:
        """The edge has every verdict up to ``have``."""
        if message.probe:
            have = self._committed + len(self._pending)
            self.outbox.append(Resync(self.attach, self._epoch, have, message.probe))
            return
        if message.have > self._committed:
            self.outbox.append(Closed(self.attach, CLOSED_UNKNOWN))
            return
        self._heard_to = max(self._heard_to, message.have)
        if message.have < self._committed:
            last, when = self._last_repeat
            if message.have <= last and now < when + REPEAT_INTERVAL:
                return
            self._last_repeat = (message.have, now)
            due = [r for r in self._rounds if r.start + len(r.tokens) > message.have]
            self.outbox.extend(due[:MAX_REPEATS])
            return
        if message.epoch > self._epoch or (message.epoch == self._epoch and self._dead):
            self._adopt(message.epoch)
        have = self._committed + len(self._pending)
        self.outbox.append(Resync(self.attach, self._epoch, have))

    def _adopt(self, epoch: int) -> None:
        self._epoch = epoch
        self._dead = False
        self._drop_pending()

    def _kill_epoch(self) -> None:
        self._dead = True
        self._drop_pending()

    def _drop_pending(self) -> None:
        self._pending.clear()
        self._arrivals.clear()
        self._verify_to = self._first_asked

    def _ask_resync(self, have: int, now: float) -> None:
        epoch, last, when = self._last_resync
        if (epoch, last) == (self._epoch, have) and now < when + RESYNC_INTERVAL:
            return
        self._last_resync = (self._epoch, have, now)
        self.outbox.append(Resync(self.attach, self._epoch, have))
