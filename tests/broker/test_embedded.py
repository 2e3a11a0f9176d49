"""The embedded broker: comes up, is found, and never outlives its parent."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from broker import embedded as module
from broker.cli import main
from broker.embedded import EmbeddedBroker
from broker.errors import ConfigError, TransportError
from broker.mqtt import MqttSettings, MqttTransport
from tests.brokers import Peer, free_port, require, wait_until


@pytest.fixture(autouse=True)
def _installed() -> None:
    require("iotcore", importlib.util.find_spec("iotcore") is not None)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def gone(pid: int) -> bool:
    """The process is no more, or is only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_starts_serves_and_stops() -> None:
    with EmbeddedBroker() as broker:
        assert broker.url == f"mqtt://127.0.0.1:{broker.port}"
        assert broker.start() is broker, "starting twice is harmless"
        peer = Peer(MqttTransport(MqttSettings.from_url(broker.url, "c")), "c")
        peer.transport.subscribe("x")
        peer.start()
        assert wait_until(lambda: peer.transport.connected)
        peer.transport.publish("x", b"hello")
        assert wait_until(lambda: peer.payloads == [b"hello"])
        peer.transport.stop()
        assert broker.alive
    assert not broker.alive
    assert not listens(broker.port)
    broker.stop()


def test_two_at_once_and_again_on_the_same_port() -> None:
    with EmbeddedBroker() as one, EmbeddedBroker() as two:
        assert one.port != two.port
    with EmbeddedBroker(port=one.port) as again:
        assert again.port == one.port


def test_max_payload_is_the_brokers_limit_too() -> None:
    with EmbeddedBroker(max_payload=4 * 1024 * 1024) as broker:
        settings = MqttSettings.from_url(broker.url, "c", max_payload=4 * 1024 * 1024)
        peer = Peer(MqttTransport(settings), "c")
        peer.transport.subscribe("x")
        peer.start()
        assert wait_until(lambda: peer.transport.connected)
        peer.transport.publish("x", b"m" * 4 * 1024 * 1024)
        assert wait_until(lambda: bool(peer.messages))
        peer.transport.stop()


def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .*taken"):
            EmbeddedBroker(port=port).start()


def test_free_port_taken_in_between_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        ports = iter([holder.getsockname()[1], holder.getsockname()[1], free_port()])
        monkeypatch.setattr(EmbeddedBroker, "_free_port", lambda self: next(ports))
        with EmbeddedBroker() as broker:
            assert broker.port != holder.getsockname()[1]
            assert listens(broker.port)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.77", "a..b"])
def test_address_of_another_machine(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        EmbeddedBroker(host).start()


@pytest.mark.parametrize("options", [{"port": -1}, {"port": 70_000}, {"max_payload": 0}])
def test_impossible_options(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        EmbeddedBroker(**options)  # type: ignore[arg-type]


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'pipesd\[embedded\]'"):
        EmbeddedBroker().start()


def test_child_that_fails_is_reported_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CONFIG", module._CONFIG.replace("[v5.1]", "[v5.1"))
    with pytest.raises(TransportError, match="TOML") as raised:
        EmbeddedBroker().start()
    assert "\n" not in str(raised.value)


def test_no_room_for_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.tempfile, "tempdir", "/nonexistent")
    with pytest.raises(ConfigError, match="TMPDIR"):
        EmbeddedBroker().start()


def test_lives_on_after_the_thread_that_started_it() -> None:
    """Linux signals a child when the thread that made it ends, not only the process."""
    broker = EmbeddedBroker()
    thread = threading.Thread(target=broker.start)
    thread.start()
    thread.join()
    try:
        assert not wait_until(lambda: not broker.alive, 0.3)
        assert listens(broker.port)
    finally:
        broker.stop()


PARENT = """
import os, sys, time
from broker.embedded import EmbeddedBroker
broker = EmbeddedBroker().start()
{before}
print(broker.port, broker._process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="alone"),
        # A fork holds the pipe open that would tell of the parent's end.
        pytest.param("if not os.fork(): time.sleep(3); os._exit(0)", id="with a fork"),
    ],
)
def test_ends_with_a_parent_that_was_killed(before: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(before=before)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(module.__file__).parents[1],
    )
    try:
        assert parent.stdout is not None
        port, child = (int(word) for word in parent.stdout.readline().split())
        assert listens(port)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        assert wait_until(lambda: gone(child) and not listens(port), 2.0)
    finally:
        parent.kill()
        parent.wait(10)


# ---- the command ------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "broker.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(module.__file__).parents[1],
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_prints_its_url_and_ends_cleanly(number: signal.Signals) -> None:
    process = command("embedded", "--port", "0")
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("mqtt://127.0.0.1:")
        port = int(url.rpartition(":")[2])
        assert listens(port)
        process.send_signal(number)
        out, errors = process.communicate(timeout=10)
        assert process.returncode == 0
        assert (out, errors) == ("", "")
        assert not listens(port)
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["embedded", "--port", "x"],
        ["embedded", "--port", "70000"],
        ["nonsense"],
        ["embedded", "--host", "203.0.113.77"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    process = command(*arguments)
    out, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert out == ""
    assert errors.count("\n") == 1
    assert errors.startswith("fleet-broker")


def test_taken_port_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            assert main(["embedded", "--port", str(holder.getsockname()[1])]) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "taken" in captured.err
    assert captured.err.count("\n") == 1


def test_port_of_another_broker_is_exit_code_2() -> None:
    with EmbeddedBroker() as other:
        process = command("embedded", "--port", str(other.port))
        out, errors = process.communicate(timeout=20)
        assert other.alive
    assert process.returncode == 2
    assert out == ""
    assert "taken" in errors
    assert errors.count("\n") == 1


def test_settings_may_come_from_a_file(tmp_path: Path) -> None:
    config = tmp_path / "pipesd.toml"
    config.write_text("[fleet-broker]\nport = 70000\n")
    process = command("embedded", "--config", str(config))
    out, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert (out, errors.count("\n")) == ("", 1)
    assert "70000" in errors


def test_broker_that_dies_ends_the_command() -> None:
    process = command("embedded", "--port", "0")
    try:
        assert process.stdout is not None
        process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        _, errors = process.communicate(timeout=10)
        assert process.returncode == 1
        assert "ended by itself" in errors
        assert errors.count("\n") == 1
    finally:
        process.kill()
        process.wait(10)
