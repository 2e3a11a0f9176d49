"""A Mosquitto on a free loopback port that ends with this process, for measurements.

As a module (``python -m edge_agent.bench.mosquitto PROGRAM PORT``) it is the child in between: it
runs Mosquitto until its standard input ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from broker.errors import ConfigError, TransportError
from edge_agent.children import Child

_PATH = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/sbin"
_PORT_TRIES = 5
_START_S = 15.0
#: Mosquitto leaves Nagle's algorithm on by default, which costs up to 40 ms a message.
_CONFIG = "listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n"


def find_mosquitto() -> str | None:
    """The program, where it is installed."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path=_PATH)


class Mosquitto:
    """``start`` and ``stop`` it; ``url`` is where it listens."""

    def __init__(self) -> None:
        self.port = 0
        self._child: Child | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    def start(self) -> Mosquitto:
        """Raises ConfigError when it is not installed, TransportError when it does not come up."""
        program = find_mosquitto()
        if program is None:
            raise ConfigError("mosquitto is not installed: install it, or --broker-kind embedded")
        deadline = time.monotonic() + _START_S
        for _ in range(_PORT_TRIES):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = int(probe.getsockname()[1])
            self._child = Child("edge_agent.bench.mosquitto", [program, str(self.port)], threads=1)
            while self._child.alive and time.monotonic() < deadline:
                with socket.socket() as attempt:
                    if attempt.connect_ex(("127.0.0.1", self.port)) == 0:
                        return self
                time.sleep(0.02)
            said = self._child.last_line
            self.stop()
        raise TransportError(f"mosquitto did not come up ({said}): try --broker-kind embedded")

    def stop(self) -> None:
        """End it; idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()


def main(program: str, port: str) -> int:
    """The child: run ``program`` on ``port`` until standard input ends."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    def end(*_: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    with tempfile.TemporaryDirectory(prefix="pipesd-mosquitto-") as folder:
        config = Path(folder) / "mosquitto.conf"
        config.write_text(_CONFIG.format(port=port), encoding="ascii")
        process = subprocess.Popen([program, "-c", str(config)])
        threading.Thread(target=watch, daemon=True).start()
        try:
            return process.wait()
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
