"""The scripted draft does what its oracle says, as often as it says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from broker.errors import LocalProtocolError, ModelError
from broker.sampling import Sampling
from edge_agent.scripted_draft import (
    ByteText,
    Oracle,
    ScriptedDraftModel,
    always_right,
    always_wrong,
    sometimes_right,
)
from edge_agent.text import Detokenizer

VOCAB = 50
GREEDY = Sampling()


def target(sequence: Sequence[int], position: int, sampling: Sampling) -> int:
    return (sum(sequence[-3:]) * 7 + len(sequence) + position + sampling.seed) % VOCAB


def hits(oracle: Oracle, count: int = 4000) -> tuple[int, list[float], list[float]]:
    """How often the oracle is right along the target's own text; confidences right and wrong."""
    right, wrong, sequence = [], [], [1, 2, 3]
    for position in range(count):
        truth = target(sequence, position, GREEDY)
        token, confidence = oracle(sequence, position, GREEDY)
        assert 0 <= token < VOCAB
        assert 0.0 <= confidence <= 1.0
        assert oracle(sequence, position, GREEDY) == (token, confidence)
        (right if token == truth else wrong).append(confidence)
        sequence.append(truth)
    return len(right), right, wrong


def test_always_right_and_always_wrong() -> None:
    assert hits(always_right(target))[0] == 4000
    assert hits(always_wrong(target, VOCAB))[0] == 0


@pytest.mark.parametrize("quality", [0.0, 0.3, 0.8, 1.0])
def test_sometimes_right_is_right_that_often(quality: float) -> None:
    right, _, _ = hits(sometimes_right(target, VOCAB, quality, seed=5))
    assert right / 4000 == pytest.approx(quality, abs=0.03)


def test_confidence_says_something() -> None:
    _, right, wrong = hits(sometimes_right(target, VOCAB, 0.5))
    assert sum(right) / len(right) == pytest.approx(0.7, abs=0.03)
    assert sum(wrong) / len(wrong) == pytest.approx(0.4, abs=0.03)


def test_the_seed_decides_where() -> None:
    def pattern(seed: int) -> list[bool]:
        oracle = sometimes_right(target, VOCAB, 0.5, seed)
        return [oracle([n], n, GREEDY)[0] == target([n], n, GREEDY) for n in range(64)]

    assert pattern(1) == pattern(1)
    assert pattern(1) != pattern(2)


def test_the_cache_is_what_was_fed() -> None:
    model = ScriptedDraftModel(always_right(target), VOCAB, eos_ids=[0], name="right")
    draft = model.open()
    draft.eval([1, 2, 3, 4])
    draft.rollback(2)
    draft.eval((9,))
    assert draft.tokens == [1, 2, 9]
    assert draft.propose(4, GREEDY).token == target([1, 2, 9], 4, GREEDY)
    assert (model.evals, model.proposals, model.open_sequences) == (2, 1, 1)
    assert model.eos_ids == {0}
    draft.close()
    assert model.open_sequences == 0


def test_it_fails_when_told_to() -> None:
    model = ScriptedDraftModel(always_right(target), VOCAB, fail_at=[2])
    draft = model.open()
    draft.eval([1])
    with pytest.raises(ModelError):
        draft.eval([2])
    assert draft.tokens == [1]
    with pytest.raises(LocalProtocolError):
        draft.propose(0, GREEDY)
    draft.eval([3])
    assert draft.tokens == [1, 3]


def test_bytes_as_tokens() -> None:
    text = ByteText()
    ids = [*text.encode_prompt("ďábelské 🦙"), text.eos]
    detokenizer = Detokenizer()
    assert "".join(detokenizer.feed(text.piece(token)) for token in ids) == "ďábelské 🦙"
    assert text.encode_chat([{"role": "user", "content": "hi"}]) == [104, 105, 10]
    for token in (-1, 257):
        with pytest.raises(LocalProtocolError):
            text.piece(token)
