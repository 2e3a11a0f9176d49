"""A small HTTP server for ``/metrics`` and ``/healthz`` that no client can hold up.

One thread for each connection, of which there are few: when one more comes, the oldest is hung up,
since a scrape takes milliseconds and what is old is slow or broken. One request for a connection;
what it asks for is rendered and compressed by one thread at a time. Where rendering is dear, what
is younger than ``reuse`` seconds answers once more, so that a flood of requests makes none of work.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from broker.errors import ConfigError

log = logging.getLogger(__name__)

#: Connections at a time.
MAX_CLIENTS = 16
#: Seconds for a client to say something, and for it to take the answer.
CLIENT_TIMEOUT = 5.0

PLAIN = "text/plain; charset=utf-8"
#: Bytes from which a page is compressed for who takes that; and how much, for how much time.
_GZIP_FROM, _GZIP_LEVEL = 1_000, 1


class Page(NamedTuple):
    """What is answered; ``content_type`` and ``encoding`` as HTTP has them."""

    body: bytes
    content_type: str = PLAIN
    encoding: str = ""


#: Makes a page, ``/metrics`` above all, from the request's Accept header.
Render = Callable[[str], Page]
#: Why ``/healthz`` is to answer 503; None: all is well.
Health = Callable[[], str | None]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "pipesd"
    sys_version = ""
    timeout = CLIENT_TIMEOUT

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        status, page = self.server.owner.page(
            self.path.partition("?")[0],
            self.headers.get("Accept", ""),
            zipped=_takes_gzip(self.headers.get("Accept-Encoding", "")),
        )
        self.send_response(status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Vary", "Accept-Encoding")
        if page.encoding:
            self.send_header("Content-Encoding", page.encoding)
        self.end_headers()
        if with_body:
            self.wfile.write(page.body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http: " + format, *args)

    def log_error(self, format: str, *args: Any) -> None:
        # A client that was too slow, or spoke no HTTP.
        self.server.owner.counts["broken"] += 1
        log.debug("http: " + format, *args)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 4 * MAX_CLIENTS

    def __init__(
        self, address: tuple[str, int], family: socket.AddressFamily, owner: MetricsServer
    ) -> None:
        self.address_family = family
        self.owner = owner
        self._open: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= MAX_CLIENTS else None
            if oldest is not None:
                del self._open[oldest]
                self.owner.counts["hung_up"] += 1
            self._open[request] = None
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes up and ends
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """End every connection."""
        with self._lock:
            for request in self._open:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        self.owner.counts["broken"] += 1
        log.debug("http: a client went wrong", exc_info=True)


class MetricsServer:
    """Serves ``render`` and ``health`` until ``close``. ``port`` 0 takes a free one.

    ``counts``: requests by what became of them (``ok``, ``unhealthy``, ``unknown``, ``failed``),
    and connections that were ``hung_up`` or ``broken``. ``flag`` names the option in errors.
    ``pages``: further paths. ``reuse``: seconds for which a page answers again, whatever is
    accepted; 0: none does.
    Raises ConfigError where nothing can listen.
    """

    def __init__(
        self,
        host: str,
        port: int,
        render: Render,
        health: Health = lambda: None,
        *,
        flag: str = "--metrics-port",
        pages: Mapping[str, Render] | None = None,
        reuse: float = 0.0,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._pages: dict[str, Render] = {"/metrics": render, **(pages or {})}
        self._health = health
        self._reuse = reuse
        self._made: dict[tuple[str, bool], tuple[float, Page]] = {}
        self._turn = threading.Lock()
        self._closed = False
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            self._server = _Server((str(address[0]), port), family, self)
        except (OSError, OverflowError, UnicodeError) as error:
            cause = getattr(error, "strerror", None) or str(error)
            where = f"{flag}: cannot listen at {host}:{port}"
            raise ConfigError(f"{where}: {cause}: choose another or stop who has it") from None
        self.host = host
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True
        )

    def start(self) -> None:
        """Begin; called once."""
        self._thread.start()

    def close(self) -> None:
        """Take nothing more and hang up; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(2.0)
        self._server.server_close()
        self._server.hang_up()

    def page(self, path: str, accept: str, *, zipped: bool = False) -> tuple[int, Page]:
        """Status and content for a path, compressed where ``zipped``. Never raises."""
        try:
            if path in self._pages:
                with self._turn:
                    page = self._make(path, accept, zipped)
                self.counts["ok"] += 1
                return 200, page
            if path == "/healthz":
                cause = self._health()
                self.counts["ok" if cause is None else "unhealthy"] += 1
                return (200, Page(b"ok\n")) if cause is None else (503, Page(f"{cause}\n".encode()))
        except Exception as error:
            self.counts["failed"] += 1
            if self.counts["failed"] == 1:
                log.exception("%s could not be answered; others are only counted", path[:40])
            return 500, Page(f"{type(error).__name__}\n".encode())
        self.counts["unknown"] += 1
        known = ", ".join([*self._pages, "/healthz"])
        return 404, Page(f"try one of {known}\n".encode())

    def _make(self, path: str, accept: str, zipped: bool) -> Page:
        key, now = (path, zipped), time.monotonic()
        made = self._made.get(key)
        if made is not None and now - made[0] < self._reuse:
            return made[1]
        page = self._pages[path](accept)
        if zipped and len(page.body) >= _GZIP_FROM:
            page = page._replace(body=gzip.compress(page.body, _GZIP_LEVEL), encoding="gzip")
        if self._reuse > 0.0:
            self._made[key] = (time.monotonic(), page)
        return page


def _takes_gzip(accepted: str) -> bool:
    """Whether an Accept-Encoding header names gzip and does not forbid it (RFC 9110, 12.5.3)."""
    for part in accepted.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() == "gzip":
            quality = weight.partition("=")[2].strip() or "1"
            return quality.strip("0.") != ""
    return False
