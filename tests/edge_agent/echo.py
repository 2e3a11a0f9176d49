"""A server that answers with what it gets, and connections to it, to try a relay on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from edge_agent.bench.relay import EmulatedLink
from tests.edge_agent.test_mqtt_frames import CONNECT, publish

#: A message of about the size of a draft.
MESSAGE = publish("a/b", bytes(50))


class Echo:
    """A server that sends back what it gets; ``silent`` ones only accept."""

    def __init__(self, *, silent: bool = False, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = int(self._listener.getsockname()[1])
        self.connections: list[socket.socket] = []
        self.ended = 0
        self._silent = silent
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections.append(connection)
            if not self._silent:
                self._threads.append(
                    threading.Thread(target=self._serve, args=(connection,), daemon=True)
                )
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(65_536):
                connection.sendall(data)
        connection.close()
        self.ended += 1

    def close(self) -> None:
        # Closing alone does not wake a thread that waits in accept or recv.
        for one in (self._listener, *self.connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(5)


class Dial:
    """Makes connections to a relay, and closes them in the end."""

    def __init__(self) -> None:
        self._made: list[socket.socket] = []

    def __call__(self, relay: EmulatedLink, greeting: bytes = CONNECT) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", relay.port), timeout=10)
        self._made.append(client)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if greeting:
            client.sendall(greeting)
            assert receive(client, len(greeting)) == greeting
        return client

    def close(self) -> None:
        for client in self._made:
            client.close()


def receive(client: socket.socket, size: int) -> bytes:
    """``size`` bytes, or what came before the end of the stream."""
    parts, left = [], size
    while left:
        data = client.recv(min(left, 65_536))
        if not data:
            break
        parts.append(data)
        left -= len(data)
    return b"".join(parts)


def ended(client: socket.socket) -> bool:
    """Whether the other side closes it, in one way or another, within ten seconds."""
    try:
        while client.recv(65_536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def round_trips(client: socket.socket, message: bytes, times: int) -> list[float]:
    taken = []
    for _ in range(times):
        begin = time.monotonic()
        client.sendall(message)
        assert receive(client, len(message)) == message
        taken.append(time.monotonic() - begin)
    return taken
