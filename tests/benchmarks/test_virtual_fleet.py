"""The virtual fleet, ``capacity`` and ``throughput`` on made-up texts: no models, no waiting."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import _forward_times, _virtual, capacity, throughput
from benchmarks._forward_times import ForwardTimes
from broker.errors import ConfigError, LocalProtocolError
from cloud_verifier.engine.scripted_target import ScriptedTarget
from cloud_verifier.engine.target import Work
from edge_agent.bench.forward_table import ForwardTable
from edge_agent.core.policies import cloud, pipesd
from tests.edge_agent.bench_traces import EOS, VOCAB, make_trace

#: Drafts that are right five times in six, and a forward whose tokens cost something.
TEXTS = [
    make_trace([(i + shift) % 6 != 5 for i in range(40)], name=f"text {shift}", prompt=(shift + 1,))
    for shift in range(4)
]
TIMES = ForwardTimes(ForwardTable(((1, 0.040), (4, 0.041), (100, 0.137))), 0.001, 0.0)


def seen(policy, devices: int, verify: str = "triggered", **changes) -> _virtual.Seen:
    scene = _virtual.Scene(TEXTS, policy, devices, verify=verify, **changes)
    engine = _virtual.TableEngine(TEXTS, TIMES.seconds)
    return _virtual.run(scene, engine, warm_s=2.0, measured_s=6.0)


def scripted_target(slots: int) -> ScriptedTarget:
    texts = {trace.prompt: trace.tokens for trace in TEXTS}

    def script(sequence) -> int:
        text = texts[tuple(sequence[:1])]
        return text[min(len(sequence) - 1, len(text) - 1)]

    return ScriptedTarget(script=script, vocab_size=VOCAB, eos_ids=(EOS,), max_slots=slots)


# ---- the virtual fleet ------------------------------------------------------------------------


def test_a_lone_session_of_the_target_alone_takes_its_forwards() -> None:
    lone = seen(cloud(), 1)
    assert lone.tpt_s == pytest.approx(0.040, rel=0.05)
    assert lone.per_verdict("committed") == 1.0
    assert lone.per_forward("batch_sessions") == pytest.approx(1.0)
    assert lone.tokens_per_s == pytest.approx(25.0, rel=0.08)


def test_sessions_share_forwards_and_drafts_save_them() -> None:
    lone, many, drafted = seen(cloud(), 1), seen(cloud(), 8), seen(pipesd(), 8)
    assert many.per_forward("batch_sessions") > 7.0
    assert many.tokens_per_s > 5.0 * lone.tokens_per_s
    assert many.tpt_s > lone.tpt_s
    assert drafted.tpt_s < many.tpt_s
    assert drafted.per_verdict("committed") > 2.0


def test_a_run_is_the_same_each_time() -> None:
    one, other = seen(pipesd(), 3), seen(pipesd(), 3)
    assert (one.tpt_s, one.stats.batch_tokens) == (other.tpt_s, other.stats.batch_tokens)
    assert one.tpt_s != seen(pipesd(), 3, seed=1).tpt_s


def test_drafts_at_hand_fill_every_forward() -> None:
    scene = throughput.scene_of(TEXTS, 6, throughput.AT_HAND)
    engine = _virtual.TableEngine(TEXTS, TIMES.seconds)
    full = _virtual.run(scene, engine, warm_s=2.0, measured_s=4.0)
    assert full.per_forward("batch_sessions") > 5.9


def test_a_text_that_was_not_recorded_so_is_an_error_unless_allowed() -> None:
    wrong = [replace(trace, tokens=(5, *trace.tokens[1:])) for trace in TEXTS]
    scene = _virtual.Scene(TEXTS, pipesd(), 2)
    engine = _virtual.TableEngine(wrong, TIMES.seconds)
    with pytest.raises(LocalProtocolError, match="texts were wrong"):
        _virtual.run(scene, engine, warm_s=1.0, measured_s=5.0)
    allowed = _virtual.run(scene, engine, warm_s=1.0, measured_s=5.0, exact=False)
    assert allowed.tally.counts["wrong"] > 0


def test_progress_is_heard_to_the_end() -> None:
    heard: list[float] = []
    scene = _virtual.Scene(TEXTS, cloud(), 1)
    engine = _virtual.TableEngine(TEXTS, TIMES.seconds)
    _virtual.run(scene, engine, warm_s=1.0, measured_s=5.0, progress=heard.append)
    assert heard == sorted(heard)
    assert 0.8 < heard[-1] <= 1.0


# ---- capacity ---------------------------------------------------------------------------------


@pytest.mark.parametrize("carried", [0, 1, 2, 3, 4, 7, 8, 13, 29, 30])
def test_the_most_that_is_carried_is_found(carried: int) -> None:
    asked: list[int] = []

    def tried(sessions: int) -> bool:
        asked.append(sessions)
        return sessions <= carried

    assert capacity.most(tried, limit=30) == carried
    assert len(asked) < 12
    assert max(asked) <= 30


def test_more_sessions_are_carried_with_drafts_where_tokens_are_cheap() -> None:
    flat = ForwardTimes(ForwardTable(((1, 0.040),)), 0.015, 0.0)
    bench = capacity.Bench(TEXTS, flat, 0.002, least_s=3.0)
    assert bench.capacity("cloud") == 2
    assert bench.capacity("auto") >= 2 * bench.capacity("cloud")


def test_the_table_is_kept_and_read(tmp_path) -> None:
    path = tmp_path / "times.json"
    capacity.save_times(path, TIMES)
    assert capacity.load_times(path) == TIMES
    path.write_text('{"alone": [[1, "x"]]}')
    with pytest.raises(ConfigError, match="no table of forward times"):
        capacity.load_times(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        capacity.save_times(tmp_path / "none" / "times.json", TIMES)


def test_forward_times_are_of_tokens_and_sessions() -> None:
    alone = {(1, n): 0.030 + 0.001 * n for n in _forward_times.ALONE}
    beside = {(n, k): 0.030 + 0.001 * n * k + 0.002 * (n - 1) for n, k in _forward_times.BESIDE}
    times = _forward_times.table_of(alone | beside)
    assert times.per_session == pytest.approx(0.002)
    assert times.off < 1e-6
    assert times.seconds(4, 20) == pytest.approx(0.056)


def test_forwards_are_timed_in_turns() -> None:
    target = scripted_target(_forward_times.MOST_SESSIONS)
    ran: list[list[Work]] = []
    target.forward = ran.append  # type: ignore[method-assign, assignment]
    times = _forward_times.measure(target, 1)
    assert times.seconds(1, 1) >= 0.0
    cases = len(_forward_times.ALONE) + len(_forward_times.BESIDE)
    assert len(ran) == _forward_times.MOST_SESSIONS + 2 * cases
    assert {len(batch) for batch in ran} == {1, 2, 4, 8, 16}


# ---- throughput -------------------------------------------------------------------------------


def test_packed_forwards_are_repeated_one_by_one_beside_a_plain_one() -> None:
    sizes: list[int] = []
    plain = SimpleNamespace(seconds=lambda tokens: sizes.append(tokens) or 0.001)
    target = scripted_target(4)
    turns = throughput.Turns(target, plain)
    real = turns.run
    # A forward of the scripted target takes no time, in which a virtual clock would not get on.
    turns.run = lambda forward: (real(forward)[0], 0.020)  # type: ignore[method-assign]
    scene = throughput.scene_of(TEXTS, 4, throughput.IN_TIME)
    memory = target.block_tokens, target.total_blocks
    scene = replace(scene, context=target.context, memory=memory)
    row = throughput.batched(turns, scene, 4.0, "test")
    assert row["works"] > 50
    assert row["works_not_as_alone"] == 0
    assert row["texts_not_as_recorded"] == 0
    assert row["speedup"] > 0.0
    assert len(sizes) > 10
    assert min(sizes) >= 1


def test_a_target_that_chooses_otherwise_in_company_is_seen(monkeypatch) -> None:
    class Fickle:
        def forward(self, batch):
            return [[len(batch)]] * len(batch)

    monkeypatch.setattr(throughput, "works_of", lambda forward: forward)
    works = [SimpleNamespace(tokens=(1,), choices=1)] * 2
    turns = throughput.Turns(Fickle(), None)
    for _ in range(2):
        turns.run(works)
    assert (turns.works, turns.differing) == (2, 2)


@pytest.mark.parametrize("text", ["0", "8,x", "-1", "65"])
def test_numbers_of_sessions_are_checked(text: str, capsys) -> None:
    assert throughput.main(["--sessions", text]) == ConfigError.exit_code
    assert "give numbers from 1 to 64" in capsys.readouterr().err


def test_the_reports_can_be_printed(capsys) -> None:
    row = {
        "sessions": 8, "drafts": "at hand", "tokens_per_s": 100.0, "tokens_per_s_one_by_one": 20.0,
        "speedup": 5.0, "plain": 1.5, "sessions_per_forward": 8.0, "tokens_per_forward": 40.0,
        "forward_ms": 90.0, "judged_per_verdict": 3.0, "committed_per_verdict": 3.0,
        "works_not_as_alone": 0, "works": 10,
    }  # fmt: skip
    text = "\n".join(throughput._lines([row], None))
    assert "5.00 times (mark 4: met)" in text
    assert "1.50 of a plain forward (mark 1.2: MISSED)" in text
    bench = capacity.Bench(TEXTS, TIMES, 0.002, least_s=3.0)
    sizes = {"1": {"tpt_ms": 1.0, "tokens_per_s": 2.0, "target_tokens_per_token": 1.0}}
    data = {
        "pair": "p", "dtype": "float32", "engine": "torch", "threads": 2, "delay_ms": 2.0,
        "base_tpt_ms": 1e3 * bench.base_s,
        "times": {"alone_ms": [[1, 40.0]], "per_session_ms": 1.0, "off": 0.01},
        "modes": {"cloud": {"carried": 4, "sizes": sizes}, "auto": {"carried": 9, "sizes": sizes}},
        "ratios": {"cloud": 1.0, "auto": 2.25}, "check": None,
    }  # fmt: skip
    assert "auto: 9 sessions carried, 2.25 times the target alone (mark 2: met)" in "\n".join(
        capacity.lines_of(json.loads(json.dumps(data)))
    )
