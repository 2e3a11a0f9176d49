"""Where the live view reads the fleet: an exporter over HTTP, or the broker itself."""

from __future__ import annotations

import json
import threading
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

from broker.errors import ConfigError, RemoteProtocolError, TransportError
from broker.transport import ConnectionEvent, ConnectionState, Transport
from cloud_verifier.exporter.service import FLEET_PATH, FleetFeed
from cloud_verifier.exporter.table import FleetTable

TIMEOUT_S = 5.0
#: Bytes, decompressed: ten thousand devices take 30 MB.
MAX_ANSWER = 1 << 28


class Source(Protocol):
    """``where``: for people. ``read`` waits for at most some seconds."""

    where: str

    @property
    def over(self) -> bool:
        """Another try cannot help."""
        ...

    def read(self) -> Any:
        """A reading. Raises TransportError or RemoteProtocolError, whose text says what is wrong;
        another try may help."""
        ...

    def close(self) -> None: ...


class ExporterSource:
    """``url``: of an exporter; without a path its report of the fleet is taken.

    Raises ConfigError for an address that cannot be, and without httpx.
    """

    def __init__(self, url: str) -> None:
        try:
            import httpx
        except ModuleNotFoundError:
            raise ConfigError("httpx is not installed: pip install 'pipesd[fleet]'") from None
        self.where = _fleet_url(url)
        self._httpx = httpx
        # Proxies of the environment are for the world outside.
        self._client = httpx.Client(timeout=TIMEOUT_S, trust_env=False)

    @property
    def over(self) -> bool:
        """See Source."""
        return False

    def read(self) -> Any:
        """See Source."""
        httpx = self._httpx
        try:
            with self._client.stream("GET", self.where) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise RemoteProtocolError(
                        f"{self.where} answers {answer.status_code}: is it an exporter?"
                    )
                body = bytearray()
                for part in answer.iter_bytes():
                    body += part
                    if len(body) > MAX_ANSWER:
                        raise RemoteProtocolError(f"{self.where} answers without end")
            return json.loads(body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            cause = " ".join(str(error).split()) or type(error).__name__
            raise TransportError(f"no exporter at {self.where} ({cause}): start it there") from None
        except (ValueError, RecursionError):
            raise RemoteProtocolError(f"{self.where} is no JSON: is it an exporter?") from None

    def close(self) -> None:
        """See Source."""
        self._client.close()


class BrokerSource:
    """Listens to the broker itself; what is seen begins when it is made.

    ``transport`` is started here.
    """

    def __init__(self, transport: Transport, table: FleetTable, where: str) -> None:
        self.where = where
        self._failed: list[str] = []
        self._changed = threading.Event()
        self._feed = FleetFeed(transport, table, on_event=self._on_event)
        self._feed.start()

    @property
    def over(self) -> bool:
        """See Source."""
        return bool(self._failed)

    def wait(self, seconds: float) -> None:
        """Listen for so long, or until the broker will not have us. Raises TransportError where
        there is none."""
        self._changed.wait(seconds)
        if not self._failed and not self._feed.transport.connected:
            raise TransportError(f"no broker at {self.where}: start it there, or see --listen")

    def read(self) -> Any:
        """See Source. Raises TransportError once the broker will not have us."""
        if self._failed:
            raise TransportError(f"no way into the broker at {self.where}: {self._failed[0]}")
        return self._feed.fleet()

    def close(self) -> None:
        """See Source."""
        self._feed.stop()

    def _on_event(self, event: ConnectionEvent) -> None:
        if event.state is ConnectionState.FAILED:
            self._failed.append(event.reason)
            self._changed.set()


def _fleet_url(url: str) -> str:
    try:
        parts = urlsplit(url.strip())
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"--exporter {url!r} is no address: give http://HOST[:PORT]")
    path = FLEET_PATH if parts.path in ("", "/", "/metrics") else parts.path
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
