"""What every target refuses before it computes anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.errors import LocalProtocolError
from cloud_verifier.engine.target import Target, Work

MAX_POSITION = 2**31 - 1  # of the shared noise


def check_batch(batch: Sequence[Work], target: Target, length: Callable[[int], int]) -> None:
    """Raise LocalProtocolError unless ``target`` can run all of ``batch``.

    ``length(slot)``: how many valid tokens a slot holds. Changes nothing.
    """
    seen: set[int] = set()
    for work in batch:
        slot = work.slot
        if not 0 <= slot < target.max_slots:
            raise LocalProtocolError(f"slot {slot} is not one of {target.max_slots}: choose below")
        if slot in seen:
            raise LocalProtocolError(f"slot {slot} is twice in one batch: put it off")
        seen.add(slot)
        count = len(work.tokens)
        if count == 0:
            raise LocalProtocolError(f"slot {slot} has no tokens to run: feed at least one")
        if not 0 <= work.choices <= count:
            raise LocalProtocolError(
                f"slot {slot}: {work.choices} choices after {count} tokens: at most one for each"
            )
        if not 0 <= work.position <= MAX_POSITION - work.choices:
            raise LocalProtocolError(f"slot {slot}: position {work.position} is outside 0 to 2^31")
        held = length(slot)
        if not 0 <= work.keep <= held:
            raise LocalProtocolError(
                f"slot {slot} holds {held} tokens, {work.keep} cannot be kept: start at 0"
            )
        if work.keep + count > target.context:
            raise LocalProtocolError(
                f"slot {slot} would hold {work.keep + count} tokens of {target.context}: "
                "clip to the context"
            )
        if min(work.tokens) < 0 or max(work.tokens) >= target.vocab_size:
            bad = next(t for t in work.tokens if not 0 <= t < target.vocab_size)
            raise LocalProtocolError(
                f"slot {slot}: token {bad} is outside the vocabulary of {target.vocab_size}: "
                "check what the edge sends"
            )
