"""Traces are written, read and recorded without loss; what is wrong in a file is named by line."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import ConfigError, LocalProtocolError, ModelError
from broker.sampling import Sampling
from edge_agent.bench.forward_table import ForwardTable
from edge_agent.bench.traces import (
    VERSION,
    Trace,
    read_traces,
    record,
    reference_tokens,
    write_traces,
)
from edge_agent.llama_draft import LlamaDraft, LlamaDraftModel
from edge_agent.scripted_draft import ScriptedDraftModel
from tests.edge_agent.bench_traces import EOS, VOCAB, make_trace, random_trace
from tests.tiny_gguf import write as write_tiny

FORWARD = ForwardTable(((1, 0.04), (8, 0.05)))
GREEDY = Sampling()

# -- forward times ------------------------------------------------------------------------------


def test_a_table_is_straight_between_its_entries() -> None:
    table = ForwardTable(((2, 0.04), (6, 0.08)))
    assert [table.seconds(n) for n in (1, 2, 4, 6)] == pytest.approx([0.04, 0.04, 0.06, 0.08])
    assert table.seconds(10) == pytest.approx(0.12)
    assert ForwardTable(((3, 0.05),)).seconds(1_000) == 0.05


_samples = st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 5.0)), min_size=1, max_size=60)


@given(_samples)
def test_more_tokens_never_cost_less(samples: list[tuple[int, float]]) -> None:
    table = ForwardTable.from_samples(samples)
    times = [table.seconds(n) for n in range(1, 100)]
    assert times == sorted(times)
    assert min(s for _, s in samples) <= times[0] + 1e-9
    assert table.seconds(max(n for n, _ in samples)) <= max(s for _, s in samples) + 1e-9


def test_medians_do_not_mind_outliers_and_noise_is_pooled() -> None:
    samples = [(1, 0.04)] * 5 + [(1, 3.0)] * 2 + [(2, 0.050)] * 3 + [(3, 0.044)] * 1
    table = ForwardTable.from_samples([*samples, (4, math.nan), (0, 1.0), (5, -1.0)])
    pooled = (3 * 0.050 + 0.044) / 4
    assert table.entries == ((1, 0.04), (2, pytest.approx(pooled)), (3, pytest.approx(pooled)))


@pytest.mark.parametrize(
    "entries",
    [(), ((0, 0.1),), ((2, 0.1), (2, 0.2)), ((1, 0.2), (2, 0.1)), ((1, math.nan),), ((1, -0.1),)],
)
def test_a_table_that_cannot_be_is_refused(entries: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigError, match="forward times"):
        ForwardTable(entries)


def test_a_table_needs_samples() -> None:
    with pytest.raises(ConfigError, match="no sample"):
        ForwardTable.from_samples([(1, -1.0)])


# -- the format ---------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path) -> None:
    traces = [random_trace(seed) for seed in range(20)]
    traces.append(dataclasses.replace(traces[0], second_right=(True, False, None) * 13 + (True,)))
    traces.append(
        dataclasses.replace(traces[1], name="ďábelské 🦙", sampling=Sampling(0.8, 5, 0.95, 0.1, 9))
    )
    path = tmp_path / "traces.jsonl"
    assert write_traces(path, traces) == len(traces)
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(traces)
    assert read_traces(path) == traces


def test_files_may_be_joined_and_blank_lines_do_not_matter(tmp_path) -> None:
    path = tmp_path / "traces.jsonl"
    write_traces(path, [random_trace(1)])
    path.write_bytes(path.read_bytes() + b"\n" + path.read_bytes())
    assert read_traces(path) == [random_trace(1)] * 2


def test_a_later_field_is_ignored() -> None:
    trace = random_trace(1)
    assert Trace.from_dict({**trace.to_dict(), "weather": "fine"}) == trace


def test_agreement_follows_from_the_tokens() -> None:
    trace = make_trace([True, False, True, True])
    assert trace.agrees == (True, False, True, True)
    assert trace.agreement == 0.75


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipesd_trace": VERSION + 1}, "version 2"),
        ({"tokens": None}, "wrong field"),
        ({"tokens": []}, "prompt and tokens"),
        ({"prompt": []}, "prompt and tokens"),
        ({"drafted": [1]}, "drafted has 1 entries for 4 tokens"),
        ({"gammas": [0.1, 0.1, 0.1, -1]}, "draft time -1"),
        ({"gammas": [0.1, 0.1, 0.1, True]}, "draft time True"),
        ({"confidences": [0.1, 0.1, 0.1, 1.5]}, "confidence 1.5"),
        ({"confidences": [0.1, 0.1, 0.1, math.nan]}, "confidence nan"),
        ({"second_right": [1, 0, 1, 0]}, "second_right"),
        ({"tokens": [100, 101, 102, VOCAB]}, f"token {VOCAB}"),
        ({"tokens": [100, EOS, 102, 103]}, "goes on after its end"),
        ({"max_tokens": 9}, "end neither the text nor at 9"),
        ({"max_tokens": 3}, "end neither"),
        ({"sampling": {"temperature": -1}}, "temperature -1"),
        ({"sampling": {"heat": 1}}, "wrong field"),
        ({"forward": []}, "forward times"),
        ({"forward": [[1]]}, "wrong field"),
        ({"eos_ids": 7}, "wrong field"),
        ({"eos_ids": [[7]]}, "wrong field"),
        ({"name": 3}, "name is no text"),
        ({"vocab_size": 0}, "vocab_size 0"),
    ],
)
def test_a_broken_line_is_named(tmp_path, changes, words) -> None:
    good = make_trace([True] * 4)
    path = tmp_path / "traces.jsonl"
    lines = [json.dumps(good.to_dict()), json.dumps({**good.to_dict(), **changes})]
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_traces(path)
    assert f"{path} line 2: " in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", Trace.__dataclass_fields__)
def test_a_missing_field_is_named(name: str) -> None:
    data = make_trace([True]).to_dict()
    del data[name]
    with pytest.raises(ConfigError, match=f"without {name}"):
        Trace.from_dict(data)


@pytest.mark.parametrize("line", [b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000])
def test_junk_is_named(tmp_path, line: bytes) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_bytes(b"\n" + line + b"\n")
    with pytest.raises(ConfigError, match="line 2: no"):
        read_traces(path)


def test_a_file_that_is_missing_empty_or_unwritable_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_traces(tmp_path / "nothing")
    (tmp_path / "empty").write_bytes(b"\n")
    with pytest.raises(ConfigError, match="holds no trace"):
        read_traces(tmp_path / "empty")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_traces(tmp_path / "no" / "folder", [])


def test_a_reference_comes_from_the_targets_own_output() -> None:
    assert reference_tokens('{"text": "a", "token_ids": [5, 6]}') == (5, 6)
    for wrong in ("", "[]", '{"token_ids": []}', '{"token_ids": [1.5]}', '{"token_ids": 3}'):
        with pytest.raises(ConfigError, match="no reference text"):
            reference_tokens(wrong)


# -- recording ----------------------------------------------------------------------------------


class Ticks:
    """A clock that goes on by 1 s at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_recording_steps_along_the_targets_text() -> None:
    seen: list[list[int]] = []

    def oracle(sequence: Sequence[int], position: int, sampling: Sampling) -> tuple[int, float]:
        seen.append(list(sequence))
        assert position == len(sequence) - 2
        return (50 + position, 0.25) if position % 2 else (90, 0.75)

    model = ScriptedDraftModel(oracle, VOCAB, eos_ids=[EOS])
    trace = record(
        model,
        [3, 4],
        [50, 51, 52, 53],
        GREEDY,
        name="n",
        target="t",
        forward=FORWARD,
        clock=Ticks(),
    )
    assert seen == [[3, 4], [3, 4, 50], [3, 4, 50, 51], [3, 4, 50, 51, 52]]
    assert trace.agrees == (False, True, False, True)
    assert trace.confidences == (0.75, 0.25, 0.75, 0.25)
    assert trace.second_right == (None,) * 4
    assert (trace.gammas, trace.prompt_seconds) == ((1.0,) * 4, 1.0)
    assert (trace.prompt, trace.tokens, trace.max_tokens) == ((3, 4), (50, 51, 52, 53), 4)
    assert (trace.name, trace.target, trace.draft) == ("n", "t", "scripted")
    assert model.open_sequences == 0


def test_a_text_that_ended_is_recorded_with_its_end() -> None:
    model = ScriptedDraftModel(lambda s, p, h: (1, 0.5), VOCAB, eos_ids=[EOS])
    text = [50, 51, EOS]
    trace = record(model, [3], text, GREEDY, name="n", target="t", forward=FORWARD, max_tokens=64)
    assert (trace.tokens, trace.max_tokens) == ((50, 51, EOS), 64)
    with pytest.raises(ConfigError, match="goes on after its end"):
        record(model, [3], [EOS, 50], GREEDY, name="n", target="t", forward=FORWARD)


def test_a_draft_that_fails_is_closed() -> None:
    model = ScriptedDraftModel(lambda s, p, h: (1, 0.5), VOCAB, fail_at=[2])
    with pytest.raises(ModelError):
        record(model, [3], [50, 51], GREEDY, name="n", target="t", forward=FORWARD)
    assert model.open_sequences == 0


# -- the second choice --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = LlamaDraftModel(write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf"), threads=1)
    yield model
    model.close()


SAMPLINGS = [
    GREEDY,
    Sampling(1.0, seed=5),
    Sampling(0.7, top_k=20, seed=6),
    Sampling(0.8, top_p=0.9, seed=7),
    Sampling(1.2, min_p=0.05, seed=8),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_ranked_begins_with_the_proposal(tiny, sampling: Sampling) -> None:
    draft = tiny.open()
    try:
        with pytest.raises(LocalProtocolError):
            draft.ranked(0, sampling, 2)
        for position in range(20):
            draft.eval([position + 3])
            choices = draft.ranked(position, sampling, 5)
            assert choices[0] == draft.propose(position, sampling).token
            assert len(set(choices)) == len(choices) == 5
            assert all(type(token) is int for token in choices)
    finally:
        draft.close()


def test_the_second_choice_is_what_the_first_ones_absence_leaves(tiny) -> None:
    draft: LlamaDraft = tiny.open()
    try:
        for sampling in (GREEDY, Sampling(1.0, seed=5)):
            for position in range(10):
                draft.eval([position + 3])
                first, second = draft.ranked(position, sampling, 2)
                logits = np.array(draft._logits)
                logits[first] = -np.inf
                assert draft._sampler.choose(logits, position, sampling) == second
    finally:
        draft.close()


def test_filters_may_leave_one_choice(tiny) -> None:
    draft = tiny.open()
    try:
        draft.eval([3])
        assert len(draft.ranked(0, Sampling(1.0, top_k=1, seed=2), 4)) == 1
    finally:
        draft.close()


def test_a_recorded_second_choice_tells_whether_it_is_right(tiny) -> None:
    draft = tiny.open()
    text: list[int] = []
    try:
        draft.eval([5])
        for position in range(8):  # the target takes the draft's first and second choice in turn
            text.append(draft.ranked(position, GREEDY, 2)[position % 2])
            draft.eval(text[-1:])
    finally:
        draft.close()
    assert not tiny.eos_ids & set(text)
    trace = record(tiny, [5], text, GREEDY, name="n", target="t", forward=FORWARD)
    assert trace.agrees == (True, False) * 4
    assert trace.second_right == (False, True) * 4
