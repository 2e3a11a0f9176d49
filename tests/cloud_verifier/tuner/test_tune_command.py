"""``cloud-verifier tune`` and its actions: wrong usage, and what works without a broker."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys

import pytest

from cloud_verifier.tuner.core.messages import Choice, Record
from cloud_verifier.tuner.core.space import Pair
from cloud_verifier.tuner.database import Database
from cloud_verifier.tuner.optuna_studies import OptunaStudies
from cloud_verifier.tuner.registry import Registry
from tests.commands import ROOT, call, error_line

BROKER = ("--broker", "mqtt://127.0.0.1:1")


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    """Nothing of whoever runs the tests is read or written."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("PIPESD_STORAGE", "PIPESD_BROKER", "PIPESD_EXPORTER", "PIPESD_PROMETHEUS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def storage(tmp_path) -> str:
    return f"sqlite:///{tmp_path / 'tuner.sqlite3'}"


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ((), "--broker is missing"),
        ((*BROKER, "--trials", "0"), "--trials 0"),
        ((*BROKER, "--interval", "0"), "--interval 0"),
        ((*BROKER, "--interval", "nan"), "--interval nan"),
        ((*BROKER, "--min-tokens", "0"), "0 tokens"),
        ((*BROKER, "--drift", "0"), "drift"),
        ((*BROKER, "--ttl", "nan"), "ttl_s"),
        ((*BROKER, "--parallel", "0"), "at least 1"),
        ((*BROKER, "--id", "a/b"), "--id"),
        ((*BROKER, "--metrics-port", "70000"), "--metrics-port"),
        ((*BROKER, "--sampler", "magic"), "--sampler"),
        ((*BROKER, "--prometheus", "http://a", "--exporter", "http://b"), "not both"),
        ((*BROKER, "--prometheus", "prometheus:9090"), "--prometheus"),
        ((*BROKER, "--exporter", "ftp://x"), "--exporter"),
        ((*BROKER, "--storage", "mysql://x/y"), "--storage"),
        (("pin", "pi", "--r1", "0.2"), "both --r1 and --r2"),
        (("pin", "pi", "--r1", "2", "--r2", "0.5"), "R1 2.0 is outside"),
        (("pin", "pi", "--r1", "0", "--r2", "0.5"), "R1 0.0 is outside"),
        (("pin", "pi", "--r1", "nan", "--r2", "0.5"), "R1 nan is outside"),
        (("pin", "p/i", "--r1", "0.1", "--r2", "0.5"), "DEVICE"),
        (("reset", "_verifiers"), "reserved"),
        (("status", "nobody"), "nothing is known of nobody"),
    ],
)
def test_wrong_usage_is_one_line(flags, word) -> None:
    error_line(call("cloud-verifier", "tune", *flags), 2, word, program="cloud-verifier")


def test_a_broker_that_is_away_leaves_the_pin_in_the_storage_and_says_so(
    storage, monkeypatch
) -> None:
    monkeypatch.setattr("cloud_verifier.tuner.operator._CONNECT_S", 0.3)
    pin = ("tune", "pin", "pi", "--r1", "0.2", "--r2", "0.5", "--storage", storage)
    result = call("cloud-verifier", *pin, *BROKER)
    assert result.code == 3
    assert "not the config" in result.lines[-1]
    assert found(storage)["pi"]["state"] == "pinned"


def found(storage: str, *device: str) -> dict[str, dict[str, object]]:
    result = call("cloud-verifier", "tune", "--storage", storage, "status", *device, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)["devices"]


def test_an_operator_needs_no_tuner(storage) -> None:
    # What stands before the action's name holds for it too.
    pin = ("tune", "--storage", storage, "pin", "pi", "--r1", "0.2", "--r2", "0.5")
    result = call("cloud-verifier", *pin)
    assert (result.code, "waits for a running tuner" in result.out) == (0, True), result.err
    one = found(storage)["pi"]
    assert (one["state"], one["r1"], one["r2"]) == ("pinned", 0.2, 0.5)
    assert call("cloud-verifier", "tune", "unpin", "pi", "--storage", storage).code == 0
    assert found(storage)["pi"]["state"] == "waiting"
    assert call("cloud-verifier", "tune", "reset", "pi", "--storage", storage).code == 0
    assert found(storage)["pi"]["search"] == 2


def test_status_shows_searches_and_trials(storage) -> None:
    database = Database(storage)
    registry = Registry(database, "tuner")
    registry.acquire(["done", "busy"], 0.0)
    registry.save("done", "class", Record(1, Choice(Pair(0.2, 0.5), 0.05, 16)))
    studies = OptunaStudies(database, sampler="random")
    trial = studies.ask("busy", 1, "")
    studies.tell("busy", 1, trial.number, 0.08, 60.0, early=True)
    trial = studies.ask("busy", 1, "")
    studies.fail("busy", 1, trial.number, "idle")
    studies.ask("busy", 1, "")
    database.close()
    assert found(storage)["done"]["tpt_ms"] == 50.0
    result = call("cloud-verifier", "tune", "status", "--storage", storage)
    lines = result.out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["busy", "searching"], ["done", "settled"]]
    result = call("cloud-verifier", "tune", "status", "busy", "--storage", storage)
    trials = result.out.splitlines()[2:]
    assert "complete" in trials[0]
    assert "80.0 ms dropped early" in trials[0]
    assert "(idle)" in trials[1]
    assert "running" in trials[2]
    states = [one["state"] for one in found(storage, "busy")["busy"]["history"]]
    assert states == ["complete", "fail", "running"]


def test_a_broken_study_is_shown_beside_the_others(storage) -> None:
    database = Database(storage)
    Registry(database, "tuner").acquire(["bad", "good"], 0.0)
    studies = OptunaStudies(database, sampler="random")
    for name in ("bad", "good"):
        trial = studies.ask(name, 1, "")
        studies.tell(name, 1, trial.number, 0.08 if name == "good" else 0.07, 60.0, early=False)
    database.close()
    with sqlite3.connect(storage.removeprefix("sqlite:///")) as connection:
        connection.execute(
            "update trial_user_attributes set value_json = '-1' "
            "where key = 'tpt' and value_json = '0.07'"
        )
    connection.close()
    assert {name: one["state"] for name, one in found(storage).items()} == {
        "bad": "broken",
        "good": "searching",
    }


def test_nothing_heavy_is_loaded_for_wrong_usage() -> None:
    code = (
        "import sys; from cloud_verifier.cli import main; main(['tune']); "
        "print(*[m for m in ('torch', 'optuna', 'sqlalchemy', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [], done.stdout


def test_without_the_extra_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['httpx'] = None; sys.modules['optuna'] = None; "
        "from cloud_verifier.cli import main; sys.exit(main(['tune', '--broker', 'mqtt://x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "pip install 'pipesd[fleet]'" in done.stderr
