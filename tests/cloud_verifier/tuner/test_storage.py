"""Studies, leases and pins in a real database, also with several processes on it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

from broker.errors import ConfigError
from cloud_verifier.tuner import registry as registry_module
from cloud_verifier.tuner.core.messages import Choice, Proposal, Record
from cloud_verifier.tuner.core.space import DEFAULT, Pair
from cloud_verifier.tuner.database import BrokenStudyError, Database, StudyError, default_url
from cloud_verifier.tuner.optuna_studies import (
    KEPT_CAMPAIGNS,
    OptunaStudies,
    check_sampler,
    study_name,
)
from cloud_verifier.tuner.registry import Registry, alike, prior_pairs
from tests.brokers import wait_until
from tests.cloud_verifier.tuner.world import bowl

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'tuner.sqlite3'}"


@pytest.fixture
def database(url):
    opened = Database(url)
    yield opened
    opened.close()


def proposal(answer) -> Proposal:
    assert isinstance(answer, Proposal)
    return answer


def search(studies: OptunaStudies, device: str, surface, campaign: int = 1) -> Choice:
    """A whole search with exact measurements."""
    while not isinstance(answer := studies.ask(device, campaign, "m|d|1|1|1"), Choice):
        tpt = surface(answer.pair)
        studies.tell(device, campaign, answer.number, tpt, 50.0, early=False)
    return answer


# -- opening --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ("nonsense", "no URL"),
        ("mysql://a/b", "not supported"),
        ("sqlite://", "names no file"),
        ("sqlite:////proc/none/x.db", "cannot use"),
    ],
)
def test_a_storage_that_cannot_be_is_refused(wrong, word) -> None:
    with pytest.raises(ConfigError, match=word):
        Database(wrong)


def test_postgresql_without_its_driver_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"psycopg is not installed.*pip install"):
        Database("postgresql://user:secret@127.0.0.1:1/x")


def test_a_file_that_is_no_database_is_named(tmp_path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(b"not a database, but long enough to be taken for one" * 40)
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        Database(f"sqlite:///{file}")


def test_a_storage_of_a_later_version_is_left_alone(url, tmp_path) -> None:
    Database(url).close()
    with sqlite3.connect(tmp_path / "tuner.sqlite3") as connection:
        connection.execute("UPDATE pipesd_tuner_meta SET schema = 99")
    with pytest.raises(ConfigError, match="later version"):
        Database(url)


def test_passwords_are_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        Database("postgresql+none://user:secret@127.0.0.1:1/x")
    assert "secret" not in str(caught.value)


def test_the_default_file_is_the_users(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_url() == f"sqlite:///{tmp_path / 'pipesd' / 'tuner.sqlite3'}"
    Database(default_url()).close()
    assert (tmp_path / "pipesd" / "tuner.sqlite3").exists()


# -- studies --------------------------------------------------------------------------------------


def test_a_search_by_gaussian_process_finds_a_good_pair(database) -> None:
    assert check_sampler("gp") == "gp"
    surface = bowl(0.15, 0.6)
    choice = search(OptunaStudies(database, trials=7), "pi", surface)
    assert choice.trials == 7
    assert surface(choice.pair) < 1.2 * 0.05
    assert choice.tpt == pytest.approx(surface(choice.pair), rel=0.05)


def test_the_default_pair_comes_first_and_then_what_the_class_found(database) -> None:
    found = [Pair(0.1, 0.3), Pair(0.6, 0.9)]
    studies = OptunaStudies(database, sampler="random", prior=lambda _device, _class: found)
    seen = []
    for index in range(1, 4):
        trial = proposal(studies.ask("pi", 1, "class"))
        assert (trial.index, trial.budget) == (index, 8)
        seen.append(trial.pair)
        studies.tell("pi", 1, trial.number, 0.05, 50.0, early=False)
    assert seen == [DEFAULT, *found]


def test_the_leaders_are_measured_again_at_the_end(database) -> None:
    studies = OptunaStudies(database, sampler="random")
    search(studies, "pi", bowl(0.2, 0.5))
    pairs = [(one["r1"], one["r2"]) for one in studies.history("pi", 1)]
    assert len(pairs) == 16
    assert all(pair in pairs[:12] for pair in pairs[12:])


def test_failed_trials_do_not_count_and_too_many_end_the_search(database) -> None:
    studies = OptunaStudies(database, trials=4, sampler="random")
    first = proposal(studies.ask("pi", 1, ""))
    studies.fail("pi", 1, first.number, "gone")
    again = proposal(studies.ask("pi", 1, ""))
    assert (again.index, again.pair) == (1, DEFAULT)
    studies.tell("pi", 1, again.number, 0.05, 50.0, early=False)
    failed = 1
    while isinstance(answer := studies.ask("pi", 1, ""), Proposal):
        studies.fail("pi", 1, answer.number, "idle")
        failed += 1
    assert failed == 12
    assert answer.pair == DEFAULT


def test_a_trial_ends_once(database) -> None:
    studies = OptunaStudies(database, sampler="random")
    trial = proposal(studies.ask("pi", 1, ""))
    studies.tell("pi", 1, trial.number, 0.05, 50.0, early=False)
    studies.tell("pi", 1, trial.number, 0.09, 50.0, early=False)
    studies.fail("pi", 1, trial.number, "gone")
    studies.tell("pi", 1, 77, 0.09, 50.0, early=False)
    (one,) = studies.history("pi", 1)
    assert (one["state"], one["tpt"]) == ("complete", 0.05)


def test_a_search_goes_on_in_another_process_where_it_was(url) -> None:
    first = Database(url)
    studies = OptunaStudies(first, sampler="random")
    for _ in range(5):
        trial = proposal(studies.ask("pi", 1, ""))
        studies.tell("pi", 1, trial.number, 0.05, 50.0, early=False)
    studies.ask("pi", 1, "")  # and then it was killed
    first.close()
    second = Database(url)
    studies = OptunaStudies(second, sampler="random")
    assert studies.fail_running("pi", 1, "tuner_gone") == 1
    assert studies.fail_running("nobody", 1, "tuner_gone") == 0
    assert proposal(studies.ask("pi", 1, "")).index == 6
    assert [one["state"] for one in studies.history("pi", 1)][-2:] == ["fail", "running"]
    second.close()


def test_a_study_of_an_older_version_is_put_aside_and_begun_anew(database, caplog) -> None:
    name = study_name("pi", 1)
    old = optuna.create_study(study_name=name, storage=database.studies)
    old.set_user_attr("format", 0)
    old.tell(old.ask({"threshold": optuna.distributions.FloatDistribution(0, 9)}), 1.0)
    with caplog.at_level(logging.WARNING):
        assert proposal(OptunaStudies(database).ask("pi", 1, "")).index == 1
    assert "another version" in caplog.text
    names = optuna.study.get_all_study_names(database.studies)
    assert sorted(names) == [name, f"{name}@0"]
    kept = optuna.load_study(study_name=f"{name}@0", storage=database.studies)
    assert kept.best_params == {"threshold": pytest.approx(kept.best_params["threshold"])}


@pytest.mark.parametrize(
    "mangle",
    [
        "update study_user_attributes set value_json = '\"junk\"' where key = 'budget'",
        "update study_user_attributes set value_json = '[[2, 0.5]]' where key = 'first'",
        "update study_user_attributes set value_json = '[[0.3' where key = 'first'",
        "delete from study_user_attributes where key = 'first'",
        "update trial_user_attributes set value_json = '-1' where key = 'tpt'",
        "update trial_user_attributes set value_json = 'NaN' where key = 'tokens'",
        "delete from trial_user_attributes",
        "update trial_params set distribution_json = 'junk'",
    ],
)
def test_what_makes_no_sense_in_a_study_is_an_error_of_that_study(url, database, mangle) -> None:
    studies = OptunaStudies(database, sampler="random")
    first = proposal(studies.ask("pi", 1, ""))
    studies.tell("pi", 1, first.number, 0.05, 60.0, early=False)
    database.close()
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        connection.execute(mangle)
    connection.close()
    studies = OptunaStudies(database, sampler="random")
    with pytest.raises(BrokenStudyError, match="tune reset pi"):
        studies.ask("pi", 1, "")
    assert proposal(studies.ask("other", 1, "")).index == 1
    assert proposal(studies.ask("pi", 2, "")).index == 1


def test_a_study_that_somebody_deleted_is_begun_anew(database) -> None:
    studies = OptunaStudies(database, sampler="random")
    first = proposal(studies.ask("pi", 1, ""))
    optuna.delete_study(study_name=study_name("pi", 1), storage=database.studies)
    with pytest.raises(BrokenStudyError):
        studies.tell("pi", 1, first.number, 0.05, 60.0, early=False)
    assert proposal(studies.ask("pi", 1, "")).index == 1


def test_old_searches_of_a_device_are_dropped(database) -> None:
    studies = OptunaStudies(database, trials=1, sampler="random")
    for campaign in range(1, KEPT_CAMPAIGNS + 4):
        search(studies, "pi", bowl(0.2, 0.5), campaign)
    names = optuna.study.get_all_study_names(database.studies)
    assert len(names) == KEPT_CAMPAIGNS


def test_without_torch_another_sampler_is_taken_and_said(monkeypatch, caplog) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "torch" else object()
    )
    with caplog.at_level(logging.WARNING):
        assert check_sampler("gp") == "tpe"
    assert "torch is not installed" in caplog.text
    assert check_sampler("random") == "random"


@pytest.mark.parametrize("sampler", ["gp", "tpe", "random"])
def test_every_sampler_keeps_the_bounds(database, sampler) -> None:
    studies = OptunaStudies(database, trials=7, sampler=sampler)
    search(studies, "pi", bowl(0.01, 0.99))
    for one in studies.history("pi", 1):
        assert 0.0 < one["r1"] < 1.0
        assert 0.0 < one["r2"] < 1.0


# -- leases ---------------------------------------------------------------------------------------


def two(database) -> tuple[Registry, Registry]:
    return Registry(database, "one", lease_s=30.0), Registry(database, "two", lease_s=30.0)


def test_a_device_has_one_tuner_while_that_lives(database) -> None:
    one, other = two(database)
    assert set(one.acquire(["a", "b"], 0.0)) == {"a", "b"}
    for now in range(0, 300, 5):
        one.sync(now)
        other.sync(now)
        assert other.acquire(["a", "b"], now) == {}
    assert {row.owner for row in one.rows().values()} == {"one"}


def test_the_table_of_devices_is_bounded(database, monkeypatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_ROWS", 2)
    one, other = two(database)
    assert set(one.acquire(["a", "b", "c"], 0.0)) == {"a", "b"}
    one.sync(1.0)
    assert one.acquire(["d"], 1.0) == {}
    assert one.refused == 2
    one.release()
    other.sync(2.0)
    assert set(other.acquire(["a", "b", "c"], 2.0)) == {"a", "b"}


def test_a_dead_tuners_lease_is_taken_over_by_one(database) -> None:
    one, other = two(database)
    third = Registry(database, "three", lease_s=30.0)
    one.acquire(["a"], 0.0)
    for now in range(0, 30, 5):
        for registry in (other, third):
            registry.sync(now)
            assert registry.acquire(["a"], now) == {}
    got = [*other.acquire(["a"], 31.0), *third.acquire(["a"], 31.0)]
    assert got == ["a"]
    # The one that was dead is alive after all: it sees that the lease is another's.
    assert one.sync(32.0)["a"].owner == "two"
    assert not one.save("a", "", Record(1, Choice(DEFAULT, 0.05, 16)))


def test_a_clock_that_jumps_takes_no_lease_that_beats(database) -> None:
    one, other = two(database)
    one.acquire(["a"], 0.0)
    other.sync(0.0)
    one.sync(1.0)
    other.sync(1e9)
    assert other.acquire(["a"], 1e9) == {}


def test_released_leases_are_free_at_once(database) -> None:
    one, other = two(database)
    one.acquire(["a"], 0.0)
    one.release()
    other.sync(1.0)
    assert set(other.acquire(["a"], 1.0)) == {"a"}


def test_what_is_saved_comes_back_and_an_operator_wins(database) -> None:
    one, _ = two(database)
    one.acquire(["a"], 0.0)
    settled = Record(1, Choice(Pair(0.2, 0.5), 0.05, 16))
    assert one.save("a", "class", settled)
    assert one.rows()["a"].record == settled
    assert one.save("a", "class", Record(2))
    one.reset("a")
    assert one.rows()["a"].record == Record(3)
    assert not one.save("a", "class", Record(2, Choice(Pair(0.2, 0.5), 0.05, 16)))
    one.pin("a", Pair(0.3, 0.4))
    assert one.rows()["a"].record == Record(3, None, Pair(0.3, 0.4))
    assert one.save("a", "class", Record(3, Choice(Pair(0.2, 0.5), 0.05, 16)))
    assert one.rows()["a"].record.pin == Pair(0.3, 0.4)
    one.pin("new", Pair(0.3, 0.4))
    assert one.rows()["new"].owner == ""


def test_a_row_that_somebody_spoilt_counts_as_nothing_found(database, tmp_path) -> None:
    one, _ = two(database)
    one.acquire(["a"], 0.0)
    with sqlite3.connect(tmp_path / "tuner.sqlite3") as connection:
        connection.execute("UPDATE pipesd_tuner_devices SET r1 = 7, r2 = -1, pin_r1 = 0, pin_r2=1")
    assert one.rows()["a"].record == Record(1)


def test_classes_a_step_apart_are_alike_and_their_typical_pair_comes_first(database) -> None:
    assert alike("pi|5|d|3|4|5", "pi|5|d|4|4|4")
    assert not alike("pi|5|d|3|4|5", "pi|5|d|5|4|5")
    assert not alike("pi|5|d|3|4|5", "pi|4|d|3|4|5")
    assert not alike("pi|d|3|4|-", "pi|d|3|4|5")
    assert not alike("", "")
    one, _ = two(database)
    pairs = {"a": Pair(0.2, 0.5), "b": Pair(0.22, 0.5), "c": Pair(0.9, 0.9), "d": Pair(0.5, 0.5)}
    one.acquire(pairs, 0.0)
    for name, pair in pairs.items():
        kind = "pi|d|3|4|5" if name != "d" else "other|d|3|4|5"
        one.save(name, kind, Record(1, Choice(pair, 0.05, 16)))
    found = prior_pairs(one.rows().values(), "new", "pi|d|3|4|6")
    assert found[-1] == pairs["c"]
    assert set(found) == {pairs["a"], pairs["b"], pairs["c"]}
    assert prior_pairs(one.rows().values(), "a", "pi|d|3|4|6")[0] == pairs["b"]


def test_a_locked_database_is_waited_for_and_then_an_error(url, tmp_path) -> None:
    database = Database(url, busy_s=0.1)
    registry = Registry(database, "one")
    holder = sqlite3.connect(tmp_path / "tuner.sqlite3", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    for call in (
        lambda: registry.sync(0.0),
        lambda: OptunaStudies(database).ask("a", 1, ""),
        lambda: registry.pin("a", DEFAULT),
    ):
        with pytest.raises(StudyError, match="locked"):
            call()
    holder.execute("ROLLBACK")
    assert set(registry.acquire(["a"], 0.0)) == {"a"}
    database.close()
    holder.close()


# -- several processes (CASES 39 and 40) ----------------------------------------------------------


def _start_and_search(url: str, index: int, go, results) -> None:
    try:
        go.wait(60)
        database = Database(url, busy_s=30.0)
        registry = Registry(database, f"tuner-{index}")
        registry.sync(0.0)
        got = registry.acquire(["shared", f"own-{index}"], 0.0)
        studies = OptunaStudies(database, trials=1, sampler="random")
        for device in got:
            search(studies, device, bowl(0.2, 0.5))
        database.close()
        results.put((index, sorted(got), ""))
    except Exception as error:  # noqa: BLE001 (whatever it is, the test is to show it)
        results.put((index, [], repr(error)))


def test_eight_tuners_start_at_once_on_one_file(url, tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    go, results = context.Event(), context.Queue()
    workers = [
        context.Process(target=_start_and_search, args=(url, index, go, results))
        for index in range(8)
    ]
    for worker in workers:
        worker.start()
    go.set()
    found = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(30)
    assert [error for _, _, error in found if error] == []
    assert sum("shared" in got for _, got, _ in found) == 1
    assert all(f"own-{index}" in got for index, got, _ in found)
    with sqlite3.connect(tmp_path / "tuner.sqlite3") as connection:
        names = [
            row[0]
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        studies = [row[0] for row in connection.execute("SELECT study_name FROM studies")]
        versions = list(connection.execute("SELECT * FROM version_info"))
    assert len(names) == len(set(names))
    assert sorted(studies) == sorted(
        [study_name("shared", 1), *(study_name(f"own-{index}", 1) for index in range(8))]
    )
    assert len(versions) == 1


_VICTIM = """
import sys, time
from cloud_verifier.tuner.database import Database
from cloud_verifier.tuner.optuna_studies import OptunaStudies
from cloud_verifier.tuner.registry import Registry
database = Database(sys.argv[1])
registry = Registry(database, "victim")
registry.sync(0.0)
registry.acquire(["a"], 0.0)
studies = OptunaStudies(database, sampler="random")
for tpt in (0.05, 0.04):
    trial = studies.ask("a", 1, "")
    studies.tell("a", 1, trial.number, tpt, 50.0, early=False)
studies.ask("a", 1, "")
print("asked", flush=True)
time.sleep(60)
"""


def test_a_tuner_killed_in_mid_trial_is_followed_by_the_next(url) -> None:
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, url], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "asked\n"
    finally:
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait(10)
        victim.stdout.close()
    assert wait_until(lambda: victim.poll() is not None)
    database = Database(url)
    registry = Registry(database, "next", lease_s=30.0)
    registry.sync(0.0)
    assert registry.acquire(["a"], 0.0) == {}
    registry.sync(31.0)
    assert set(registry.acquire(["a"], 31.0)) == {"a"}
    studies = OptunaStudies(database, sampler="random")
    assert studies.fail_running("a", 1, "tuner_gone") == 1
    history = studies.history("a", 1)
    assert [one["state"] for one in history] == ["complete", "complete", "fail"]
    assert history[-1]["cause"] == "tuner_gone"
    trial = proposal(studies.ask("a", 1, ""))
    assert (trial.index, trial.best and trial.best.trials) == (3, 2)
    database.close()
