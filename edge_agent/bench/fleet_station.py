"""The broker and the verifier that a fleet starts for itself, and meeting one that runs already."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from broker.codec import decode
from broker.embedded import EmbeddedBroker
from broker.errors import ConfigError, ModelError, RemoteProtocolError, TransportError
from broker.messages import VerifierStatus
from broker.mqtt import MqttTransport
from broker.mqtt_settings import MqttSettings
from broker.topics import VERIFIER_STATUS_ALL, parse_verifier_status_topic
from broker.transport import ConnectionEvent, ConnectionState, Message
from edge_agent.bench.fleet_metrics import free_port
from edge_agent.bench.mosquitto import Mosquitto
from edge_agent.children import Child

#: Seconds until a verifier that we start is up, preparing its model included.
READY_S = 1800.0
#: Seconds in which a verifier that runs already must show itself.
FOUND_S = 15.0
_COUNTERS = "scripted-verifier counters "
_PREFIXES = ("cloud-verifier: ", "scripted-verifier: ")
SCRIPTED, REAL = "cloud_verifier.scripted", "cloud_verifier.cli"
#: By which the children are told apart when it is asked what they use.
BROKER_WORDS = ("mosquitto", "broker.embedded")
VERIFIER_WORDS = ("cloud_verifier.",)


class _Broker(Protocol):
    @property
    def url(self) -> str: ...
    @property
    def alive(self) -> bool: ...
    def stop(self) -> None: ...


class FleetStation:
    """A broker and a verifier as child processes; use it as a context manager.

    ``module``: SCRIPTED or REAL, with ``flags`` of its own. ``note`` hears progress.
    ``metrics_url``: where a REAL one tells its counters, a SCRIPTED one says them when it ends.
    """

    def __init__(
        self,
        kind: str,
        module: str,
        flags: Sequence[str],
        threads: int,
        note: Callable[[str], None],
    ) -> None:
        self.verifier = f"fleet-{secrets.token_hex(3)}"
        self.counters: dict[str, Any] | None = None
        self.metrics_url = ""
        self._kind = kind
        self._module = module
        self._flags = list(flags)
        self._threads = threads
        self._note = note
        self._broker: _Broker | None = None
        self._child: Child | None = None

    def __enter__(self) -> FleetStation:
        """Raises ConfigError or TransportError when the broker does not come up."""
        mosquitto = self._kind == "mosquitto"
        self._broker = Mosquitto().start() if mosquitto else EmbeddedBroker().start()
        where = ["--broker", self._broker.url, "--id", self.verifier, "--until-eof"]
        serve = []
        if self._module == REAL:
            port = free_port()
            self.metrics_url = f"http://127.0.0.1:{port}/metrics"
            # Its devices repeat a few recorded prompts, which real ones do not.
            serve = ["serve", "--no-prefix-sharing", "--metrics-port", str(port)]
        self._child = Child(
            self._module,
            [*serve, *where, *self._flags],
            threads=self._threads,
            on_line=self._heard,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _heard(self, line: str) -> None:
        if line.startswith(_COUNTERS):
            self.counters = _object(line.removeprefix(_COUNTERS))
        elif not line.startswith(_PREFIXES):
            self._note(line)

    @property
    def url(self) -> str:
        assert self._broker is not None
        return self._broker.url

    def check(self) -> None:
        """Raises what ended the verifier (ConfigError, ModelError) or the broker."""
        child = self._child
        if child is not None and not child.alive:
            line = child.last_line
            for prefix in _PREFIXES:
                line = line.removeprefix(prefix)
            if child.exit_code == ConfigError.exit_code:
                raise ConfigError(line)
            raise ModelError(f"the verifier ended: {line}")
        if self._broker is not None and not self._broker.alive:
            raise TransportError("the broker ended: see --verbose")

    def stop(self) -> None:
        """End both, the verifier first, whose last words are in ``counters`` then; idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.stop(10.0)
            child.last_line  # noqa: B018 (waits for the reader of its last words)
        broker, self._broker = self._broker, None
        if broker is not None:
            broker.stop()


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class Watcher:
    """Listens to the statuses of verifiers; ``stop`` it."""

    def __init__(self, settings: MqttSettings) -> None:
        self._settings = replace(settings, client_id=f"fleet-watch-{secrets.token_hex(4)}")
        self._lock = threading.Lock()
        self._online: dict[str, VerifierStatus] = {}
        self._trouble = ""
        self._failed: TransportError | None = None
        self._transport = MqttTransport(self._settings)
        self._transport.subscribe(VERIFIER_STATUS_ALL, qos=1)
        self._transport.start(self._on_message, self._on_event)

    def online(self) -> dict[str, VerifierStatus]:
        """The verifiers that are online."""
        with self._lock:
            return dict(self._online)

    def meet(self, station: FleetStation | None) -> VerifierStatus:
        """Wait for the station's verifier, or without one for any that runs already.

        Raises what ended the station, TransportError when there is none, ConfigError when several
        verifiers have different vocabularies.
        """
        limit = FOUND_S if station is None else READY_S
        deadline = time.monotonic() + limit
        while True:
            online = self.online()
            if station is not None and station.verifier in online:
                return online[station.verifier]
            if station is None and online:
                if len({status.vocab_hash for status in online.values()}) > 1:
                    raise ConfigError("verifiers with different vocabularies run there: leave one")
                return next(iter(online.values()))
            if self._failed is not None:
                raise self._failed
            if station is not None:
                station.check()
            if time.monotonic() > deadline:
                where = self._settings.url
                cause = f": {self._trouble}" if self._trouble else ": start one, or check --broker"
                raise TransportError(f"no verifier at {where} within {limit:.0f} s{cause}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Disconnect; idempotent."""
        self._transport.stop()

    def _on_message(self, message: Message) -> None:
        try:
            verifier = parse_verifier_status_topic(message.topic)
            status = decode(message.payload) if message.payload else VerifierStatus(online=False)
        except RemoteProtocolError:
            return
        with self._lock:
            if isinstance(status, VerifierStatus) and status.online and len(self._online) < 256:
                self._online[verifier] = status
            else:
                self._online.pop(verifier, None)

    def _on_event(self, event: ConnectionEvent) -> None:
        self._trouble = event.reason
        if event.state is ConnectionState.FAILED:
            self._failed = TransportError(event.reason, event.reason_code)
