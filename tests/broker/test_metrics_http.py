"""The HTTP server of metrics: what it answers, and clients that would hold it up."""

from __future__ import annotations

import gzip
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from broker import metrics_http
from broker.errors import ConfigError
from broker.metrics_http import MAX_CLIENTS, MetricsServer, Page
from tests.brokers import wait_until


class Site:
    """A server whose page and health can be changed."""

    def __init__(self) -> None:
        self.body = b"a 1\n"
        self.cause: str | None = None
        self.fault: Exception | None = None
        self.server = MetricsServer("127.0.0.1", 0, self.render, lambda: self.cause)
        self.server.start()

    def render(self, accept: str) -> Page:
        if self.fault is not None:
            raise self.fault
        return Page(self.body + accept.encode(), "text/x")

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, str]:
        client = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=5.0)
        try:
            client.request(method, path, headers=headers)
            answer = client.getresponse()
            return answer.status, answer.read(), answer.getheader("Content-Type", "")
        finally:
            client.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=5.0)


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.server.close()


def test_pages(site: Site) -> None:
    assert site.get("/metrics", Accept="x") == (200, b"a 1\nx", "text/x")
    assert site.get("/metrics?name[]=a", Accept="") == (200, b"a 1\n", "text/x")
    assert site.get("/metrics", "HEAD", Accept="") == (200, b"", "text/x")
    assert site.get("/healthz")[:2] == (200, b"ok\n")
    assert site.get("/")[0] == 404
    assert site.get("/metrics", "POST")[0] == 501
    site.cause = "no broker"
    assert site.get("/healthz")[:2] == (503, b"no broker\n")
    assert site.server.counts == {"ok": 4, "unknown": 1, "broken": 1, "unhealthy": 1}


def test_a_page_that_fails_is_an_answer_too(site: Site) -> None:
    site.fault = ZeroDivisionError("a bug")
    assert site.get("/metrics")[:2] == (500, b"ZeroDivisionError\n")
    site.fault = None
    assert site.get("/metrics")[0] == 200
    assert site.server.counts["failed"] == 1


def test_clients_that_say_nothing_do_not_hold_it_up(site: Site) -> None:
    """More of them than connections: the oldest are hung up."""
    idle = [site.connect() for _ in range(MAX_CLIENTS + 4)]
    try:
        for client in idle[MAX_CLIENTS:]:
            client.sendall(b"GET /met")
        for _ in range(3):
            assert site.get("/metrics")[0] == 200
        assert site.server.counts["hung_up"] >= 4
        assert idle[0].recv(1) == b""
    finally:
        for client in idle:
            client.close()


def test_a_client_that_does_not_read_gives_up_its_thread(site: Site, monkeypatch) -> None:
    monkeypatch.setattr(metrics_http._Handler, "timeout", 0.2)
    site.body = b"x" * 20_000_000
    client = site.connect()
    try:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert wait_until(lambda: site.server.counts["broken"] == 1)
        site.body = b"b 2\n"
        assert site.get("/metrics", Accept="")[:2] == (200, b"b 2\n")
    finally:
        client.close()


@pytest.mark.parametrize("junk", [b"\0\xff" * 50 + b"\r\n\r\n", b"GET\r\n\r\n", b"A" * 70_000, b""])
def test_junk(site: Site, junk: bytes) -> None:
    client = site.connect()
    client.sendall(junk)
    client.close()
    assert site.get("/metrics")[0] == 200


def test_where_nothing_can_listen(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"--metrics-port.*in use") as caught:
        MetricsServer("127.0.0.1", site.server.port, site.render)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    for host, port in (("no such host!", 0), ("203.0.113.7", 0), ("127.0.0.1", 70_000)):
        with pytest.raises(ConfigError, match="cannot listen"):
            MetricsServer(host, port, site.render)


def test_closing_ends_everything(site: Site) -> None:
    client = site.connect()
    assert site.get("/metrics")[0] == 200
    site.server.close()
    site.server.close()
    assert client.recv(1) == b""
    client.close()
    with pytest.raises(ConnectionError):
        site.get("/metrics")
    assert wait_until(lambda: not [t for t in threading.enumerate() if "process_request" in t.name])


def test_closing_before_the_start() -> None:
    MetricsServer("127.0.0.1", 0, lambda accept: Page(b"")).close()


def test_ipv6_where_there_is_one() -> None:
    try:
        server = MetricsServer("::1", 0, lambda accept: Page(b""))
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    server.start()
    with socket.create_connection(("::1", server.port), timeout=5.0) as client:
        client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.0 200")
    server.close()


def test_a_large_page_is_compressed_for_who_takes_that(site: Site) -> None:
    site.body = b"pipesd_a 1\n" * 1_000
    for accepted, zipped in (
        ("gzip", True),
        ("deflate, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("identity", False),
        ("", False),
    ):
        client = http.client.HTTPConnection("127.0.0.1", site.server.port, timeout=5.0)
        client.request("GET", "/metrics", headers={"Accept-Encoding": accepted, "Accept": ""})
        answer = client.getresponse()
        body = answer.read()
        client.close()
        assert (answer.getheader("Content-Encoding") == "gzip") is zipped, accepted
        assert answer.getheader("Vary") == "Accept-Encoding"
        assert int(answer.getheader("Content-Length", "")) == len(body)
        assert (gzip.decompress(body) if zipped else body) == site.body


def test_a_page_may_answer_more_than_once() -> None:
    made = []

    def render(accept: str) -> Page:
        made.append(accept)
        return Page(b"%d" % len(made))

    server = MetricsServer("127.0.0.1", 0, render, pages={"/more": render}, reuse=60.0)
    assert [server.page("/metrics", kind)[1].body for kind in ("", "x", "y")] == [b"1"] * 3
    assert server.page("/more", "")[1].body == b"2"
    assert server.page("/less", "") == (404, Page(b"try one of /metrics, /more, /healthz\n"))
    server.close()
