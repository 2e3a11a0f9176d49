"""A broker that answers as a test tells it to, byte by byte: for what real brokers do rarely."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

CONNECT, PUBLISH, SUBSCRIBE, PINGREQ, DISCONNECT = 1, 3, 8, 12, 14


class Connection:
    """One client; ``received`` holds (kind, flags, body) of its packets."""

    def __init__(self, peer: socket.socket, number: int) -> None:
        self.peer = peer
        self.number = number
        self.received: list[tuple[int, int, bytes]] = []

    def send(self, first: int, body: bytes) -> None:
        assert len(body) < 128
        with contextlib.suppress(OSError):
            self.peer.sendall(bytes([first, len(body)]) + body)

    def raw(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.peer.sendall(data)

    def accept(self, properties: bytes = b"") -> None:
        self.send(0x20, b"\0\0" + bytes([len(properties)]) + properties)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.peer.shutdown(socket.SHUT_RDWR)

    def publishes(self) -> list[bytes]:
        """Payloads of what was published; topics are at most 127 bytes long."""
        return [_payload(flags, body) for kind, flags, body in self.received if kind == PUBLISH]


def packet_id(flags: int, body: bytes) -> bytes:
    """The packet identifier of a QoS 1 PUBLISH."""
    length = int.from_bytes(body[:2], "big")
    return body[2 + length : 4 + length]


def _payload(flags: int, body: bytes) -> bytes:
    start = 2 + int.from_bytes(body[:2], "big") + (2 if flags & 6 else 0)
    return body[start + 1 + body[start] :]


class ScriptedBroker:
    """Listens on a free port; ``script(connection, kind, flags, body)`` answers each packet."""

    def __init__(self, script: Callable[[Connection, int, int, bytes], None]) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections: list[Connection] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            connection = Connection(peer, len(self.connections))
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        stream = connection.peer.makefile("rb")
        with contextlib.suppress(OSError, ValueError):
            while first := stream.read(1):
                length = shift = 0
                while True:
                    byte = stream.read(1)[0]
                    length |= (byte & 127) << shift
                    shift += 7
                    if byte < 128:
                        break
                packet = (first[0] >> 4, first[0] & 15, stream.read(length))
                connection.received.append(packet)
                self._script(connection, *packet)
        stream.close()
        connection.peer.close()

    def __enter__(self) -> ScriptedBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for connection in self.connections:
            connection.close()


def polite(connection: Connection, kind: int, flags: int, body: bytes) -> None:
    """Accept, acknowledge everything."""
    if kind == CONNECT:
        connection.accept()
    elif kind == SUBSCRIBE:
        filters = 0
        rest = body[3 + body[2] :]
        while rest:
            rest = rest[2 + int.from_bytes(rest[:2], "big") + 1 :]
            filters += 1
        connection.send(0x90, body[:2] + b"\0" + b"\0" * filters)
    elif kind == PUBLISH and flags & 6:
        connection.send(0x40, packet_id(flags, body))
    elif kind == PINGREQ:
        connection.send(0xD0, b"")
