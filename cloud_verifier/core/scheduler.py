"""Which sessions share the next forward: who waits for a verdict first, then oldest first.

A forward takes what is ready, up to a number of tokens; a long prompt goes in by pieces beside the
others, so that a newcomer does not stop everybody.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cloud_verifier.core.session import Plan, VerifierSession
from cloud_verifier.core.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class Limits:
    """``forward_tokens``: tokens in one forward; ``prefill_tokens``: of one session's prefill."""

    forward_tokens: int = 1024
    prefill_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Seat:
    """One session's place in a forward."""

    session: VerifierSession
    slot: int
    plan: Plan


def next_batch(
    sessions: Iterable[VerifierSession], slots: SlotTable[VerifierSession], limits: Limits
) -> list[Seat]:
    """The seats of the next forward; empty when there is nothing to do.

    A session without a slot takes a free one, or that of the least recently used session that has
    no seat in this batch; the loser is prefilled again when it returns.
    """
    ready = [session for session in sessions if session.has_work]
    ready.sort(key=lambda session: (not session.triggered, session.waiting_since))
    seats: list[Seat] = []
    seated: set[VerifierSession] = set()
    room = limits.forward_tokens
    for session in ready:
        if room < 1:
            break
        place = slots.acquire(session, lambda other: other not in seated)
        if place is None:
            break
        slot, loser = place
        if loser is not None:
            loser.cached = 0
        plan = session.plan(min(room, max(limits.prefill_tokens, 1)))
        if plan is None:
            continue
        seated.add(session)
        seats.append(Seat(session, slot, plan))
        room -= len(plan.tokens)
    return seats
