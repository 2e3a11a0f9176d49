"""``edge-agent bench`` with real models: outlives its broker, and goes on after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from edge_agent.bench.contenders import CONTENDERS, read_constants
from edge_agent.bench.link import Scenario
from edge_agent.bench.recording import MIN_SIZES
from edge_agent.bench.replay import replay_all
from edge_agent.bench.traces import read_traces
from edge_agent.bench.watch import DOWN, DRAFT, FORWARD, UPLINK, VERDICT, Watch
from edge_agent.generation import Request
from edge_agent.scripted_draft import sometimes_right
from tests.commands import Command, Result, still_alive
from tests.system import (
    PROMPT,
    VOCAB,
    Device,
    PacedTarget,
    Replica,
    chooser,
    collect,
    scripted_draft,
)

#: Seconds for loading models and some generations on a busy machine.
PATIENCE = 300.0
SCENARIOS = [
    {"name": "near", "link": {"delay_s": 0.004, "startup_s": 0.001}},
    {
        "name": "slow",
        "link": {"up_bps": 1e6, "delay_s": 0.01, "jitter_s": 0.004},
        "gamma_floor_s": 0.02,
        "forward_floor_s": 0.12,
    },
]
POLICIES = ("pipesd", "vanilla", "cloud", "local")
CELLS = 2 * len(POLICIES) * 2


def flags(folder: Path) -> list[str]:
    path = folder / "scenarios.json"
    path.write_text(json.dumps(SCENARIOS))
    return [
        *("bench", "--scenario-file", str(path), "--policies", ",".join(POLICIES)),
        *("--prompt-count", "2", "--max-tokens", "10", "--threads", "1", "--timeout", "5"),
    ]


def results(path: Path) -> list[dict]:
    """The whole lines of a results file, without its first."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines[1:]]


def check_report(folder: Path, done: Result) -> None:
    assert done.code == 0, done.err
    data = json.loads((folder / "run.json").read_text())
    assert (data["cells_planned"], data["cells_done"]) == (CELLS, CELLS)
    assert data["differences"] == []
    assert "texts: the same in all 12 generations" in done.out
    rows = {(row["scenario"], row["policy"]): row for row in data["summary"]}
    assert len(rows) == 2 * len(POLICIES)
    for (scenario, policy), row in rows.items():
        assert row["pairs"] == 2
        assert row["tpt_ms"] > 0.0
        if policy != "local":
            assert row["speedup_cloud"] > 0.0
            assert row["wire_up_per_token"] > row["payload_up_per_token"] > 0.0
        if scenario == "slow" and policy != "local":
            assert row["forward_ms"] >= 120.0, "the forward's floor"
        if scenario == "slow" and policy != "cloud":
            assert row["gamma_ms"] >= 20.0, "the device's floor"
    assert rows["near", "cloud"]["forwards_per_token"] == 1.0
    assert rows["near", "local"]["forwards_per_token"] == 0.0
    assert rows["near", "pipesd"]["forwards_per_token"] < 1.0
    with_timeline = [cell for cell in data["cells"] if cell["timeline"]]
    assert {cell["policy"] for cell in with_timeline} == set(POLICIES)
    assert (folder / "run.html").read_text().count("<svg") == 2 * 8


@pytest.mark.models
@pytest.mark.slow
def test_a_run_outlives_its_broker_and_is_resumed_after_ctrl_c(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    with Command("edge-agent", *flags(tmp_path), "--out", str(tmp_path / "run")) as command:
        command.until(lambda: len(results(path)) >= 2, PATIENCE)
        children = command.children()
        brokers = [one for one in children if "mosquitto.conf" in one.what or "iotcore" in one.what]
        brokers = brokers or [one for one in children if "embedded_child" in one.what]
        for broker in brokers:
            os.kill(broker.pid, signal.SIGKILL)
        before = len(results(path))
        command.until(
            lambda: sum(one["error"] is None for one in results(path)[before:]) >= 2, PATIENCE
        )
        assert any(one["error"] for one in results(path)), "a cell that failed has a name"
        children |= command.children()
        command.signal(signal.SIGINT)
        stopped = command.wait(PATIENCE)
        assert stopped.code == 130, stopped.err
        assert f"--resume {path}" in stopped.err
        assert still_alive(children) == []
    done = len([one for one in results(path) if one["error"] is None])
    assert done < CELLS

    with Command("edge-agent", *flags(tmp_path), "--resume", str(path)) as command:
        ended = command.wait(PATIENCE)
    check_report(tmp_path, ended)
    assert sum(one["error"] is None for one in results(path)) == CELLS, "nothing is run twice"

    # Everything is there: the reports alone, and no model is loaded for them.
    with Command("edge-agent", *flags(tmp_path), "--resume", str(path), "--json") as command:
        again = command.wait(PATIENCE)
    assert again.code == 0, again.err
    assert again.err == ""
    assert len(json.loads(again.out)["summary"]) == 2 * len(POLICIES)


@pytest.mark.models
@pytest.mark.slow
def test_a_comparison_is_tuned_recorded_and_replayed(tmp_path, monkeypatch) -> None:
    """From prompts to constants to a comparison to a file that replays it, with a real pair."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "near.json").write_text(json.dumps(SCENARIOS[:1]))
    (tmp_path / "others.jsonl").write_text(
        '{"prompt": "Describe a lighthouse.", "id": "lighthouse"}\n'
        '{"prompt": "1, 2, 4, 8,", "id": "powers", "chat": false}\n'
    )
    compared = [
        *("bench", "--scenario-file", "near.json", "--policies", "pipesd,vanilla,cloud"),
        *("--prompt-count", "2", "--max-tokens", "16", "--threads", "1", "--timeout", "20"),
        *("--tune", "grid", "--tune-budget", "4", "--tune-prompts", "others.jsonl"),
    ]
    with Command(
        "edge-agent", *compared, "--out", "run", "--record", "t.jsonl", cwd=tmp_path
    ) as command:
        done = command.wait(PATIENCE)
        assert still_alive(command.children()) == []
    assert done.code == 0, done.err
    data = json.loads((tmp_path / "run.json").read_text())
    assert (data["cells_done"], data["differences"]) == (6, [])
    assert data["tuning"]["prompts"] == ["lighthouse", "powers"]
    constants = read_constants("run.constants.json")
    for policy in ("pipesd", "vanilla"):
        assert data["tuning"]["found"][policy]["near"]["tried"] == 4
        used = data["settings"]["policies"][policy]["all"]
        assert used["thresholds"]["window"] == constants[policy]["near"]["window"]
        assert used["max_ahead"] == constants[policy]["near"]["max_ahead"]

    traces = read_traces("t.jsonl")
    texts = {cell["prompt"]: cell["tokens"] for cell in data["cells"]}
    assert {trace.name: list(trace.tokens) for trace in traces} == texts
    assert len(traces) == 2
    for trace in traces:
        assert trace.max_tokens == 16
        assert 0.2 < trace.agreement <= 1.0
        assert None not in trace.second_right
        assert all(0.0 < seconds < 1.0 for seconds in trace.gammas)
        sizes = [tokens for tokens, _ in trace.forward.entries]
        assert sizes[0] == 1
        assert {len(one.prompt) for one in traces} <= set(sizes), "the prompts' own forwards"
        assert len([size for size in sizes if size <= 17]) >= MIN_SIZES
    near = Scenario.from_dict(SCENARIOS[0])
    for name in ("pipesd", "vanilla", "cloud"):
        results = replay_all(traces, CONTENDERS[name].policy(constants, "near"), near)
        assert [one.tokens for one in results] == [len(trace.tokens) for trace in traces]

    # A finished run can be recorded again, and is not tuned again.
    with Command(
        "edge-agent", *compared, "--resume", "run.jsonl", "--record", "again.jsonl", cwd=tmp_path
    ) as command:
        again = command.wait(PATIENCE)
    assert again.code == 0, again.err
    assert "constants tried" not in again.err
    assert [one.tokens for one in read_traces("again.jsonl")] == [one.tokens for one in traces]
    assert [one.drafted for one in read_traces("again.jsonl")] == [one.drafted for one in traces]


@pytest.mark.models
@pytest.mark.slow
def test_a_broker_that_dies_while_recording_leaves_the_reports(tmp_path) -> None:
    """Nothing but one policy was compared, so recording needs the target again."""
    path, record = tmp_path / "run.jsonl", tmp_path / "t.jsonl"
    (tmp_path / "near.json").write_text(json.dumps(SCENARIOS[:1]))
    wanted = [
        *("bench", "--scenario-file", str(tmp_path / "near.json"), "--policies", "vanilla"),
        *("--prompt-count", "1", "--max-tokens", "200", "--threads", "1", "--timeout", "4"),
    ]
    with Command(
        "edge-agent", *wanted, "--out", str(tmp_path / "run"), "--record", str(record)
    ) as command:
        command.until(lambda: "texts to record: 1" in command.err, PATIENCE)
        children = command.children()
        for child in children:
            if "mosquitto.conf" in child.what or "embedded_child" in child.what:
                os.kill(child.pid, signal.SIGKILL)
        ended = command.wait(PATIENCE)
        assert still_alive(children) == []
    assert ended.code == 3, ended.err
    assert ended.err.splitlines()[-1].startswith("edge-agent: ")
    assert len(results(path)) == 1
    assert (tmp_path / "run.json").exists()
    assert not record.exists()
    assert not list(tmp_path.glob("*.part-*"))


def test_what_is_observed_is_what_happened(url) -> None:
    """Every draft, message and verdict of a generation is heard of, once."""
    watch = Watch()
    draft = scripted_draft(sometimes_right(chooser(), VOCAB, 0.7, 3))
    with Replica(url, PacedTarget(seconds=0.01)), Device(url, draft) as device:
        generation = device.agent.generate(Request(PROMPT, 48), watch)
        tokens = collect(generation)
    stats, traffic = generation.stats, generation.traffic
    spans = watch.timeline(0.0, [], [])
    assert sum(span.lane == DRAFT for span in spans) == stats.drafted
    assert sum(span.count for span in spans if span.lane == VERDICT) == len(tokens)
    assert len(watch.forwards) == stats.forwards
    assert sum(judged for judged, _ in watch.forwards) == stats.judged
    assert 0 < watch.draft_messages < traffic.uplink_messages
    assert 0 < watch.draft_bytes < traffic.uplink_bytes
    assert 0 < watch.kept + watch.dropped <= watch.proactive <= stats.drafted
    assert not any(span.lane in (UPLINK, DOWN, FORWARD) for span in spans)
