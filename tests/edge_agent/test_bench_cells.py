"""The order of a benchmark's cells, and the file that a run can be resumed from."""

from __future__ import annotations

import json

import pytest

from broker.errors import ConfigError
from edge_agent.bench.cells import Cell, ResultsFile, order
from edge_agent.bench.link import SCENARIOS
from edge_agent.bench.runner import timing
from edge_agent.bench.schedule import Pace, run_all
from edge_agent.core.policies import find_policy
from edge_agent.core.sending import Learnt
from edge_agent.core.timing import Timing
from tests.edge_agent.bench_results import TIMELINE, result, settings

POLICIES, PLACES, PROMPTS = ["pipesd", "hsl", "cloud"], ["wifi", "far"], ["a", "b", "c"]

LEARNT = Learnt("serial", True, 0.02, 0.02, 0.0, 0.01, 0.04, 4, 1, 2, 8, 0)


def new(path, **values) -> ResultsFile:
    return ResultsFile.create(path, settings(**values), {"cpu": "x"}, started="now")


# ---- order ----------------------------------------------------------------------------------


def test_what_is_compared_runs_close_together_in_changing_order() -> None:
    cells = list(order(POLICIES, PLACES, PROMPTS, 2, seed=1))
    assert len(set(cells)) == len(cells) == 3 * 2 * 3 * 2
    groups = [cells[i : i + 3] for i in range(0, len(cells), 3)]
    for group in groups:
        assert {cell.policy for cell in group} == set(POLICIES)
        assert len({cell[1:] for cell in group}) == 1
    assert len({tuple(cell.policy for cell in group) for group in groups}) > 2
    assert cells == list(order(POLICIES, PLACES, PROMPTS, 2, seed=1))
    assert cells != list(order(POLICIES, PLACES, PROMPTS, 2, seed=2))
    # An interrupted run has every policy and scenario for the prompts that it came to.
    assert {cell.prompt for cell in cells[:6]} == {"a"}


# ---- the file -------------------------------------------------------------------------------


def test_results_come_back_as_they_were(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    file = new(path)
    first = result("pipesd", timeline=TIMELINE, learnt=LEARNT)
    failed = result("cloud", error="the broker ended", tokens=())
    file.add(first)
    file.add(failed)
    file.close()
    again = ResultsFile.resume(path, settings())
    assert again.results == {first.cell: first, failed.cell: failed}
    assert again.header["environment"] == {"cpu": "x"}
    assert again.done(first.cell)
    assert not again.done(failed.cell), "what failed is run again"
    assert not again.done(Cell("hsl", "4g", "a", 0))
    again.close()


def test_the_latest_result_of_a_cell_counts(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    file = new(path)
    file.add(result("cloud", error="the broker ended"))
    file.add(result("cloud", total_s=2.0))
    file.close()
    again = ResultsFile.resume(path, None)
    assert [one.total_s for one in again.results.values()] == [2.0]
    again.close()


def test_a_line_that_a_killed_run_began_is_no_result(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    file = new(path)
    file.add(result("pipesd"))
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[-100:-40])
    again = ResultsFile.resume(path, settings())
    assert len(again.results) == 1
    again.add(result("cloud"))
    again.close()
    assert len(ResultsFile.resume(path, settings()).results) == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": 11}, "max_tokens was 10 and is 11"),
        ({"dtype": "bfloat16"}, 'dtype was "float32" and is "bfloat16"'),
        ({"policies": {"pipesd": {}}}, "policies were pipesd, vanilla, cloud and are pipesd"),
        (
            {"policies": {"pipesd": {"r1": 1}, "vanilla": {}, "cloud": {}}},
            "policies: pipesd were none and are r1",
        ),
        (
            {"prompts": {"a": {"text": "x", "chat": True}, "b": {"text": "B", "chat": True}}},
            'prompts: a: text was "A" and is "x"',
        ),
        ({"scenarios": {}}, "scenarios were 4g and are"),
    ],
)
def test_other_settings_are_refused_by_name(values, words, tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    new(path).close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=words):
        ResultsFile.resume(path, settings(**values))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no results"),
        ("hello\n", "no results"),
        ('{"kind": "other", "settings": {}}\n', "no results"),
        ("[]\n", "no results"),
        ('{"kind": "pipesd-bench", "version": 99, "settings": {}}\n', "version 99"),
        ('{"kind": "pipesd-bench", "version": 1, "settings": {}}\n{}\n', "line 2 is broken"),
        ('{"kind": "pipesd-bench", "version": 1, "settings": {}}\nx\n', "line 2 is broken"),
    ],
)
def test_files_of_something_else_are_refused(text, words, tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        ResultsFile.resume(path, None)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {}},
        {"settings": {**settings().to_dict(), "policies": ["pipesd"]}},
        {"settings": {**settings().to_dict(), "scenarios": {"4g": 1}}},
        {"environment": None},
        {"started": None},
        {"tuning": {}},
    ],
)
def test_a_first_line_that_lacks_something_is_refused(change, tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    file = new(path)
    file.close()
    path.write_text(json.dumps({**file.header, **change}) + "\n")
    with pytest.raises(ConfigError, match="line 1 is broken"):
        ResultsFile.resume(path, None)


@pytest.mark.parametrize(
    "change", [{"total_s": "x"}, {"load": None}, {"forwards": [1]}, {"kept": True}]
)
def test_a_figure_that_is_no_number_is_named_by_its_line(change, tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    file = new(path)
    file.add(result("pipesd"))
    file.close()
    first, row = path.read_text().splitlines()
    path.write_text(f"{first}\n{row}\n{json.dumps({**json.loads(row), **change})}\n")
    with pytest.raises(ConfigError, match="line 3 is broken"):
        ResultsFile.resume(path, None)


def test_nothing_is_overwritten(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    new(path).close()
    with pytest.raises(ConfigError, match="exists"):
        new(path)
    with pytest.raises(ConfigError, match="cannot write"):
        new(tmp_path / "missing" / "run.jsonl")
    with pytest.raises(ConfigError, match="cannot read"):
        ResultsFile.resume(tmp_path / "other.jsonl", None)


# ---- running --------------------------------------------------------------------------------


class Paced:
    """Stands in for a Runner: each cell takes a second, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[Cell] = []

    def run(self, cell, at_s):
        self.ran.append(cell)
        self.now += 1.0
        return result(*cell[:3], repeat=cell.repeat, at_s=at_s)


def test_only_what_is_missing_is_run_and_the_time_left_is_told(tmp_path) -> None:
    cells = list(order(POLICIES, ["4g"], ["a", "b"], 1, seed=0))
    file = new(tmp_path / "run.jsonl")
    file.add(result(*cells[1][:3]))
    file.add(result(*cells[2][:3], error="gone"))
    runner, told = Paced(), []

    def tell(done, latest, left_s):
        told.append((done, latest.cell, left_s))

    complete = run_all(runner, cells, file, limit_s=60.0, report=tell, clock=lambda: runner.now)
    assert complete
    assert runner.ran == [cell for i, cell in enumerate(cells) if i != 1]
    assert [done for done, _, _ in told] == [2, 3, 4, 5, 6]
    assert [left for _, _, left in told] == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert all(file.done(cell) for cell in cells)


def test_nothing_begins_after_the_limit(tmp_path) -> None:
    cells = list(order(POLICIES, ["4g"], ["a", "b"], 1, seed=0))
    file, runner = new(tmp_path / "run.jsonl"), Paced()
    complete = run_all(
        runner, cells, file, limit_s=2.5, report=lambda *_: None, clock=lambda: runner.now
    )
    assert not complete
    assert runner.ran == cells[:3]
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 4
    json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])


def test_timers_are_patient_where_each_token_is_charged_as_a_distribution() -> None:
    policy = find_policy("pipesd")
    usual = timing(SCENARIOS["S1"], policy, 30.0)
    assert usual == Timing(offline_after=30.0)
    patient = timing(SCENARIOS["S1"].with_wire("full-probs"), policy, 30.0)
    # 0.116 s for each of the tokens that may be under way.
    upload = policy.max_ahead * 0.116
    assert patient.first_timeout == pytest.approx(usual.first_timeout + upload)
    assert patient.min_timeout == pytest.approx(usual.min_timeout + upload)
    assert timing(SCENARIOS["loopback"].with_wire("full-probs"), policy, 30.0) == usual
    slowest = timing(SCENARIOS["S4"].with_wire("full-probs"), policy, 30.0)
    assert slowest.first_timeout > patient.first_timeout


def test_the_time_left_follows_what_cells_of_a_kind_took() -> None:
    pace = Pace()
    quick, slow = Cell("cloud", "wifi", "a", 0), Cell("cloud", "far", "a", 0)
    assert pace.left_s([quick]) is None
    pace.note(quick, 1.0)
    pace.note(slow, 3.0)
    pace.note(slow, 5.0)
    assert pace.left_s([quick, slow]) == 5.0
    assert pace.left_s([Cell("hsl", "S3", "a", 0)]) == 2.5
    assert pace.left_s([]) == 0.0
