"""What a fleet writes and drafts: made up by a seed, or after a record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import load_text
from broker.errors import ConfigError
from edge_agent.bench.fleet_texts import (
    AGREEMENT,
    GAMMA_S,
    check_texts,
    made_up,
    on_scripted_target,
)
from edge_agent.bench.recorded_draft import RecordedDraft
from edge_agent.core.effects import DraftNext
from tests.edge_agent.bench_traces import EOS, make_trace, random_trace


def test_made_up_texts_follow_from_their_seed() -> None:
    texts = made_up(3, 64)
    assert texts == made_up(3, 64)
    assert texts != made_up(4, 64)
    assert len({text.prompt for text in texts}) == len(texts)
    positions = [right for text in texts for right in text.agrees]
    assert abs(sum(positions) / len(positions) - AGREEMENT) < 0.03
    for text in texts:
        assert text.tokens == load_text.write(text.prompt, 64)
        assert set(text.gammas) == {GAMMA_S}
    sure = [
        c for text in texts for c, right in zip(text.confidences, text.agrees, strict=True) if right
    ]
    unsure = [
        c
        for text in texts
        for c, right in zip(text.confidences, text.agrees, strict=True)
        if not right
    ]
    assert sum(sure) / len(sure) > sum(unsure) / len(unsure) + 0.1


@given(st.integers(0, 10_000), st.integers(1, 120))
def test_a_record_lends_a_scripted_text_its_agreement_and_times(seed, size) -> None:
    trace = random_trace(seed)
    made = on_scripted_target(trace, seed, size)
    assert made.tokens == load_text.write(made.prompt, size)
    for position, right in enumerate(made.agrees):
        place = position % len(trace.tokens)
        assert right == trace.agrees[place]
        assert made.gammas[position] == trace.gammas[place]
        assert made.confidences[position] == trace.confidences[place]
        if not right:
            assert made.drafted[position] != load_text.END
    assert len(made.prompt) == len(trace.prompt)


def test_texts_that_a_verifier_cannot_write_are_refused() -> None:
    check_texts(made_up(0, 8, 2), load_text.VOCAB_HASH, 100)
    check_texts([make_trace([True] * 4)], "abc", 100)
    with pytest.raises(ConfigError, match="no text of the verifier"):
        check_texts(made_up(0, 8, 2), "abc", 100)
    with pytest.raises(ConfigError, match="no text of the verifier"):
        check_texts([make_trace([True] * 4)], load_text.VOCAB_HASH, 100)
    with pytest.raises(ConfigError, match="longer than the verifier's context of 6"):
        check_texts([make_trace([True] * 4)], "abc", 6)


def test_a_draft_says_what_was_recorded_and_takes_as_long() -> None:
    trace = make_trace([True, False, True], prompt_seconds=0.3)
    draft = RecordedDraft(trace)
    assert draft.feed(DraftNext(0, trace.prompt, 0)) == (100, 0.9, pytest.approx(0.010 + 0.2))
    assert draft.feed(DraftNext(3, (100,), 1)) == (trace.drafted[1], 0.3, 0.010)
    # On the wrong branch that it drafted itself: wrong again, never the end of the text.
    wrong, _, _ = draft.feed(DraftNext(4, (trace.drafted[1],), 2))
    assert wrong not in (trace.tokens[2], EOS)
    # After the rollback it is back on the text.
    assert draft.feed(DraftNext(4, (101,), 2))[0] == trace.drafted[2] == trace.tokens[2]


def test_a_draft_beyond_the_record_is_wrong() -> None:
    trace = make_trace([True, True])
    draft = RecordedDraft(trace)
    draft.feed(DraftNext(0, (*trace.prompt, 100), 1))
    token, _, _ = draft.feed(DraftNext(4, (101,), 2))
    assert token not in (trace.tokens[1], EOS)
