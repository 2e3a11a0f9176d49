"""Traces are made of what a run knows, and of measurements for what it does not."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest

from broker.errors import ModelError, TransportError
from broker.sampling import Sampling
from edge_agent.bench.cells import Result
from edge_agent.bench.link import Scenario, find_scenario
from edge_agent.bench.recording import (
    LENGTHS,
    Pair,
    Recording,
    enough,
    samples_of,
    texts_of,
)
from edge_agent.bench.traces import Trace, read_traces, write_traces
from edge_agent.core.policies import Policy
from edge_agent.scripted_draft import ScriptedDraftModel, sometimes_right
from tests.edge_agent.bench_results import result

VOCAB, EOS = 1_000, 7
PROMPTS = {"a": tuple(range(10, 40)), "b": tuple(range(50, 120))}
#: Three numbers of tokens with three forwards each, and a first and last one that do not count.
RICH = (
    *((0, 500.0), (2, 43.0), (2, 43.0), (2, 43.0), (5, 46.0), (5, 46.0), (5, 46.0)),
    *((9, 50.0), (9, 50.0), (9, 50.0), (1, 900.0)),
)


def text(name: str, size: int = 12) -> tuple[int, ...]:
    return tuple(200 + 50 * ord(name[0]) % 300 + n for n in range(size))


def target(sequence: Sequence[int], position: int, sampling: Sampling) -> int:
    """Writes ``text`` of the prompt that the sequence begins with."""
    name = "a" if sequence[0] == PROMPTS["a"][0] else "b"
    return text(name, 64)[position]


def pair(**options) -> Pair:
    draft = ScriptedDraftModel(
        sometimes_right(target, VOCAB, 0.8), VOCAB, eos_ids=frozenset({EOS}), **options
    )
    return Pair(draft, "target", Sampling(), 12)


class Alone:
    """Stands in for ``Runner.alone``: fixed drafts are half right; 40 ms and 1 ms a token."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []

    def __call__(self, name: str, prompt: tuple[int, ...], policy: Policy) -> Result:
        assert prompt == PROMPTS[name]
        length = policy.thresholds.window
        self.asked.append((policy.name, name, 0 if policy.stream else length))
        tokens = text(name)
        if policy.stream:
            samples = [(0, 40.0 + len(prompt)), *[(0, 41.0)] * (len(tokens) - 1)]
        else:
            samples = [(0, 70.0), *[(length, 41.0 + length)] * 3, (1, 41.0 + length)]
        return result(
            policy.name, "", name, tokens=tokens, finish="length", forward_samples=tuple(samples)
        )


def never(name: str, prompt: tuple[int, ...], policy: Policy) -> Result:
    raise AssertionError(f"{policy.name} was run for {name}")


def finished(policy: str, prompt: str, **values) -> Result:
    return result(policy, prompt=prompt, **{"tokens": text(prompt), "finish": "length", **values})


# -- what a run knows ---------------------------------------------------------------------------


def test_a_text_is_the_targets_and_of_the_first_repeat() -> None:
    found = texts_of(
        [
            finished("local", "a"),
            finished("pipesd", "a", error="gone"),
            finished("pipesd", "a", tokens=()),
            finished("pipesd", "a", repeat=1),
            finished("vanilla", "b"),
            finished("cloud", "b"),
            finished("hsl", "b"),
        ]
    )
    assert {name: one.policy for name, one in found.items()} == {"b": "cloud"}


def test_a_forward_counts_with_the_token_before_its_drafts() -> None:
    scenarios = {"4g": find_scenario("4g")}
    lengths = {"a": 30}
    streamed = finished("cloud", "a", forward_samples=((0, 80.0), (0, 40.0), (0, 42.0)))
    assert samples_of([streamed], scenarios, lengths) == [(30, 0.08), (1, 0.04), (1, 0.042)]
    drafted = finished("vanilla", "a", forward_samples=((0, 80.0), (6, 46.0), (4, 44.0), (2, 46.0)))
    # The first may hold some of the prompt; drafts of the last may lie behind the end.
    assert samples_of([drafted], scenarios, lengths) == [(7, 0.046), (5, 0.044)]


def test_forwards_that_tell_nothing_certain_do_not_count() -> None:
    scenarios = {
        "4g": find_scenario("4g"),
        "slow": Scenario("slow", forward_floor_s=0.2),
    }
    lengths = {"a": 30, "long": 3_000}
    assert samples_of([finished("vanilla", "a", error="gone")], scenarios, lengths) == []
    assert samples_of([finished("vanilla", "a", timeouts=1)], scenarios, lengths) == []
    assert samples_of([finished("vanilla", "a", resyncs=1)], scenarios, lengths) == []
    assert samples_of([finished("local", "a")], scenarios, lengths) == []
    assert samples_of([result("vanilla", "slow", "a")], scenarios, lengths) == []
    assert samples_of([result("vanilla", "elsewhere", "a")], scenarios, lengths) == []
    # Where all are slow, that is what the run's forwards take.
    slow = {"slow": scenarios["slow"]}
    assert len(samples_of([result("vanilla", "slow", "a")], slow, lengths)) == 1
    # A prompt that is prefilled in pieces: the last one's size is not known.
    streamed = finished("cloud", "long", forward_samples=((0, 80.0), (0, 40.0)))
    assert samples_of([streamed], scenarios, lengths) == [(1, 0.04)]


def test_enough_is_several_numbers_of_tokens_and_a_large_one() -> None:
    assert enough([(1, 0.1)] * 3 + [(5, 0.1)] * 3 + [(9, 0.1)] * 3)
    assert not enough([])
    assert not enough([(1, 0.1)] * 300)
    assert not enough([(1, 0.1)] * 3 + [(5, 0.1)] * 3 + [(9, 0.1)] * 2)
    assert not enough([(1, 0.1)] * 3 + [(4, 0.1)] * 3 + [(5, 0.1)] * 3)


# -- recording ----------------------------------------------------------------------------------


def test_a_rich_run_needs_only_the_draft(tmp_path) -> None:
    results = [finished("cloud", name) for name in PROMPTS]
    samples = [(1, 0.04)] * 3 + [(5, 0.05)] * 3 + [(9, 0.06)] * 3
    both = pair()
    recording = Recording(both, PROMPTS, never, texts=texts_of(results), samples=samples)
    traces = list(recording.traces())
    assert [(one.name, one.prompt, one.tokens) for one in traces] == [
        (name, PROMPTS[name], text(name)) for name in PROMPTS
    ]
    for trace in traces:
        assert trace.forward.entries == ((1, 0.04), (5, 0.05), (9, 0.06))
        assert (trace.draft, trace.target) == (both.draft.name, "target")
        assert 0.3 < trace.agreement <= 1.0
        oracle = sometimes_right(target, VOCAB, 0.8)
        sequence = (*trace.prompt, *trace.tokens)
        for at, drafted in enumerate(trace.drafted):
            known = sequence[: len(trace.prompt) + at]
            assert drafted == oracle(known, at, Sampling())[0], "drafted after the target's text"
    write_traces(tmp_path / "t.jsonl", traces)
    assert read_traces(tmp_path / "t.jsonl") == traces


def test_drafting_times_are_those_of_the_run() -> None:
    """Beside a target that shares the machine a draft takes longer than while it is recorded."""
    results = [finished("cloud", name) for name in PROMPTS]
    samples = [(1, 0.04)] * 3 + [(5, 0.05)] * 3 + [(9, 0.06)] * 3
    recording = Recording(
        pair(), PROMPTS, never, texts=texts_of(results), samples=samples, pace=0.02
    )
    gammas = [seconds for trace in recording.traces() for seconds in trace.gammas]
    assert statistics.median(gammas) == pytest.approx(0.02, rel=1e-3)


def test_missing_texts_are_written_by_the_target_alone() -> None:
    alone = Alone()
    known = {"a": finished("vanilla", "a")}
    samples = samples_of(
        [finished("vanilla", "a", forward_samples=RICH)], {"4g": Scenario("4g")}, {"a": 30}
    )
    traces = list(Recording(pair(), PROMPTS, alone, texts=known, samples=samples).traces())
    assert alone.asked == [("cloud", "b", 0)]
    assert [one.tokens for one in traces] == [text("a"), text("b")]
    table = dict(traces[0].forward.entries)
    # What the prompt took is known from it as well.
    assert table[len(PROMPTS["b"])] == pytest.approx(0.11)
    assert table[3] == pytest.approx(0.043)


def test_the_prompts_forward_is_measured_where_no_target_wrote_alone() -> None:
    alone = Alone()
    known = {name: finished("vanilla", name) for name in PROMPTS}
    samples = [(1, 0.04)] * 3 + [(5, 0.05)] * 3 + [(9, 0.06)] * 3
    traces = list(Recording(pair(), PROMPTS, alone, texts=known, samples=samples).traces())
    assert alone.asked == [("cloud", "b", 0)], "the longest prompt's"
    assert dict(traces[0].forward.entries)[70] == pytest.approx(0.11)


def test_thin_samples_are_filled_up_with_fixed_drafts() -> None:
    alone = Alone()
    known = {name: finished("cloud", name) for name in PROMPTS}
    traces = list(
        Recording(pair(), PROMPTS, alone, texts=known, samples=[(1, 0.041)] * 50).traces()
    )
    assert alone.asked == [("vanilla", "a", length) for length in LENGTHS]
    table = dict(traces[0].forward.entries)
    assert table == {1: 0.041, **{n + 1: pytest.approx((41 + n) / 1000) for n in LENGTHS}}


def test_forwards_are_looked_for_over_a_bounded_number_of_prompts() -> None:
    asked = []

    def barren(name: str, prompt: tuple[int, ...], policy: Policy) -> Result:
        asked.append(name)
        samples = ((0, 40.0), (0, 40.0)) if policy.stream else ()
        return result(policy.name, "", name, tokens=text("a"), forward_samples=samples)

    prompts = {f"p{n}": PROMPTS["a"] for n in range(10)}
    traces = list(Recording(pair(), prompts, barren).traces())
    assert len(traces) == 10
    assert len(asked) == 10 + 3 * len(LENGTHS)
    assert dict(traces[0].forward.entries) == {1: 0.04, 30: 0.04}


def test_nothing_known_as_when_tuning_and_progress_is_told() -> None:
    told: list[tuple[int, int, float]] = []
    now = iter(float(n) for n in range(1_000))
    recording = Recording(
        pair(),
        PROMPTS,
        alone := Alone(),
        report=lambda done, total, what, left: told.append((done, total, left)),
        clock=lambda: next(now),
    )
    assert len(list(recording.traces())) == 2
    assert [policy for policy, _, _ in alone.asked] == ["cloud"] * 2 + ["vanilla"] * len(LENGTHS)
    steps = [done for done, _, _ in told]
    assert steps == sorted(steps)
    assert len({total for _, total, _ in told}) == 1
    assert told[-1][0] == told[-1][1]
    assert told[-1][2] == 0.0
    assert all(left >= 0.0 for _, _, left in told)


@pytest.mark.parametrize(
    ("finish", "size", "wanted"), [("stop", 5, 12), ("length", 12, 12), ("length", 5, 5)]
)
def test_how_a_text_ended_is_recorded(finish, size, wanted) -> None:
    tokens = text("a", size)
    if finish == "stop":
        tokens = (*tokens[:-1], EOS)
    known = {"a": finished("cloud", "a", tokens=tokens, finish=finish)}
    samples = [(1, 0.04)] * 3 + [(5, 0.05)] * 3 + [(9, 0.06)] * 3
    traces: list[Trace] = list(
        Recording(pair(), {"a": PROMPTS["a"]}, never, texts=known, samples=samples).traces()
    )
    assert [(one.tokens, one.max_tokens) for one in traces] == [(tokens, wanted)]


def test_what_fails_ends_the_recording() -> None:
    def gone(name: str, prompt: tuple[int, ...], policy: Policy) -> Result:
        raise TransportError("the broker ended: see --verbose")

    with pytest.raises(TransportError, match="the broker ended"):
        list(Recording(pair(), PROMPTS, gone).traces())
    with pytest.raises(ModelError):
        list(Recording(pair(fail_at=frozenset({3})), PROMPTS, Alone()).traces())
