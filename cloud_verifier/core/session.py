"""One session on the verifier, as a pure state machine (docs/protocol.md).

It holds nothing that the edge could not rebuild: prompt and committed tokens from SessionOpen, the
drafts that arrived since, and where the engine's cache stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.messages import (
    CLOSED_TOKEN,
    CLOSED_UNKNOWN,
    FINISH_LENGTH,
    FINISH_STOP,
    VERIFY_EAGER,
    VERIFY_STREAM,
    Closed,
    DraftBatch,
    Resync,
    SessionOpen,
    Verdict,
    VerifierMessage,
)
from cloud_verifier.core.branches import Branches, accepted_path, branches_of
from cloud_verifier.core.stats import VerifierStats

#: Unverified draft tokens that one session may have here.
MAX_PENDING = 1024
#: Verdicts kept to be repeated as they were; older ones are repeated merged.
MAX_ROUNDS = 64
#: Verdicts repeated for one Resync.
MAX_REPEATS = 32
#: Seconds in which the same Resync is not asked again.
RESYNC_INTERVAL = 0.25
#: Seconds in which verdicts are not repeated again for an edge that is no further. Below the least
#: time after which an edge asks for them again.
REPEAT_INTERVAL = 0.1
#: Batches whose arrival is remembered, so that a verdict can say how long it held its own.
MAX_ARRIVALS = 64
#: Tokens that the target writes on by itself beyond what the edge has spoken of.
MAX_UNHEARD = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What a session puts into the next forward: ``tokens`` after ``keep`` cached ones.

    ``judged``: how many of the last tokens are drafts in a chain; ``choices``: one after each draft
    and one before them, or 0 for a piece of prefill. ``position``: that of the first choice.
    ``parents``: of a tree, whose drafts are the ``judged`` of the chain and the branches beside it.
    ``path``: what became of the tree in this session's last work (both as in ``Work``). ``epoch``:
    of the drafts; ``arrived``: when the batch came that ends with the last of the chain.
    """

    keep: int
    tokens: tuple[int, ...]
    judged: int
    choices: int
    position: int
    parents: tuple[int, ...] | None = None
    path: tuple[int, ...] = ()
    epoch: int = field(default=0, compare=False)
    arrived: float | None = field(default=None, compare=False)

    @property
    def drafts(self) -> tuple[int, ...]:
        """The drafted tokens in it."""
        count = self.judged if self.parents is None else len(self.parents)
        return self.tokens[len(self.tokens) - count :]


class VerifierSession:
    """See the module. ``context``: tokens the target can hold; ``limit``: where the text ends."""

    def __init__(
        self,
        opened: SessionOpen,
        *,
        context: int,
        vocab_size: int,
        eos_ids: frozenset[int],
        stats: VerifierStats,
        now: float,
    ) -> None:
        self.attach = opened.attach
        self.prompt = opened.prompt
        self.sampling = opened.sampling
        self.committed: list[int] = list(opened.committed)
        self.limit = min(opened.max_tokens, context - len(opened.prompt))
        self.eager = opened.verify == VERIFY_EAGER
        self.stream = opened.verify == VERIFY_STREAM
        self.finish: str | None = None
        self.cached = 0  # valid tokens of this session in its slot; 0 after an eviction
        self.tree_from: int | None = None  # where the first of them stands that a tree brought
        self.last_seen = now
        self.waiting_since = now  # for the scheduler: oldest first
        self._context = context
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._stats = stats
        self._epoch = 0
        self._dead = False  # this epoch contradicts what is committed
        self._pending: list[int] = []
        self._branches = Branches(MAX_PENDING)
        self._path: tuple[int, ...] = ()  # accepted nodes of the tree in the slot's last work
        self._arrivals: deque[tuple[int, float]] = deque(maxlen=MAX_ARRIVALS)  # end, now
        # Asked for by the opening, which no epoch takes back: the token at this position.
        self._first_asked = len(self.committed) if opened.ask else -1
        self._verify_to = self._first_asked  # judge up to this position
        self._heard_to = len(self.committed)  # the furthest position that the edge spoke of
        self._go_on = False  # whether the target may write on by itself
        self._rounds: deque[Verdict] = deque(maxlen=MAX_ROUNDS)
        self._last_resync: tuple[int, int, float] = (-1, -1, 0.0)
        self._last_repeat: tuple[int, float] = (-1, 0.0)
        self._outbox: list[VerifierMessage] = []

    # -- what is to be done ---------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Prompt and committed tokens."""
        return len(self.prompt) + len(self.committed)

    @property
    def settled(self) -> int:
        """Of ``cached`` those tokens that need no ``path`` to be found."""
        return max(0, self.cached - len(self._path))

    @property
    def triggered(self) -> bool:
        """Whether the edge waits for a verdict."""
        if self.finish is not None:
            return False
        return self.stream or self._verify_to >= len(self.committed)

    @property
    def wants_choice(self) -> bool:
        """Whether the next forward with it is to commit something, or to lead there."""
        return self.triggered or (self.finish is None and self._may_go_on)

    @property
    def _may_go_on(self) -> bool:
        """Whether a forward that nobody asked for may serve this session."""
        if self._go_on and len(self.committed) < self._heard_to + MAX_UNHEARD:
            return True
        return self.eager and bool(self._pending)

    @property
    def behind(self) -> bool:
        """Whether more than the last committed token must be run before a choice."""
        return self.cached < self.length - 1

    @property
    def has_work(self) -> bool:
        """Whether a forward could do anything for this session now."""
        return self.finish is None and (self.wants_choice or self.behind)

    def plan(self, budget: int) -> Plan | None:
        """The next piece of work of at most ``budget`` tokens (at least 1); None without any."""
        if not self.has_work:
            return None
        committed, prompt = self.committed, len(self.prompt)
        missing = self.length - self.cached
        path = self._path if self.cached else ()
        if missing > budget or not self.wants_choice:
            # Prefill, in pieces; the last committed token waits for the forward that chooses.
            end = min(self.cached + budget, self.length - 1)
            if end <= self.cached:
                return None
            tokens = self.text(self.cached, end)
            return Plan(self.cached, tokens, 0, 0, len(committed), path=path)
        judged = min(len(self._pending), self.limit - len(committed) - 1, budget - missing)
        tokens = self.text(self.cached, prompt + len(committed))
        room = min(budget - missing, self._context - self.length) - judged
        depth = self.limit - len(committed) - 1
        beside = self._branches.beside(judged, len(committed), depth, room)
        return Plan(
            self.cached,
            (*tokens, *self._pending[:judged], *beside.tokens),
            judged,
            judged + len(beside.tokens) + 1,
            len(committed),
            (*range(-1, judged - 1), *beside.parents) if beside.tokens else None,
            path,
            self._epoch,
            self._arrival(len(committed) + judged),
        )

    def _arrival(self, end: int) -> float | None:
        """When the first batch of this epoch that ended at ``end`` came."""
        return next((at for last, at in self._arrivals if last == end), None)

    def common_prefix(self, other: VerifierSession) -> int:
        """How many leading tokens of prompt and committed text both share."""
        length = min(self.length, other.length)
        mine, theirs = self.text(0, length), other.text(0, length)
        if mine == theirs:
            return length
        return next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)

    def text(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens ``start`` to ``end`` of prompt and committed text."""
        prompt = len(self.prompt)
        if start >= prompt:
            return tuple(self.committed[start - prompt : end - prompt])
        return (*self.prompt[start:end], *self.committed[: max(0, end - prompt)])

    # -- what was done --------------------------------------------------------------------------

    def lose_cache(self) -> None:
        """The slot is another's now, or what it holds is spoilt."""
        self.cached = 0
        self.tree_from = None
        self._path = ()

    def prefilled(self, plan: Plan) -> None:
        """A piece of prefill is in the cache."""
        self.cached = plan.keep + len(plan.tokens)
        self._path = ()

    def judge(self, plan: Plan, choices: Sequence[int], now: float, forward_ms: float) -> None:
        """The target's choices for ``plan``: commit the accepted drafts and one of its own.

        What arrived while the forward ran, a newer epoch even, is compared afterwards.
        """
        drafts = plan.drafts
        path = accepted_path(drafts, plan.parents, choices)
        start = len(self.committed)
        fresh: list[int] = []
        for node in (-1, *path):
            token = choices[node + 1]
            fresh.append(token)
            if token in self._eos_ids:
                self.finish = FINISH_STOP
                break
        if self.finish is None and start + len(fresh) >= self.limit:
            self.finish = FINISH_LENGTH
        accepted = min(len(path), len(fresh))
        judged = max(plan.judged, accepted)  # a branch may be longer than the chain
        judged = min(judged, len(fresh)) if self.finish else judged
        self.committed.extend(fresh)
        # The target's own token is not in the cache yet; rejected drafts are forgotten.
        self.cached = plan.keep + len(plan.tokens) - len(drafts) + accepted
        self._path = () if plan.parents is None else tuple(path[:accepted])
        # With a newer epoch meanwhile the edge could take another batch for the one it was.
        known = plan.arrived is not None and plan.epoch == self._epoch
        hold = now - plan.arrived if plan.arrived is not None and known else 0.0
        self._reconcile(fresh)
        verdict = Verdict(
            self.attach,
            self._epoch,
            start,
            tuple(fresh),
            accepted,
            judged,
            self.finish,
            max(0.0, hold * 1000.0),
            max(0.0, forward_ms),
        )
        self.waiting_since = now
        self._rounds.append(verdict)
        self._outbox.append(verdict)
        stats = self._stats
        stats.verdicts += 1
        stats.judged += judged
        stats.accepted += accepted
        stats.committed += len(fresh)

    def _reconcile(self, fresh: Sequence[int]) -> None:
        """Drafts that begin with what was just committed stay valid; otherwise it is dead."""
        pending = self._pending
        overlap = min(len(pending), len(fresh))
        if pending[:overlap] == list(fresh[:overlap]):
            del pending[:overlap]
            self._branches.pass_by(len(self.committed))
        else:
            self._kill_epoch()

    def _kill_epoch(self) -> None:
        self._dead = True
        self._drop_pending()

    # -- what arrives ---------------------------------------------------------------------------

    def take_messages(self) -> list[VerifierMessage]:
        messages, self._outbox = self._outbox, []
        return messages

    def receive_draft(self, batch: DraftBatch, now: float) -> None:
        """Draft tokens, perhaps with a trigger; anything that does not fit is counted."""
        self.last_seen = now
        if batch.epoch < self._epoch or self.finish is not None:
            self._stats.stale_drafts += 1
            return
        if batch.epoch > self._epoch:
            self._adopt(batch.epoch)
        elif self._dead:
            self._stats.stale_drafts += 1
            return
        tokens = batch.trunk()
        if batch.tokens and max(batch.tokens) >= self._vocab_size:
            self._stats.rejected["token_out_of_range"] += 1
            self._outbox.append(Closed(self.attach, CLOSED_TOKEN))
            return
        committed = len(self.committed)
        end = committed + len(self._pending)
        if batch.base > end:
            self._stats.gaps += 1
            self._ask_resync(end, now)
            return
        if not self._append(batch.base, tokens):
            return
        if batch.parents is not None:
            self._add_branches(batch)
        asked = batch.base + len(tokens)
        self._arrivals.append((asked, now))
        self._heard_to = max(self._heard_to, min(asked, len(self.committed) + len(self._pending)))
        if batch.verify:
            self._go_on = batch.go_on
        if batch.verify and asked >= len(self.committed):
            if not self.triggered:
                self.waiting_since = now
            self._verify_to = max(self._verify_to, asked)
        elif batch.verify:
            self._stats.late_triggers += 1

    def _append(self, base: int, tokens: Sequence[int]) -> bool:
        """Add what is new of ``tokens`` at ``base``; False when they contradict what is here."""
        committed = len(self.committed)
        if base < committed:
            known = self.committed[base : base + len(tokens)]
            if list(tokens[: len(known)]) != known:
                self._stats.dead_epochs += 1
                self._kill_epoch()
                return False
            tokens = tokens[len(known) :]
            base = committed
        offset = base - committed
        overlap = self._pending[offset : offset + len(tokens)]
        if list(tokens[: len(overlap)]) != overlap:
            self._stats.rejected["contradiction"] += 1
            return False
        fresh = tokens[len(overlap) :]
        room = MAX_PENDING - len(self._pending)
        if len(fresh) > room:
            self._stats.rejected["too_far_ahead"] += 1
            fresh = fresh[:room]
        self._pending.extend(fresh)
        self._stats.drafts += len(fresh)
        return True

    def _add_branches(self, batch: DraftBatch) -> None:
        """What a tree holds beside its chain, as far as the chain reaches here."""
        committed = len(self.committed)
        for branch in branches_of(batch):
            if not committed <= branch.fork <= committed + len(self._pending):
                self._stats.lost_branches += 1
            elif self._branches.add(branch):
                self._stats.drafts += len(branch.tokens)
            else:
                self._stats.lost_branches += 1

    def receive_resync(self, message: Resync, now: float) -> None:
        """The edge has every verdict up to ``have``: repeat the rest, or say where we stand."""
        self.last_seen = now
        committed = len(self.committed)
        if message.probe:
            have = committed + len(self._pending)
            self._outbox.append(Resync(self.attach, self._epoch, have, message.probe))
            return
        if message.have > committed:
            self._outbox.append(Closed(self.attach, CLOSED_UNKNOWN))
            return
        self._heard_to = max(self._heard_to, message.have)
        if message.have < committed:
            self._repeat(message.have, now)
            return
        if message.epoch > self._epoch:
            self._adopt(message.epoch)
        elif message.epoch == self._epoch and self._dead:
            # It knows all that is committed and stands by this epoch: begin it again.
            self._adopt(message.epoch)
        self._outbox.append(Resync(self.attach, self._epoch, committed + len(self._pending)))

    def _adopt(self, epoch: int) -> None:
        self._epoch = epoch
        self._dead = False
        self._drop_pending()

    def _drop_pending(self) -> None:
        self._pending.clear()
        self._branches.clear()
        self._arrivals.clear()
        self._verify_to = self._first_asked

    def _ask_resync(self, have: int, now: float) -> None:
        epoch, last, when = self._last_resync
        if (epoch, last) == (self._epoch, have) and now < when + RESYNC_INTERVAL:
            return
        self._last_resync = (self._epoch, have, now)
        self._stats.resyncs += 1
        self._outbox.append(Resync(self.attach, self._epoch, have))

    def _repeat(self, have: int, now: float) -> None:
        last, when = self._last_repeat
        if have <= last and now < when + REPEAT_INTERVAL:
            return
        self._last_repeat = (have, now)
        self._stats.repeats += 1
        first = self._rounds[0].start if self._rounds else len(self.committed)
        if have < first:
            tokens = tuple(self.committed[have:first][:MAX_PENDING])
            self._outbox.append(Verdict(self.attach, self._epoch, have, tokens, 0, 0))
        due = [r for r in self._rounds if r.start + len(r.tokens) > have]
        self._outbox.extend(due[:MAX_REPEATS])
