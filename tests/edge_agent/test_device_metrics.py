"""A device's own /metrics: the same series as its telemetry makes at the exporter."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families as read

from broker.errors import ConfigError
from broker.exposition import CONTENT_TYPE, FAMILIES, join, render
from broker.transport import ConnectionEvent, ConnectionState
from edge_agent.device_metrics import device_metrics
from edge_agent.telemetry import Upkeep
from tests.edge_agent.test_telemetry import Sensors, World


def fetch(port: int, path: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def test_it_serves_what_its_telemetry_says() -> None:
    world = World(Upkeep(telemetry_s=5.0, sampler=Sensors()))  # type: ignore[arg-type]
    world.begin().close()
    server = device_metrics(world.agent, "127.0.0.1", 0)
    server.start()
    try:
        assert fetch(server.port, "/healthz")[0] == 503
        world.turn(3.0)
        (told,) = world.heard()
        assert fetch(server.port, "/healthz")[::2] == (200, "ok\n")
        status, kind, text = fetch(server.port, "/metrics")
        assert (status, kind) == (200, CONTENT_TYPE)
        # What the exporter makes of the message, at the same moment of the device's clock.
        assert text == join([render("d", told).texts])
        known = {family.name for family in FAMILIES}
        found = list(read(text))
        for family in found:
            total = f"{family.name}_total" if family.type == "counter" else family.name
            assert total in known
        names = {family.name for family in found}
        assert "pipesd_device_energy_joules" in names
        assert "pipesd_device_temperature_celsius" not in names, "there is no such sensor"
        world.agent._on_event(ConnectionEvent(ConnectionState.DISCONNECTED))
        world.broker.cut("device-d")
        assert fetch(server.port, "/healthz")[0] == 503
        assert fetch(server.port, "/metrics")[0] == 200
    finally:
        server.close()


def test_a_device_that_never_means_to_connect_is_healthy() -> None:
    world = World(Upkeep())
    server = device_metrics(world.agent, "127.0.0.1", 0, alone=True)
    try:
        assert server.page("/healthz", "")[0] == 200
        with pytest.raises(ConfigError, match="--metrics-port"):
            device_metrics(world.agent, "127.0.0.1", server.port)
    finally:
        server.close()
