"""How to reach a broker: address, credentials, TLS, limits. Checked when made, before any traffic.

There is no switch that turns certificate verification off: a private authority goes into
``TlsSettings.ca_file``.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from broker.errors import ConfigError, LocalProtocolError
from broker.filters import check_topic
from broker.transport import Will

_URL_FORM = "mqtt[s]://[user[:password]@]host[:port]"
#: What a packet carries besides topic and payload: fixed header 5, topic length 2, packet
#: identifier 2, property length 2, and up to 64 bytes of the property that marks a birth message.
PACKET_OVERHEAD = 75


@dataclass(frozen=True)
class TlsSettings:
    """TLS to the broker; the certificate's name or IP address is always checked.

    ``ca_file``: PEM authorities to trust, None for the system's. ``cert_file`` and ``key_file``:
    PEM certificate and key of this client, where the broker asks for one.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def context(self) -> ssl.SSLContext:
        """A verifying context (TLS 1.2 or later). Raises ConfigError that names the bad file."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot use the CA file {self.ca_file!r} ({_why(error)}): give a readable PEM file"
            ) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.key_file and not self.cert_file:
            raise ConfigError("a TLS key without a certificate: give both files")
        if self.cert_file:
            try:
                # An encrypted key would be asked for on the terminal; a service has none.
                context.load_cert_chain(self.cert_file, self.key_file, password=lambda: b"")
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"cannot use the client certificate {self.cert_file!r} with key "
                    f"{self.key_file or self.cert_file!r} ({_why(error)}): "
                    "give matching, readable PEM files"
                ) from None
        return context


@dataclass(frozen=True)
class MqttSettings:
    """Everything that ``MqttTransport`` needs to know. Times in seconds, sizes in bytes.

    ``max_queued``: QoS 1 messages not yet acknowledged; ``max_queued_qos0``: QoS 0 messages that
    the socket has not taken yet; ``max_queued_bytes``: both together. ``max_payload``: largest
    payload to send; the broker's own limit applies as well when it announces a smaller one.
    ``stable_after``: a connection that lived shorter does not reset the back-off.
    ``quick_ack``: acknowledge every TCP segment at once (Linux). A broker that leaves Nagle's
    algorithm on, as the embedded one does, otherwise holds its second small packet back for about
    40 ms. None: only towards this machine, where the extra packets cost nothing.

    Raises ConfigError when made with values that cannot work.
    """

    host: str
    client_id: str
    port: int = 1883
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: TlsSettings | None = None
    keepalive: int = 15
    will: Will | None = None
    clean_start: bool = True
    max_queued: int = 1_000
    max_queued_qos0: int = 10_000
    max_queued_bytes: int = 16 * 1024 * 1024
    max_payload: int = 1024 * 1024
    connect_timeout: float = 10.0
    backoff_min: float = 0.25
    backoff_max: float = 30.0
    stable_after: float = 5.0
    quick_ack: bool | None = None

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError(f"the broker has no host: give it as {_URL_FORM}")
        if not 1 <= self.port <= 65_535:
            raise ConfigError(f"broker port {self.port} is outside 1 to 65535: mend --broker")
        if not self.client_id or len(self.client_id.encode()) > 65_535 or "\0" in self.client_id:
            raise ConfigError("the MQTT client id is empty or too long: give an id")
        if self.password is not None and self.username is None:
            raise ConfigError("a broker password without a user name: give both")
        if not 1 <= self.keepalive <= 65_535:
            raise ConfigError(f"keepalive {self.keepalive} is outside 1 to 65535 seconds")
        if not 0 < self.backoff_min <= self.backoff_max:
            raise ConfigError("the reconnect back-off needs 0 < backoff_min <= backoff_max")
        if self.connect_timeout <= 0 or min(self.max_queued, self.max_queued_qos0) < 1:
            raise ConfigError("connect_timeout and the queue limits must be positive")
        if not 1 <= self.max_payload <= self.max_queued_bytes or self.max_payload >= 2**28:
            raise ConfigError("max_payload must be positive, below 2^28 and fit max_queued_bytes")
        if self.will is not None:
            try:
                check_topic(self.will.topic)
            except LocalProtocolError as error:
                raise ConfigError(f"the will's topic is not usable: {error}") from None

    @classmethod
    def from_url(cls, url: str, client_id: str, **options: Any) -> MqttSettings:
        """Settings from ``mqtt[s]://[user[:password]@]host[:port]`` and any further fields.

        User and password may be percent-encoded; those given as options win. ``mqtts`` means TLS
        with the system's authorities unless ``tls`` says more. Raises ConfigError, which never
        repeats a password.
        """
        parts, port = _split(url)
        secure = parts.scheme == "mqtts"
        if options.get("tls") is not None and not secure:
            raise ConfigError(f"TLS files with {_shown(parts)}: use mqtts://")
        if secure and options.get("tls") is None:
            options["tls"] = TlsSettings()
        if options.get("username") is None and parts.username:
            options["username"] = unquote(parts.username)
        if options.get("password") is None and parts.password is not None:
            options["password"] = unquote(parts.password)
        return cls(
            host=parts.hostname or "",
            port=port or (8883 if secure else 1883),
            client_id=client_id,
            **options,
        )

    @property
    def url(self) -> str:
        """Where it goes, without credentials; for messages to people."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"mqtt{'s' if self.tls else ''}://{host}:{self.port}"


def _split(url: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the broker address is broken ({error}): use {_URL_FORM}") from None
    if parts.scheme not in ("mqtt", "mqtts"):
        raise ConfigError(
            f"the broker address must begin with mqtt:// or mqtts://: use {_URL_FORM}"
        )
    if not parts.hostname or port == 0:
        raise ConfigError(f"the broker address {_shown(parts)} lacks a host or port: {_URL_FORM}")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError(f"the broker address {_shown(parts)} goes on after the port: {_URL_FORM}")
    return parts, port


def _shown(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
