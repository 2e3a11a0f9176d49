"""The flags of ``edge-agent bench``: what is wrong is said before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_agent.bench.cells import Cell, ResultsFile
from edge_agent.bench.link import SCENARIOS
from edge_agent.cli import build_parser
from tests.commands import call, error_line
from tests.edge_agent.bench_results import result, settings


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A run leaves its files where it is called."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--policies pipesd,fast", "unknown policy 'fast'"),
        ("--policies ,", "no policy"),
        ("--scenarios 4g,5g", "unknown scenario '5g'"),
        ("--scenarios 4g,4g", "'4g' comes twice"),
        ("--scenario-file missing", "cannot read --scenario-file missing"),
        ("--prompts missing", "cannot read --prompts missing"),
        ("--prompt-count 0", "--prompt-count 0 is below 1"),
        ("--raw", "--raw goes with --prompts"),
        ("--constants missing", "cannot read --constants missing"),
        ("--repeats 0", "--repeats 0"),
        ("--repeats 1001", "--repeats 1001"),
        ("--max-tokens 0", "at least one"),
        ("--temperature -1", "0 is greedy"),
        ("--max-minutes 0", "--max-minutes 0"),
        ("--max-minutes nan", "--max-minutes nan"),
        ("--timeout 0", "--timeout 0"),
        ("--threads 0", "--threads 0 is below 1"),
        ("--target-threads 0", "--target-threads 0 is below 1"),
        ("--gamma-floor-ms -1", "--gamma-floor-ms -1"),
        ("--forward-floor-ms nan", "--forward-floor-ms nan"),
        ("--draft a.gguf", "give --draft and --target"),
        ("--pair smollm2 --target b", "give --draft and --target"),
        ("--wire morse", "invalid choice: 'morse'"),
        ("--out missing/run", "cannot write missing/run.json"),
        ("--resume missing.jsonl", "cannot read --resume missing.jsonl"),
        ("--report-only", "--report-only without --resume"),
    ],
)
def test_wrong_flags_are_one_line(flags, words, elsewhere) -> None:
    error_line(call("edge-agent", "bench", *flags.split()), 2, words)
    assert list(elsewhere.iterdir()) == [], "nothing is left of a run that never began"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON"),
        ("{}", "no list"),
        ("[]", "no list"),
        ("[3]", "no table"),
        ('[{"link": {}}]', "name is missing"),
        ('[{"name": "x", "link": {"delay": 1}}]', "unknown setting 'delay'"),
        ('[{"name": "x", "link": {"delay_s": -1}}]', "delay_s"),
        ('[{"name": "4g"}]', "'4g' comes twice"),
    ],
)
def test_wrong_scenario_files_are_one_line(text, words, elsewhere) -> None:
    (elsewhere / "own.json").write_text(text)
    flags = ["--scenario-file", "own.json", "--scenarios", "4g"]
    error_line(call("edge-agent", "bench", *flags), 2, words)


def test_constants_for_a_scenario_that_there_is_not(elsewhere) -> None:
    (elsewhere / "c.json").write_text('{"hsl": {"5g": {"r2": 0.5}}}')
    error_line(call("edge-agent", "bench", "--constants", "c.json"), 2, "'5g'", "hsl")


def chosen(*flags: str):
    from edge_agent.bench.choices import Choices

    return Choices(build_parser().parse_args(["bench", *flags]))


def test_floors_and_wire_hold_in_every_scenario() -> None:
    choices = chosen(
        *("--scenarios", "4g,slow-edge", "--wire", "full-probs"),
        *("--gamma-floor-ms", "12", "--forward-floor-ms", "80"),
    )
    near, slow = choices.scenarios["4g"], choices.scenarios["slow-edge"]
    assert near.gamma_floor_s == pytest.approx(0.012)
    assert slow.gamma_floor_s == SCENARIOS["slow-edge"].gamma_floor_s
    assert {one.forward_floor_s for one in (near, slow)} == {0.08}
    assert {one.wire for one in (near, slow)} == {"full-probs"}
    assert choices.settings.scenarios["4g"]["wire"] == "full-probs"


def test_quick_is_small_and_gives_way_to_what_is_said() -> None:
    quick, full = chosen("--quick"), chosen()
    assert len(quick.cells) <= 60 < len(full.cells)
    assert quick.settings.max_tokens == 32
    assert quick.limit_s < 180.0
    own = chosen("--quick", "--policies", "hsl", "--scenarios", "far", "--prompt-count", "5")
    assert len(own.cells) == 5
    assert chosen("--quick", "--max-tokens", "9").settings.max_tokens == 9


def test_everything_that_results_depend_on_is_in_the_settings() -> None:
    base = chosen().settings
    assert base.difference(chosen().settings.to_dict()) is None
    assert base.difference(json.loads(json.dumps(base.to_dict()))) is None
    for flags in (
        ("--policies", "hsl"),
        ("--scenarios", "far"),
        ("--prompt-count", "3"),
        ("--repeats", "2"),
        ("--max-tokens", "5"),
        ("--temperature", "0.5"),
        ("--seed", "1"),
        ("--dtype", "bfloat16"),
        ("--pair", "gemma3"),
        ("--draft-quant", "q2_k"),
        ("--threads", "7"),
        ("--target-threads", "7"),
        ("--verify", "eager"),
        ("--wire", "full-probs"),
        ("--gamma-floor-ms", "500"),
        ("--forward-floor-ms", "500"),
    ):
        assert base.difference(chosen(*flags).settings.to_dict()) is not None, flags
    for flags in (("--max-minutes", "3"), ("--timeout", "3"), ("--json",)):
        assert base.difference(chosen(*flags).settings.to_dict()) is None, flags


def recorded(path: Path, *, dtype: str = "float32", **other) -> None:
    file = ResultsFile.create(path, settings(dtype=dtype), {}, started="then")
    for policy in ("pipesd", "vanilla", "cloud"):
        for prompt in ("a", "b"):
            file.add(result(policy, prompt=prompt, **(other if policy == "cloud" else {})))
    file.close()


def test_reports_can_be_written_again_without_models(elsewhere) -> None:
    recorded(elsewhere / "run.jsonl")
    done = call("edge-agent", "bench", "--resume", "run.jsonl", "--report-only")
    assert (done.code, done.err) == (0, "")
    assert "the same in all 6 generations" in done.out
    data = json.loads((elsewhere / "run.json").read_text())
    assert (data["cells_planned"], data["cells_done"]) == (6, 6)
    assert (elsewhere / "run.html").read_text().startswith("<!DOCTYPE html>")
    as_json = call("edge-agent", "bench", "--resume", "run.jsonl", "--report-only", "--json")
    assert len(json.loads(as_json.out)["summary"]) == 3


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_another_text_is_an_error_where_it_must_be_exact(dtype, code, elsewhere) -> None:
    recorded(elsewhere / "run.jsonl", dtype=dtype, tokens=(1, 2, 3))
    done = call("edge-agent", "bench", "--resume", "run.jsonl", "--report-only")
    assert done.code == code
    assert "texts: 2 of 6 generations differ" in done.out
    assert "prompt a: pipesd in 4g and cloud in 4g differ from token 0 on" in done.out


def test_a_failed_cell_is_named_and_an_error(elsewhere) -> None:
    recorded(elsewhere / "run.jsonl", error="the broker ended", tokens=())
    done = call("edge-agent", "bench", "--resume", "run.jsonl", "--report-only")
    assert done.code == 1
    assert "failed: cloud in 4g, prompt a: the broker ended" in done.err
    assert ResultsFile.resume(elsewhere / "run.jsonl", None).done(Cell("pipesd", "4g", "a", 0))


def test_a_run_with_other_settings_is_refused(elsewhere) -> None:
    recorded(elsewhere / "run.jsonl")
    before = (elsewhere / "run.jsonl").read_bytes()
    line = error_line(call("edge-agent", "bench", "--resume", "run.jsonl"), 2, "run.jsonl")
    assert "was" in line or "were" in line
    assert (elsewhere / "run.jsonl").read_bytes() == before
