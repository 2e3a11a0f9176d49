"""A device's own ``/metrics``, for a Prometheus on the same network: the series that the fleet's
exporter makes of its telemetry, by the same code, and ``/healthz``."""

from __future__ import annotations

from broker.exposition import CONTENT_TYPE, join, render
from broker.metrics_http import MetricsServer, Page
from edge_agent.runtime import Agent


def device_metrics(agent: Agent, host: str, port: int, *, alone: bool = False) -> MetricsServer:
    """A server that is yet to be started. ``port`` 0 takes a free one.

    ``alone``: the device never means to be connected, so that is no reason to be unhealthy.
    Raises ConfigError where nothing can listen.
    """

    def page(accept: str) -> Page:  # noqa: ARG001 (there is one format)
        telemetry = agent.reporter.telemetry(agent.clock.now())
        texts = render(agent.device, telemetry).texts
        return Page(join([texts]).encode(), CONTENT_TYPE)

    def health() -> str | None:
        return None if alone or agent.connected else "no connection to the broker"

    return MetricsServer(host, port, page, health)
