"""A whole replica as a pure state machine: its sessions, their slots, the next forward.

The driver feeds decoded messages in and publishes what ``messages_to_send`` returns; it runs the
``Forward`` that ``next_effect`` hands out, one at a time, and answers with ``forward_done`` or
``forward_failed``. Messages may be fed in while a forward runs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from broker.errors import ConfigError
from broker.messages import (
    CLOSED_ERROR,
    CLOSED_MOVED,
    CLOSED_UNKNOWN,
    REFUSED_BUSY,
    REFUSED_PROMPT,
    REFUSED_TOKEN,
    REFUSED_VOCABULARY,
    Accepted,
    Close,
    Closed,
    DraftBatch,
    EdgeMessage,
    Refused,
    Resync,
    SessionOpen,
    VerifierMessage,
)
from cloud_verifier.core.block_table import BlockTable
from cloud_verifier.core.memory import Memory
from cloud_verifier.core.scheduler import Limits, Seat, next_batch
from cloud_verifier.core.session import VerifierSession
from cloud_verifier.core.slot_table import SlotTable
from cloud_verifier.core.stats import VerifierStats


class SessionKey(NamedTuple):
    device: str
    session: str


class Outgoing(NamedTuple):
    """A message for one session's ``down`` topic."""

    device: str
    session: str
    message: VerifierMessage


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """What a replica is. ``idle_ttl``, ``busy_retry`` in seconds; ``context`` in tokens.

    ``max_sessions``: held at a time, of them ``max_sessions_per_device`` of one device.
    ``total_blocks`` of ``block_tokens`` tokens are the engine's K/V memory; 0: a slot is one block
    with room for the whole context. ``share_prefixes``: whether what one session computed serves
    others whose text begins alike. Raises ConfigError where they do not hold one session.
    """

    verifier: str
    vocab_size: int
    vocab_hash: str
    context: int
    eos_ids: frozenset[int]
    slots: int = 16
    block_tokens: int = 0
    total_blocks: int = 0
    share_prefixes: bool = True
    max_sessions: int = 256
    max_sessions_per_device: int = 32
    idle_ttl: float = 300.0
    busy_retry: float = 2.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        tokens = self.block_tokens * self.total_blocks
        if self.block_tokens and tokens < self.context:
            raise ConfigError(
                f"K/V memory for {tokens} tokens holds no session of {self.context}: "
                "give more, or a smaller context"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """One forward to run: the seats are in the order of the engine's batch."""

    seats: tuple[Seat, ...]


class VerifierCore:
    """See the module. One thread at a time."""

    def __init__(self, config: VerifierConfig) -> None:
        self.config = config
        self.stats = VerifierStats()
        # The one that was heard longest ago comes first: drivers ask for timers at every forward.
        self.sessions: OrderedDict[SessionKey, VerifierSession] = OrderedDict()
        self.slots: SlotTable[VerifierSession] = SlotTable(config.slots)
        total = config.total_blocks if config.block_tokens else config.slots
        self.blocks: BlockTable[VerifierSession] = BlockTable(
            total, config.block_tokens or config.context
        )
        self.draining = False
        self._memory = Memory(self.slots, self.blocks, self.stats)
        self._keys: dict[VerifierSession, SessionKey] = {}
        self._devices: Counter[str] = Counter()  # sessions of each device that has some
        self._over: dict[SessionKey, None] = {}  # sessions whose text is finished, in that order
        self._outbox: list[Outgoing] = []
        self._running: Forward | None = None
        self._dirty: dict[SessionKey, None] = {}  # sessions that may have something to send

    # -- messages -------------------------------------------------------------------------------

    def receive(self, device: str, session: str, message: EdgeMessage, now: float) -> None:
        """A message of a session, on ``open`` (SessionOpen) or on this replica's ``up``."""
        key = SessionKey(device, session)
        if isinstance(message, SessionOpen):
            self._on_open(key, message, now)
            return
        held = self.sessions.get(key)
        if held is None or message.attach > held.attach:
            self.stats.unknown_sessions += 1
            if not isinstance(message, Close):
                self._say(key, Closed(message.attach, CLOSED_UNKNOWN))
            return
        if message.attach < held.attach:
            self.stats.stale_attach += 1
            return
        if isinstance(message, DraftBatch):
            held.receive_draft(message, now)
        elif isinstance(message, Resync):
            held.receive_resync(message, now)
        elif isinstance(message, Close):
            self.stats.closed += 1
            self._forget(key)
            return
        self.sessions.move_to_end(key)
        self._dirty[key] = None

    def messages_to_send(self, now: float) -> list[Outgoing]:  # noqa: ARG002 (the cores' surface)
        """Everything that is to be published now, in order; each exactly once."""
        for key in self._dirty:
            held = self.sessions.get(key)
            if held is not None:
                self._outbox.extend(Outgoing(*key, m) for m in held.take_messages())
        self._dirty.clear()
        messages, self._outbox = self._outbox, []
        return messages

    def drain(self, *, at_once: bool = False) -> None:
        """Take nothing new and hand every session back: they open again elsewhere.

        Those in the forward that runs have its verdict first, unless it is to be ``at_once``.
        """
        self.draining = True
        running = self._running.seats if self._running and not at_once else ()
        busy = {seat.session for seat in running}
        for key, held in list(self.sessions.items()):
            if held not in busy:
                self._outbox.extend(Outgoing(*key, message) for message in held.take_messages())
                self._say(key, Closed(held.attach, CLOSED_MOVED))
                self._forget(key)

    def _say(self, key: SessionKey, message: VerifierMessage) -> None:
        self._outbox.append(Outgoing(*key, message))

    def _on_open(self, key: SessionKey, opened: SessionOpen, now: float) -> None:
        held = self.sessions.get(key)
        if held is not None and opened.attach < held.attach:
            self.stats.stale_attach += 1
            return
        if held is None or opened.attach > held.attach:
            if held is None and len(self.sessions) >= self.config.max_sessions:
                self._make_room(now)
            refusal = self._refusal(key, opened)
            if refusal is not None:
                self.stats.refusals += 1
                self.stats.refused[refusal.reason] += 1
                self._say(key, refusal)
                return
            held = self._take(key, opened, now)
        held.last_seen = now
        self.sessions.move_to_end(key)
        self._say(key, Accepted(held.attach, self.config.verifier, self.config.context, held.limit))

    def _make_room(self, now: float) -> None:
        """Forget the session that is over for longest, whose device had time to say so.

        What devices closed while the broker or this replica was away would else keep its place for
        ``idle_ttl``, and newcomers outside.
        """
        key = next(iter(self._over), None)
        held = None if key is None else self.sessions.get(key)
        if key is None or held is None:
            return
        if now >= max(held.last_seen, held.waiting_since) + self.config.busy_retry:
            self.stats.expired += 1
            self._forget(key)

    def _refusal(self, key: SessionKey, opened: SessionOpen) -> Refused | None:
        config = self.config
        attach = opened.attach
        if opened.vocab_hash != config.vocab_hash:
            detail = "the draft's tokenizer is not the target's: use a draft of the same family"
            return Refused(attach, REFUSED_VOCABULARY, detail)
        length = len(opened.prompt) + len(opened.committed)
        if length >= config.context or len(opened.committed) >= opened.max_tokens:
            detail = f"{length} tokens leave no room in a context of {config.context}: shorten it"
            return Refused(attach, REFUSED_PROMPT, detail)
        top = max(max(opened.prompt), max(opened.committed, default=0))
        if top >= config.vocab_size:
            detail = f"token {top} is beyond the target's {config.vocab_size}: check the draft"
            return Refused(attach, REFUSED_TOKEN, detail)
        new = key not in self.sessions
        if self.draining or (new and len(self.sessions) >= config.max_sessions):
            detail = f"{len(self.sessions)} sessions are running here"
            return Refused(attach, REFUSED_BUSY, detail, config.busy_retry)
        own = self._devices.get(key.device, 0)
        if new and own >= config.max_sessions_per_device:
            self.stats.device_refusals += 1
            detail = f"{own} sessions of this device are running here: close one"
            return Refused(attach, REFUSED_BUSY, detail, config.busy_retry)
        return None

    def _take(self, key: SessionKey, opened: SessionOpen, now: float) -> VerifierSession:
        self.stats.opens += 1
        session = VerifierSession(
            opened,
            context=self.config.context,
            vocab_size=self.config.vocab_size,
            eos_ids=self.config.eos_ids,
            stats=self.stats,
            now=now,
        )
        old = self.sessions.get(key)
        if old is not None:
            # The edge attached again: what the cache holds of the same text is still right. A
            # forward that runs now writes behind what is settled.
            session.cached = min(old.settled, session.common_prefix(old), session.length - 1)
            self._memory.hand_over(old, session)
            del self._keys[old]
            self._over.pop(key, None)
        else:
            self._devices[key.device] += 1
        self.sessions[key] = session
        self._keys[session] = key
        return session

    def _forget(self, key: SessionKey, *, remember: bool = True) -> None:
        held = self.sessions.pop(key, None)
        if held is not None:
            self._memory.release(held, remember=remember)
            del self._keys[held]
            self._over.pop(key, None)
            self._devices[key.device] -= 1
            if not self._devices[key.device]:
                del self._devices[key.device]

    # -- forwards -------------------------------------------------------------------------------

    def next_effect(self) -> Forward | None:
        """The next forward to run, or None (nothing to do, or one is running)."""
        if self._running is not None:
            return None
        seats = next_batch(self.sessions.values(), self._memory, self.config.limits)
        if not seats:
            return None
        self._running = Forward(tuple(seats))
        return self._running

    def forward_done(
        self, forward: Forward, choices: Sequence[Sequence[int]], now: float, seconds: float
    ) -> list[Exception]:
        """The engine's answer: per seat the target's choices; ``seconds``: what it took.

        Returns what was raised while answers were taken in: each such bug costs its own session,
        which is handed back, and no other. Raises ValueError, before anything changes, for answers
        that are not one for each seat.
        """
        if len(choices) != len(forward.seats):
            raise ValueError(f"{len(choices)} answers for {len(forward.seats)} seats")
        self._running = None
        stats = self.stats
        stats.forwards += 1
        stats.forward_seconds += seconds
        stats.batch_sessions += len(forward.seats)
        stats.batch_tokens += sum(len(seat.plan.tokens) for seat in forward.seats)
        faults: list[Exception] = []
        for seat, chosen in zip(forward.seats, choices, strict=True):
            stats.prefilled_tokens += len(seat.plan.tokens) - seat.plan.choices
            key = self._keys.get(seat.session)
            if key is None:
                continue  # closed or replaced while the forward ran
            try:
                self._take_answer(key, seat, chosen, now, seconds * 1000.0)
            except Exception as fault:  # noqa: BLE001 (a bug costs one session, not the batch)
                faults.append(fault)
                self._say(key, Closed(seat.session.attach, CLOSED_ERROR))
                self._forget(key, remember=False)
        if self.draining:
            self.drain()
        return faults

    def _take_answer(
        self, key: SessionKey, seat: Seat, chosen: Sequence[int], now: float, forward_ms: float
    ) -> None:
        session = seat.session
        if seat.plan.choices == 0:
            session.prefilled(seat.plan)
        else:
            session.judge(seat.plan, chosen, now, forward_ms)
            self._dirty[key] = None
        self._memory.settle(session, seat.plan)
        if session.finish is not None:
            self._memory.release(session)
            self._over[key] = None

    def forward_failed(self, forward: Forward) -> None:
        """The target failed on this batch: its sessions are handed back and their slots freed."""
        self._running = None
        self.stats.forward_failures += 1
        for seat in forward.seats:
            key = self._keys.get(seat.session)
            if key is not None:
                self._say(key, Closed(seat.session.attach, CLOSED_ERROR))
                self._forget(key, remember=False)
            elif (heir := self.slots.owner_of(seat.slot)) is not None:
                # It attached again meanwhile and took the slot, whose contents are lost now.
                self._memory.release(heir, remember=False)

    # -- time -----------------------------------------------------------------------------------

    def get_timer(self) -> float | None:
        """When the longest idle session expires; None without sessions."""
        first = next(iter(self.sessions.values()), None)
        return None if first is None else first.last_seen + self.config.idle_ttl

    def handle_timer(self, now: float) -> None:
        """Forget sessions from which nothing came for ``idle_ttl``; they may open again."""
        while (due := self.get_timer()) is not None and now >= due:
            self.stats.expired += 1
            self._forget(next(iter(self.sessions)))
