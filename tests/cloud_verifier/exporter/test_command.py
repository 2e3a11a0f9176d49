"""``cloud-verifier exporter``: its flags, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests.brokers import MosquittoBroker
from tests.commands import ROOT, Command, call, clean_environment, error_line

BROKER = ("--broker", "mqtt://127.0.0.1:1")


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of whoever runs the tests are no part of them."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), ("--broker is missing",)),
        (("--broker", "http://x"), ("mqtt://",)),
        ((*BROKER, "--ttl", "0"), ("--ttl 0",)),
        ((*BROKER, "--ttl", "nan"), ("--ttl nan",)),
        ((*BROKER, "--ttl", "soon"), ("--ttl",)),
        ((*BROKER, "--max-devices", "0"), ("--max-devices 0",)),
        ((*BROKER, "--port", "70000"), ("--port", "70000")),
        ((*BROKER, "--bind", "nowhere.invalid", "--port", "0"), ("--port", "nowhere.invalid")),
        ((*BROKER, "--password-file", "/does/not/exist"), ("--password-file",)),
    ],
)
def test_wrong_usage_is_one_line(
    no_settings: None, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    error_line(call("cloud-verifier", "exporter", *flags), 2, *words, program="cloud-verifier")


def test_a_port_in_use_is_named(no_settings: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = call("cloud-verifier", "exporter", *BROKER, "--port", port)
        error_line(result, 2, "--port", port, program="cloud-verifier")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_or_without_a_broker(mosquitto: MosquittoBroker, number: int) -> None:
    url = mosquitto.url if number == signal.SIGTERM else BROKER[1]
    with Command("cloud-verifier", "exporter", "--broker", url, "--port", "0") as command:
        command.until(lambda: command.out.endswith("\n"))
        where = command.out.split()[2]
        assert command.out == f"exporter serves {where} for the fleet at {url}\n"
        with urllib.request.urlopen(where, timeout=10) as answer:
            assert b"pipesd_exporter_broker_connected" in answer.read()
        if number == signal.SIGINT:
            command.until(lambda: "\n" in command.err)
        command.signal(number)
        result = command.wait()
    assert result.code == 0
    # An outage is said once.
    assert len(result.lines) == (number == signal.SIGINT), result.err


def test_a_broker_that_lets_nobody_in_ends_it_with_code_3(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("closed")
    with MosquittoBroker(folder) as probe:
        port = probe.port
    lines = f"listener {port} 127.0.0.1\nallow_anonymous false\n"
    with MosquittoBroker(folder, config=lines, port=port) as closed:
        flags = ("exporter", "--broker", closed.url, "--port", "0")
        with Command("cloud-verifier", *flags) as command:
            result = command.wait()
    assert result.code == 3
    assert "no way into the broker" in result.err


def test_exporter_and_live_view_need_no_torch() -> None:
    code = (
        "import sys, cloud_verifier.exporter.service, cloud_verifier.exporter.command; "
        "import cloud_verifier.top.command, cloud_verifier.top.screen, cloud_verifier.top.sources; "
        "print([m for m in ('torch', 'transformers', 'llama_cpp', 'paho', 'optuna', 'scipy') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
