"""What the tuner makes of a Prometheus and of an exporter, in every state that they can be in."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading

import httpx
import pytest

from broker.codec import encode
from broker.errors import ConfigError
from broker.exposition import CONTENT_TYPE
from broker.figures import BY_NAME
from broker.telemetry import Telemetry
from broker.topics import telemetry_topic
from cloud_verifier.exporter.table import FleetTable
from cloud_verifier.tuner import sources
from cloud_verifier.tuner.core.readings import SERIES
from cloud_verifier.tuner.sources import (
    QUERY,
    ExporterSource,
    PrometheusSource,
    SourceError,
)

VALUES = {
    "config_version": "3",
    "committed_tokens_total": "120",
    "generation_seconds_total": "6.5",
    "generations_total": "2",
    "alpha_seconds": "0.02",
    "last_seen_timestamp_seconds": "1700000000.5",
    "online": "1",
}


def samples(device: str, values=VALUES, **labels: str) -> list[dict[str, object]]:
    told = [
        {"metric": {"__name__": f"pipesd_device_{name}", "device": device, **labels},
         "value": [1.0, value]}
        for name, value in values.items()
    ]  # fmt: skip
    info = {"__name__": "pipesd_device_info", "device": device, "policy": "pipesd",
            "machine": "board", "draft": "small", "version": "1", **labels}  # fmt: skip
    return [*told, {"metric": info, "value": [1.0, "1"]}]


def prometheus(answer, status: int = 200) -> PrometheusSource:
    """A source whose Prometheus gives ``answer``: text, or what a vector holds."""

    def handle(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/api/v1/query"
        assert request.url.params["query"] == QUERY
        if isinstance(answer, Exception):
            raise answer
        body = answer
        if isinstance(answer, list):
            body = json.dumps(
                {"status": "success", "data": {"resultType": "vector", "result": answer}}
            )
        return httpx.Response(status, text=body)

    client = httpx.Client(transport=httpx.MockTransport(handle))
    return PrometheusSource("http://prometheus:9090/", client=client)


def test_one_query_tells_of_every_device() -> None:
    source = prometheus([*samples("a"), *samples("b", {**VALUES, "config_version": "4"})])
    found = {reading.device: reading for reading in source.read()}
    assert set(found) == {"a", "b"}
    one = found["a"]
    assert (one.config_version, one.committed, one.seconds, one.alpha) == (3, 120.0, 6.5, 0.02)
    assert (one.policy, one.machine, one.draft, one.online) == ("pipesd", "board", "small", True)
    assert one.forward is None
    assert found["b"].config_version == 4
    assert source.queries == 1


def test_of_two_exporters_the_one_that_heard_the_device_last_counts() -> None:
    late = {**VALUES, "committed_tokens_total": "500", "last_seen_timestamp_seconds": "1700000009"}
    source = prometheus([*samples("a", late, instance="x"), *samples("a", instance="y")])
    (one,) = source.read()
    assert one.committed == 500.0


def test_an_empty_vector_is_no_device_and_no_error() -> None:
    assert prometheus([]).read() == []


def test_what_is_wrong_about_one_device_leaves_the_others() -> None:
    wrong = [
        *samples("nan", {**VALUES, "committed_tokens_total": "NaN"}),
        *samples("negative", {**VALUES, "generation_seconds_total": "-3"}),
        *samples("huge", {**VALUES, "committed_tokens_total": "1e300"}),
        *samples("bad/id"),
        *samples("silent", {"config_version": "1"}),
        {"metric": {"__name__": "pipesd_device_online", "device": "a"}, "value": [1.0, "word"]},
        {"metric": "junk", "value": [1.0, "1"]},
        {"metric": {"device": "a"}, "value": [1.0, "1"]},
        {"metric": {"__name__": "x", "device": 7}, "value": [1.0, "1"]},
        {"value": []},
        7,
        None,
    ]
    source = prometheus([*wrong, *samples("good")])
    assert [reading.device for reading in source.read()] == ["good"]
    assert source.rejected["not_finite"] == 1
    assert source.rejected["sample"] == 7
    assert source.rejected["device"] == 1
    assert source.rejected["absent"] == 2  # a NaN is left out before the device is looked at
    assert source.rejected["value"] == 2


@pytest.mark.parametrize(
    ("answer", "status", "cause"),
    [
        (httpx.ConnectError("refused"), 200, "away"),
        (httpx.ReadTimeout("slow"), 200, "timeout"),
        (httpx.ConnectTimeout("slow"), 200, "timeout"),
        (httpx.RemoteProtocolError("half"), 200, "away"),
        ('{"status": "error", "errorType": "bad_data", "error": "parse error"}', 400, "status"),
        ("<html>bad gateway</html>", 502, "status"),
        ('{"status": "error", "error": "query timed out"}', 200, "query"),
        ('{"status": "success", "data": {"resultType": "matrix", "result": []}}', 200, "answer"),
        ('{"status": "success", "data": {"resultType": "vector", "result": 7}}', 200, "answer"),
        ('{"status": "success"}', 200, "answer"),
        ("[]", 200, "answer"),
        ("7", 200, "answer"),
        ("", 200, "answer"),
        ("not json", 200, "answer"),
        ("[" * 100_000, 200, "answer"),
    ],
)
def test_a_source_that_fails_says_how(answer, status, cause) -> None:
    with pytest.raises(SourceError) as caught:
        prometheus(answer, status).read()
    assert caught.value.cause == cause
    assert "\n" not in str(caught.value)


def test_an_answer_without_end_is_cut_off(monkeypatch) -> None:
    monkeypatch.setattr(sources, "MAX_ANSWER", 1_000)
    with pytest.raises(SourceError) as caught:
        prometheus(samples("a") * 50).read()
    assert caught.value.cause == "size"


def test_an_answer_that_trickles_in_is_given_up(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(sources.time, "monotonic", lambda: now[0])

    class Trickle(httpx.SyncByteStream):
        def __iter__(self):
            for _ in range(100):
                now[0] += 1.0
                yield b" "

    def handle(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Trickle())

    client = httpx.Client(transport=httpx.MockTransport(handle))
    with pytest.raises(SourceError) as caught:
        PrometheusSource("http://prometheus:9090", client=client, timeout=10.0).read()
    assert caught.value.cause == "timeout"
    assert now[0] < 15.0


def test_a_head_that_trickles_in_is_given_up_and_the_next_request_is_made() -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                while not over.wait(0.02):
                    connection.sendall(b"A: b\r\n")

        thread = threading.Thread(target=trickle)
        thread.start()
        source = PrometheusSource(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.3)
        try:
            for _ in range(2):  # the second meets a server that accepts and never answers
                with pytest.raises(SourceError) as caught:
                    source.read()
                assert caught.value.cause == "timeout"
        finally:
            over.set()
            thread.join()
            source.close()
    assert source.queries == 2


@pytest.mark.parametrize("url", ["prometheus:9090", "ftp://x", "http://", "", "http:///path"])
def test_an_address_that_cannot_be_is_refused(url) -> None:
    for make in (PrometheusSource, ExporterSource):
        with pytest.raises(ConfigError):
            make(url)


# -- the exporter itself --------------------------------------------------------------------------


def exporter(text: str) -> ExporterSource:
    def handle(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/metrics"
        return httpx.Response(200, text=text, headers={"Content-Type": CONTENT_TYPE})

    client = httpx.Client(transport=httpx.MockTransport(handle))
    return ExporterSource("http://exporter:9108", client=client)


def test_lines_of_an_exporter() -> None:
    text = "\n".join(
        [
            "# HELP pipesd_device_committed_tokens_total Tokens.",
            'pipesd_device_committed_tokens_total{device="a"} 120',
            'pipesd_device_generation_seconds_total{device="a"} 6.5',
            'pipesd_device_config_version{device="a"} 3.0 1700000000',
            'pipesd_device_committed_tokens_total{device="b"} 1',
            'pipesd_device_generation_seconds_total{device="b"} NaN',
            'pipesd_device_ttft_seconds_bucket{device="a",le="0.1"} 3',
            'pipesd_device_committed_tokens_total{device="c"} word',
            'pipesd_device_info{device="a",machine="a \\"b\\" \\\\ c\\n",draft="}"} 1',
            'pipesd_device_online{device="a"} 0',
            "pipesd_device_online junk",
            'pipesd_exporter_devices{device="z"} 1',
        ]
    )
    source = exporter(text)
    (one,) = source.read()
    assert (one.device, one.committed, one.seconds, one.config_version) == ("a", 120.0, 6.5, 3)
    assert (one.machine, one.draft, one.online) == ('a "b" \\ c\n', "}", False)
    assert source.rejected == {"not_finite": 1, "sample": 1, "absent": 1}


@pytest.mark.parametrize("text", ["", "<html>welcome</html>", "pipesd_verifier_sessions 3\n"])
def test_a_page_of_something_else_is_no_fleet_without_devices(text) -> None:
    with pytest.raises(SourceError) as caught:
        exporter(text).read()
    assert caught.value.cause == "answer"
    assert exporter("pipesd_exporter_devices 0\n").read() == []


def test_the_series_asked_for_are_those_that_there_are() -> None:
    beside = {"online", "last_seen_timestamp_seconds", "info"}
    assert set(SERIES) - beside <= set(BY_NAME)


def test_what_the_exporter_really_writes_is_read() -> None:
    figures = {BY_NAME[name].number: value for name, value in (
        ("committed_tokens_total", 120), ("generation_seconds_total", 6.5), ("config_version", 9),
        ("r1_ratio", 0.2), ("r2_ratio", 0.5), ("alpha_seconds", 0.02), ("uptime_seconds", 12.0),
    )}  # fmt: skip
    message = Telemetry(
        "boot", 1, figures=figures, policy="pipesd", machine='pi "5"\\', draft="small"
    )
    table = FleetTable()
    topic = telemetry_topic("pi-1")
    table.receive(topic, encode(message), False, 10.0, 1_700_000_000.0)
    (one,) = exporter(table.snapshot(11.0).text()).read()
    assert (one.device, one.committed, one.seconds, one.config_version) == ("pi-1", 120, 6.5, 9)
    assert (one.r1, one.r2, one.alpha, one.uptime) == (0.2, 0.5, 0.02, 12.0)
    assert (one.policy, one.machine, one.draft) == ("pipesd", 'pi "5"\\', "small")
    assert math.isfinite(one.seen)
