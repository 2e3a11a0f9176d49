"""The flags of ``bench --fleet``: what is wrong is one line, before anything is started."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from collections import Counter

import pytest

from broker import load_text
from broker.errors import ConfigError
from broker.messages import VerifierStatus
from edge_agent.bench import fleet_usage
from edge_agent.bench.fleet_command import FleetChoices
from edge_agent.bench.fleet_report import as_json, lines
from edge_agent.bench.fleet_run import Outcome
from edge_agent.bench.fleet_stats import Tally
from edge_agent.bench.fleet_usage import Usage, raise_file_limit, usage_of
from edge_agent.bench.traces import write_traces
from edge_agent.cli import build_parser
from tests.commands import call, error_line
from tests.edge_agent.bench_traces import make_trace


def choices(*flags: str) -> FleetChoices:
    args: argparse.Namespace = build_parser().parse_args(["bench", "--fleet", *flags])
    return FleetChoices(args)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("0", "--fleet 0 is outside 1 to 10000"),
        ("10001", "--fleet 10001"),
        ("5 --minutes 0", "--minutes 0"),
        ("5 --minutes nan", "--minutes nan"),
        ("5 --generations 0", "--generations 0"),
        ("5 --think -1", "--think -1"),
        ("5 --ramp nan", "--ramp nan"),
        ("5 --drain -1", "--drain -1"),
        ("5 --patience 0", "--patience 0"),
        ("5 --forward-ms -1", "--forward-ms -1"),
        ("5 --max-sessions 0", "--max-sessions 0"),
        ("5 --processes -1", "--processes -1"),
        ("5 --max-tokens 0", "at least one token"),
        ("5 --policy fast", "unknown policy 'fast'"),
        ("5 --policy local", "no policy of a fleet"),
        ("5 --policy all", "no policy of a fleet"),
        ("5 --traces missing", "missing cannot be read"),
        ("5 --pair smollm2", "--record FILE and give them with --traces FILE"),
        ("5 --pair smollm2 --target x --traces t", "not both"),
        ("5 --pair smollm2 --scripted-target --traces t", "--scripted-target stands alone"),
        ("5 --broker mqtt://127.0.0.1 --pair smollm2", "leave the target out"),
        ("5 --broker mqtt://127.0.0.1 --scripted-target", "leave the target out"),
        ("5 --out missing/run", "cannot write missing/run.json"),
        ("1901 --broker-kind embedded", "install mosquitto"),
        ("5 --broker nonsense", "broker address"),
    ],
)
def test_wrong_flags_are_one_line(flags, words, tmp_path, monkeypatch, no_settings) -> None:
    monkeypatch.chdir(tmp_path)
    error_line(call("edge-agent", "bench", "--fleet", *flags.split()), 2, words)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_settings(monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIPESD_")]:
        monkeypatch.delenv(name)


def test_what_is_not_said_is_a_minute_with_a_scripted_target() -> None:
    chosen = choices("300")
    assert (chosen.args.minutes, chosen.args.generations) == (1.0, None)
    assert (chosen.real, chosen.ramp_s, chosen.policy.name) == (False, 3.0, "pipesd")
    assert chosen.module_flags() == ["--max-sessions", "300", "--forward-ms", "0.0"]
    assert choices("300", "--generations", "4").args.minutes is None
    assert choices("1", "--processes", "8").processes == 1


def test_a_real_target_gets_its_flags(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    write_traces(path, [make_trace([True])])
    chosen = choices(
        *("5", "--pair", "smollm2", "--traces", str(path), "--dtype", "bfloat16"),
        *("--target-threads", "2", "--forward-floor-ms", "30", "--max-sessions", "9"),
    )
    assert chosen.real
    assert " ".join(chosen.module_flags()) == (
        "--max-sessions 9 --pair smollm2 --dtype bfloat16 --threads 2 --forward-floor-ms 30.0"
    )


def test_the_texts_are_those_that_the_verifier_can_write(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    write_traces(path, [make_trace([True, False, True]), make_trace([False])])
    scripted = VerifierStatus(True, vocab_hash=load_text.VOCAB_HASH, context=1 << 17)
    real = VerifierStatus(True, vocab_hash="abc", context=2048)
    texts, said = choices("5", "--max-tokens", "9").texts(scripted)
    assert all(text.max_tokens == 9 for text in texts)
    assert "no model speaks here" in said
    assert "seed 0" in said
    recorded = choices("5", "--traces", str(path))
    texts, said = recorded.texts(scripted)
    assert [text.agrees for text in texts] == [(True, False, True), (False,)]
    assert "made up for a scripted target" in said
    texts, said = recorded.texts(real)
    assert texts == recorded.recorded
    assert "replayed as they are" in said
    with pytest.raises(ConfigError, match="--traces"):
        choices("5").texts(real)


# ---- files and use --------------------------------------------------------------------------


def test_too_few_files_is_an_error_that_says_how_to_have_more(monkeypatch) -> None:
    set_to: list = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: set_to.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1_024, 4_096))
    raise_file_limit(1_000, "--fleet 900")
    assert set_to == [], "enough already"
    raise_file_limit(4_096, "--fleet 4000")
    assert set_to == [(4_096, 4_096)]
    with pytest.raises(ConfigError, match=r"--fleet 5000 needs 5064 .* 4096: .*ulimit -Hn 5064"):
        raise_file_limit(5_064, "--fleet 5000")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1_024, resource.RLIM_INFINITY))
    raise_file_limit(5_064, "--fleet 5000")
    assert set_to[1:] == [(5_064, resource.RLIM_INFINITY)]


def test_what_children_use_is_read_while_they_live() -> None:
    mark = "fleet-usage-test"
    code = "import sys; x = sum(range(2_000_000)); print('up', flush=True); sys.stdin.read()"
    assert usage_of((mark,)) is None
    child = subprocess.Popen(
        [sys.executable, "-c", code, mark], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        used = usage_of((mark,))
    finally:
        child.communicate()
    assert used is not None
    assert used.peak_bytes > 1_000_000
    assert 0.0 < used.cpu_s < 60.0
    assert usage_of((mark,)) is None


def test_a_system_without_proc_tells_nothing(tmp_path) -> None:
    assert usage_of(("x",), proc=tmp_path / "none") is None
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "stat").write_text("17 (odd) S")
    assert fleet_usage.usage_of(("x",), proc=tmp_path, root=17) is None


# ---- the report -----------------------------------------------------------------------------


def outcome() -> Outcome:
    tally = Tally()
    tally.counts = Counter(
        generations=4, tokens=100, forwards=30, drafted=150, judged=80, accepted=60, timeouts=2,
        messages_up=50, messages_down=40, bytes_up=900, refusals=3,
    )  # fmt: skip
    for histogram in (tally.tpt, tally.ttft, tally.rounds, tally.late):
        histogram.add(0.010)
    return Outcome(tally, 20.0, 1.5, 3, 2.0, 5_000_000)


SETTINGS = {
    "devices": 3, "processes": 1, "policy": "pipesd", "verifier": "scripted text", "texts": "some"
}  # fmt: skip


def test_the_report_says_what_was_counted() -> None:
    counters = {
        "forwards": 20, "batch_sessions": 30, "batch_tokens": 90, "committed": 100,
        "sessions_left": 0,
    }  # fmt: skip
    usage = {"verifier": Usage(1.0, 2_000_000), "broker": None}
    data = as_json(outcome(), SETTINGS, counters=counters, usage=usage)
    assert data["tokens_per_s"] == 5.0
    assert data["messages_per_s"] == 4.5
    assert data["verdicts_per_token"] == 0.3
    assert data["accepted"] == 0.75
    assert data["batch"] == {
        "forwards": 20, "sessions": 1.5, "tokens": 4.5, "forwards_per_token": 0.2
    }  # fmt: skip
    assert data["tpt_ms"]["p50"] == pytest.approx(10.0, rel=0.011)
    text = "\n".join(lines(data))
    for words in ("4 texts complete and exact, 0 wrong", "3 refusals", "timeouts 2", "unknown"):
        assert words in text
    assert "late: the times" not in text


def test_a_report_of_nothing_and_of_a_late_loop() -> None:
    empty = as_json(Outcome(), SETTINGS, counters=None, usage={})
    assert empty["tokens_per_s"] is None
    text = "\n".join(lines(empty))
    assert "this verifier does not tell" in text
    assert "nothing lost" in text
    late = outcome()
    late.tally.late.add(0.5)
    assert "the emulation itself was late" in "\n".join(
        lines(as_json(late, SETTINGS, counters=None, usage={}))
    )
