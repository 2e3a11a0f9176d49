"""The driver of a device: a transport, a draft model and one session core per generation.

The transport's thread only sorts messages into the inboxes of the generations; each generation is
driven by the thread that iterates over it, which is also the one that runs the draft model. So two
generations at once never wait for each other's model calls, and the network for none.

Beside them the agent counts (``edge_agent.metrics``), tells and keeps its state
(``edge_agent.telemetry``), and follows the config that the broker retains for it
(``edge_agent.device_config``).
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter

from broker import __version__
from broker.clock import Clock, MonotonicClock
from broker.codec import decode, encode
from broker.errors import RemoteProtocolError, TransportError
from broker.messages import Accepted, Close, DeviceStatus, VerifierStatus
from broker.sensors import Readings
from broker.telemetry import DeviceConfig
from broker.topics import (
    VERIFIER_STATUS_ALL,
    config_topic,
    down_filter,
    parse_verifier_status_topic,
    status_topic,
    up_topic,
)
from broker.transport import ConnectionEvent, ConnectionState, Message, Transport, Will
from edge_agent.core.sending import Estimates
from edge_agent.core.session import EdgeSession
from edge_agent.device_config import ALL_TUNABLES, RemoteConfig, policy_of, thresholds_of
from edge_agent.draft import DraftModel
from edge_agent.generation import Generation, Request
from edge_agent.metrics import DeviceFigures, Figures
from edge_agent.observer import Observer
from edge_agent.state import DeviceState
from edge_agent.telemetry import Reporter, Upkeep
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
    """Everything that one device's generations share. Thread-safe.

    ``upkeep``: what it does beside them, nothing unless it is said. ``wish``: like what will be
    asked for first; before that telemetry names its thresholds.
    """

    def __init__(
        self,
        transport: Transport,
        draft: DraftModel,
        device: str,
        *,
        clock: Clock | None = None,
        upkeep: Upkeep | None = None,
        wish: Request | None = None,
    ) -> None:
        self.device = device
        self.draft = draft
        self.clock = clock or MonotonicClock()
        self.figures = DeviceFigures(self.clock.now())
        self.reporter = Reporter(self, upkeep or Upkeep())
        self.remote = RemoteConfig()
        self._wish = wish or Request((0,), tunable=ALL_TUNABLES)
        self.rejected: Counter[str] = Counter()  # input dropped, by cause (a fixed set)
        self._transport = transport
        self._lock = threading.Lock()
        self._forgotten = threading.Condition(self._lock)
        self._generations: dict[str, Generation] = {}
        self._verifiers: dict[str, VerifierStatus] = {}
        self._state: ConnectionEvent | None = None
        self._estimates = Estimates()
        self._learnt = False  # whether the estimates are more than assumptions
        self._config_topic = config_topic(device)
        self._config_lock = threading.Lock()
        self._config_heard = False  # on this connection
        self._recall()

    def _recall(self) -> None:
        """What an earlier run has left."""
        if self.reporter.file is None:
            return
        state = self.reporter.file.load()
        self.remote.current = state.config
        if state.estimates is not None:
            self._estimates = state.estimates
            self._learnt = True
            self.figures.remember(state.estimates)

    def start(self) -> None:
        """Begin connecting; returns at once."""
        self._transport.subscribe(down_filter(self.device), qos=0)
        self._transport.subscribe(VERIFIER_STATUS_ALL, qos=1)
        self._transport.subscribe(self._config_topic, qos=1)
        self.reporter.start()
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
        self.reporter.stop()
        self._transport.stop(max(0.0, deadline - self.clock.now()))

    @property
    def connected(self) -> bool:
        return self._transport.connected

    @property
    def link_failed(self) -> bool:
        """Whether the transport has given up for good."""
        with self._lock:
            return self._state is not None and self._state.state is ConnectionState.FAILED

    def verifiers(self) -> dict[str, VerifierStatus]:
        """The verifiers that are online as far as the broker's retained statuses say."""
        with self._lock:
            return dict(self._verifiers)

    def generate(self, request: Request, observer: Observer | None = None) -> Generation:
        """A generation; nothing happens until it is iterated over. ``observer``: see Observer.

        Raises ModelError when the draft model has no room for another sequence.
        """
        draft = self.draft
        with self._lock:
            estimates = self._estimates
        told = self.remote.current
        self._wish = request
        policy = policy_of(told, request)
        config = request.config(
            draft.vocab_hash, draft.vocab_size, draft.eos_ids, draft.context, policy
        )
        core = EdgeSession(
            config,
            timing=request.timing,
            now=self.clock.now(),
            policy=policy,
            estimates=estimates,
        )
        generation = Generation(
            self, secrets.token_hex(8), core, draft.open(), observer, request=request
        )
        with self._lock:
            self._generations[generation.session] = generation
            self.figures.begin(generation.meter)
            if self.remote.current is not told:  # another has come meanwhile
                self._apply(generation, told)
            # Within the lock, or a newer event could be heard before this one.
            if self._state is not None:
                generation.hear(self._state)
        return generation

    # -- for generations ------------------------------------------------------------------------

    def publish(self, topic: str, payload: bytes, qos: int) -> None:
        self._transport.publish(topic, payload, qos=qos)

    def forget(self, generation: Generation, estimates: Estimates) -> None:
        """It has ended; what it learnt of link and draft model serves the next."""
        now = self.clock.now()
        with self._forgotten:
            self._generations.pop(generation.session, None)
            self.figures.end(generation.meter, now)
            self._forgotten.notify_all()
            self._estimates = estimates
            self._learnt = True

    # -- for telemetry --------------------------------------------------------------------------

    @property
    def draft_name(self) -> str:
        """Of the draft model."""
        return self.draft.name

    def figures_now(self, now: float, readings: Readings | None) -> Figures:
        """The device's figures at ``now``; see DeviceFigures.snapshot."""
        policy = policy_of(self.remote.current, self._wish)
        given = {
            # Listed first: the network's thread may add a cause meanwhile.
            "rejected_messages_total": float(sum(list(self.rejected.values()))),
            "config_rejected_total": float(sum(list(self.remote.rejected.values()))),
            "reconnects_total": float(self._transport.reconnects),
            "config_version": float(self.remote.version),
            "r1_ratio": policy.thresholds.r1,
            "r2_ratio": policy.thresholds.r2,
        }
        return self.figures.snapshot(now, given, readings, policy=policy.name)

    def config_is_due(self) -> None:
        """A broker that retains a config has sent it by now; one that does not took it back."""
        if self.connected and not self._config_heard and self.remote.current is not None:
            self._on_config(b"")

    def state_now(self) -> DeviceState:
        """What is worth keeping over a restart."""
        with self._lock:
            estimates = self._estimates if self._learnt else None
        return DeviceState(self.remote.current, estimates)

    # -- the transport's thread -----------------------------------------------------------------

    def _on_event(self, event: ConnectionEvent) -> None:
        with self._lock:
            self._state = event
            running = list(self._generations.values())
        for generation in running:
            generation.hear(event)
        if event.state is ConnectionState.CONNECTED:
            self.reporter.connected(self.clock.now())
        else:
            self._config_heard = False

    def _on_message(self, message: Message) -> None:
        if message.topic == self._config_topic:
            self._on_config(message.payload)
            return
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

    def _on_config(self, payload: bytes) -> None:
        self._config_heard = True
        with self._config_lock:
            before = self.remote.current
            if not self.remote.take(payload):
                return
            with self._lock:
                for generation in self._generations.values():
                    self._apply(generation, before)

    def _apply(self, generation: Generation, before: DeviceConfig | None) -> None:
        """Give a running generation the thresholds of the config in force, where they are others
        than those of the one ``before``: what a policy has made of them itself stays else."""
        request, policy = generation.request, generation.policy
        if request is None:
            return
        now = thresholds_of(self.remote.current, request, policy)
        if now != thresholds_of(before, request, policy):
            generation.set_thresholds(now)

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
