"""A whole system of processes that can be struck: a broker, verifiers, and a crew of devices.

Linux only. Everything ends with this process: the broker is told by the kernel, verifiers and crews
notice the end of a pipe.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks._left import Left
from broker.command import Stopped
from broker.errors import ConfigError, PipesdError, TransportError
from broker.mqtt import MqttSettings
from edge_agent.bench.fleet_station import Watcher
from edge_agent.bench.fleet_worker import STOP, Progress, WorkerPlan, play
from edge_agent.bench.mosquitto import find_mosquitto
from edge_agent.children import Child

_CONFIG = (
    "listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\nsys_interval 1\n"
    "max_queued_messages 10000\n"
)
_START_S = 30.0
_PORT_TRIES = 5
_COUNTERS = "scripted-verifier counters "


def wait_for(condition: Callable[[], object], timeout: float, what: str) -> None:
    """Raises TransportError that names ``what`` when it does not come true in ``timeout`` s."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TransportError(f"{what} did not happen within {timeout:.0f} s")
        time.sleep(0.02)


def resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 when it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


class Broker:
    """A Mosquitto on a free port that keeps it over its deaths; ``start``, ``kill``, ``stop``."""

    def __init__(self, folder: Path) -> None:
        program = find_mosquitto()
        if program is None:
            raise ConfigError("mosquitto is not installed: install it (apt install mosquitto)")
        self._command = [program, "-c", str(folder / "mosquitto.conf")]
        if (guard := shutil.which("setpriv")) is not None:
            self._command = [guard, "--pdeathsig", "KILL", "--", *self._command]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Broker:
        """Raises TransportError when it does not listen soon."""
        # Only the first start picks a port; another program may have taken it by then.
        for _ in range(1 if self.port else _PORT_TRIES):
            if self._begin():
                return self
        raise TransportError("mosquitto does not listen: see whether its port is taken")

    def _begin(self) -> bool:
        fresh = not self.port
        if fresh:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = int(probe.getsockname()[1])
        # As root it would become another user, which would undo what the kernel was told.
        user = "user root\n" if os.geteuid() == 0 else ""
        config = _CONFIG.format(port=self.port) + user
        (self._folder / "mosquitto.conf").write_text(config, encoding="ascii")
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as attempt:
                if attempt.connect_ex(("127.0.0.1", self.port)) == 0:
                    return True
            time.sleep(0.01)
        self.stop()
        if fresh:
            self.port = 0
        return False

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """At once, without a word to anybody."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def stop(self) -> None:
        """End it; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


class Verifier:
    """A replica: scripted, which tells what it holds, or with a real ``pair``, which does not."""

    def __init__(self, url: str, name: str, flags: Sequence[str], *, scripted: bool) -> None:
        self.name = name
        self.scripted = scripted
        self._url = url
        self._flags = list(flags)
        self._told: dict[str, Any] | None = None
        self._heard = threading.Event()
        self._child = self._make()

    def _make(self) -> Child:
        module = "cloud_verifier.scripted" if self.scripted else "cloud_verifier.cli"
        where = ["--broker", self._url, "--id", self.name, "--until-eof", *self._flags]
        serve = [] if self.scripted else ["serve"]
        return Child(module, [*serve, *where], threads=1, on_line=self._on_line)

    def _on_line(self, line: str) -> None:
        if line.startswith(_COUNTERS):
            self._told = json.loads(line.removeprefix(_COUNTERS))
            self._heard.set()

    @property
    def alive(self) -> bool:
        return self._child.alive

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        return self._child.exit_code

    @property
    def last_line(self) -> str:
        return self._child.last_line

    def signal(self, number: int) -> None:
        self._child.signal(number)

    def counters(self, timeout: float = 20.0) -> dict[str, Any]:
        """What a scripted one counts and holds. Raises TransportError when it does not answer."""
        self._heard.clear()
        self._child.tell("counters")
        if not self._heard.wait(timeout) or self._told is None:
            raise TransportError(f"{self.name} does not answer: {self.last_line}")
        return self._told

    def restart(self) -> None:
        """Another process under the same id, in place of one that has ended."""
        self._child.stop()
        self._child = self._make()

    def stop(self) -> None:
        """End it; idempotent."""
        with contextlib.suppress(OSError):
            self.signal(signal.SIGCONT)
        self._child.stop()


def _crew(pipe: Connection) -> None:
    """The process: plays one plan after another until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.ERROR)  # that connections die is the purpose
    with contextlib.suppress(EOFError, OSError):
        # A STOP that crossed the end of a plan is for nobody.
        while isinstance(plan := pipe.recv(), WorkerPlan | str):
            if isinstance(plan, WorkerPlan) and not play(plan, pipe):
                return


class Crew:
    """Emulated devices in a process of their own; it plays one plan at a time."""

    def __init__(self) -> None:
        context = get_context("spawn")  # not forked: there are threads
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_crew, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.latest = Progress()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def begin(self, plan: WorkerPlan) -> None:
        self.latest = Progress()
        self._pipe.send(plan)

    def halt(self) -> None:
        """Cut off what runs; its last report comes all the same."""
        self._pipe.send(STOP)

    def hear(self, timeout: float) -> bool:
        """Take in reports for ``timeout`` seconds at most; whether the last one has come.

        Raises PipesdError when the process broke down.
        """
        deadline = time.monotonic() + timeout
        while self.latest.tally is None:
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                return False
            try:
                self.latest = self._pipe.recv()
            except (EOFError, OSError):
                raise PipesdError("a crew died: see whether memory ran out") from None
            if self.latest.failure is not None:
                raise PipesdError(f"a crew broke down: {self.latest.failure}")
        return True

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """At once: all its devices vanish."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def stop(self) -> None:
        """End it; idempotent."""
        if not self._pipe.closed:
            self._pipe.close()
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self.signal(signal.SIGCONT)
            self._process.join(2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Lab:
    """A broker with ``count`` verifiers; use it as a context manager.

    ``flags``: of each verifier. ``pair``: a real one instead of the scripted target.
    """

    def __init__(self, count: int, flags: Sequence[str], pair: str | None = None) -> None:
        self._count = count
        self._flags = list(flags)
        self._pair = pair
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Lab:
        try:
            return self._enter()
        except BaseException:
            self._cleanup.close()
            raise

    def _enter(self) -> Lab:
        stack = self._cleanup
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipesd-lab-"))
        self.broker = Broker(Path(folder))
        stack.callback(self.broker.stop)
        self.broker.start()
        self.settings = MqttSettings.from_url(self.broker.url, "lab")
        self.verifiers: list[Verifier] = []
        for number in range(self._count):
            name = f"replica-{number + 1}"
            scripted = self._pair is None
            self.verifiers.append(Verifier(self.broker.url, name, self._flags, scripted=scripted))
            stack.callback(self.verifiers[-1].stop)
        self.watcher = Watcher(self.settings)
        stack.callback(self.watcher.stop)
        self.left = Left(self.broker.url)
        stack.callback(self.left.stop)
        self.wait_online(600.0 if self._pair else 60.0)
        return self

    def wait_online(self, timeout: float) -> None:
        """Until all verifiers are known to be online. Raises TransportError."""

        def online() -> bool:
            for verifier in self.verifiers:
                if not verifier.alive:
                    raise TransportError(f"{verifier.name} ended: {verifier.last_line}")
            return set(self.watcher.online()) >= {one.name for one in self.verifiers}

        wait_for(online, timeout, "that all verifiers are online")

    def crew(self) -> Crew:
        """One more, which ends with the lab."""
        crew = Crew()
        self._cleanup.callback(crew.stop)
        return crew

    def sessions_left(self, timeout: float) -> list[str]:
        """What living verifiers still hold after ``timeout`` seconds at most, in words."""
        deadline = time.monotonic() + timeout
        while True:
            held = [words for verifier in self.verifiers if (words := self._held(verifier))]
            if not held or time.monotonic() >= deadline:
                return held
            time.sleep(0.1)

    def forgotten(self) -> dict[int, int]:
        """By process: sessions that a scripted verifier gave up because nobody spoke of them."""
        return {one.pid: one.counters()["expired"] for one in self.verifiers if one.scripted}

    def _held(self, verifier: Verifier) -> str:
        if verifier.scripted:
            told = verifier.counters()
            sessions, slots = told["sessions_left"], told["slots_left"]
        else:
            # It tells the number of its sessions in its status alone, every ten seconds.
            status = self.watcher.online().get(verifier.name)
            sessions, slots = (1 if status is None else status.sessions), 0
        if not sessions and not slots:
            return ""
        return f"{verifier.name} holds {sessions} sessions and {slots} slots"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._cleanup.close()
        except Stopped:
            self._cleanup.close()
            raise
