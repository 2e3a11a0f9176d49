"""The transport over a real broker: MQTT 5 through paho, the only module that imports it.

Every connection gets a fresh paho client, used in the way of an external event loop (``loop_read``,
``loop_write``, ``loop_misc``) by one thread: paho's own reconnection resends its backlog all at
once, past the broker's receive window, and lets new messages overtake it; and its threaded mode
may write from two threads at a time.
"""

from __future__ import annotations

import ipaddress
import selectors
import socket
import ssl
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from broker.mqtt_driver import SESSION_TAKEN_OVER, MqttDriver
from broker.mqtt_link import Listener, Loss
from broker.mqtt_settings import PACKET_OVERHEAD, MqttSettings, TlsSettings

__all__ = ["MqttSettings", "MqttTransport", "TlsSettings"]

#: CONNACK codes that another try cannot change (MQTT 5, 3.2.2.2): protocol version, client id,
#: credentials, authorisation, ban, authentication method, and a will that the broker cannot take.
PERMANENT = frozenset({0x84, 0x85, 0x86, 0x87, 0x8A, 0x8C, 0x90, 0x95, 0x99, 0x9A, 0x9B})
_CREDENTIALS = frozenset({0x85, 0x86, 0x87, 0x8A, 0x8C})
#: Most QoS 1 messages under way at once; the broker may allow fewer.
WINDOW = 20
#: What the largest packet may be before a broker says otherwise (MQTT 5, 2.1.4).
MAX_PACKET = 268_435_460
#: Packets that are taken in before anything else has its turn again.
_PACKETS = 32
_MARK = "link"  # the user property that tells whose birth or will a message is


class MqttTransport(MqttDriver):
    """A ``Transport`` to the broker that ``settings`` name."""

    def __init__(self, settings: MqttSettings) -> None:
        """Raises ConfigError when TLS files cannot be used."""
        tls = settings.tls.context() if settings.tls is not None else None

        def make_link(listener: Listener, mark: str) -> PahoLink:
            return PahoLink(settings, tls, listener, mark)

        super().__init__(settings, make_link)


class PahoLink:
    """One connection by way of one paho client; see ``broker.mqtt_driver.Link``."""

    def __init__(
        self,
        settings: MqttSettings,
        tls: ssl.SSLContext | None,
        listener: Listener,
        mark: str,
    ) -> None:
        self.loss: Loss | None = None
        self.accepted = False
        self.max_packet = MAX_PACKET
        self.window = WINDOW
        self.pending: dict[int, list[str]] = {}
        self.own: set[int] = set()
        self._settings = settings
        self._listener = listener
        self._mark = mark
        self._selector = selectors.DefaultSelector()
        self._socket: Any = None
        self._wake: socket.socket | None = None
        self._quick_ack: int | None = None
        self._client = self._make_client(tls)

    def _make_client(self, tls: ssl.SSLContext | None) -> paho.Client:
        settings = self._settings
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=settings.client_id,
            protocol=paho.MQTTv5,
            reconnect_on_failure=False,
        )
        client.connect_timeout = settings.connect_timeout
        client.max_inflight_messages = 0  # the driver keeps the window
        if settings.username is not None:
            client.username_pw_set(settings.username, settings.password)
        if tls is not None:
            client.tls_set_context(tls)
        if settings.will is not None:
            mark = self._marked(PacketTypes.WILLMESSAGE)
            client.will_set(settings.will.topic, settings.will.payload, 1, True, mark)
        client.on_socket_open = self._on_socket_open
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        return client

    # ---- what the driver asks for ---------------------------------------------------------

    def open(self, wake: socket.socket) -> None:
        """See Link."""
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.MaximumPacketSize = self._settings.max_payload + 65_536 + PACKET_OVERHEAD
        self._client.connect(
            self._settings.host,
            self._settings.port,
            self._settings.keepalive,
            clean_start=self._settings.clean_start,
            properties=properties,
        )
        if self._client.socket() is None:
            raise ConnectionError("the connection was lost during the handshake")
        self._wake = wake
        self._selector.register(wake, selectors.EVENT_READ)
        self._selector.register(self._socket, selectors.EVENT_READ)

    def wait(self, timeout: float) -> bool:
        """See Link."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.blocked else 0)
        if self._selector.get_key(self._socket).events != wanted:
            self._selector.modify(self._socket, wanted)
        # Bytes that TLS has already decrypted do not make the socket readable.
        decrypted = self._socket.pending() if isinstance(self._socket, ssl.SSLSocket) else 0
        awake, readable = False, decrypted > 0
        for key, mask in self._selector.select(0.0 if readable else timeout):
            if key.fileobj is self._wake:
                awake = True
            else:
                readable |= bool(mask & selectors.EVENT_READ)
        if readable:
            self.read()
            if self._quick_ack is not None and self.loss is None:
                # The kernel falls back to delayed acknowledgements by itself: ask every time.
                self._socket.setsockopt(socket.IPPROTO_TCP, self._quick_ack, 1)
        return awake

    def read(self) -> None:
        """Take in what has come, up to _PACKETS; the socket is readable.

        One packet for each look of a busy loop would let messages pile up in front of it.
        """
        for _ in range(_PACKETS):
            self._client.loop_read()
            if self.loss is not None or not self._more():
                return

    def _more(self) -> bool:
        """Whether the next packet has begun to arrive, or the connection has ended."""
        if isinstance(self._socket, ssl.SSLSocket):
            return self._socket.pending() > 0  # such bytes do not make the socket readable
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass  # paho meets it as well, and says what it is
        return True

    def flush(self) -> None:
        """See Link."""
        if self._client.want_write():
            self._client.loop_write()
        if self.loss is None:
            self._client.loop_misc()

    @property
    def blocked(self) -> bool:
        """See Link."""
        return self._client.want_write()

    def publish(self, topic: str, payload: bytes, qos: int, retain: bool) -> int:
        """See Link."""
        return self._client.publish(topic, payload, qos, retain).mid

    def say(self, topic: str, payload: bytes) -> None:
        """See Link."""
        info = self._client.publish(topic, payload, 1, True, self._marked(PacketTypes.PUBLISH))
        self.own.add(info.mid)

    def subscribe(self, filters: list[tuple[str, int]]) -> None:
        """See Link."""
        asked = [(name, SubscribeOptions(qos=qos)) for name, qos in filters]
        _, packet_id = self._client.subscribe(asked)
        if packet_id is not None:
            self.pending[packet_id] = [name for name, _ in filters]

    def unsubscribe(self, filters: list[str]) -> None:
        """See Link."""
        self._client.unsubscribe(filters)

    def disconnect(self) -> None:
        """See Link."""
        self._client.disconnect()
        self._client.loop_write()

    def close(self) -> None:
        """See Link."""
        self._client.on_disconnect = None
        self._selector.close()
        if self._socket is not None:
            self._socket.close()

    # ---- what paho reports, always from within the calls above ----------------------------

    def _marked(self, packet: int) -> Properties:
        properties = Properties(packet)  # type: ignore[no-untyped-call]
        properties.UserProperty = (_MARK, self._mark)
        return properties

    def _on_socket_open(self, _client: Any, _userdata: Any, opened: Any) -> None:
        self._socket = opened
        # Nagle's algorithm against delayed acknowledgements costs 40 ms a message.
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wanted = self._settings.quick_ack
        if wanted is None:
            peer = str(opened.getpeername()[0]).partition("%")[0]
            wanted = ipaddress.ip_address(peer).is_loopback
        self._quick_ack = getattr(socket, "TCP_QUICKACK", None) if wanted else None
        if self._quick_ack is not None:
            opened.setsockopt(socket.IPPROTO_TCP, self._quick_ack, 1)

    def _on_connect(
        self,
        _client: Any,
        _userdata: Any,
        _flags: paho.ConnectFlags,
        code: ReasonCode,
        answer: Properties | None,
    ) -> None:
        if code.is_failure:
            mend = ": check user name, password and client id" if code.value in _CREDENTIALS else ""
            self.loss = Loss(
                f"the broker refused the connection ({code}){mend}",
                code.value,
                fatal=code.value in PERMANENT,
            )
            return
        self.accepted = True
        self.max_packet = getattr(answer, "MaximumPacketSize", MAX_PACKET)
        self.window = min(WINDOW, getattr(answer, "ReceiveMaximum", WINDOW))

    def _on_disconnect(
        self, _client: Any, _userdata: Any, flags: Any, code: ReasonCode, _properties: Any
    ) -> None:
        if self.loss is not None:
            return
        if not flags.is_disconnect_packet_from_server:
            self.loss = Loss("the connection was lost", passing=True)
        elif code.value == SESSION_TAKEN_OVER:
            self.loss = Loss("another client connected with the same id", code.value)
        else:
            self.loss = Loss(f"the broker ended the connection ({code})", code.value)

    def _on_message(self, _client: Any, _userdata: Any, message: paho.MQTTMessage) -> None:
        marks = getattr(message.properties, "UserProperty", ())
        mark = next((value for name, value in marks if name == _MARK), None)
        try:
            topic = message.topic
        except UnicodeDecodeError:
            self._listener.unreadable()
            return
        self._listener.heard(topic, bytes(message.payload), message.retain, mark)

    def _on_publish(
        self, _client: Any, _userdata: Any, packet_id: int, code: ReasonCode, _properties: Any
    ) -> None:
        self.own.discard(packet_id)
        self._listener.acknowledged(packet_id, str(code) if code.is_failure else None)

    def _on_subscribe(
        self,
        _client: Any,
        _userdata: Any,
        packet_id: int,
        codes: list[ReasonCode],
        _properties: Any,
    ) -> None:
        for name, code in zip(self.pending.pop(packet_id, ()), codes, strict=False):
            if code.is_failure:
                self._listener.filter_refused(name, str(code))
        if not self.pending:
            self._listener.subscribed()
