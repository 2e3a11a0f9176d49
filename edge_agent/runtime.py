"""The driver of a device: a transport, a draft model and one session core per generation.

The transport's thread only sorts messages into the inboxes of the generations; each generation is
driven by the thread that iterates over it, which is also the one that runs the draft model. So two
generations at once never wait for each other's model calls, and the network for none.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from dataclasses import replace

from broker import __version__
from broker.clock import Clock, MonotonicClock
from broker.codec import decode, encode
from broker.errors import RemoteProtocolError, TransportError
from broker.messages import Accepted, Close, DeviceStatus, VerifierStatus
from broker.topics import (
    VERIFIER_STATUS_ALL,
    down_filter,
    parse_verifier_status_topic,
    status_topic,
    up_topic,
)
from broker.transport import ConnectionEvent, Message, Transport, Will
from edge_agent.core.sending import Estimates
from edge_agent.core.session import EdgeSession
from edge_agent.draft import DraftModel
from edge_agent.generation import Generation, Request
from edge_agent.observer import Observer
from edge_agent.wire import arrival

log = logging.getLogger(__name__)

#: Verifiers whose status is remembered.
MAX_VERIFIERS = 256


def device_will(device: str, draft: str) -> Will:
    """Online while connected, offline when the connection dies or the agent leaves."""
    offline = encode(DeviceStatus(online=False))
    birth = encode(DeviceStatus(online=True, version=__version__, draft=draft[-200:]))
    return Will(status_topic(device), offline, birth=birth, farewell=offline)


class Agent:
    """Everything that one device's generations share. Thread-safe."""

    def __init__(
        self,
        transport: Transport,
        draft: DraftModel,
        device: str,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.device = device
        self.draft = draft
        self.clock = clock or MonotonicClock()
        self.rejected: Counter[str] = Counter()  # input dropped, by cause (a fixed set)
        self._transport = transport
        self._lock = threading.Lock()
        self._forgotten = threading.Condition(self._lock)
        self._generations: dict[str, Generation] = {}
        self._verifiers: dict[str, VerifierStatus] = {}
        self._state: ConnectionEvent | None = None
        self._estimates = Estimates()

    def start(self) -> None:
        """Begin connecting; returns at once."""
        self._transport.subscribe(down_filter(self.device), qos=0)
        self._transport.subscribe(VERIFIER_STATUS_ALL, qos=1)
        self._transport.start(self._on_message, self._on_event)

    def stop(self, timeout: float = 2.0) -> None:
        """Cancel what runs and say goodbye, in at most ``timeout`` seconds; idempotent.

        Half of them are for generations that other threads drive, to tell their verifiers.
        """
        deadline = self.clock.now() + timeout
        with self._forgotten:
            for generation in self._generations.values():
                generation.cancel()
            me = threading.get_ident()
            self._forgotten.wait_for(
                lambda: all(one.driver in (None, me) for one in self._generations.values()),
                timeout / 2,
            )
        self._transport.stop(max(0.0, deadline - self.clock.now()))

    @property
    def connected(self) -> bool:
        return self._transport.connected

    def verifiers(self) -> dict[str, VerifierStatus]:
        """The verifiers that are online as far as the broker's retained statuses say."""
        with self._lock:
            return dict(self._verifiers)

    def generate(self, request: Request, observer: Observer | None = None) -> Generation:
        """A generation; nothing happens until it is iterated over. ``observer``: see Observer.

        Raises ModelError when the draft model has no room for another sequence.
        """
        draft = self.draft
        config = request.config(draft.vocab_hash, draft.vocab_size, draft.eos_ids, draft.context)
        policy = request.policy
        if request.thresholds is not None:
            policy = replace(policy, thresholds=request.thresholds)
        with self._lock:
            estimates = self._estimates
        core = EdgeSession(
            config,
            timing=request.timing,
            now=self.clock.now(),
            policy=policy,
            estimates=estimates,
        )
        generation = Generation(self, secrets.token_hex(8), core, draft.open(), observer)
        with self._lock:
            self._generations[generation.session] = generation
            # Within the lock, or a newer event could be heard before this one.
            if self._state is not None:
                generation.hear(self._state)
        return generation

    # -- for generations ------------------------------------------------------------------------

    def publish(self, topic: str, payload: bytes, qos: int) -> None:
        self._transport.publish(topic, payload, qos=qos)

    def forget(self, session: str, estimates: Estimates) -> None:
        """A generation has ended; what it learnt of link and draft model serves the next."""
        with self._forgotten:
            self._generations.pop(session, None)
            self._forgotten.notify_all()
            self._estimates = estimates

    # -- the transport's thread -----------------------------------------------------------------

    def _on_event(self, event: ConnectionEvent) -> None:
        with self._lock:
            self._state = event
            running = list(self._generations.values())
        for generation in running:
            generation.hear(event)

    def _on_message(self, message: Message) -> None:
        try:
            if message.topic.startswith("pipesd/1/_verifiers/"):
                self._on_verifier_status(message)
                return
            session, decoded = arrival(self.device, message)
        except RemoteProtocolError as error:
            self.rejected[error.cause] += 1
            if self.rejected[error.cause] == 1:
                log.warning(
                    "dropped a message on %r (%s): see who publishes there; others of this kind "
                    "are only counted",
                    message.topic[:120],
                    error.cause,
                )
            return
        with self._lock:
            generation = self._generations.get(session)
        if generation is not None:
            generation.hear(decoded, len(message.payload))
        elif isinstance(decoded, Accepted):
            # It ended before this answer came: the verifier need not keep a place for it.
            topic = up_topic(self.device, session, decoded.verifier)
            try:
                self.publish(topic, encode(Close(decoded.attach)), 1)
            except TransportError:
                self.rejected["close_not_sent"] += 1

    def _on_verifier_status(self, message: Message) -> None:
        verifier = parse_verifier_status_topic(message.topic)
        status = decode(message.payload) if message.payload else VerifierStatus(online=False)
        if not isinstance(status, VerifierStatus):
            raise RemoteProtocolError("no status of a verifier", cause="unexpected_kind")
        with self._lock:
            if not status.online:
                self._verifiers.pop(verifier, None)
            elif verifier in self._verifiers or len(self._verifiers) < MAX_VERIFIERS:
                self._verifiers[verifier] = status
            running = list(self._generations.values())
        if not status.online and not message.retain:
            for generation in running:
                generation.hear(verifier)
