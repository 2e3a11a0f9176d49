"""``edge-agent bench`` from its flags to its files, with scripted models in place of real ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.command import Stopped
from broker.errors import TransportError
from edge_agent.bench import command
from edge_agent.bench.cells import Cell, Result
from edge_agent.bench.choices import Choices
from edge_agent.bench.recording import Pair
from edge_agent.bench.traces import read_traces
from edge_agent.core.policies import Policy
from edge_agent.scripted_draft import ScriptedDraftModel, sometimes_right
from tests.commands import call, error_line
from tests.edge_agent.bench_results import result

VOCAB, EOS = 1_000, 7
FLAGS = (
    *("bench", "--policies", "pipesd,vanilla,cloud", "--scenarios", "wifi,4g"),
    *("--prompt-count", "2", "--max-tokens", "12", "--out", "run"),
)
TUNE = ("--tune", "grid", "--tune-budget", "5")
CELLS = 3 * 2 * 2


def text(name: str) -> tuple[int, ...]:
    return tuple(100 + 10 * (sum(map(ord, name)) % 80) + n for n in range(12))


class Scripted:
    """Stands in for ``Machines`` and its ``Runner``. ``fail``: raised by the n-th ``alone``."""

    def __init__(self, chosen: Choices, load: Any, note: Any) -> None:
        self.chosen = chosen
        self.prompts = self.encode(chosen.prompts)
        oracle = sometimes_right(lambda *_: 5, VOCAB, 0.8)
        draft = ScriptedDraftModel(oracle, VOCAB, eos_ids=[EOS])
        self.pair = Pair(draft, "target", chosen.sampling, chosen.args.max_tokens)
        self.runner = self
        self.ran: list[Cell] = []
        self.asked: list[tuple[str, str]] = []
        self.constants: Any = None
        self.fail: dict[int, BaseException] = {}
        self.fail_cell: dict[int, BaseException] = {}

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def encode(self, prompts: Any) -> dict[str, tuple[int, ...]]:
        return {prompt.name: tuple(range(1, 30)) for prompt in prompts}

    def use(self, constants: Any) -> None:
        self.constants = constants

    def alone(self, name: str, prompt: tuple[int, ...], policy: Policy) -> Result:
        self.asked.append((policy.name, name))
        if len(self.asked) in self.fail:
            raise self.fail[len(self.asked)]
        length = 0 if policy.stream else policy.thresholds.window
        samples = ((0, 60.0), *[(length, 40.0 + length)] * 4, (1, 41.0))
        return result(policy.name, "", name, tokens=text(name), forward_samples=samples)

    def run(self, cell: Cell, at_s: float) -> Result:
        self.ran.append(cell)
        if len(self.ran) in self.fail_cell:
            raise self.fail_cell[len(self.ran)]
        samples = ((0, 60.0), *[(len(self.ran) % 10, 40.0 + len(self.ran) % 10)] * 4, (1, 41.0))
        return result(*cell[:3], tokens=text(cell.prompt), forward_samples=samples)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def made(monkeypatch) -> Iterator[SimpleNamespace]:
    """The stand-ins made, latest last; ``fail`` and ``fail_cell`` are given to the next ones."""
    told = SimpleNamespace(all=[], fail={}, fail_cell={})

    def make(*arguments: Any) -> Scripted:
        told.all.append(Scripted(*arguments))
        told.all[-1].fail, told.all[-1].fail_cell = told.fail, told.fail_cell
        return told.all[-1]

    monkeypatch.setattr(command, "Machines", make)
    # One process: the search itself is tested elsewhere.
    monkeypatch.setattr("edge_agent.bench.tuned.usable_cores", lambda: 1)
    return told


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


REPORTS = ["run.html", "run.json", "run.jsonl"]

# -- recording ----------------------------------------------------------------------------------


def test_a_run_is_recorded_after_its_reports(made, elsewhere) -> None:
    done = call("edge-agent", *FLAGS, "--record", "t.jsonl")
    assert done.code == 0, done.err
    assert names(elsewhere) == sorted([*REPORTS, "t.jsonl"])
    traces = read_traces("t.jsonl")
    assert [(one.name, one.tokens) for one in traces] == [
        (name, text(name)) for name in ("tides", "primes")
    ]
    assert made.all[-1].asked == [], "the run knew everything"
    assert len(traces[0].forward.entries) > 3
    assert "recorded: t.jsonl" in done.err


def test_what_is_recorded_is_replaced_and_an_old_run_can_be_recorded(made, elsewhere) -> None:
    assert call("edge-agent", *FLAGS).code == 0
    (elsewhere / "t.jsonl").write_text("old")
    done = call("edge-agent", *FLAGS, "--resume", "run.jsonl", "--record", "t.jsonl")
    assert done.code == 0, done.err
    assert len(read_traces("t.jsonl")) == 2
    assert made.all[-1].ran == []


@pytest.mark.parametrize(
    ("error", "code"), [(TransportError("the broker ended: see --verbose"), 3), (Stopped(), 130)]
)
def test_what_ends_the_recording_leaves_reports_and_the_old_file(
    error, code, made, elsewhere
) -> None:
    (elsewhere / "t.jsonl").write_text("old")
    made.fail[1] = error
    # Without the target alone one generation is left to be run.
    flags = [*FLAGS, "--record", "t.jsonl", "--policies", "vanilla"]
    done = call("edge-agent", *flags)
    assert done.code == code
    assert names(elsewhere) == sorted([*REPORTS, "t.jsonl"])
    assert (elsewhere / "t.jsonl").read_text() == "old"
    assert json.loads((elsewhere / "run.json").read_text())["cells_done"] == 4
    last = done.err.splitlines()[-1]
    if code == 3:
        assert last == "edge-agent: the broker ended: see --verbose"
    else:
        assert last.startswith("stopped while recording: go on with the same flags and --resume")
    made.fail.clear()
    again = call("edge-agent", *flags, "--resume", "run.jsonl")
    assert again.code == 0, again.err
    assert len(read_traces("t.jsonl")) == 2


def test_a_run_that_was_stopped_is_not_recorded(made, elsewhere) -> None:
    made.fail_cell[3] = Stopped()
    done = call("edge-agent", *FLAGS, "--record", "t.jsonl")
    assert done.code == 130
    assert names(elsewhere) == REPORTS


def test_of_a_run_out_of_time_its_texts_are_recorded(made, elsewhere, monkeypatch) -> None:
    now = iter(range(0, 10_000, 10))
    real = command.run_all

    def paced(*arguments: Any, **options: Any) -> bool:
        return real(*arguments, **options, clock=lambda: float(next(now)))

    monkeypatch.setattr(command, "run_all", paced)
    flags = [*FLAGS, "--record", "t.jsonl", "--max-minutes", "1"]
    done = call("edge-agent", *flags)
    assert done.code == 0, done.err
    assert [one.name for one in read_traces("t.jsonl")] == ["tides"]
    assert "--max-minutes is over" in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--record", "missing/t.jsonl"], "missing/t.jsonl cannot be written"),
        (["--record", "."], "no regular file"),
        (["--record", "run.json"], "--record run.json is a file of the results"),
        (["--record", "run.jsonl"], "--record run.jsonl is a file of the results"),
        (
            ["--resume", "run.jsonl", "--report-only", "--record", "t"],
            "--report-only with --record",
        ),
        (["--tune", "gird"], "invalid choice: 'gird'"),
        (["--tune", "grid", "--tune-budget", "0"], "--tune-budget 0"),
        (["--tune-budget", "4"], "--tune-budget without --tune"),
        (["--tune", "grid", "--tune-prompts", "missing"], "--tune-prompts missing"),
    ],
)
def test_wrong_flags_are_one_line(flags, words, made, elsewhere) -> None:
    error_line(call("edge-agent", *FLAGS, *flags), 2, words)
    assert names(elsewhere) == []
    assert made.all == []


# -- tuning -------------------------------------------------------------------------------------


def header() -> dict[str, Any]:
    first = Path("run.jsonl").read_text().split("\n", 1)[0]
    return json.loads(first)  # type: ignore[no-any-return]


def test_policies_are_compared_with_the_constants_found(made, elsewhere) -> None:
    done = call("edge-agent", *FLAGS, *TUNE)
    assert done.code == 0, done.err
    assert names(elsewhere) == sorted([*REPORTS, "run.constants.json"])
    constants = json.loads((elsewhere / "run.constants.json").read_text())
    assert {name: set(one) for name, one in constants.items()} == {
        "pipesd": {"wifi", "4g"},
        "vanilla": {"wifi", "4g"},
    }
    machines = made.all[-1]
    assert machines.constants == constants
    assert len(machines.ran) == CELLS
    whole = header()
    for scenario in ("wifi", "4g"):
        window = constants["vanilla"][scenario]["window"]
        kept = whole["settings"]["policies"]["vanilla"]
        assert kept.get(scenario, kept.get("all"))["thresholds"]["window"] == window
        assert whole["tuning"]["found"]["vanilla"][scenario]["tried"] == 5
        assert whole["tuning"]["found"]["pipesd"][scenario]["tried"] == 5
    assert "constants: of 5 candidates" in done.out
    assert "<h3>Constants</h3>" in (elsewhere / "run.html").read_text()
    assert json.loads((elsewhere / "run.json").read_text())["tuning"] == whole["tuning"]
    compared = set(machines.prompts)
    assert not compared & {name for _, name in machines.asked}
    # The same comparison from the file alone.
    again = call("edge-agent", *FLAGS[:-1], "two", "--constants", "run.constants.json")
    assert again.code == 0, again.err
    two = json.loads(Path("two.json").read_text())
    assert two["settings"]["policies"] == whole["settings"]["policies"]


def test_a_resumed_run_keeps_its_constants(made, elsewhere) -> None:
    made.fail_cell[4] = Stopped()
    stopped = call("edge-agent", *FLAGS, *TUNE)
    assert stopped.code == 130
    before = header()
    (elsewhere / "run.constants.json").unlink()
    made.fail_cell.clear()
    done = call("edge-agent", *FLAGS, *TUNE, "--resume", "run.jsonl")
    assert done.code == 0, done.err
    assert header() == before
    assert made.all[-1].asked == []
    assert len(made.all[-1].ran) == CELLS - 3
    assert made.all[-1].chosen.settings.policies == before["settings"]["policies"]
    assert "constants: of 5 candidates" in done.out
    # Without --tune the constants are others, which is said.
    other = call("edge-agent", *FLAGS, "--resume", "run.jsonl")
    assert "policies: " in error_line(other, 2)


def test_a_run_that_was_not_tuned_is_not_taken_for_one(made, elsewhere) -> None:
    assert call("edge-agent", *FLAGS).code == 0
    error_line(
        call("edge-agent", *FLAGS, *TUNE, "--resume", "run.jsonl"), 2, "that run was not tuned"
    )


def test_given_constants_stay(made, elsewhere) -> None:
    Path("mine.json").write_text('{"vanilla": {"wifi": {"window": 3}, "4g": {"window": 9}}}')
    flags = [*FLAGS, *TUNE, "--constants", "mine.json"]
    done = call("edge-agent", *flags)
    assert done.code == 0, done.err
    constants = json.loads((elsewhere / "run.constants.json").read_text())
    assert constants["vanilla"] == {"wifi": {"window": 3}, "4g": {"window": 9}}
    assert set(header()["tuning"]["found"]) == {"pipesd"}
    again = call("edge-agent", *flags, "--resume", "run.jsonl")
    assert again.code == 0, again.err
    Path("mine.json").write_text('{"vanilla": {"wifi": {"window": 4}, "4g": {"window": 9}}}')
    other = call("edge-agent", *flags, "--resume", "run.jsonl")
    assert "window was 3 and is 4" in error_line(other, 2)


def test_policies_without_constants_are_not_tuned(made, elsewhere) -> None:
    flags = [*FLAGS, *TUNE, "--policies", "cloud,local"]
    done = call("edge-agent", *flags)
    assert done.code == 0, done.err
    assert names(elsewhere) == REPORTS
    assert made.all[-1].asked == []
    assert "constants" not in done.out
    assert call("edge-agent", *flags, "--resume", "run.jsonl").code == 0


@pytest.mark.parametrize("error", [TransportError("the broker ended: see --verbose"), Stopped()])
def test_what_ends_the_tuning_leaves_nothing(error, made, elsewhere) -> None:
    made.fail[3] = error
    done = call("edge-agent", *FLAGS, *TUNE)
    assert names(elsewhere) == []
    if isinstance(error, Stopped):
        assert done.code == 130
        assert done.err.splitlines()[-1] == "stopped while tuning: nothing was compared"
    else:
        assert done.code == 3
        assert done.err.splitlines()[-1] == "edge-agent: the broker ended: see --verbose"
    assert done.out == ""


def test_an_old_run_is_not_overwritten_by_a_tuned_one(made, elsewhere) -> None:
    assert call("edge-agent", *FLAGS).code == 0
    before = (elsewhere / "run.jsonl").read_bytes()
    error_line(call("edge-agent", *FLAGS, *TUNE), 2, "run.jsonl exists")
    assert (elsewhere / "run.jsonl").read_bytes() == before
    assert len(made.all) == 1
