"""The thread behind the MQTT transport: it connects, reconnects, subscribes again, sends, listens.

One thread per transport owns the socket and the MQTT client (a ``Link``, one per connection);
publishing threads only put messages into the ``Outbox`` and wake it. What must outlive a
connection, subscriptions and unacknowledged QoS 1 messages, is kept here. This module knows no
MQTT library; ``broker.mqtt`` supplies the link.
"""

from __future__ import annotations

import logging
import random
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from broker.errors import LocalProtocolError, TransportError
from broker.filters import check_topic, matches, parse_filter
from broker.mqtt_link import Link, Listener, Loss
from broker.mqtt_settings import PACKET_OVERHEAD, MqttSettings
from broker.outbox import Outbox
from broker.rivals import RivalWatch
from broker.transport import ConnectionEvent, ConnectionState, Message, OnEvent, OnMessage

log = logging.getLogger("broker.mqtt")

PACKET_TOO_LARGE = 0x95
QUOTA_EXCEEDED = 0x97
SESSION_TAKEN_OVER = 0x8E
MAX_FILTERS = 1_000
_FILTERS_PER_PACKET = 32
_MAX_REASONS = 8
_Argument = TypeVar("_Argument")


class MqttDriver:
    """A ``Transport`` without its MQTT library; see ``broker.transport`` for what it promises.

    ``CONNECTED`` comes when the broker has acknowledged the subscriptions made until then: whoever
    publishes after it is heard. Beside the counters of the port: ``refused``, subscriptions and
    QoS 1 messages that the broker turned down (its access rules, mostly).
    """

    def __init__(self, settings: MqttSettings, make_link: Callable[[Listener, str], Link]) -> None:
        """``make_link(listener, mark)``: a fresh link; ``mark`` goes into its will and birth."""
        self.bytes_sent = self.bytes_received = 0
        self.messages_sent = self.messages_received = 0
        self.reconnects = self.dropped = self.callback_errors = self.refused = 0
        self._settings = settings
        self._make_link = make_link
        self._rivals = RivalWatch(f"{time.time_ns():016x}{secrets.token_hex(4)}")
        self._outbox = Outbox(
            settings.max_queued_qos0, settings.max_queued, settings.max_queued_bytes
        )
        self._lock = threading.Lock()  # guards filters, dropped, and what start and stop change
        self._filters: dict[str, int] = {}
        self._filters_version = 0
        self._thread: threading.Thread | None = None
        self._ended: str | None = None  # why nothing can be published any more
        self._stop_at: float | None = None
        self._stopped = threading.Event()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._awake = False
        # The rest is the network thread's; others only read ``_link`` and ``_up``.
        self._link: Link | None = None
        self._up = False
        self._links_up = 0
        self._link_filters: dict[str, int] = {}
        self._link_version = -1
        self._birth_due = self._farewell_said = self._taken_over = False
        self._told: set[str] = set()  # reasons already told in this outage
        self._logged: set[str] = set()  # kinds of trouble that are logged once and for all

    # ---- the port, called from any thread -------------------------------------------------

    def start(self, on_message: OnMessage, on_event: OnEvent) -> None:
        """Begin connecting; returns at once. Raises LocalProtocolError when started twice."""
        with self._lock:
            if self._thread is not None or self._stop_at is not None:
                raise LocalProtocolError("a transport starts only once")
            self._on_message = on_message
            self._on_event = on_event
            self._thread = threading.Thread(
                target=self._run, name=f"mqtt-{self._settings.client_id}", daemon=True
            )
        self._thread.start()

    def publish(self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False) -> None:
        """Hand one message over; see the port. QoS 2 is not offered: nothing here needs it."""
        check_topic(topic)
        _check_qos(qos)
        if self._ended is not None:
            raise TransportError(self._ended)
        link = self._link
        limit = self._settings.max_payload
        if link is not None:
            limit = min(limit, link.max_packet - PACKET_OVERHEAD - 4 * len(topic))
        if len(payload) > limit:
            raise TransportError(
                f"a payload of {len(payload)} bytes is above the limit of {limit} bytes: "
                "send less, or raise the limit here and on the broker",
                PACKET_TOO_LARGE,
            )
        if qos == 0 and not self._up:
            self._drop(1)
        elif self._outbox.offer(topic, payload, qos, retain):
            self._wake()
        elif qos == 0:
            self._drop(1)
        else:
            raise TransportError(
                "the queue of unsent messages is full: the broker is away or too slow",
                QUOTA_EXCEEDED,
            )

    def subscribe(self, topic_filter: str, *, qos: int = 0) -> None:
        """Subscribe now and after every reconnect. Raises LocalProtocolError for a bad filter."""
        parse_filter(topic_filter)
        _check_qos(qos)
        with self._lock:
            if len(self._filters) >= MAX_FILTERS and topic_filter not in self._filters:
                raise LocalProtocolError(f"more than {MAX_FILTERS} subscriptions: use wildcards")
            self._filters[topic_filter] = qos
            self._filters_version += 1
        self._wake()

    def unsubscribe(self, topic_filter: str) -> None:
        """Forget a subscription; an unknown one is no error."""
        with self._lock:
            self._filters.pop(topic_filter, None)
            self._filters_version += 1
        self._wake()

    @property
    def connected(self) -> bool:
        """The connection is up and its subscriptions are made."""
        return self._up

    def stop(self, timeout: float = 2.0) -> None:
        """Say goodbye and end; at most ``timeout`` seconds. No callback comes after it."""
        with self._lock:
            if self._stop_at is None:
                # A tenth is left for the thread to end in, so that no callback comes afterwards.
                self._stop_at = time.monotonic() + 0.9 * timeout
            self._ended = self._ended or "the transport was stopped: make another one"
            thread = self._thread
        self._stopped.set()
        if thread is None:
            self._close_pipe()
            return
        self._wake()
        if thread is not threading.current_thread():
            thread.join(timeout)

    # ---- the network thread ---------------------------------------------------------------

    def _run(self) -> None:
        attempt = 0
        jitter = random.Random()  # noqa: S311  (spreads reconnects; no secret)
        while not (self._stopped.is_set() and self._outbox.empty):
            up_since = self._serve_once()
            loss = self._loss
            if self._stopped.is_set():
                break
            if loss.fatal:
                self._ended = loss.reason
                # Not louder: the event goes to somebody who has to answer it, and says it there.
                log.info("%s: %s; giving up", self._settings.url, loss.reason)
                self._tell(ConnectionState.FAILED, loss)
                break
            self._tell_outage(loss)
            if up_since is not None and (
                time.monotonic() - up_since >= self._settings.stable_after
            ):
                attempt = 0
            pause = min(self._settings.backoff_max, self._settings.backoff_min * 2.0**attempt)
            attempt = min(attempt + 1, 30)
            # Jitter: a fleet that lost its broker together must not return in one wave.
            if self._stopped.wait(pause * jitter.uniform(0.5, 1.0)):
                break
        self._close_pipe()

    def _serve_once(self) -> float | None:
        """One connection from beginning to end, the reason into ``_loss``; since when it was up."""
        self._link_filters, self._link_version = {}, -1
        self._birth_due = self._farewell_said = False
        self._up_since: float | None = None
        link = self._link = self._make_link(self, self._rivals.new_link(self._taken_over))
        try:
            self._loss = self._carry(link)
        except (OSError, UnicodeError) as error:
            passing = isinstance(error, OSError) and not isinstance(error, ssl.SSLError)
            self._loss = Loss(_reason(error), passing=passing)
        except Exception as error:  # whatever a broker sends, the thread lives
            log.debug("the connection broke", exc_info=True)
            self._loss = Loss(
                f"the broker sent something that is not MQTT 5 ({type(error).__name__})"
            )
        self._up = False
        self._link = None
        link.close()
        self._drop(self._outbox.connection_lost())
        self._taken_over = self._loss.code == SESSION_TAKEN_OVER and not self._loss.fatal
        if self._taken_over and self._rivals.taken_over(time.monotonic()):
            self._loss = self._rival_loss()
        return self._up_since

    def _carry(self, link: Link) -> Loss:
        link.open(self._wake_receiver)
        patience = time.monotonic() + self._settings.connect_timeout
        while link.loss is None:
            now = time.monotonic()
            if self._stop_at is not None and self._goodbye(link, now, self._stop_at):
                return Loss("stopped")
            if not self._up and now >= patience:
                return Loss("the broker does not answer the MQTT handshake", passing=True)
            pause = self._settings.keepalive / 5 if self._up else 0.25
            if self._stop_at is not None:
                pause = max(0.0, min(pause, self._stop_at - now))
            if link.wait(pause):
                self._wake_receiver.recv(4_096)
                self._awake = False  # before the queue is looked at: a later message wakes again
            self._move(link)
        return link.loss

    def _move(self, link: Link) -> None:
        """Subscribe, tell that the connection is up, and send, as far as the link is there."""
        if link.accepted and link.loss is None:
            self._keep_subscribed(link)
            if not self._up and not link.pending and link.loss is None:
                self._link_up()
        if self._up and link.loss is None:
            self._feed(link)
        if link.loss is None:
            link.flush()

    def _keep_subscribed(self, link: Link) -> None:
        if self._link_version == self._filters_version:
            return
        with self._lock:
            wanted, self._link_version = dict(self._filters), self._filters_version
        will = self._settings.will
        if will is not None and will.birth is not None:
            wanted.setdefault(will.topic, 0)
        new = [(name, qos) for name, qos in wanted.items() if self._link_filters.get(name) != qos]
        gone = [name for name in self._link_filters if name not in wanted]
        self._link_filters = wanted
        for first in range(0, len(new), _FILTERS_PER_PACKET):
            link.subscribe(new[first : first + _FILTERS_PER_PACKET])
        for first in range(0, len(gone), _FILTERS_PER_PACKET):
            link.unsubscribe(gone[first : first + _FILTERS_PER_PACKET])

    def _link_up(self) -> None:
        self._up_since = time.monotonic()
        self._rivals.link_up()
        self._told.clear()
        self._birth_due = True
        self.reconnects = self._links_up
        self._links_up += 1
        self._up = True
        log.info("connected to %s as %s", self._settings.url, self._settings.client_id)
        self._tell(ConnectionState.CONNECTED, Loss(""))

    def _feed(self, link: Link) -> None:
        will = self._settings.will
        if self._birth_due and not self._farewell_said:
            self._birth_due = False
            if will is not None and will.birth is not None:
                link.say(will.topic, will.birth)
        outbox = self._outbox
        while not link.blocked and link.loss is None:
            message = outbox.take(outbox.in_flight + len(link.own) < link.window)
            if message is None:
                return
            if len(message.payload) + 4 * len(message.topic) + PACKET_OVERHEAD > link.max_packet:
                # Queued before this broker told its limit; sent, it would cost the connection.
                outbox.discard(message)
                self._drop(1)
                self._log_once("queued message above the broker's packet limit: dropped")
                continue
            packet_id = link.publish(message.topic, message.payload, message.qos, message.retain)
            if message.qos:
                outbox.sent(packet_id, message)
            self.messages_sent += 1
            self.bytes_sent += len(message.payload)

    def _goodbye(self, link: Link, now: float, stop_at: float) -> bool:
        """One step of the farewell; True when all is said or the time is over."""
        if not self._up:
            return now >= stop_at or self._outbox.empty
        will = self._settings.will
        farewell = will.farewell if will is not None else None
        if now < stop_at:
            if link.own or link.blocked or not self._outbox.empty:
                return False
            if will is not None and farewell is not None and not self._farewell_said:
                self._farewell_said = True
                link.say(will.topic, farewell)
                return False
        elif farewell is not None and (link.own or not self._farewell_said):
            return True  # without DISCONNECT: the broker then speaks the will in our place
        link.disconnect()
        return True

    # ---- what the link reports ------------------------------------------------------------

    def heard(self, topic: str, payload: bytes, retain: bool, mark: str | None) -> None:
        """See Listener."""
        will = self._settings.will
        if will is not None and will.birth is not None and topic == will.topic:
            is_will = payload == will.payload
            if self._rivals.heard(mark, is_will, time.monotonic()) and self._link is not None:
                self._link.loss = self._rival_loss()
            if is_will and not retain:
                self._birth_due = True  # a late will of ours, overwritten at the next step
            with self._lock:
                filters = list(self._filters)
            if not any(matches(name, topic) for name in filters):
                return  # only the transport itself listens here
        self.messages_received += 1
        self.bytes_received += len(payload)
        self._call(self._on_message, Message(topic, payload, retain))

    def unreadable(self) -> None:
        """See Listener."""
        self._drop(1)
        self._log_once("a message came whose topic is not UTF-8: dropped")

    def acknowledged(self, packet_id: int, refusal: str | None) -> None:
        """See Listener."""
        self._outbox.acknowledged(packet_id)
        if refusal is not None:
            self.refused += 1
            self._log_once(f"the broker refused a message ({refusal}): check its access rules")

    def subscribed(self) -> None:
        """See Listener; an answer to what was read in with this one must not be dropped."""
        link = self._link
        if link is None or self._up or self._link_version != self._filters_version:
            return
        if link.accepted and link.loss is None:
            self._link_up()

    def filter_refused(self, topic_filter: str, refusal: str) -> None:
        """See Listener."""
        self.refused += 1
        self._log_once(
            f"the broker refused to subscribe {topic_filter} ({refusal}): check its access rules"
        )

    # ---- helpers --------------------------------------------------------------------------

    def _rival_loss(self) -> Loss:
        return Loss(
            f"another client uses the id {self._settings.client_id!r}: give each its own id",
            SESSION_TAKEN_OVER,
            fatal=True,
        )

    def _tell_outage(self, loss: Loss) -> None:
        """Once per outage, and again only for a cause that somebody has to mend."""
        if self._told and (loss.passing or loss.reason in self._told):
            return
        if len(self._told) >= _MAX_REASONS:
            return
        self._told.add(loss.reason)
        log.warning(
            "%s: %s; trying again every %g to %g s",
            self._settings.url,
            loss.reason,
            self._settings.backoff_min,
            self._settings.backoff_max,
        )
        self._tell(ConnectionState.DISCONNECTED, loss)

    def _tell(self, state: ConnectionState, loss: Loss) -> None:
        self._call(self._on_event, ConnectionEvent(state, loss.reason, loss.code))

    def _call(self, callback: Callable[[_Argument], None], argument: _Argument) -> None:
        try:
            callback(argument)
        except Exception as error:  # noqa: BLE001  (the caller's bug must not end the connection)
            self.callback_errors += 1
            self._log_once(f"a callback raised {type(error).__name__}: {error}", error)

    def _log_once(self, kind: str, error: Exception | None = None) -> None:
        key = type(error).__name__ if error is not None else kind
        if key not in self._logged and len(self._logged) < 100:
            self._logged.add(key)
            log.error("%s: %s", self._settings.client_id, kind, exc_info=error)

    def _drop(self, count: int) -> None:
        with self._lock:
            self.dropped += count

    def _wake(self) -> None:
        if self._awake or threading.current_thread() is self._thread:
            return
        self._awake = True
        try:
            self._wake_sender.send(b"\0")
        except OSError:
            return  # a full pipe wakes as well; a closed one has nobody behind it

    def _close_pipe(self) -> None:
        self._wake_receiver.close()
        self._wake_sender.close()


def _check_qos(qos: int) -> None:
    if qos not in (0, 1):
        raise LocalProtocolError(f"QoS {qos} is not offered: use 0 or 1")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the broker's certificate was not accepted ({error.verify_message})"
    if isinstance(error, UnicodeError):
        return "the broker's host name is not a name"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
