"""One session on the verifier: what it plans, what a forward's answer does, what drafts may do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.messages import (
    CLOSED_TOKEN,
    CLOSED_UNKNOWN,
    FINISH_LENGTH,
    FINISH_STOP,
    VERIFY_EAGER,
    VERIFY_TRIGGERED,
    Closed,
    DraftBatch,
    Resync,
    SessionOpen,
    Verdict,
)
from broker.sampling import Sampling
from cloud_verifier.core.session import (
    MAX_PENDING,
    MAX_REPEATS,
    MAX_ROUNDS,
    MAX_UNHEARD,
    REPEAT_INTERVAL,
    Plan,
    VerifierSession,
)
from cloud_verifier.core.stats import VerifierStats

PROMPT = (91, 92, 93)
EOS = 0
VOCAB = 100


def session(
    prompt: tuple[int, ...] = PROMPT,
    committed: tuple[int, ...] = (),
    max_tokens: int = 50,
    context: int = 200,
    verify: str = VERIFY_TRIGGERED,
) -> VerifierSession:
    opened = SessionOpen(1, prompt, committed, Sampling(), max_tokens, "v", verify)
    return VerifierSession(
        opened,
        context=context,
        vocab_size=VOCAB,
        eos_ids=frozenset({EOS}),
        stats=VerifierStats(),
        now=0.0,
    )


def draft(
    held: VerifierSession, base: int, *tokens: int, verify: bool = False, epoch: int = 1,
    now: float = 1.0,
) -> None:  # fmt: skip
    held.receive_draft(DraftBatch(1, epoch, base, tokens, None, verify), now)


def judge(held: VerifierSession, *choices: int, budget: int = 99, now: float = 2.0) -> Verdict:
    """One forward in which the target answers ``choices``; the verdict that follows."""
    plan = held.plan(budget)
    assert plan is not None
    assert plan.choices == len(choices), plan
    held.judge(plan, choices, now, 10.0)
    (message,) = held.take_messages()
    assert isinstance(message, Verdict)
    return message


# -- plans --------------------------------------------------------------------------------------


def test_a_new_session_prefills_all_but_its_last_token() -> None:
    held = session()
    assert held.plan(99) == Plan(0, (91, 92), 0, 0, 0)
    held.prefilled(held.plan(99))
    assert held.cached == 2
    assert not held.has_work
    assert held.plan(99) is None


def test_committed_text_of_an_earlier_attachment_is_prefilled_too() -> None:
    held = session(committed=(1, 2))
    assert held.plan(99) == Plan(0, (91, 92, 93, 1), 0, 0, 2)


def test_a_long_prompt_goes_in_by_pieces() -> None:
    held = session(prompt=tuple(range(1, 11)))
    pieces = []
    while (plan := held.plan(4)) is not None:
        pieces.append(plan.tokens)
        held.prefilled(plan)
    assert pieces == [(1, 2, 3, 4), (5, 6, 7, 8), (9,)]


@pytest.mark.parametrize(
    ("budget", "plan"),
    [
        (2, Plan(0, (91, 92), 0, 0, 0)),  # no room for all that is missing: prefill first
        (3, Plan(0, PROMPT, 0, 1, 0)),  # room for one choice, none for drafts
        (4, Plan(0, (*PROMPT, 1), 1, 2, 0)),
        (99, Plan(0, (*PROMPT, 1, 2), 2, 3, 0)),
    ],
)
def test_a_request_takes_what_the_budget_leaves(budget, plan) -> None:
    held = session()
    draft(held, 0, 1, 2, verify=True)
    assert held.plan(budget) == plan


def test_unasked_drafts_wait_unless_the_session_is_eager() -> None:
    for verify, choices in ((VERIFY_TRIGGERED, 0), (VERIFY_EAGER, 3)):
        held = session(verify=verify)
        draft(held, 0, 1, 2)
        plan = held.plan(99)
        assert plan is not None
        assert plan.choices == choices
        assert held.wants_choice == bool(choices)


@pytest.mark.parametrize(
    ("max_tokens", "context", "limit"), [(5, 200, 5), (50, 10, 7), (7, 10, 7), (1, 200, 1)]
)
def test_no_more_is_judged_than_there_are_places(max_tokens, context, limit) -> None:
    """Case 29: the last place is the target's own, so limit - 1 drafts at most."""
    held = session(max_tokens=max_tokens, context=context)
    assert held.limit == limit
    draft(held, 0, *range(1, 21), verify=True)
    plan = held.plan(99)
    assert plan is not None
    assert plan.judged == limit - 1
    verdict = judge(held, *range(1, limit + 1))
    assert verdict.tokens == tuple(range(1, limit + 1))
    assert (verdict.accepted, verdict.judged, verdict.finish) == (limit - 1, limit - 1, "length")


# -- verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "choices", "tokens", "accepted", "cached"),
    [
        ((), (5,), (5,), 0, 3),  # an empty draft
        ((1, 2), (1, 2, 5), (1, 2, 5), 2, 5),  # none rejected: bonus
        ((1, 2), (1, 6, 5), (1, 6), 1, 4),  # the second rejected: recovered
        ((1, 2), (7, 6, 5), (7,), 0, 3),  # all rejected
        ((1, 2), (2, 2, 5), (2,), 0, 3),  # right tokens after a wrong one do not count
    ],
)
def test_one_token_of_the_target_each_time(drafts, choices, tokens, accepted, cached) -> None:
    """Case 23: and the cache length is right afterwards."""
    held = session()
    draft(held, 0, *drafts, verify=True)
    verdict = judge(held, *choices)
    assert verdict == Verdict(1, 1, 0, tokens, accepted, len(drafts), None, verdict.hold_ms, 10.0)
    assert held.cached == cached
    assert held.committed == list(tokens)
    assert held.cached == held.length - 1  # the target's own token is not in it yet


@pytest.mark.parametrize(
    ("drafts", "choices", "tokens", "accepted", "judged"),
    [
        ((1, EOS, 3, 4, 5), (1, EOS, 3, 4, 5, 6), (1, EOS), 2, 2),
        ((1, 2), (1, EOS, 9), (1, EOS), 1, 2),
        ((1, 2), (1, 2, EOS), (1, 2, EOS), 2, 2),
        ((), (EOS,), (EOS,), 0, 0),
        ((EOS,), (EOS, 5), (EOS,), 1, 1),
    ],
)
def test_end_of_text_ends_it_at_that_token(drafts, choices, tokens, accepted, judged) -> None:
    """Case 21: in slot 2 of 5 accepted, the text ends there and two count."""
    held = session()
    draft(held, 0, *drafts, verify=True)
    verdict = judge(held, *choices)
    assert verdict.finish == FINISH_STOP
    assert (verdict.tokens, verdict.accepted, verdict.judged) == (tokens, accepted, judged)
    assert held._stats.accepted == accepted
    assert held._stats.judged == judged
    assert not held.has_work
    draft(held, len(tokens), 8, verify=True)
    assert not held.has_work


def test_end_of_text_at_the_last_place_is_a_stop() -> None:
    held = session(max_tokens=1)
    draft(held, 0, verify=True)
    assert judge(held, EOS).finish == FINISH_STOP


def test_drafts_beyond_the_bonus_stay_when_they_begin_with_it() -> None:
    held = session()
    draft(held, 0, 1, 2, verify=True)
    plan = held.plan(99)
    draft(held, 2, 3, 4, verify=True)  # arrives while the forward runs
    held.judge(plan, (1, 2, 3), 2.0, 10.0)
    assert held.committed == [1, 2, 3]
    assert held.triggered  # up to 4 was asked for
    assert held.plan(99) == Plan(5, (3, 4), 1, 2, 3)


def test_drafts_that_contradict_the_bonus_die_with_their_epoch() -> None:
    held = session()
    draft(held, 0, 1, 2, verify=True)
    plan = held.plan(99)
    draft(held, 2, 3, 4, verify=True)
    held.judge(plan, (1, 2, 7), 2.0, 10.0)
    assert not held.triggered
    assert not held.has_work
    draft(held, 5, 8, verify=True)  # more of the dead epoch
    assert held._stats.stale_drafts == 1
    draft(held, 3, 9, verify=True, epoch=2)
    assert held.plan(99) == Plan(5, (7, 9), 1, 2, 3)


def test_a_newer_epoch_while_the_forward_runs_is_kept() -> None:
    held = session()
    draft(held, 0, 1, 2, verify=True)
    plan = held.plan(99)
    draft(held, 0, 5, 6, verify=True, epoch=2)
    held.judge(plan, (5, 2, 3), 2.0, 10.0)  # draft 1 was wrong, and the newer one says 5 too
    assert held.committed == [5]
    assert held.plan(99) == Plan(3, (5, 6), 1, 2, 1)


def test_hold_is_the_time_from_the_arrival_of_the_last_batch_judged() -> None:
    held = session()
    draft(held, 0, 1, now=1.0)
    draft(held, 1, 2, verify=True, now=3.0)
    draft(held, 1, 2, verify=True, now=4.0)  # a duplicate does not start it anew
    assert judge(held, 1, 2, 3, now=3.5).hold_ms == pytest.approx(500.0)


def test_a_batch_that_a_forward_came_too_early_for_counts_from_its_own_arrival() -> None:
    held = session()
    draft(held, 0, 1, verify=True, now=1.0)
    plan = held.plan(100)
    assert plan is not None
    draft(held, 1, 2, verify=True, now=1.25)
    held.judge(plan, (1, 2), 2.0, 10.0)
    first, second = held.take_messages()[0], judge(held, 3, now=2.5)
    assert isinstance(first, Verdict)
    assert first.hold_ms == pytest.approx(1000.0)
    assert second.hold_ms == pytest.approx(1250.0), "it ended where the second batch did"


def test_where_no_batch_ended_there_is_no_hold() -> None:
    held = session()
    held.receive_draft(DraftBatch(1, 1, 0, (), None, True, True), 1.0)
    judge(held, 1, now=3.0)
    assert judge(held, 2, now=4.0).hold_ms == 0.0, "the target wrote on"
    draft(held, 2, 3, 4, now=4.0)
    plan = held.plan(2)  # with room for one of both
    assert plan is not None
    assert plan.judged == 1
    held.judge(plan, (3, 4), 5.0, 10.0)
    (verdict,) = held.take_messages()
    assert isinstance(verdict, Verdict)
    assert verdict.hold_ms == 0.0


def test_a_newer_epoch_leaves_no_hold_that_could_be_taken_for_its_own() -> None:
    held = session()
    draft(held, 0, 1, verify=True, now=1.0)
    plan = held.plan(100)
    assert plan is not None
    draft(held, 0, 7, verify=True, now=1.5, epoch=2)
    held.judge(plan, (7, 8), 2.0, 10.0)
    (verdict,) = held.take_messages()
    assert isinstance(verdict, Verdict)
    assert verdict.hold_ms == 0.0


def test_the_opening_may_ask_for_the_first_token() -> None:
    opened = SessionOpen(1, PROMPT, (4, 5), Sampling(), 50, "v", VERIFY_TRIGGERED, ask=True)
    held = VerifierSession(
        opened,
        context=200,
        vocab_size=VOCAB,
        eos_ids=frozenset({EOS}),
        stats=VerifierStats(),
        now=0.0,
    )
    assert held.triggered
    draft(held, 2, 6)  # of the edge's first epoch, which is newer than none
    assert held.triggered, "that does not take the question back"
    assert judge(held, 6, 7).tokens == (6, 7)
    assert not held.has_work


def go_on(held: VerifierSession, base: int, *tokens: int, may: bool = True) -> None:
    """Ask, and let the target write on or not."""
    held.receive_draft(DraftBatch(1, 1, base, tokens, None, True, may), 1.0)


def test_allowed_to_the_target_writes_on_alone_but_not_for_ever() -> None:
    held = session(max_tokens=4 * MAX_UNHEARD)
    go_on(held, 0)
    written = 0
    while held.has_work:
        assert held.triggered is (written == 0), "nobody waits for the rest"
        judge(held, 1 + written % 7)
        written += 1
    assert written == MAX_UNHEARD
    held.receive_resync(Resync(1, 1, 10), 3.0)
    held.take_messages()
    while held.has_work:
        judge(held, 1 + written % 7)
        written += 1
    assert written == MAX_UNHEARD + 10, "it goes on from what the edge spoke of"


def test_a_request_without_leave_ends_the_writing_on() -> None:
    held = session()
    go_on(held, 0)
    judge(held, 1)
    judge(held, 2)
    go_on(held, 1, may=False)  # it has seen the first of both only
    assert not held.has_work
    go_on(held, 2, 3)
    assert judge(held, 3, 4).accepted == 1
    assert held.has_work


def test_what_contradicts_ends_no_writing_on() -> None:
    held = session()
    go_on(held, 0, 5, 6)
    plan = held.plan(100)
    assert plan is not None
    held.judge(plan, (7, 8, 9), 2.0, 10.0)
    held.take_messages()
    draft(held, 2, 6)
    assert judge(held, 1).tokens == (1,)


def test_a_flood_of_resyncs_repeats_each_verdict_once() -> None:
    """Five bytes would otherwise buy thirty-two verdicts, a thousand times in a row."""
    held = session()
    for position in range(20):
        draft(held, position, verify=True)
        judge(held, 1 + position % 7)
    for _ in range(1000):
        held.receive_resync(Resync(1, 1, 0), 5.0)
    assert len(held.take_messages()) == 20
    held.receive_resync(Resync(1, 1, 15), 5.0)  # an edge that got some of them
    assert len(held.take_messages()) == 5
    held.receive_resync(Resync(1, 1, 0), 5.0 + REPEAT_INTERVAL)  # and one that lost them
    assert len(held.take_messages()) == 20


def test_a_probe_is_answered_and_changes_nothing() -> None:
    held = session()
    draft(held, 0, 1, 2)
    held.receive_resync(Resync(1, 5, 9, 77, (3, 3)), 3.0)
    assert held.take_messages() == [Resync(1, 1, 2, 77)]
    assert judge_after(held) == (1, 2)


def judge_after(held: VerifierSession) -> tuple[int, ...]:
    """The drafts that a request would have judged now."""
    draft(held, 2, verify=True)
    plan = held.plan(100)
    assert plan is not None
    return plan.tokens[len(plan.tokens) - plan.judged :]


def test_a_dead_epoch_leaves_no_time_behind() -> None:
    held = session(verify=VERIFY_EAGER)
    draft(held, 0, verify=True)
    judge(held, 5)
    draft(held, 0, 4, 1, now=10.0)  # contradicts
    draft(held, 1, 1, now=100.0, epoch=2)
    assert judge(held, 1, 2, now=100.5).hold_ms == pytest.approx(500.0)


# -- drafts -------------------------------------------------------------------------------------


def test_duplicates_and_overlaps_add_only_what_is_new() -> None:
    held = session()
    draft(held, 0, 1, 2)
    draft(held, 0, 1, 2)
    draft(held, 1, 2, 3, 4, verify=True)
    draft(held, 0, 1)
    assert held.plan(99) == Plan(0, (*PROMPT, 1, 2, 3, 4), 4, 5, 0)
    assert held._stats.drafts == 4


def test_a_gap_is_answered_at_most_four_times_a_second() -> None:
    held = session()
    draft(held, 0, 1)
    for now in (1.0, 1.1, 1.2, 1.3, 1.4):
        draft(held, 3, 4, verify=True, now=now)
    assert held.take_messages() == [Resync(1, 1, 1)] * 2
    assert held._stats.gaps == 5
    assert not held.triggered  # a request behind a gap is not taken


def test_a_gap_of_one_is_a_gap() -> None:
    held = session()
    draft(held, 0, 1)
    draft(held, 2, 3, verify=True)
    assert held.take_messages() == [Resync(1, 1, 1)]
    assert held._pending == [1]


def test_drafts_that_repeat_what_is_committed_add_the_rest() -> None:
    held = session()
    draft(held, 0, verify=True)
    judge(held, 5)
    draft(held, 0, 5, 6, 7, verify=True, epoch=2)
    assert held.plan(99) == Plan(3, (5, 6, 7), 2, 3, 1)


def test_a_late_copy_of_an_earlier_request_takes_nothing_back() -> None:
    held = session()
    draft(held, 0, 1, verify=True)
    draft(held, 1, 2, 3, verify=True)
    draft(held, 0, 1, verify=True)
    judge(held, 1, 2, 9, 9)
    assert held.committed == [1, 2, 9]
    held = session()
    draft(held, 0, 1, verify=True)
    plan = held.plan(99)
    draft(held, 1, 2, 3, verify=True)
    draft(held, 0, 1, verify=True)
    held.judge(plan, (1, 2), 2.0, 10.0)
    assert held.triggered  # up to 3 was asked for


def test_another_gap_is_answered_at_once() -> None:
    held = session()
    draft(held, 3, 4, verify=True)
    draft(held, 0, 1)
    draft(held, 3, 4, verify=True)
    assert held.take_messages() == [Resync(1, 1, 0), Resync(1, 1, 1)]


def test_older_epochs_are_dropped_and_newer_ones_replace() -> None:
    held = session()
    draft(held, 0, 1, 2, verify=True, epoch=3)
    draft(held, 0, 7, verify=True, epoch=2)
    assert held.plan(99).tokens == (*PROMPT, 1, 2)
    draft(held, 0, 8, epoch=4)
    assert not held.triggered  # the request went with its draft
    draft(held, 1, verify=True, epoch=4)
    assert held.plan(99).tokens == (*PROMPT, 8)
    assert held._stats.stale_drafts == 1


def test_the_same_epoch_cannot_say_two_things() -> None:
    held = session()
    draft(held, 0, 1, 2)
    draft(held, 1, 9, verify=True)
    assert held._stats.rejected["contradiction"] == 1
    assert not held.triggered


def test_a_trigger_for_what_is_committed_comes_late() -> None:
    held = session()
    draft(held, 0, 1, verify=True)
    judge(held, 1, 2)
    draft(held, 0, 1, verify=True)
    assert held._stats.late_triggers == 1
    assert not held.triggered
    draft(held, 0, 1, 2, verify=True)  # this one is for the next token
    assert held.triggered


def test_a_token_beyond_the_vocabulary_is_answered_with_an_error() -> None:
    """Case 27: and nothing of the batch is taken."""
    held = session()
    draft(held, 0, 1, VOCAB, verify=True)
    assert held.take_messages() == [Closed(1, CLOSED_TOKEN)]
    assert not held.triggered
    assert held._stats.rejected["token_out_of_range"] == 1


def test_pending_drafts_are_bounded() -> None:
    held = session(max_tokens=5000, context=9000)
    for base in range(0, MAX_PENDING + 400, 200):
        draft(held, base, *([1] * 200))
    assert len(held._pending) == MAX_PENDING
    assert held._stats.rejected["too_far_ahead"] >= 1
    assert held._stats.gaps >= 1  # what follows a cut batch does not fit


# -- trees --------------------------------------------------------------------------------------

#: 1 - 2 - 8 with 7 - 9 beside the 1, and 3 beside the 2.
BUSHY = DraftBatch(1, 1, 0, (1, 7, 2, 8, 9, 3), (-1, -1, 0, 2, 1, 0), True)


def test_a_tree_is_judged_whole() -> None:
    held = session()
    held.receive_draft(BUSHY, 1.0)
    plan = held.plan(99)
    assert plan is not None
    assert plan.tokens == (*PROMPT, 1, 2, 8, 7, 9, 3)
    assert plan.parents == (-1, 0, 1, -1, 3, 0)
    assert (plan.judged, plan.choices, plan.position) == (3, 7, 0)


@pytest.mark.parametrize(
    ("choices", "tokens", "accepted", "cached", "path"),
    [
        ((1, 2, 8, 40, 0, 0, 0), (1, 2, 8, 40), 3, 6, (0, 1, 2)),  # along the chain
        ((7, 0, 0, 0, 9, 41, 0), (7, 9, 41), 2, 5, (3, 4)),  # a branch from the root
        ((1, 3, 0, 0, 0, 0, 42), (1, 3, 42), 2, 5, (0, 5)),  # a branch of the chain's first
        ((5, 0, 0, 0, 0, 0, 0), (5,), 0, 3, ()),  # none of them
        ((7, 0, 0, 0, EOS, 9, 0), (7, EOS), 1, 4, (3,)),  # the end behind a branch
    ],
)
def test_the_verdict_goes_along_any_branch(choices, tokens, accepted, cached, path) -> None:
    held = session()
    held.receive_draft(BUSHY, 1.0)
    verdict = judge(held, *choices)
    assert verdict.tokens == tokens
    assert (verdict.accepted, held.cached, held.committed) == (accepted, cached, list(tokens))
    assert verdict.judged == (2 if EOS in tokens else 3)
    assert held.settled == cached - len(path)
    if held.finish is None:
        draft(held, len(tokens), verify=True, epoch=2)
        plan = held.plan(99)
        assert plan is not None
        assert (plan.keep, plan.path, plan.tokens) == (cached, path, tokens[-1:])


def test_an_evicted_tree_leaves_no_path() -> None:
    held = session()
    held.receive_draft(BUSHY, 1.0)
    judge(held, 1, 2, 8, 40, 0, 0, 0)
    held.cached = 0
    draft(held, 4, verify=True)
    plan = held.plan(99)
    assert plan is not None
    assert (plan.keep, plan.path, plan.tokens) == (0, (), (*PROMPT, 1, 2, 8, 40))


def test_branches_stay_with_the_chain_that_stays() -> None:
    held = session()
    held.receive_draft(BUSHY, 1.0)
    plan = held.plan(99)
    assert plan is not None
    # What comes while the forward runs: more of the chain, and a branch beside it.
    held.receive_draft(DraftBatch(1, 1, 3, (4, 5, 6), (-1, -1, 0), True), 1.5)
    held.judge(plan, (1, 2, 8, 4, 0, 0, 0), 2.0, 10.0)
    later = held.plan(99)
    assert later is not None
    assert (later.tokens, later.parents, later.path) == ((4, 6), None, (0, 1, 2))
    held.receive_draft(DraftBatch(1, 1, 4, (6, 9), (-1, -1)), 2.5)
    later = held.plan(99)
    assert later is not None
    assert (later.tokens, later.parents) == ((4, 6, 9), (-1, -1))


def test_a_tree_repeated_is_taken_once() -> None:
    held = session()
    held.receive_draft(BUSHY, 1.0)
    held.receive_draft(BUSHY, 1.1)
    plan = held.plan(99)
    assert plan is not None
    assert plan.tokens == (*PROMPT, 1, 2, 8, 7, 9, 3)
    assert held._stats.drafts == 6
    assert held._stats.lost_branches == 2


def test_branches_fit_into_budget_and_context() -> None:
    held = session(max_tokens=50, context=len(PROMPT) + 5)
    held.receive_draft(BUSHY, 1.0)
    plan = held.plan(99)  # five places: three for the chain, two beside it
    assert plan is not None
    assert plan.tokens == (*PROMPT, 1, 2, 8, 7, 9)
    plan = held.plan(len(PROMPT) + 4)
    assert plan is not None
    assert plan.tokens == (*PROMPT, 1, 2, 8, 7)
    plan = session_of(BUSHY, max_tokens=2).plan(99)
    assert plan is not None
    assert plan.tokens == (*PROMPT, 1, 7)  # what is deeper lies behind the end


def session_of(batch: DraftBatch, **changes: int) -> VerifierSession:
    held = session(**changes)
    held.receive_draft(batch, 1.0)
    return held


def test_the_tokens_of_all_branches_are_bounded() -> None:
    held = session(max_tokens=5000, context=9000)
    for number in range(5):
        wide = (1, *range(10, 10 + 80), *range(10, 10 + 80), *range(10, 10 + 80))
        batch = DraftBatch(1, 1, 0, wide, tuple(-1 for _ in wide), number == 0)
        held.receive_draft(batch, 1.0)
    assert len(held._branches) <= MAX_PENDING
    held.receive_draft(DraftBatch(1, 1, 1, tuple([1] * 500), tuple([-1] * 500)), 1.0)
    held.receive_draft(DraftBatch(1, 1, 1, tuple([1] * 900), tuple([-1] * 900)), 1.0)
    assert len(held._branches) <= MAX_PENDING
    assert held._stats.lost_branches > 0


def test_a_token_of_a_branch_beyond_the_vocabulary_is_refused() -> None:
    held = session_of(DraftBatch(1, 1, 0, (1, VOCAB), (-1, -1), True))
    assert held.take_messages() == [Closed(1, CLOSED_TOKEN)]


# -- resync -------------------------------------------------------------------------------------


def rounds(number: int, **changes: int) -> VerifierSession:
    held = session(max_tokens=500, context=900)
    for position in range(number):
        draft(held, position, verify=True)
        judge(held, 1 + position % 9)
    return held


def test_resync_repeats_the_verdicts_that_are_missing_as_they_were() -> None:
    held = session()
    draft(held, 0, 1, 2, verify=True)
    first = judge(held, 1, 2, 3)
    draft(held, 3, 4, verify=True)
    second = judge(held, 4, 5)
    held.receive_resync(Resync(1, 1, 0), 3.0)
    assert held.take_messages() == [first, second]
    held.receive_resync(Resync(1, 1, 3), 3.0)
    assert held.take_messages() == [second]
    held.receive_resync(Resync(1, 1, 1), 4.0)
    assert held.take_messages() == [first, second]


def test_resync_repeats_the_end() -> None:
    held = session()
    draft(held, 0, verify=True)
    last = judge(held, EOS)
    held.receive_resync(Resync(1, 1, 0), 3.0)
    assert held.take_messages() == [last]


def test_old_verdicts_are_repeated_merged_and_in_bounded_number() -> None:
    held = rounds(MAX_ROUNDS + 40)
    held.receive_resync(Resync(1, 1, 7), 3.0)
    merged, *others = held.take_messages()
    assert (merged.start, len(merged.tokens), merged.accepted) == (7, 33, 0)
    assert len(others) == MAX_REPEATS
    assert others[0].start == 40
    held.receive_resync(Resync(1, 1, 40 + MAX_REPEATS), 3.0)
    assert len(held.take_messages()) == MAX_ROUNDS - MAX_REPEATS


@given(st.integers(0, 130), st.integers(0, 130))
def test_enough_resyncs_bring_everything(number, have) -> None:
    held = rounds(number)
    have = min(have, number)
    known = held.committed[:have]
    for _ in range(10):
        held.receive_resync(Resync(1, 1, len(known)), 3.0)
        for message in held.take_messages():
            if isinstance(message, Verdict):
                assert message.start <= len(known)
                known[message.start :] = message.tokens
        if len(known) == number:
            break
    assert known == held.committed


def test_resync_with_everything_is_told_how_far_the_draft_is_here() -> None:
    held = session()
    draft(held, 0, 1, 2)
    held.receive_resync(Resync(1, 1, 0), 3.0)
    assert held.take_messages() == [Resync(1, 1, 2)]


def test_resync_of_a_newer_epoch_begins_it() -> None:
    held = session()
    draft(held, 0, 1, 2, verify=True)
    held.receive_resync(Resync(1, 2, 0), 3.0)
    assert held.take_messages() == [Resync(1, 2, 0)]
    assert not held.triggered


def test_resync_of_an_older_epoch_changes_nothing() -> None:
    held = session()
    draft(held, 0, 1, 2, verify=True, epoch=3)
    held.receive_resync(Resync(1, 2, 0), 3.0)
    assert held.take_messages() == [Resync(1, 3, 2)]
    assert held.triggered


def test_resync_revives_a_dead_epoch_of_an_edge_that_stands_by_it() -> None:
    held = session()
    draft(held, 0, verify=True)
    judge(held, 5)
    draft(held, 0, 4)  # contradicts: dead
    draft(held, 1, 6, verify=True)
    assert not held.triggered
    held.receive_resync(Resync(1, 1, 1), 3.0)
    assert held.take_messages() == [Resync(1, 1, 1)]
    draft(held, 1, 6, verify=True)
    assert held.triggered


def test_an_edge_that_knows_more_than_the_verifier_is_sent_away() -> None:
    """The verifier came back with an older state: the edge opens again with all it has."""
    held = session(committed=(1,))
    held.receive_resync(Resync(1, 1, 5), 3.0)
    assert held.take_messages() == [Closed(1, CLOSED_UNKNOWN)]


# -- reuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (((1, 2), (3, 4)), ((1, 2), (3, 4)), 4),
        (((1, 2), (3, 4)), ((1, 2), (3, 4, 5)), 4),
        (((1, 2), (3, 4)), ((1, 2), (3, 9)), 3),
        (((1, 2), (3, 4)), ((9, 2), (3, 4)), 0),
        (((1, 2), (3,)), ((1, 2, 3), ()), 3),
        (((1,), ()), ((1, 2), ()), 1),
    ],
)
def test_common_prefix(first, second, shared) -> None:
    one, other = (session(prompt, committed) for prompt, committed in (first, second))
    assert one.common_prefix(other) == other.common_prefix(one) == shared


def test_length_finish_keeps_its_name() -> None:
    held = session(committed=(1, 2), max_tokens=3)
    draft(held, 2, 5, verify=True)
    assert held.plan(99).judged == 0
    assert judge(held, 5).finish == FINISH_LENGTH
