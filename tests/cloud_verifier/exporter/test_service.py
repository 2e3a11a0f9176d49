"""The exporter over an in-memory broker, scraped over real HTTP."""

from __future__ import annotations

import gzip
import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from broker.clock import VirtualClock
from broker.codec import encode
from broker.exposition import CONTENT_TYPE
from broker.figures import BUCKETS, BY_NAME
from broker.memory import InMemoryBroker, InMemoryTransport
from broker.messages import DeviceStatus, VerifierStatus
from broker.metrics_http import CLIENT_TIMEOUT
from broker.telemetry import Telemetry
from broker.topics import status_topic, telemetry_topic, verifier_status_topic
from broker.transport import Message
from cloud_verifier.exporter import service
from cloud_verifier.exporter.figures import CAUSES, CHANNELS, OUTCOMES
from cloud_verifier.exporter.service import FLEET_PATH, Exporter, FleetFeed
from cloud_verifier.exporter.table import TTL_S, FleetTable
from tests.cloud_verifier.exporter.fleet import COMMITTED, WALL, full, series, telemetry
from tests.prometheus import check_metrics


class World:
    """An exporter, a broker, and one client that speaks for the whole fleet."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.broker = InMemoryBroker(self.clock, seed=1)
        transport = InMemoryTransport(self.broker, "exporter")
        feed = FleetFeed(transport, FleetTable(), clock=self.clock, wall=self.wall)
        self.exporter = Exporter(feed, "127.0.0.1", 0)
        self.client = InMemoryTransport(self.broker, "fleet")
        self.client.start(lambda message: None, lambda event: None)
        self.settle()

    def wall(self) -> float:
        return WALL + self.clock.now()

    def start(self) -> World:
        self.exporter.start()
        self.settle()
        return self

    def settle(self, seconds: float = 0.0) -> None:
        self.clock.advance_to(self.clock.now() + seconds)
        while self.broker.deliver_due(self.clock.now()):
            pass

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        self.client.publish(topic, payload, qos=1, retain=retain)
        self.settle()

    def get(self, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        client = http.client.HTTPConnection("127.0.0.1", self.exporter.web.port, timeout=10)
        client.request("GET", path, headers={"Accept-Encoding": "identity", **headers})
        answer = client.getresponse()
        body = answer.read()
        client.close()
        return answer, body

    def scrape(self) -> dict[str, float]:
        answer, body = self.get("/metrics")
        assert answer.status == 200
        return series(body.decode())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(service, "REUSE_S", 0.0)
    made = World()
    yield made
    made.exporter.stop()


def test_a_device_s_telemetry_comes_out_at_the_scrape(world: World) -> None:
    world.start()
    world.publish(status_topic("pi-1"), encode(DeviceStatus(True)), retain=True)
    world.publish(telemetry_topic("pi-1"), encode(telemetry(committed_tokens_total=5.0)))
    shown = world.scrape()
    assert shown[f'{COMMITTED}{{device="pi-1"}}'] == 5.0
    assert shown['pipesd_device_online{device="pi-1"}'] == 1.0
    assert shown['pipesd_device_last_seen_timestamp_seconds{device="pi-1"}'] == WALL
    world.settle(TTL_S)
    assert not [key for key in world.scrape() if "last_seen" in key or COMMITTED in key]


def test_the_page_is_what_prometheus_asks_for(world: World) -> None:
    world.start()
    for number in range(5):
        world.publish(telemetry_topic(f"d{number}"), encode(full()))
    world.publish(verifier_status_topic("v"), encode(VerifierStatus(True, sessions=2)), retain=True)
    answer, body = world.get("/metrics")
    assert answer.getheader("Content-Type") == CONTENT_TYPE
    assert check_metrics(body.decode()) == ""
    answer, zipped = world.get("/metrics", **{"Accept-Encoding": "gzip"})
    assert answer.getheader("Content-Encoding") == "gzip"
    assert set(series(gzip.decompress(zipped).decode())) == set(series(body.decode()))
    assert len(zipped) < len(body) / 4


def test_its_own_series_are_there_from_the_start(world: World) -> None:
    world.start()
    shown = world.scrape()
    for name, label, values in (
        ("messages", "channel", CHANNELS),
        ("dropped", "cause", CAUSES),
        ("http_requests", "outcome", OUTCOMES),
    ):
        for value in values:
            assert f'pipesd_exporter_{name}_total{{{label}="{value}"}}' in shown
    assert shown["pipesd_exporter_broker_connected{}"] == 1.0
    assert shown["pipesd_exporter_devices{}"] == 0.0
    world.publish(telemetry_topic("d"), encode(full()))
    world.publish(telemetry_topic("d"), b"junk")
    world.publish(telemetry_topic("e"), encode(telemetry(gamma_seconds=math.nan)))
    world.publish(status_topic("f"), encode(DeviceStatus(True)), retain=True)
    shown = world.scrape()
    assert shown["pipesd_exporter_devices{}"] == 2.0
    assert shown["pipesd_exporter_devices_online{}"] == 1.0
    assert shown['pipesd_exporter_messages_total{channel="telemetry"}'] == 3.0
    assert shown['pipesd_exporter_dropped_total{cause="msgpack"}'] == 1.0
    assert shown['pipesd_exporter_dropped_total{cause="not_finite"}'] == 1.0
    assert shown["pipesd_exporter_render_seconds_count{}"] == 2.0
    assert shown['pipesd_exporter_http_requests_total{outcome="ok"}'] == 1.0


def test_without_the_broker_it_serves_what_it_has_until_that_is_old(world: World) -> None:
    assert not world.exporter.feed.transport.connected
    world.start()
    assert world.get("/healthz")[0].status == 200
    world.publish(status_topic("d"), encode(DeviceStatus(True)), retain=True)
    world.publish(telemetry_topic("d"), encode(full()))
    world.broker.cut("exporter")
    world.settle()
    world.settle(TTL_S / 2)
    shown = world.scrape()
    assert shown['pipesd_device_online{device="d"}'] == 1.0
    assert shown["pipesd_exporter_broker_connected{}"] == 0.0
    answer, body = world.get("/healthz")
    assert (answer.status, body.count(b"\n")) == (503, 1)
    world.settle(TTL_S / 2)
    assert not [key for key in world.scrape() if 'device="d"' in key]
    world.broker.restore("exporter")
    world.settle()
    assert world.scrape()['pipesd_device_online{device="d"}'] == 1.0  # it is retained
    assert world.get("/healthz")[0].status == 200


def test_the_fleet_as_json(world: World) -> None:
    world.start()
    message = full("boot", 7, clock=WALL + 3.0)
    figures = {**message.figures, BY_NAME["gamma_seconds"].number: math.nan}
    world.publish(telemetry_topic("pi-1"), encode(Telemetry("boot", 7, WALL + 3.0, figures)))
    world.publish(telemetry_topic("pi-2"), encode(message))
    world.publish(status_topic("pi-3"), encode(DeviceStatus(True)), retain=True)
    world.publish(
        verifier_status_topic("v"), encode(VerifierStatus(True, "1", "m", "h", 64, 3, 8)), True
    )
    world.settle(1.5)
    answer, body = world.get(FLEET_PATH)
    assert answer.getheader("Content-Type") == "application/json"

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    fleet = json.loads(body, parse_constant=refuse)
    assert fleet == {**world.exporter.feed.fleet(), "time": fleet["time"]}
    assert (fleet["format"], fleet["ttl_seconds"], fleet["broker_connected"]) == (1, TTL_S, True)
    assert fleet["time"] == WALL + 1.5
    assert fleet["buckets_seconds"] == list(BUCKETS)
    assert fleet["verifiers"] == {
        "v": {
            "online": True,
            "version": "1",
            "model": "m",
            "context": 64,
            "sessions": 3,
            "max_sessions": 8,
        }
    }
    one, two, three = (fleet["devices"][f"pi-{number}"] for number in (1, 2, 3))
    assert three == {"online": True}
    assert (two["boot"], two["sequence"], two["age_seconds"]) == ("boot", 7, 1.5)
    assert (two["clock_offset_seconds"], two["online"]) == (3.0, None)
    assert (two["draft"], two["policy"], two["energy_source"]) == ("smollm2-q3", "pipesd", "pmic")
    assert two["ttft_seconds"]["counts"][:3] == [0, 2, 1]
    assert two["figures"] == {name: float(figure.number) for name, figure in BY_NAME.items()}
    assert set(two["figures"]) - set(one["figures"]) == {"gamma_seconds"}
    assert "ttft_seconds" not in one


def test_clients_that_take_nothing_hold_no_scrape_and_no_message_up() -> None:
    world = World().start()
    for number in range(1_000):
        message = Message(telemetry_topic(f"d{number}"), encode(full()))
        world.exporter.feed._on_message(message)
    port = world.exporter.web.port
    slow = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(20)]
    try:
        for connection in slow:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        begin = time.monotonic()
        answer, body = world.get("/metrics")
        world.publish(telemetry_topic("d0"), encode(full("b1", 2)))
        assert world.get("/healthz")[0].status == 200
        assert time.monotonic() - begin < CLIENT_TIMEOUT  # which each of them may take
        assert answer.status == 200
        assert body.count(COMMITTED.encode() + b"{") == 1_000
    finally:
        for connection in slow:
            connection.close()
        world.exporter.stop()


def test_a_thousand_devices_are_scraped_within_a_second(world: World) -> None:
    """CASES 37 in part: benchmarks/exporter.py measures it, and memory, with 10,000 as well."""
    world.start()
    taken = []
    for turn in range(1, 4):
        for number in range(1_000):
            message = Message(telemetry_topic(f"device-{number}"), encode(full("b1", turn, turn)))
            world.exporter.feed._on_message(message)
        begin = time.perf_counter()
        answer, body = world.get("/metrics")
        taken.append(time.perf_counter() - begin)
        assert answer.status == 200
        assert body.count(b"\npipesd_device_online") == 0
        assert body.count(COMMITTED.encode() + b"{") == 1_000
    assert min(taken) < 1.0


def test_a_flood_of_scrapes_makes_one_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "REUSE_S", 60.0)
    world = World().start()
    try:
        threads = [threading.Thread(target=world.get, args=("/metrics",)) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert world.exporter._renders == 1
    finally:
        world.exporter.stop()
