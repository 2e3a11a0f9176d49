"""The driver of a verifier: a transport, a target and the core between them.

Two threads. The transport's own feeds messages to the core and publishes what follows at once; the
engine thread runs forwards and timers. One lock guards the core; it is never held across a model
call, so the network waits for bookkeeping only (some 100 us), never for a forward.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import fields

from broker import __version__
from broker.clock import Clock, MonotonicClock
from broker.codec import encode
from broker.errors import ModelError, TransportError
from broker.messages import CLOSED_ERROR, Close, Closed, VerifierStatus
from broker.topics import OPEN_SHARED, down_topic, up_filter, verifier_status_topic
from broker.transport import ConnectionEvent, ConnectionState, Message, Transport, Will
from cloud_verifier.core.session import VerifierSession
from cloud_verifier.core.verifier import Forward, SessionKey, VerifierConfig, VerifierCore
from cloud_verifier.engine.target import Target, Work
from cloud_verifier.measures import Measures, Snapshot
from cloud_verifier.wire import feed, publication, session_of

log = logging.getLogger(__name__)

#: Seconds between two looks at whether the retained status is still true.
STATUS_INTERVAL = 10.0
#: Seconds after which the core is asked again when it failed and no session was to blame.
_AFTER_FAULT_S = 1.0
#: Kinds of faults of the core that are logged; beyond those they are only counted.
_MAX_FAULT_KINDS = 32


def status_will(verifier: str, status: VerifierStatus) -> Will:
    """Online while connected, offline when the connection dies or the verifier leaves."""
    offline = encode(VerifierStatus(online=False))
    return Will(verifier_status_topic(verifier), offline, birth=encode(status), farewell=offline)


def online_status(config: VerifierConfig, model: str, sessions: int = 0) -> VerifierStatus:
    return VerifierStatus(
        online=True,
        version=__version__,
        model=model[-200:],
        vocab_hash=config.vocab_hash,
        context=config.context,
        sessions=sessions,
        max_sessions=config.max_sessions,
    )


def config_for(target: Target, verifier: str, **overrides: object) -> VerifierConfig:
    """The replica's configuration from its target's facts; ``overrides`` by field name."""
    facts: dict[str, object] = {
        "verifier": verifier,
        "vocab_size": target.vocab_size,
        "vocab_hash": target.vocab_hash,
        "context": target.context,
        "eos_ids": target.eos_ids,
        "slots": target.max_slots,
        "block_tokens": target.block_tokens,
        "total_blocks": target.total_blocks,
        **overrides,
    }
    return VerifierConfig(**facts)  # type: ignore[arg-type]


def works_of(forward: Forward) -> list[Work]:
    """What the engine is to run for ``forward``, in its order."""
    return [
        Work(
            seat.slot,
            seat.plan.keep,
            seat.plan.tokens,
            seat.plan.choices,
            seat.plan.position,
            seat.session.sampling,
            seat.plan.parents,
            seat.plan.path,
            seat.blocks,
        )
        for seat in forward.seats
    ]


def _wants_a_seat(session: VerifierSession) -> bool:
    try:
        return session.triggered and session.has_work
    except Exception:  # noqa: BLE001 (the engine finds such a session, and gives it up)
        return False


class VerifierRuntime:
    """One replica. ``on_event`` hears of connection changes (from the transport's thread).

    ``transport`` should carry ``status_will``. ``start`` and ``stop`` are called once each.
    """

    def __init__(
        self,
        transport: Transport,
        target: Target,
        config: VerifierConfig,
        *,
        clock: Clock | None = None,
        on_event: Callable[[ConnectionEvent], None] | None = None,
    ) -> None:
        self.core = VerifierCore(config)
        self.publish_failures = 0
        self.core_faults = 0  # exceptions of the core, each of which cost one session at most
        self.measures = Measures()
        self._fault_kinds: set[str] = set()
        self._transport = transport
        self._target = target
        self._clock = clock or MonotonicClock()
        self._on_event = on_event
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._stopping = False
        self._status = online_status(config, target.name)
        self._status_due = 0.0
        self._forward: Forward | None = None  # the one that runs
        self._thread = threading.Thread(target=self._engine, name="engine", daemon=True)

    def start(self) -> None:
        """Begin connecting and serving; returns at once."""
        self._transport.subscribe(OPEN_SHARED, qos=1)
        self._transport.subscribe(up_filter(self.core.config.verifier), qos=0)
        self._thread.start()
        self._transport.start(self._on_message, self._on_connection)

    def stop(self, timeout: float = 5.0) -> None:
        """Hand the sessions back, let the running forward end, say goodbye; idempotent.

        At most ``timeout`` seconds for the forward and as much again for the network.
        """
        with self._work:
            if self._stopping:
                return
            self._stopping = True
            # First, or the broker would give us what our own sessions are about to open again.
            self._transport.unsubscribe(OPEN_SHARED)
            self.core.drain()
            self._publish()
            self._work.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            with self._work:
                self.core.drain(at_once=True)  # the forward takes longer than there is time for
                self._publish()
        self._transport.stop(timeout)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def connected(self) -> bool:
        return self._transport.connected

    def snapshot(self) -> Snapshot:
        """Counts and measures of this moment, for exporters; holds the lock for some 100 us."""
        transport = self._transport
        with self._lock:
            core, now = self.core, self._clock.now()
            seated = {seat.session for seat in self._forward.seats} if self._forward else set()
            waiting = [
                now - held.waiting_since
                for held in core.sessions.values()
                if held not in seated and _wants_a_seat(held)
            ]
            stats = {field.name: getattr(core.stats, field.name) for field in fields(core.stats)}
            return Snapshot(
                stats={k: dict(v) if isinstance(v, dict) else v for k, v in stats.items()},
                counters={
                    "core_faults": self.core_faults,
                    "publish_failures": self.publish_failures,
                    "mqtt_sent_bytes": transport.bytes_sent,
                    "mqtt_received_bytes": transport.bytes_received,
                    "mqtt_sent_messages": transport.messages_sent,
                    "mqtt_received_messages": transport.messages_received,
                    "mqtt_reconnects": transport.reconnects,
                    "mqtt_dropped_messages": transport.dropped,
                    "mqtt_callback_errors": transport.callback_errors,
                },
                gauges={
                    "sessions": len(core.sessions),
                    "sessions_limit": core.config.max_sessions,
                    "slots": core.slots.size,
                    "slots_used": len(core.slots),
                    "blocks": core.blocks.total,
                    "block_tokens": core.blocks.block_tokens,
                },
                measures=self.measures.copy(),
                waiting=len(waiting),
                waited=max(waiting, default=0.0),
                alive=self.alive and not self._stopping,
                connected=transport.connected,
            )

    # -- the transport's thread -----------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        with self._work:
            if self._stopping:
                return
            causes = self.core.stats.rejected
            known = len(causes)
            begin = self._clock.now()
            try:
                taken = feed(self.core, message, begin)
            except Exception as error:  # noqa: BLE001 (a bug must not end the replica)
                taken = True
                self._fault(error)
                self._give_up(session_of(message))
            self.measures.stages["receive"] += self._clock.now() - begin
            if not taken and len(causes) > known:
                log.warning(
                    "dropped a message on %r (%s): see who publishes there; others of this kind "
                    "are only counted",
                    message.topic[:120],
                    next(reversed(causes)),
                )
            self._publish()
            self._work.notify()

    def _on_connection(self, event: ConnectionEvent) -> None:
        if event.state is ConnectionState.CONNECTED:
            with self._work:
                # The birth message has said so anew.
                self._status = online_status(self.core.config, self._target.name)
        if self._on_event is not None:
            self._on_event(event)

    # -- both, under the lock -------------------------------------------------------------------

    def _publish(self) -> None:
        begin = self._clock.now()
        self._publish_all(begin)
        self.measures.stages["publish"] += self._clock.now() - begin

    def _publish_all(self, now: float) -> None:
        try:
            messages = self.core.messages_to_send(now)
        except Exception as error:  # noqa: BLE001 (what is lost here the protocol repeats)
            self._fault(error)
            self._give_up(self._culprit())
            return
        for outgoing in messages:
            try:
                topic, payload, qos = publication(outgoing)
            except Exception as error:  # noqa: BLE001 (what one session says cannot be encoded)
                self._fault(error)
                self._give_up(SessionKey(outgoing.device, outgoing.session))
                continue
            self._send(topic, payload, qos)

    def _fault(self, error: Exception) -> None:
        """The core raised: count it, and say it once for each kind."""
        self.core_faults += 1
        kind = type(error).__name__
        if kind not in self._fault_kinds and len(self._fault_kinds) < _MAX_FAULT_KINDS:
            self._fault_kinds.add(kind)
            log.error(
                "the verifier's core failed (%s: %s): please report the trace; others of this kind "
                "are only counted",
                kind,
                error,
                exc_info=error,
            )

    def _give_up(self, key: SessionKey | None) -> None:
        """Close a session with an error: its device opens it again with all that it has."""
        held = self.core.sessions.get(key) if key is not None else None
        if key is None or held is None:
            return
        try:
            self.core.receive(*key, Close(held.attach), self._clock.now())
        except Exception as error:  # noqa: BLE001 (it goes in any case)
            self._fault(error)
            self.core.sessions.pop(key, None)
        closed = encode(Closed(held.attach, CLOSED_ERROR))
        self._send(down_topic(key.device, key.session), closed, 1)

    def _culprit(self) -> SessionKey | None:
        """The session for which no forward can be planned; else the one that was heard last."""
        for key, held in self.core.sessions.items():
            try:
                if held.has_work:
                    held.plan(1)
            except Exception:  # noqa: BLE001 (that is what is looked for)
                return key
        sessions = self.core.sessions
        return max(sessions, key=lambda key: sessions[key].last_seen, default=None)

    def _send(self, topic: str, payload: bytes, qos: int, *, retain: bool = False) -> None:
        try:
            self._transport.publish(topic, payload, qos=qos, retain=retain)
        except TransportError as error:
            # The session protocol repeats what mattered; a closed transport has nobody to tell.
            self.publish_failures += 1
            log.debug("not published to %s: %s", topic, error)

    # -- the engine's thread --------------------------------------------------------------------

    def _engine(self) -> None:
        while True:
            with self._work:
                forward = self._next_forward()
            if forward is None:
                return
            try:
                self._run(forward)
            except Exception:
                # A bug must not silence the replica: give the batch back and go on.
                log.exception("a forward failed")
                with self._work:
                    self._forward = None
                    self.core.forward_failed(forward)
                    self._publish()

    def _next_forward(self) -> Forward | None:
        """Wait for work, minding timers; None when stopping. Called with the lock held."""
        while not self._stopping:
            now = self._clock.now()
            try:
                self.core.handle_timer(now)
                self._refresh_status(now)
                forward = self.core.next_effect()
                due = self.core.get_timer()
            except Exception as error:  # noqa: BLE001 (a bug must not end the replica)
                self._fault(error)
                culprit = self._culprit()
                self._give_up(culprit)
                if culprit is None:
                    self._work.wait(_AFTER_FAULT_S)
                continue
            planned = self._clock.now()
            stages = self.measures.stages
            stages["schedule"] += planned - now
            if forward is not None:
                self._forward = forward
                return forward
            wait = self._status_due - now if due is None else min(due, self._status_due) - now
            self._work.wait(max(0.001, wait))
            stages["idle"] += self._clock.now() - planned
        return None

    def _run(self, forward: Forward) -> None:
        batch = works_of(forward)
        begin = self._clock.now()
        try:
            choices = self._target.forward(batch)
        except ModelError as error:
            log.error("the target failed on %d sessions: %s", len(batch), error)
            with self._work:
                self._forward = None
                self.measures.stages["forward"] += self._clock.now() - begin
                self.core.forward_failed(forward)
                self._publish()
            return
        end = self._clock.now()
        tokens = sum(len(work.tokens) for work in batch)
        with self._work:
            self._forward = None
            self.measures.forward(end - begin, len(batch), tokens)
            locked = self._clock.now()
            for fault in self.core.forward_done(forward, choices, end, end - begin):
                self._fault(fault)
            self.measures.stages["commit"] += self._clock.now() - locked
            self._publish()

    def _refresh_status(self, now: float) -> None:
        if now < self._status_due:
            return
        self._status_due = now + STATUS_INTERVAL
        status = online_status(self.core.config, self._target.name, len(self.core.sessions))
        if status != self._status and self._transport.connected:
            self._status = status
            topic = verifier_status_topic(self.core.config.verifier)
            self._send(topic, encode(status), 1, retain=True)
