"""Where the tuner reads what the devices tell: Prometheus, or an exporter itself.

Either answers one request with everything about all devices. What cannot be used is counted and
left out; a source that is away, slow or broken is a SourceError, and the tuner goes on later.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from broker.errors import ConfigError, PipesdError, RemoteProtocolError
from cloud_verifier.tuner.core.readings import SERIES, Reading, make_reading
from cloud_verifier.tuner.database import not_installed

if TYPE_CHECKING:
    import httpx

PREFIX = "pipesd_device_"
_EXPORTER = "pipesd_exporter_"
#: The one question to Prometheus.
QUERY = f'{{__name__=~"{PREFIX}({"|".join(SERIES)})"}}'
#: Seconds for an answer, and its most bytes: 10,000 devices make about 15 MB.
TIMEOUT_S = 10.0
MAX_ANSWER = 128 << 20
_SEEN = "last_seen_timestamp_seconds"
_LINE = re.compile(
    rf"{PREFIX}(?P<name>{'|'.join(SERIES)})\{{(?P<labels>.*)\}} (?P<value>\S+)(?: \S+)?"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)",?')
_ESCAPES = {"\\n": "\n", "\\\\": "\\", '\\"': '"'}


class SourceError(PipesdError):
    """The source did not answer as it should. ``cause``: a short label for a counter."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class Source(Protocol):
    """``rejected``: devices and samples left out, by cause; ``queries``: requests made."""

    rejected: Counter[str]
    queries: int

    def read(self) -> list[Reading]:
        """Every device that is known now. Raises SourceError."""
        ...

    def close(self) -> None: ...


class _HttpSource:
    """One request a reading, over one connection that is kept."""

    def __init__(
        self, url: str, flag: str, *, timeout: float = TIMEOUT_S, client: httpx.Client | None = None
    ) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise not_installed(error) from None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{flag} {url!r} is no http:// or https:// address: give one")
        self.rejected: Counter[str] = Counter()
        self.queries = 0
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._httpx = httpx
        self._client = client or self._connect()

    def _connect(self) -> httpx.Client:
        return self._httpx.Client(timeout=self._timeout, follow_redirects=False)

    def close(self) -> None:
        self._client.close()

    def _get(self, url: str, params: Mapping[str, str] | None = None) -> bytes:
        """The body of a good answer. The time-out holds for all of it, however it trickles in."""
        httpx = self._httpx
        if self._client.is_closed:
            self._client = self._connect()
        self.queries += 1
        deadline = time.monotonic() + self._timeout
        parts: list[bytes] = []
        size = 0
        # httpx bounds single reads: a head that comes byte by byte would never end.
        guard = threading.Timer(self._timeout, self._client.close)
        guard.daemon = True
        guard.start()
        try:
            with self._client.stream("GET", url, params=params) as answer:
                for part in answer.iter_bytes():
                    size += len(part)
                    if size > MAX_ANSWER:
                        raise SourceError(f"{self._url} sends more than {MAX_ANSWER} B", "size")
                    if time.monotonic() > deadline:
                        raise SourceError(f"{self._url} is slow", "timeout")
                    parts.append(part)
                status = answer.status_code
        except httpx.TimeoutException:
            raise SourceError(f"{self._url} is slow: no answer in time", "timeout") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as error:
            if time.monotonic() >= deadline:
                raise SourceError(f"{self._url} is slow: no answer in time", "timeout") from None
            raise SourceError(f"{self._url} is away: {error}", "away") from None
        finally:
            guard.cancel()
        body = b"".join(parts)
        if status != 200:
            raise SourceError(f"{self._url} answers {status}: {_why(body)}", "status")
        return body

    def _make(self, found: Mapping[str, _Group]) -> list[Reading]:
        readings: list[Reading] = []
        for device, group in found.items():
            try:
                readings.append(make_reading(device, group.values, group.labels))
            except RemoteProtocolError as error:
                self.rejected[error.cause] += 1
        return readings


class _Group:
    """The series of one device, as one exporter tells them."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.labels: dict[str, str] = {}

    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        if name == "info":
            self.labels = dict(labels)
        else:
            self.values[name] = value


class PrometheusSource(_HttpSource):
    """Reads Prometheus by one instant query. Raises ConfigError for a wrong ``url``."""

    def __init__(
        self, url: str, *, timeout: float = TIMEOUT_S, client: httpx.Client | None = None
    ) -> None:
        super().__init__(url, "--prometheus", timeout=timeout, client=client)

    def read(self) -> list[Reading]:
        """See Source. Where several exporters tell of a device, the one that heard it last."""
        body = self._get(
            f"{self._url}/api/v1/query",
            {"query": QUERY, "timeout": f"{max(1, int(self._timeout))}s"},
        )
        groups: dict[tuple[str, str, str], _Group] = {}
        for name, labels, value in self._samples(body):
            key = (labels.get("device", ""), labels.get("job", ""), labels.get("instance", ""))
            groups.setdefault(key, _Group()).add(name, value, labels)
        found: dict[str, _Group] = {}
        for (device, _, _), group in groups.items():
            known = found.get(device)
            if known is None or group.values.get(_SEEN, 0.0) > known.values.get(_SEEN, 0.0):
                found[device] = group
        return self._make(found)

    def _samples(self, body: bytes) -> Iterator[tuple[str, dict[str, str], float]]:
        try:
            answer = json.loads(body)
            if answer["status"] != "success":
                raise SourceError(f"{self._url}: {str(answer.get('error'))[:200]}", "query")
            if answer["data"]["resultType"] != "vector":
                raise SourceError(f"{self._url} answers with no vector", "answer")
            result = answer["data"]["result"]
            if not isinstance(result, list):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise SourceError(f"{self._url} answers with no query result", "answer") from None
        for sample in result:
            try:
                labels: dict[str, Any] = sample["metric"]
                name = labels["__name__"].removeprefix(PREFIX)
                value = float(sample["value"][1])
                if not all(type(text) is str for text in labels.values()):
                    raise TypeError
            except (ValueError, KeyError, TypeError, IndexError, AttributeError):
                self.rejected["sample"] += 1
                continue
            if math.isfinite(value):
                yield name, labels, value
            else:
                self.rejected["not_finite"] += 1


class ExporterSource(_HttpSource):
    """Reads an exporter's /metrics, without Prometheus. Raises ConfigError for a wrong ``url``."""

    def __init__(
        self, url: str, *, timeout: float = TIMEOUT_S, client: httpx.Client | None = None
    ) -> None:
        super().__init__(url, "--exporter", timeout=timeout, client=client)
        if not urlsplit(self._url).path:
            self._url += "/metrics"

    def read(self) -> list[Reading]:
        """See Source."""
        text = self._get(self._url).decode("utf-8", "replace")
        if _EXPORTER not in text and PREFIX not in text:
            raise SourceError(f"{self._url} is no page of an exporter", "answer")
        found: dict[str, _Group] = {}
        for line in text.splitlines():
            if not line.startswith(PREFIX) or (match := _LINE.fullmatch(line)) is None:
                continue
            labels = {
                key: re.sub(r"\\.", lambda hit: _ESCAPES.get(hit[0], hit[0]), value)
                for key, value in _LABEL.findall(match["labels"])
            }
            try:
                value = float(match["value"])
            except ValueError:
                self.rejected["sample"] += 1
                continue
            if not math.isfinite(value):
                self.rejected["not_finite"] += 1
                continue
            group = found.setdefault(labels.get("device", ""), _Group())
            group.add(match["name"], value, labels)
        return self._make(found)


def _why(body: bytes) -> str:
    """What an error answer says, in one short line."""
    try:
        text = str(json.loads(body).get("error", ""))
    except (ValueError, AttributeError, RecursionError):
        text = body[:200].decode("utf-8", "replace")
    return " ".join(text.split())[:200]
