"""The driver of the exporter: a transport, the table and a web server between them.

The transport's thread feeds the table (some 100 us a message); the web server's threads take what
a scrape shows in one short look, and put it together without the lock. A broker that is away stops
nothing: what is known is served until it is too old.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from broker.clock import Clock, MonotonicClock
from broker.exposition import CONTENT_TYPE
from broker.metrics_http import MetricsServer, Page
from broker.topics import DEVICE_STATUS_ALL, TELEMETRY_ALL, VERIFIER_STATUS_ALL
from broker.transport import ConnectionEvent, ConnectionState, Message, Transport
from cloud_verifier.exporter.figures import Own, OwnFigures
from cloud_verifier.exporter.report import fleet_head, fleet_json, fleet_report
from cloud_verifier.exporter.table import Entry, FleetTable

#: The fleet as JSON, beside /metrics and /healthz.
FLEET_PATH = "/fleet.json"
#: Seconds for which a page answers again: a page of many devices is dear.
REUSE_S = 0.25


class FleetFeed:
    """A table that a transport fills; for the exporter and for whoever looks without one.

    Thread-safe. ``on_event`` hears of connection changes from the transport's thread. ``clock``:
    for ages; ``wall``: Unix seconds, for what people and Prometheus read.
    """

    def __init__(
        self,
        transport: Transport,
        table: FleetTable,
        *,
        clock: Clock | None = None,
        wall: Callable[[], float] = time.time,
        on_event: Callable[[ConnectionEvent], None] | None = None,
    ) -> None:
        self.transport = transport
        self.table = table
        self.clock = clock or MonotonicClock()
        self.wall = wall
        self.lock = threading.Lock()
        self._on_event = on_event

    def start(self) -> None:
        """Begin connecting; returns at once."""
        self.transport.subscribe(TELEMETRY_ALL, qos=0)
        self.transport.subscribe(DEVICE_STATUS_ALL, qos=1)
        self.transport.subscribe(VERIFIER_STATUS_ALL, qos=1)
        self.transport.start(self._on_message, self._on_connection)

    def stop(self, timeout: float = 2.0) -> None:
        """Leave the broker."""
        self.transport.stop(timeout)

    def fleet(self) -> dict[str, Any]:
        """The fleet as it is now; see cloud_verifier.exporter.report."""
        return fleet_report(*self._look())

    def fleet_json(self) -> str:
        """The same as text."""
        return fleet_json(*self._look())

    def _look(self) -> tuple[dict[str, Any], list[Entry]]:
        with self.lock:
            now = self.clock.now()
            entries, verifiers = self.table.entries(now), self.table.statuses(now)
        head = fleet_head(
            verifiers, wall=self.wall(), ttl=self.table.ttl, connected=self.transport.connected
        )
        return head, entries

    def _on_message(self, message: Message) -> None:
        with self.lock:
            now = self.clock.now()
            self.table.receive(message.topic, message.payload, message.retain, now, self.wall())

    def _on_connection(self, event: ConnectionEvent) -> None:
        if event.state is not ConnectionState.CONNECTED:
            with self.lock:
                self.table.link_lost(self.clock.now())
        if self._on_event is not None:
            self._on_event(event)


class Exporter:
    """One exporter: ``feed`` and a web server on ``bind``:``port``, which listens at once.

    Raises ConfigError when it cannot listen there. ``start`` and ``stop`` are called once each.
    """

    def __init__(self, feed: FleetFeed, bind: str, port: int) -> None:
        self.feed = feed
        self._renders, self._render_seconds = 0, 0.0
        self._figures = OwnFigures(self._own)
        self.web = MetricsServer(
            bind,
            port,
            self.metrics,
            self._health,
            flag="--port",
            pages={FLEET_PATH: self._fleet},
            reuse=REUSE_S,
        )

    def start(self) -> None:
        """Begin to serve, and to connect to the broker; returns at once."""
        self.web.start()
        self.feed.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Leave the broker and end the web server."""
        self.feed.stop(timeout)
        self.web.close()

    def metrics(self, accept: str = "") -> Page:  # noqa: ARG002 (one format is all there is)
        """Every device's series, the verifiers', and the exporter's own."""
        feed = self.feed
        begin = time.perf_counter()
        with feed.lock:
            snapshot = feed.table.snapshot(feed.clock.now())
        devices = snapshot.text()
        self._renders += 1
        self._render_seconds += time.perf_counter() - begin
        return Page((devices + self._figures.text()).encode(), CONTENT_TYPE)

    def _fleet(self, accept: str) -> Page:  # noqa: ARG002
        return Page(self.feed.fleet_json().encode(), "application/json")

    def _health(self) -> str | None:
        if self.feed.transport.connected:
            return None
        return "the broker is away: series end as they grow too old"

    def _own(self) -> Own:
        feed, web = self.feed, self.web
        transport, table = feed.transport, feed.table
        with feed.lock:
            own = Own(
                messages=dict(table.messages),
                dropped=dict(table.dropped),
                devices=table.with_telemetry,
                online=sum(device.online is True for device in table.devices.values()),
                max_devices=table.max_devices,
                verifiers=len(table.verifiers),
                expired=table.expired,
            )
        own.connected = transport.connected
        own.reconnects = transport.reconnects
        own.callback_errors = transport.callback_errors
        own.subscriptions_refused = getattr(transport, "refused", 0)
        own.http = dict(web.counts)
        own.renders, own.render_seconds = self._renders, self._render_seconds
        return own
