"""What a fleet reads from a verifier's metrics page."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator

import pytest

from broker.errors import ConfigError
from edge_agent.bench.fleet_command import FleetChoices
from edge_agent.bench.fleet_metrics import counted, free_port, parse_counters, read_counters
from edge_agent.cli import build_parser

PAGE = """\
# HELP pipesd_verifier_forwards_total Forwards of the target that were done.
# TYPE pipesd_verifier_forwards_total counter
pipesd_verifier_forwards_total 20.0
pipesd_verifier_batch_sessions_bucket{le="1.0"} 3.0
pipesd_verifier_batch_sessions_sum 50.0
pipesd_verifier_batch_tokens_sum 1.5e2
pipesd_verifier_committed_tokens_total 90.0 1700000000
pipesd_verifier_sessions 4.0
pipesd_verifier_broken x
other_forwards_total 7
"""


@contextlib.contextmanager
def served(page: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_page_tells_counters() -> None:
    wanted = {
        "forwards": 20.0, "batch_sessions": 50.0, "batch_tokens": 150.0, "committed": 90.0,
        "sessions_left": 4.0,
    }  # fmt: skip
    assert parse_counters(PAGE) == wanted
    with served(PAGE.encode()) as url:
        assert read_counters(url) == wanted


@pytest.mark.parametrize("page", ["", "hello", PAGE.replace("20.0", "NaN"), PAGE[:300]])
def test_another_page_tells_nothing(page: str) -> None:
    assert parse_counters(page) is None


def test_no_page_is_nothing() -> None:
    assert read_counters(f"http://127.0.0.1:{free_port()}/metrics") is None
    assert read_counters("file:///etc/hostname") is None
    assert read_counters("") is None
    with served(b"\xff\xfe") as url:
        assert read_counters(url) is None


def test_what_was_counted_is_between_two_looks_and_what_is_held_at_the_last() -> None:
    before = parse_counters(PAGE)
    assert before is not None
    after = {name: 2.0 * value for name, value in before.items()}
    assert counted(before, after) == {
        "forwards": 20, "batch_sessions": 50, "batch_tokens": 150, "committed": 90,
        "sessions_left": 8,
    }  # fmt: skip
    assert counted(None, after) is None
    assert counted(before, None) is None
    assert counted(after, before) is None, "it began anew"


def test_a_page_is_of_a_verifier_that_runs_already() -> None:
    args = build_parser().parse_args(["bench", "--fleet", "3", "--metrics-url", "http://x/metrics"])
    with pytest.raises(ConfigError, match="give --broker too"):
        FleetChoices(args)
