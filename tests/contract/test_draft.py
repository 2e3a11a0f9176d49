"""What every implementation of ``edge_agent.draft.Draft`` promises."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from broker.errors import LocalProtocolError, ModelError
from broker.sampling import Sampling
from edge_agent.draft import Draft, DraftModel
from edge_agent.llama_draft import LlamaDraftModel
from edge_agent.scripted_draft import ScriptedDraftModel
from tests.draft_models import CONTEXT, draft_file, draft_model

GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=7)
HOT = Sampling(temperature=5.0, seed=3)

Make = Callable[..., DraftModel]


def scripted_logits(sequence: Sequence[int]) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng([len(sequence), *sequence[-4:]])
    return rng.normal(scale=2.0, size=97).astype(np.float32)


def scripted(context: int = CONTEXT, max_sequences: int = 4) -> DraftModel:
    return ScriptedDraftModel.from_logits(
        scripted_logits, 97, context=context, max_sequences=max_sequences
    )


def llama(pair: str) -> Make:
    def make(context: int = CONTEXT, max_sequences: int = 4) -> DraftModel:
        return LlamaDraftModel(
            draft_file(pair), context=context, threads=1, max_sequences=max_sequences
        )

    return make


KINDS = [
    pytest.param("scripted"),
    pytest.param("smollm2", marks=pytest.mark.models),
    pytest.param("gemma3", marks=pytest.mark.models),
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(kind: str) -> Make:
    """Makes a model of its own, for tests that fill or close it."""
    return scripted if kind == "scripted" else llama(kind)


@pytest.fixture
def model(kind: str) -> DraftModel:
    """A shared model; a test closes the sequences that it opens."""
    return scripted() if kind == "scripted" else draft_model(kind)


@contextmanager
def opened(model: DraftModel) -> Iterator[Draft]:
    draft = model.open()
    try:
        yield draft
    finally:
        draft.close()


@pytest.fixture
def draft(model: DraftModel) -> Iterator[Draft]:
    with opened(model) as draft:
        yield draft


def tokens(model: DraftModel, count: int, seed: float = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, min(model.vocab_size, 5000)) for _ in range(count)]


def test_the_model_describes_itself(model: DraftModel) -> None:
    assert model.name
    assert model.vocab_hash
    assert model.context == CONTEXT
    assert all(0 <= token < model.vocab_size for token in model.eos_ids)


def test_an_empty_sequence_proposes_nothing(draft: Draft) -> None:
    assert draft.length == 0
    with pytest.raises(LocalProtocolError):
        draft.propose(0, GREEDY)


def test_length_counts_the_cache(draft: Draft, model: DraftModel) -> None:
    draft.eval(tokens(model, 5))
    assert draft.length == 5
    draft.eval(tokens(model, 1))
    assert draft.length == 6
    draft.rollback(2)
    assert draft.length == 2
    draft.rollback(0)
    assert draft.length == 0
    draft.eval(tokens(model, 3))
    assert draft.length == 3


def test_proposals_are_tokens_with_probabilities(draft: Draft, model: DraftModel) -> None:
    draft.eval(tokens(model, 4))
    for sampling in (GREEDY, SAMPLED, HOT):
        token, confidence = draft.propose(0, sampling)
        assert 0 <= token < model.vocab_size
        assert type(token) is int
        assert 0.0 < confidence <= 1.0
        assert type(confidence) is float


def test_propose_is_repeatable_and_changes_nothing(model: DraftModel) -> None:
    ids = tokens(model, 6)
    with opened(model) as asked, opened(model) as silent:
        for draft in (asked, silent):
            draft.eval(ids[:5])
        first = [asked.propose(position, s) for position in (0, 9) for s in (GREEDY, SAMPLED)]
        again = [asked.propose(position, s) for position in (0, 9) for s in (GREEDY, SAMPLED)]
        assert first == again
        assert asked.length == 5
        for draft in (asked, silent):
            draft.eval(ids[5:])
        assert asked.propose(1, SAMPLED) == silent.propose(1, SAMPLED)


def test_greedy_has_the_highest_confidence(draft: Draft, model: DraftModel) -> None:
    draft.eval(tokens(model, 4))
    best = draft.propose(0, GREEDY)
    others = [draft.propose(position, HOT) for position in range(30)]
    assert all(other.confidence <= best.confidence for other in others)


def test_the_noise_depends_on_position_and_seed(draft: Draft, model: DraftModel) -> None:
    draft.eval(tokens(model, 4))
    by_position = {draft.propose(position, HOT).token for position in range(20)}
    by_seed = {draft.propose(0, Sampling(temperature=5.0, seed=s)).token for s in range(20)}
    greedy = {draft.propose(position, GREEDY).token for position in range(20)}
    assert len(by_position) > 5
    assert len(by_seed) > 5
    assert len(greedy) == 1


def test_rollback_then_eval_equals_a_fresh_sequence(model: DraftModel) -> None:
    ids = tokens(model, 40)
    with opened(model) as rolled, opened(model) as fresh:
        rolled.eval(ids[:20])
        rolled.eval(ids[20:])
        rolled.rollback(20)
        rolled.eval([ids[3]])
        fresh.eval(ids[:20])
        fresh.eval([ids[3]])
        for sampling in (GREEDY, SAMPLED, HOT):
            assert rolled.propose(5, sampling) == fresh.propose(5, sampling)


@pytest.mark.parametrize("seed", range(3))
def test_any_walk_ends_like_a_fresh_sequence(model: DraftModel, seed: int) -> None:
    # One token at a time on both sides: models round differently for batches of other sizes.
    rng = random.Random(seed)
    kept: list[int] = []
    with opened(model) as walked, opened(model) as fresh:
        for _ in range(12):
            more = tokens(model, rng.randrange(1, 5), seed=rng.random())
            for token in more:
                walked.eval([token])
            kept += more
            if rng.random() < 0.6:
                keep = rng.randrange(len(kept) + 1)
                walked.rollback(keep)
                del kept[keep:]
        walked.eval([11])
        for token in [*kept, 11]:
            fresh.eval([token])
        assert walked.length == fresh.length == len(kept) + 1
        assert walked.propose(2, GREEDY) == fresh.propose(2, GREEDY)
        assert walked.propose(2, SAMPLED) == fresh.propose(2, SAMPLED)


def test_no_proposal_after_a_rollback(draft: Draft, model: DraftModel) -> None:
    ids = tokens(model, 6)
    draft.eval(ids)
    for length in (6, 3):
        draft.rollback(length)
        with pytest.raises(LocalProtocolError):
            draft.propose(0, GREEDY)
    draft.eval(ids[:1])
    draft.propose(0, GREEDY)


def test_a_rollback_out_of_range_changes_nothing(draft: Draft, model: DraftModel) -> None:
    draft.eval(tokens(model, 4))
    before = draft.propose(0, GREEDY)
    for length in (-1, 5):
        with pytest.raises(LocalProtocolError):
            draft.rollback(length)
    assert draft.length == 4
    assert draft.propose(0, GREEDY) == before


def test_wrong_tokens_change_nothing(draft: Draft, model: DraftModel) -> None:
    draft.eval(tokens(model, 4))
    before = draft.propose(0, GREEDY)
    for wrong in ([], [-1], [3, model.vocab_size], [2**40]):
        with pytest.raises(LocalProtocolError):
            draft.eval(wrong)
    assert draft.length == 4
    assert draft.propose(0, GREEDY) == before


def test_a_full_context_leaves_the_cache_as_it_was(make: Make) -> None:
    model = make(context=64)
    ids = tokens(model, 64)
    draft = model.open()
    with pytest.raises(ModelError, match="64"):
        draft.eval([*ids, 5])
    assert draft.length == 0
    draft.eval(ids[:60])
    before = draft.propose(0, SAMPLED)
    with pytest.raises(ModelError, match="64") as caught:
        draft.eval(ids[:5])
    assert "\n" not in str(caught.value)
    assert draft.length == 60
    assert draft.propose(0, SAMPLED) == before
    draft.eval(ids[60:])
    assert draft.length == 64
    with pytest.raises(ModelError):
        draft.eval([5])
    draft.rollback(63)
    draft.eval([5])
    model.close()


def test_two_sequences_do_not_meet(model: DraftModel) -> None:
    one, two = tokens(model, 12, seed=1), tokens(model, 12, seed=2)
    with opened(model) as a, opened(model) as b:
        for at in range(0, 12, 3):
            a.eval(one[at : at + 3])
            b.eval(two[at : at + 3])
        together = a.propose(0, SAMPLED), b.propose(0, SAMPLED)
    alone = []
    for ids in (one, two):
        with opened(model) as draft:
            for at in range(0, 12, 3):
                draft.eval(ids[at : at + 3])
            alone.append(draft.propose(0, SAMPLED))
    assert list(together) == alone


def test_sequences_are_bounded_and_given_back(make: Make) -> None:
    model = make(context=64, max_sequences=2)
    first, second = model.open(), model.open()
    with pytest.raises(ModelError, match="2"):
        model.open()
    first.close()
    first.close()
    third = model.open()
    with pytest.raises(ModelError):
        model.open()
    second.eval([11])
    third.eval([11])
    assert third.propose(0, GREEDY) == second.propose(0, GREEDY)
    model.close()


def test_a_closed_sequence_refuses(model: DraftModel) -> None:
    draft = model.open()
    draft.eval([11])
    draft.close()
    draft.close()
    for call in (
        lambda: draft.eval([11]),
        lambda: draft.rollback(0),
        lambda: draft.propose(0, GREEDY),
    ):
        with pytest.raises(LocalProtocolError):
            call()


def test_closing_the_model_closes_its_sequences(make: Make) -> None:
    model = make(context=64)
    draft = model.open()
    draft.eval([11])
    model.close()
    model.close()
    with pytest.raises(LocalProtocolError):
        draft.eval([11])
    with pytest.raises(LocalProtocolError):
        model.open()
    draft.close()
