"""``bench --fleet`` as a person runs it: processes, Mosquitto, a scripted verifier."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from cloud_verifier.scripted import STATS, main
from tests.brokers import MOSQUITTO, MosquittoBroker, require
from tests.commands import Command, Result, clean_environment, run_command, still_alive

PATIENCE = 120.0


@pytest.fixture(autouse=True)
def mosquitto_is_there() -> None:
    require("mosquitto", MOSQUITTO is not None)


def report(done: Result) -> dict:
    assert done.code == 0, f"{done.code}: {done.err[-2000:]}{done.out[-2000:]}"
    return json.loads(done.out)


def check_exact(data: dict) -> None:
    assert data["generations"] > 0
    bad = {name: data[name] for name in ("wrong", "incomplete", "cut_off")}
    assert bad == dict.fromkeys(bad, 0), data["reasons"]


def test_fifty_devices_write_exact_texts_and_leave_nothing(tmp_path) -> None:
    flags = [
        *("bench", "--fleet", "50", "--minutes", "0.08", "--think", "0.3", "--ramp", "1"),
        *("--max-tokens", "24", "--json", "--out", str(tmp_path / "fleet")),
    ]
    with Command("edge-agent", *flags) as command:
        command.until(lambda: "50 of 50 connected" in command.err or len(command.children()) >= 5)
        children = command.children()
        done = command.wait(PATIENCE)
    data = report(done)
    assert not still_alive(children, 10.0)
    check_exact(data)
    assert data["generations"] >= 50, "everybody wrote"
    assert data["settings"]["devices"] == 50
    assert data["settings"]["processes"] >= 1
    assert data["verifier"]["sessions_left"] == data["verifier"]["slots_left"] == 0
    assert data["verifier"]["rejected"] == {}
    assert data["verifier"]["opens"] >= data["generations"]
    assert data["batch"]["forwards"] > 0
    assert data["tokens"] == data["verifier"]["committed"]
    assert data["tpt_ms"]["p50"] > 0.0
    assert data["round_ms"]["p99"] >= data["round_ms"]["p50"]
    for name in ("verifier", "broker", "fleet"):
        assert data["usage"][name]["peak"] > 1_000_000
    assert json.loads((tmp_path / "fleet.json").read_text()) == data


def test_a_full_verifier_makes_devices_wait(tmp_path) -> None:
    flags = [
        *("bench", "--fleet", "12", "--generations", "2", "--max-sessions", "4", "--ramp", "0"),
        *("--max-tokens", "16", "--forward-ms", "10", "--policy", "cloud", "--json"),
    ]
    data = report(run_command("edge-agent", *flags, timeout=PATIENCE))
    check_exact(data)
    assert data["generations"] == 24
    assert data["refusals"] > 0
    assert data["sessions"]["most"] <= 4


def test_ctrl_c_shows_what_there_is_so_far() -> None:
    flags = ["bench", "--fleet", "10", "--minutes", "30", "--max-tokens", "16", "--json"]
    with Command("edge-agent", *flags) as command:
        command.until(lambda: "of 10 connected, " in command.err and len(command.children()) >= 5)
        children = command.children()
        command.signal(signal.SIGINT)
        done = command.wait(PATIENCE)
    assert done.code == 130, done.err
    assert not still_alive(children, 10.0)
    data = json.loads(done.out)
    assert data["stopped"]
    assert data["wrong"] == data["incomplete"] == 0
    assert data["verifier"]["sessions_left"] == 0
    assert "Traceback" not in done.err


def test_a_fleet_meets_a_verifier_that_runs_already(tmp_path) -> None:
    with MosquittoBroker(tmp_path) as broker:
        verifier = subprocess.Popen(
            [sys.executable, "-m", "cloud_verifier.scripted", "--broker", broker.url],
            env=clean_environment(),
            stderr=subprocess.PIPE,
        )
        try:
            flags = ["--broker", broker.url, "--generations", "2", "--max-tokens", "8", "--json"]
            done = run_command("edge-agent", "bench", "--fleet", "3", *flags, timeout=PATIENCE)
        finally:
            verifier.terminate()
            said = verifier.communicate(timeout=30)[1].decode()
        assert verifier.returncode == 0, said
    data = report(done)
    check_exact(data)
    assert data["generations"] == 6
    assert data["batch"] is None, "its counters are not ours to read"
    counters = json.loads(said.splitlines()[-1].removeprefix(STATS))
    assert counters["opens"] == 6
    assert counters["sessions_left"] == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "--broker is missing"),
        ("--broker mqtt://127.0.0.1 --max-sessions 0", "--max-sessions"),
        ("--broker mqtt://127.0.0.1 --slots 0", "--slots"),
        ("--broker mqtt://127.0.0.1 --idle-ttl 0", "--idle-ttl"),
        ("--broker mqtt://127.0.0.1 --forward-ms -1", "outside 0"),
        ("--broker mqtt://127.0.0.1 --id a/b", "--id"),
    ],
)
def test_wrong_flags_of_the_scripted_verifier(flags, words, capsys, monkeypatch) -> None:
    monkeypatch.delenv("PIPESD_BROKER", raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    hook = sys.unraisablehook
    try:
        assert main(flags.split()) == 2
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
    assert words in capsys.readouterr().err
