"""``cloud-verifier top``: both sources, one look or many, and how it ends."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from broker.codec import encode
from broker.messages import DeviceStatus
from broker.mqtt import MqttSettings, MqttTransport
from broker.topics import status_topic, telemetry_topic
from tests.brokers import MosquittoBroker, free_port, wait_until
from tests.cloud_verifier.exporter.fleet import full
from tests.cloud_verifier.top.readings import counters, device, reading, replica
from tests.commands import PATIENCE, call, clean_environment, error_line, run_command

PROGRAM = "cloud-verifier"


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of whoever runs the tests are no part of them."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)


class FakeExporter:
    """Answers every request with ``status`` and ``body``, by default a fleet of one."""

    def __init__(self, port: int = 0) -> None:
        self.status = 200
        self.body = json.dumps(
            reading(verifiers={"v1": replica()}, **{"pi-1": device(**counters(10.0))})
        ).encode()
        self.paths: list[str] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.paths.append(self.path)
                self.send_response(owner.status)
                self.send_header("Content-Length", str(len(owner.body)))
                self.end_headers()
                self.wfile.write(owner.body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def exporter() -> Iterator[FakeExporter]:
    made = FakeExporter()
    yield made
    made.close()


# ---- one look -------------------------------------------------------------------------------


def test_one_look_at_an_exporter(no_settings: None, exporter: FakeExporter) -> None:
    done = call(PROGRAM, "top", "--exporter", exporter.url, "--once")
    assert (done.code, done.err) == (0, "")
    assert "1 devices online" in done.out
    assert "pi-1" in done.out
    assert "v1" in done.out
    assert "\x1b" not in done.out
    assert exporter.paths == ["/fleet.json"]


def test_without_a_terminal_it_is_one_look(no_settings: None, exporter: FakeExporter) -> None:
    done = call(PROGRAM, "top", "--exporter", f"{exporter.url}/metrics")
    assert done.code == 0
    assert "pi-1" in done.out
    assert len(done.lines) == 1
    assert "--once" in done.err


def test_one_look_for_programs(no_settings: None, exporter: FakeExporter) -> None:
    done = call(PROGRAM, "top", "--exporter", exporter.url, "--json")
    assert (done.code, done.err) == (0, "")
    shown = json.loads(done.out)
    assert shown["devices"][0]["device"] == "pi-1"
    assert shown["devices"][0]["tpt_seconds"] == pytest.approx(0.1)
    assert shown["totals"]["sessions"] == 3


@pytest.mark.parametrize(
    ("status", "body", "word"),
    [
        (404, b"{}", "404"),
        (200, b"<html>", "no JSON"),
        (200, b"[" * 100_000, "no JSON"),
        (200, b"\xff\xfe", "no JSON"),
        (200, b"{}", "no report"),
        (200, b'{"format": 9, "devices": {}}', "format 9"),
    ],
)
def test_what_is_no_exporter_is_said_in_one_line(
    no_settings: None, exporter: FakeExporter, status: int, body: bytes, word: str
) -> None:
    exporter.status, exporter.body = status, body
    error_line(call(PROGRAM, "top", "--exporter", exporter.url, "--once"), 1, word, program=PROGRAM)


def test_nobody_there_is_said_in_one_line(no_settings: None) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    error_line(call(PROGRAM, "top", "--exporter", url, "--once"), 3, url, program=PROGRAM)


def test_no_broker_is_no_empty_fleet(no_settings: None) -> None:
    url = f"mqtt://127.0.0.1:{free_port()}"
    flags = ("--broker", url, "--once", "--listen", "0.2")
    done = run_command(PROGRAM, "top", *flags)
    assert (done.code, done.out) == (3, "")
    assert f"no broker at {url}" in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--exporter", "mqtt://x"), "--exporter"),
        (("--exporter", "http://"), "--exporter"),
        (("--exporter", "http://x:99999"), "--exporter"),
        (("--exporter", "http://x", "--broker", "mqtt://x"), "either"),
        (("--broker", "http://x"), "mqtt://"),
        (("--sort", "age"), "--sort"),
        (("--interval", "0"), "--interval"),
        (("--interval", "nan"), "--interval"),
        (("--listen", "-1"), "--listen"),
    ],
)
def test_wrong_usage_is_one_line(no_settings: None, flags: tuple[str, ...], word: str) -> None:
    error_line(call(PROGRAM, "top", *flags), 2, word, program=PROGRAM)


def test_one_look_at_the_broker_itself(mosquitto: MosquittoBroker) -> None:
    transport = MqttTransport(MqttSettings.from_url(mosquitto.url, "device-top-1"))
    transport.start(lambda message: None, lambda event: None)
    assert wait_until(lambda: transport.connected)
    online = encode(DeviceStatus(True))
    transport.publish(status_topic("top-1"), online, qos=1, retain=True)
    over = threading.Event()

    def talk() -> None:
        sequence = 0
        while not over.wait(0.1):
            sequence += 1
            transport.publish(telemetry_topic("top-1"), encode(full("b", sequence, sequence)))

    talker = threading.Thread(target=talk)
    talker.start()
    try:
        flags = ("--broker", mosquitto.url, "--json", "--listen", "1.5")
        done = run_command(PROGRAM, "top", *flags)
    finally:
        over.set()
        talker.join()
        transport.publish(status_topic("top-1"), b"", qos=1, retain=True)
        transport.stop()
    assert (done.code, done.err) == (0, "")
    shown = {row["device"]: row for row in json.loads(done.out)["devices"]}
    assert shown["top-1"]["online"] is True
    assert shown["top-1"]["policy"] == "pipesd"


# ---- a terminal -----------------------------------------------------------------------------


class Terminal:
    """The command on a pseudo terminal of 24 lines and 120 columns."""

    def __init__(self, *flags: str, term: str = "xterm") -> None:
        self.fd, theirs = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        environment = clean_environment({"TERM": term})
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cloud_verifier.cli", "top", *flags],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""

    def until(self, *words: str) -> None:
        """Read on until all of ``words`` came after what was read before."""
        begin, deadline = len(self.shown), time.monotonic() + PATIENCE
        while not all(word in self.shown[begin:] for word in words):
            assert time.monotonic() < deadline, self.shown[-2_000:]
            assert self._read(), self.shown[-2_000:]

    def end(self, number: int = 0) -> int:
        """Its exit code, after a signal if one is given."""
        if number:
            self.process.send_signal(number)
        while self._read():
            pass
        return self.process.wait(PATIENCE)

    def _read(self) -> bool:
        """Whether there may be more."""
        if select.select([self.fd], [], [], 1.0)[0]:
            try:
                part = os.read(self.fd, 65_536)
            except OSError:
                return False  # the other end is closed
            self.shown += part.decode("utf-8", "replace")
            return bool(part)
        return True

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.fd)


def test_it_goes_on_until_interrupted_and_tells_when_the_exporter_is_away() -> None:
    site = FakeExporter()
    with Terminal("--exporter", site.url, "--interval", "0.2") as terminal:
        terminal.until("pi-1", "100.0", "sessions 3 of 8")
        site.close()
        # What was seen last stays, and why there is nothing newer is said.
        terminal.until("no exporter at", "pi-1")
        site = FakeExporter(site.port)
        site.body = site.body.replace(b"pi-1", b"pi-2")
        terminal.until("pi-2")
        assert terminal.end(signal.SIGINT) == 0
        site.close()
        assert terminal.shown.rstrip().endswith("\x1b[?1049l")  # the screen of before is back
        assert "Traceback" not in terminal.shown


def test_a_broker_that_lets_nobody_in_ends_it(tmp_path: Path) -> None:
    port = free_port()
    lines = f"listener {port} 127.0.0.1\nallow_anonymous false\n"
    with (
        MosquittoBroker(tmp_path, config=lines, port=port) as closed,
        Terminal("--broker", closed.url, "--interval", "0.1") as terminal,
    ):
        assert terminal.end() == 3
    assert "no way into the broker" in terminal.shown


def test_a_dumb_terminal_gets_one_look(exporter: FakeExporter) -> None:
    with Terminal("--exporter", exporter.url, term="dumb") as terminal:
        terminal.until("pi-1")
        assert terminal.end() == 0
        assert "\x1b[?1049h" not in terminal.shown


def test_one_look_that_is_interrupted_ends_with_130(mosquitto: MosquittoBroker) -> None:
    flags = ("--broker", mosquitto.url, "--once", "--listen", "600", "--verbose")
    with Terminal(*flags) as terminal:
        terminal.until("connected")
        assert terminal.end(signal.SIGINT) == 130
