"""The tuning tries each policy's grid, finds its best, and writes what the benchmark reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from broker.errors import ConfigError
from edge_agent.bench import grids
from edge_agent.bench.contenders import CONTENDERS, read_constants
from edge_agent.bench.grids import candidates
from edge_agent.bench.link import Scenario, find_scenario
from edge_agent.bench.replay import replay_all
from edge_agent.bench.traces import write_traces
from edge_agent.bench.tuning import TUNED, main, measure, tune
from tests.edge_agent.bench_traces import make_trace, random_trace

TRACES = [random_trace(seed) for seed in range(3)]
SMALL = {
    "vanilla": {"window": (1, 4, 8)},
    "hsl": {"r2": (0.2, 0.7)},
    "edgellm": {"r1": (0.1, 0.5)},
    "pipesd": {"r1": (0.0, 0.2, 0.5), "r2": (0.0, 0.3, 0.6), "min_survival": (0.05, 0.3)},
}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(grids, "GRIDS", SMALL)


def test_the_best_is_the_least_of_all_rows(small) -> None:
    scenarios = [find_scenario("wifi"), find_scenario("far")]
    found = tune(TRACES, TUNED, scenarios)
    assert len(found.rows) == 2 * sum(len(list(candidates(name))) for name in TUNED)
    for name in TUNED:
        for scenario in scenarios:
            own = [r for r in found.rows if (r.policy, r.scenario) == (name, scenario.name)]
            policy = CONTENDERS[name].policy(found.best, scenario.name)
            results = replay_all(TRACES, policy, scenario)
            seconds = sum(result.seconds for result in results)
            tpt = seconds / sum(result.tokens for result in results)
            assert tpt == min(row.tpt_s for row in own)


def test_a_longer_draft_is_best_where_the_way_is_long() -> None:
    traces = [make_trace([True] * 60)]
    near, far = Scenario("near"), find_scenario("far")
    found = tune(traces, ["vanilla"], [near, far])
    assert found.best["vanilla"]["far"]["window"] >= 20
    wrong = tune([make_trace([False] * 60)], ["vanilla"], [near])
    assert wrong.best["vanilla"]["near"]["window"] == 1


def test_processes_find_what_one_finds(small) -> None:
    # The workers import the module anew and have the whole grid: only what is tried is passed on.
    scenarios = [find_scenario("wifi")]
    seen: list[tuple[int, int]] = []
    alone = tune(TRACES, ["vanilla", "pipesd"], scenarios)
    both = tune(
        TRACES,
        ["vanilla", "pipesd"],
        scenarios,
        processes=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert alone == both
    assert seen == [(n, len(alone.rows)) for n in range(1, len(alone.rows) + 1)]


def test_workers_end_with_their_killed_owner(files) -> None:
    traces, out, _ = files
    command = [sys.executable, "-m", "edge_agent.bench.tuning", traces, "--out", out]
    owner = subprocess.Popen([*command, "--processes", "2"], stderr=subprocess.PIPE, text=True)
    try:
        assert owner.stderr is not None
        assert "tried" in owner.stderr.readline()  # the workers are at work
        workers = psutil.Process(owner.pid).children(recursive=True)
    finally:
        owner.kill()
        owner.wait(30.0)
        assert owner.stderr is not None
        owner.stderr.close()
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, 30.0)
    assert not alive


def test_a_share_of_each_grid_is_the_same_for_one_process_and_many() -> None:
    scenarios = [find_scenario("wifi"), find_scenario("far")]
    names = ["vanilla", "pipesd", "cloud"]
    seen: list[tuple[int, int]] = []
    alone = tune(TRACES, names, scenarios, budget=10)
    both = tune(
        TRACES,
        names,
        scenarios,
        budget=10,
        processes=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert alone == both
    counts = [sum(row.policy == name for row in alone.rows) for name in names]
    assert counts == [20, 20, 2]
    assert seen == [(n, 42) for n in range(1, 43)]
    for name in ("vanilla", "pipesd"):
        for scenario in scenarios:
            own = [r for r in alone.rows if (r.policy, r.scenario) == (name, scenario.name)]
            defaults = measure(TRACES, name, scenario, {})
            assert min(row.tpt_s for row in own) <= defaults.tpt_s, "never worse than untuned"


def test_what_is_known_is_not_tuned() -> None:
    scenarios = [find_scenario("wifi"), find_scenario("far")]
    found = tune(TRACES, ["vanilla", "hsl"], scenarios, budget=3, known={"hsl": {"far": {}}})
    assert {name: set(one) for name, one in found.best.items()} == {
        "vanilla": {"wifi", "far"},
        "hsl": {"wifi"},
    }


def test_an_interrupt_ends_the_workers_without_a_word(files) -> None:
    """Ctrl-C reaches the whole group; it is the owner that ends the others."""
    traces, out, _ = files
    command = [sys.executable, "-m", "edge_agent.bench.tuning", traces, "--out", out]
    owner = subprocess.Popen(
        [*command, "--processes", "2"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert owner.stderr is not None
        assert "tried" in owner.stderr.readline()
        workers = psutil.Process(owner.pid).children(recursive=True)
        os.killpg(owner.pid, signal.SIGINT)
        rest = owner.stderr.read()
        assert owner.wait(30.0) == 130
    finally:
        owner.kill()
        owner.wait(30.0)
        assert owner.stderr is not None
        owner.stderr.close()
    assert "Traceback" not in rest
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, 30.0)
    assert not alive


def test_a_row_counts_per_token() -> None:
    row = measure([make_trace([True] * 15)], "vanilla", Scenario("nothing"), {"window": 4})
    assert row.constants == {"window": 4}
    assert 0.0 < row.forwards < 1.0
    assert row.bytes_up > 1.0
    assert row.drafted <= 1.0


@pytest.mark.parametrize(
    ("traces", "options"),
    [
        ([], {}),
        (TRACES, {"processes": 0}),
        (TRACES, {"processes": 10_000}),
        (TRACES, {"budget": 0}),
        (TRACES, {"budget": 1_000_000}),
    ],
)
def test_impossible_wishes_are_refused(traces, options) -> None:
    with pytest.raises(ConfigError):
        tune(traces, ["vanilla"], [find_scenario("wifi")], **options)


# -- the command --------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    path = tmp_path / "t.jsonl"
    write_traces(path, TRACES)
    return str(path), str(tmp_path / "best.json"), str(tmp_path / "table.json")


def test_the_command_writes_what_the_benchmark_reads(small, files, capsys) -> None:
    traces, out, table = files
    assert main([traces, "--out", out, "--table", table, "--scenarios", "wifi,4g"]) == 0
    found = read_constants(out)
    assert set(found) == set(TUNED)
    for name, scenarios in found.items():
        assert set(scenarios) == {"wifi", "4g"}
        for constants in scenarios.values():
            thresholds, rest = ("r1", "r2", "window"), ("min_survival", "max_ahead", "ask_again")
            assert set(constants) == {*thresholds, *rest}
            assert CONTENDERS[name].policy(found, "wifi")
    rows = json.loads(Path(table).read_text(encoding="utf-8"))
    assert len(rows) == 2 * sum(len(list(candidates(name))) for name in TUNED)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * len(TUNED)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--policies", "fast"], "unknown policy 'fast'"),
        (["--scenarios", "moon"], "unknown scenario 'moon'"),
        (["--processes", "0"], "0 processes"),
        (["--nice", "-5"], "--nice -5"),
        (["--table", "/nowhere/t.json"], "/nowhere/t.json cannot be written"),
    ],
)
def test_wrong_flags_are_one_line(small, files, capsys, argv, words) -> None:
    traces, out, _ = files
    assert main([traces, "--out", out, *argv]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_an_output_that_cannot_be_written_is_said_before_the_work(files, capsys) -> None:
    assert main([files[0], "--out", "/nowhere/best.json"]) == 2
    assert "/nowhere/best.json cannot be written" in capsys.readouterr().err


def test_a_failed_run_leaves_the_old_constants(small, files, capsys) -> None:
    traces, out, _ = files
    assert main([traces, "--out", out, "--scenarios", "wifi"]) == 0
    before = read_constants(out)
    assert main([traces, "--out", out, "--processes", "0"]) == 2
    assert read_constants(out) == before
