"""The edge's window: what a verdict does to the draft, and what the draft model is fed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.messages import DraftBatch, Verdict
from edge_agent.core.effects import DraftNext
from edge_agent.core.window import (
    APPLIED,
    CONTRADICTION,
    DUPLICATE,
    GAP,
    DraftWindow,
    Outcome,
)

PROMPT = (91, 92)


def window_with(committed: tuple[int, ...], draft: tuple[int, ...]) -> DraftWindow:
    window = DraftWindow(PROMPT)
    for token in committed:
        window.commit_local(token)
    for token in draft:
        assert window.answered(window.next_draft())
        window.append(token, 0.5)
    return window


def verdict(start: int, *tokens: int, accepted: int = 0) -> Verdict:
    return Verdict(1, 0, start, tokens, accepted, max(accepted, len(tokens) - 1))


@pytest.mark.parametrize(
    ("committed", "draft", "message", "outcome", "left"),
    [
        # Accepted whole with a bonus beyond the draft, equal to the next one, other than it.
        ((), (1, 2), verdict(0, 1, 2, 3, accepted=2), Outcome(APPLIED, 0, (1, 2, 3), 2), ()),
        ((), (1, 2, 3), verdict(0, 1, 2, accepted=1), Outcome(APPLIED, 0, (1, 2), 1), (3,)),
        ((), (1, 2, 3), verdict(0, 1, 9, accepted=1), Outcome(APPLIED, 0, (1, 9), 1, 2), ()),
        # Rejected at once; nothing drafted; exactly the draft.
        ((), (1, 2), verdict(0, 7), Outcome(APPLIED, 0, (7,), 0, 2), ()),
        ((5,), (), verdict(1, 6), Outcome(APPLIED, 1, (6,), 0), ()),
        ((), (1, 2), verdict(0, 1, 2, accepted=2), Outcome(APPLIED, 0, (1, 2), 2), ()),
        # What is known already: all of it, part of it, none of it.
        ((1, 2), (3,), verdict(0, 1, 2, accepted=1), Outcome(DUPLICATE), (3,)),
        ((1, 2), (3,), verdict(1, 2), Outcome(DUPLICATE), (3,)),
        ((1, 2), (3,), verdict(0, 1, 2, 3, 4, accepted=3), Outcome(APPLIED, 2, (3, 4), 1), ()),
        ((1, 2), (3,), verdict(1, 2, 8, accepted=0), Outcome(APPLIED, 2, (8,), 0, 1), ()),
        ((1, 2), (3,), verdict(3, 4), Outcome(GAP), (3,)),
        # Something else than what is known.
        ((1, 2), (3,), verdict(1, 9, 3, accepted=1), Outcome(CONTRADICTION), (3,)),
        ((1, 2), (3,), verdict(0, 9), Outcome(CONTRADICTION), (3,)),
    ],
)
def test_a_verdict(committed, draft, message, outcome, left) -> None:
    window = window_with(committed, draft)
    assert window.apply(message) == outcome
    assert tuple(window.draft) == left
    assert tuple(window.committed) == (*committed, *outcome.fresh)
    assert window.epoch == (0 if outcome.lost is None else 1)
    assert window.survival == 0.5 ** len(left)


def test_batches_hold_what_is_new() -> None:
    window = window_with((), (1, 2))
    assert window.take_batch(3, verify=False) == DraftBatch(3, 0, 0, (1, 2))
    assert not window.has_unsent
    assert window.take_batch(3, verify=False) is None
    assert window.take_batch(3, verify=True) == DraftBatch(3, 0, 2, (), None, True)
    window.append(4, 1.0)
    assert window.has_unsent
    assert window.take_batch(3, verify=True) == DraftBatch(3, 0, 2, (4,), None, True)


def test_a_batch_begins_where_the_target_stopped() -> None:
    window = window_with((), (1, 2, 3))
    window.take_batch(1, verify=True)
    window.append(4, 1.0)
    window.apply(verdict(0, 1, 2, 3, 4, accepted=3))  # its bonus is the unsent token
    assert not window.has_unsent
    window.append(5, 1.0)
    assert window.take_batch(1, verify=False) == DraftBatch(1, 0, 4, (5,))


@pytest.mark.parametrize(
    ("have", "base"), [(0, 1), (1, 1), (2, 2), (3, 3), (9, None)], ids="have {}".format
)
def test_resending_begins_between_what_is_committed_and_what_was_sent(have, base) -> None:
    window = window_with((7,), (1, 2, 3))
    window.take_batch(1, verify=False)
    window.resend_from(have)
    batch = window.take_batch(1, verify=False)
    if base is None:
        assert batch is None
    else:
        assert batch is not None
        assert (batch.base, batch.tokens) == (base, (1, 2, 3)[base - 1 :])


def test_a_new_verifier_knows_nothing_of_the_draft() -> None:
    window = window_with((7,), (1, 2))
    window.take_batch(1, verify=False)
    window.new_verifier()
    assert window.take_batch(2, verify=True) == DraftBatch(2, 1, 1, (1, 2), None, True)


def test_the_model_is_fed_the_prompt_once() -> None:
    window = DraftWindow(PROMPT)
    first = window.next_draft()
    assert first == DraftNext(0, PROMPT, 0)
    assert window.next_draft() is first  # until it is answered
    assert window.answered(first)
    assert not window.answered(first)
    window.append(1, 1.0)
    assert window.next_draft() == DraftNext(2, (1,), 1)


def test_after_a_rejection_only_what_was_right_stays_in_the_cache() -> None:
    """Several committed tokens behind the rejection, as a repeated verdict brings them."""
    window = window_with((), (1, 2, 3, 4))
    window.apply(verdict(0, 1, 9, 8, 7, accepted=1))
    assert window.next_draft() == DraftNext(len(PROMPT) + 1, (9, 8, 7), 4)


def test_after_a_failure_the_cache_counts_as_empty() -> None:
    window = window_with((), (1, 2))
    window.abandon(window.next_draft())
    assert not window.drafting
    assert window.next_draft() == DraftNext(0, (*PROMPT, 1, 2), 2)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), max_size=60))
@settings(deadline=None)
def test_the_cache_always_holds_what_the_model_is_to_continue(actions) -> None:
    """Any order of proposals, late answers, rollbacks and bonus tokens: keep and feed fit."""
    window = DraftWindow(PROMPT)
    cache: list[int] = []
    running: list[DraftNext] = []
    for action, number, wrong in actions:
        if action <= 1 and not running:
            running.append(window.next_draft())
        elif action <= 2 and running:
            effect = running.pop()
            assert effect.keep <= len(cache)
            del cache[effect.keep :]
            cache.extend(effect.feed)
            if window.answered(effect):
                whole = [*PROMPT, *window.committed, *window.draft]
                assert cache == whole
                window.append(len(whole) % 7, 0.9)
        elif action >= 3:
            right = window.draft[:number]
            own = 50 if wrong or len(window.draft) <= number else window.draft[number]
            window.apply(verdict(len(window.committed), *right, own, accepted=len(right)))
        assert window.length == len(PROMPT) + len(window.committed) + len(window.draft)
