"""What each session holds of the engine: a slot and its blocks, given and taken together.

Pure bookkeeping over ``slot_table`` and ``block_table``.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from broker.errors import LocalProtocolError
from cloud_verifier.core.block_table import BlockTable
from cloud_verifier.core.session import Plan, VerifierSession
from cloud_verifier.core.slot_table import SlotTable
from cloud_verifier.core.stats import VerifierStats


@dataclass(frozen=True, slots=True)
class Memory:
    """What sessions need of the engine: a slot each, and blocks for what they hold there.

    Who may read what was written: a block is remembered for others by ``settle`` only, after the
    forward that filled it, when it is full of prompt and committed tokens that lie in their place,
    none of which was computed in or behind a tree: those differ from a chain's by a rounding.
    Nothing is written to it any more then (``BlockTable.resume``). Blocks that a running forward
    writes cannot become another's before it ends, since only planning the next one gives any.
    """

    slots: SlotTable[VerifierSession]
    blocks: BlockTable[VerifierSession]
    stats: VerifierStats

    def release(self, session: VerifierSession, *, remember: bool = True) -> None:
        """Take slot and blocks back; see ``BlockTable.release``."""
        self.slots.release(session)
        self.blocks.release(session, remember=remember)
        session.lose_cache()
        self.count()

    def hand_over(self, old: VerifierSession, new: VerifierSession) -> None:
        """``new`` takes slot and blocks of ``old``, contents and all."""
        new.tree_from = old.tree_from
        self.slots.hand_over(old, new)
        self.blocks.hand_over(old, new)

    def enter(self, session: VerifierSession, seated: Collection[VerifierSession]) -> int | None:
        """A slot for ``session``, which then holds what is known of its text; None: there is none.

        One that wants a verdict may take the slot of another, see ``next_batch``.
        """
        if not session.triggered or len(seated) >= self.slots.size:
            # Nobody gives one up for it; asking all of them for each such session would take long.
            place = self.slots.acquire(session, None)
        else:
            place = self.slots.acquire(session, lambda other: other not in seated)
        if place is None:
            return None
        slot, loser = place
        if loser is not None:
            self._lost(loser)
        return slot

    def resume(self, session: VerifierSession) -> None:
        """Take over what is known of the session's text."""
        if session.settled < session.cached:
            return  # the path of its last tree is put in its place first
        # The last committed token is fed with the drafts, so there is nothing to gain from it.
        session.cached, adopted = self.blocks.resume(
            session, session.cached, session.text, session.length - 1
        )
        self.stats.shared_tokens += adopted
        self.stats.shared_blocks += adopted // self.blocks.block_tokens

    def settle(self, session: VerifierSession, plan: Plan) -> None:
        """The forward with ``plan`` was done: remember what is full of committed text."""
        settled, held = session.settled, session.cached
        if settled < held:
            held = plan.keep + len(plan.tokens)  # the accepted path lies anywhere in its tree
        if session.tree_from is not None and plan.keep <= session.tree_from:
            session.tree_from = None  # that was forgotten, or rejected
        if plan.parents is not None and session.tree_from is None:
            session.tree_from = plan.keep + len(plan.tokens) - len(plan.parents)
        if session.tree_from is not None:
            settled = min(settled, session.tree_from)
        self.blocks.note(session, settled, session.text, held)
        self.count()

    def count(self) -> None:
        """Bring the figure of blocks in use up to date."""
        self.stats.blocks_in_use = self.blocks.total - self.blocks.available

    def upcoming(self, session: VerifierSession) -> Hashable | None:
        """See ``BlockTable.upcoming``."""
        return self.blocks.upcoming(session, session.cached, session.text, session.length - 1)

    def room(self, session: VerifierSession, seated: Collection[VerifierSession], most: int) -> int:
        """How many of ``most`` tokens there are blocks for, those of others that may be taken."""
        blocks = self.blocks
        held = len(blocks.table(session)) * blocks.block_tokens - session.cached
        if held + blocks.available * blocks.block_tokens >= most:
            return most
        count = blocks.room(session, seated) if session.triggered else blocks.available
        return min(most, held + count * blocks.block_tokens)

    def grow(
        self, session: VerifierSession, end: int, seated: Collection[VerifierSession]
    ) -> tuple[int, ...]:
        """The table of ``session`` with room for ``end`` tokens, which ``room`` has allowed.

        The sessions that have to make room are the least recently used without a seat.
        """
        while self.blocks.needed(session, end) > self.blocks.available:
            loser = self.slots.evict(lambda other: other is not session and other not in seated)
            if loser is None:  # pragma: no cover (room says how much there is)
                raise LocalProtocolError("no block is left: plan within what room allows")
            self._lost(loser)
        self.blocks.grow(session, end)
        self.count()
        return self.blocks.table(session)

    def _lost(self, loser: VerifierSession) -> None:
        self.blocks.release(loser)
        loser.lose_cache()
        self.stats.evictions += 1
