"""What every target refuses before it computes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from broker.errors import LocalProtocolError, ModelError, PipesdError
from cloud_verifier.engine.target import Target, Work
from cloud_verifier.engine.trees import is_path, is_tree

MAX_POSITION = 2**31 - 1  # of the shared noise


def check_batch(
    batch: Sequence[Work],
    target: Target,
    length: Callable[[Work], int],
    trees: Mapping[int, Sequence[int]],
) -> None:
    """Raise LocalProtocolError unless ``target`` can run all of ``batch``.

    ``length(work)``: how many valid tokens its slot holds, those of a tree left out. ``trees``: the
    parents of the tree that a slot's last work fed, where it fed one. Changes nothing.
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
        if work.parents is not None:
            _check_tree(work, work.parents)
        if not is_path(trees.get(slot, ()), work.path):
            raise LocalProtocolError(
                f"slot {slot}: path {work.path} is no branch of its last tree: name accepted tokens"
            )
        held = length(work) + len(work.path)
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


@contextmanager
def all_or_nothing(
    name: str, batch: Sequence[Work], spoil: Callable[[Work], None]
) -> Iterator[None]:
    """Around the forward of target ``name``: when it fails, ``spoil`` forgets what may be half
    written, work by work.

    Raises ModelError for whatever the model raises.
    """
    finished = False
    try:
        yield
        finished = True
    except PipesdError:
        raise
    except Exception as exc:
        cause = " ".join(str(exc).split())[:200]
        raise ModelError(
            f"target {name} failed in a forward of {len(batch)} sessions: "
            f"{type(exc).__name__} {cause}; its sessions start again"
        ) from exc
    finally:
        # Also after KeyboardInterrupt: half-written K/V must not be taken for valid.
        if not finished:
            for work in batch:
                spoil(work)


def _check_tree(work: Work, parents: Sequence[int]) -> None:
    slot, nodes = work.slot, len(parents)
    if nodes >= len(work.tokens):
        raise LocalProtocolError(
            f"slot {slot}: {nodes} drafted of {len(work.tokens)} tokens: one must stand before them"
        )
    if not is_tree(parents):
        raise LocalProtocolError(
            f"slot {slot}: a drafted token stands before its parent: sort them"
        )
    if work.choices <= nodes:
        raise LocalProtocolError(
            f"slot {slot}: {work.choices} choices for a tree of {nodes}: ask after each and before"
        )
