"""Which sessions share the next forward: who waits for a verdict first, then oldest first.

A forward takes what is ready, up to a number of tokens; a long prompt goes in by pieces beside the
others, so that a newcomer does not stop everybody.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from cloud_verifier.core.memory import Memory
from cloud_verifier.core.session import Plan, VerifierSession


@dataclass(frozen=True, slots=True)
class Limits:
    """``forward_tokens``: tokens in one forward; ``prefill_tokens``: of one session's prefill.

    ``unasked_tokens``: in a forward that nobody waits for. It is kept short, because who asks
    meanwhile waits for its end.

    ``draft_tokens``: drafted tokens of one session while others wait too. No edge as shipped is so
    far ahead, and one that sends huge trees shall not set the pace of all. ``shared_drafts``:
    those of ``crowd`` or more that wait, together, of each ``least_drafts`` at least.
    Devices draft on while they wait, so in a crowd more and more is judged that is probably wrong,
    and a forward of many tokens takes longer for everybody. What is left out is judged next time.
    """

    forward_tokens: int = 1024
    prefill_tokens: int = 256
    unasked_tokens: int = 32
    draft_tokens: int = 64
    crowd: int = 4
    shared_drafts: int = 32
    least_drafts: int = 5

    @property
    def all_prefills(self) -> int:
        """Tokens of all prefills together while other sessions are under way."""
        return max(1, self.prefill_tokens, self.forward_tokens // 2)


@dataclass(frozen=True, slots=True)
class Seat:
    """One session's place in a forward. ``blocks``: of K/V memory, in the order of its text."""

    session: VerifierSession
    slot: int
    plan: Plan
    blocks: tuple[int, ...] = ()


def next_batch(sessions: Collection[VerifierSession], memory: Memory, limits: Limits) -> list[Seat]:
    """The seats of the next forward; empty when there is nothing to do.

    A session without a slot takes a free one. One that wants a verdict may also take that of the
    least recently used session that has no seat in this batch; the loser is prefilled again when
    it returns. A mere prefill takes nothing from anybody: idle sessions would otherwise go on
    evicting each other for ever. Nor does work that nobody waits for (verify "eager", "ahead"): it
    is done when the target would idle, so that it makes no verdict later that somebody waits for.

    The same holds for blocks. Who gets fewer than its work needs does a smaller piece of it, so
    that the session that waits longest always comes on. Of several that would compute the same
    block of a common beginning one does; the others take it over in the next forward.

    When many newcomers come at once, as from a replica that died, half of a forward is theirs, so
    that no session that writes already waits for all of them.
    """
    ready = [session for session in sessions if session.has_work]
    ready.sort(key=lambda session: (not session.triggered, session.waiting_since))
    seats: list[Seat] = []
    seated: set[VerifierSession] = set()
    coming: set[Hashable] = set()  # blocks of common beginnings that this forward computes
    room = limits.forward_tokens
    under_way = any(not session.behind and session.finish is None for session in sessions)
    prefill = limits.all_prefills if under_way else room
    awaited = bool(ready) and ready[0].triggered
    spare = 0 if awaited else limits.unasked_tokens
    waiting = sum(session.triggered for session in ready)
    share = limits.draft_tokens
    if waiting >= limits.crowd:
        share = max(limits.least_drafts, min(share, limits.shared_drafts // waiting))
    for session in ready:
        if room < 1:
            break
        unasked = session.wants_choice and not session.triggered
        if (unasked and spare < 1) or (session.behind and prefill < 1):
            continue
        slot = memory.enter(session, seated)
        if slot is None:
            continue
        memory.resume(session)
        block = memory.upcoming(session)
        if block in coming:
            continue
        most = min(room, max(limits.prefill_tokens, 1))
        most = min(most, prefill) if session.behind else most
        missing = session.length - session.cached
        if session.triggered and waiting > 1 and missing <= most:
            most = min(most, missing + share)
        most = memory.room(session, seated, min(most, spare) if unasked else most)
        plan = session.plan(most) if most > 0 else None
        if plan is None:
            continue
        if block is not None and len(plan.tokens) >= memory.blocks.block_tokens:
            coming.add(block)
        blocks = memory.grow(session, plan.keep + len(plan.tokens), seated)
        if unasked:
            spare -= len(plan.tokens)
        seated.add(session)
        seats.append(Seat(session, slot, plan, blocks))
        room -= len(plan.tokens)
        prefill -= len(plan.tokens) - plan.choices
    return seats
