"""The verifier's driver: a bug in its core costs one session, and neither thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from broker.codec import decode, encode
from broker.messages import (
    CLOSED_ERROR,
    CLOSED_MOVED,
    Closed,
    DraftBatch,
    SessionOpen,
    Verdict,
    VerifierMessage,
)
from broker.sampling import Sampling
from broker.topics import OPEN_SHARED, open_topic, parse_session_topic, up_topic
from broker.transport import Message, OnEvent, OnMessage
from cloud_verifier.core.session import VerifierSession
from cloud_verifier.core.verifier import SessionKey, VerifierCore
from cloud_verifier.engine.scripted_target import ScriptedTarget
from cloud_verifier.runtime import VerifierRuntime, config_for
from tests.brokers import wait_until

GOOD, BAD = SessionKey("d", "good"), SessionKey("d", "bad")


class Wire:
    """A transport that keeps what is published; ``deliver`` is the network's thread."""

    connected = True

    def __init__(self) -> None:
        self.said: list[tuple[str, VerifierMessage | str]] = []
        self._on_message: OnMessage | None = None

    def start(self, on_message: OnMessage, on_event: OnEvent) -> None:
        self._on_message = on_message

    def publish(self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False) -> None:
        if not retain:
            message: Any = decode(payload)
            self.said.append((parse_session_topic(topic).session, message))

    def subscribe(self, topic_filter: str, *, qos: int = 0) -> None:
        """Everything arrives anyway."""

    def unsubscribe(self, topic_filter: str) -> None:
        self.said.append(("", topic_filter))

    def stop(self, timeout: float = 2.0) -> None:
        """Nothing runs."""

    def deliver(self, topic: str, message: Any) -> None:
        assert self._on_message is not None
        self._on_message(Message(topic, encode(message), False))

    def of(self, key: SessionKey, kind: type) -> list[Any]:
        return [m for session, m in list(self.said) if session == key.session and type(m) is kind]


class System:
    """A running verifier with two sessions, each of which has had its first verdict."""

    def __init__(self) -> None:
        self.wire = Wire()
        target = ScriptedTarget(
            script=lambda text: len(text) % 50,
            vocab_size=50,
            vocab_hash="h",
            context=1000,
            max_slots=4,
        )
        self.runtime = VerifierRuntime(self.wire, target, config_for(target, "v"))
        self.core = self.runtime.core
        self.runtime.start()

    def open(self, key: SessionKey, attach: int = 1) -> None:
        opened = SessionOpen(attach, (1, 2, 3), (), Sampling(), 100, "h")
        self.wire.deliver(open_topic(*key), opened)

    def ask(self, key: SessionKey, attach: int = 1) -> None:
        held = self.core.sessions.get(key)
        base = len(held.committed) if held is not None else 0
        batch = DraftBatch(attach, 0, base, (), None, True)
        self.wire.deliver(up_topic(*key, "v"), batch)

    def answered(self, key: SessionKey, attach: int = 1) -> bool:
        """Whether a request brings a verdict."""
        before = len(self.wire.of(key, Verdict))
        self.ask(key, attach)
        return wait_until(lambda: len(self.wire.of(key, Verdict)) > before)


@pytest.fixture
def system() -> Iterator[System]:
    made = System()
    for key in (GOOD, BAD):
        made.open(key)
        assert made.answered(key)
    yield made
    made.runtime.stop()


def test_who_leaves_takes_nothing_new_before_it_hands_its_sessions_back(system: System) -> None:
    """Else a device would open again here, and wait for an answer that never comes."""
    before = len(system.wire.said)
    system.runtime.stop()
    said = system.wire.said[before:]
    assert said[0] == ("", OPEN_SHARED)
    moved = Closed(1, CLOSED_MOVED)
    assert sorted(said[1:]) == [(key.session, moved) for key in (BAD, GOOD)]


def broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError("a bug of the core")


def in_receiving(system: System) -> None:
    """The session fails over a message."""
    system.core.sessions[BAD].receive_draft = broken  # type: ignore[method-assign]


def in_planning(system: System) -> None:
    """The scheduler fails over the session."""
    system.core.sessions[BAD].plan = broken  # type: ignore[method-assign]


def in_speaking(system: System) -> None:
    """What the session says cannot be encoded."""
    said: Any = ["no message"]
    system.core.sessions[BAD].take_messages = lambda: said  # type: ignore[method-assign]


def in_collecting(system: System) -> None:
    """The session cannot even say what it says."""
    system.core.sessions[BAD].take_messages = broken  # type: ignore[method-assign]


@pytest.mark.parametrize("where", [in_receiving, in_planning, in_speaking, in_collecting])
def test_a_bug_costs_the_one_session(
    where: Callable[[System], None], system: System, caplog: pytest.LogCaptureFixture
) -> None:
    where(system)
    with caplog.at_level(logging.ERROR):
        system.ask(BAD)
        assert wait_until(lambda: system.wire.of(BAD, Closed))
    assert system.wire.of(BAD, Closed) == [Closed(1, CLOSED_ERROR)]
    assert system.runtime.core_faults >= 1
    assert BAD not in system.core.sessions
    assert len(system.core.slots) == 1
    assert system.runtime.alive
    # The other goes on, and the one may come back.
    assert system.answered(GOOD)
    assert system.wire.of(GOOD, Closed) == []
    system.open(BAD, 2)
    assert system.answered(BAD, 2)
    traces = [record for record in caplog.records if record.exc_info]
    assert len(traces) == 1
    assert "core failed" in traces[0].getMessage()


def test_the_same_bug_is_logged_once(system: System, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for attach in range(2, 7):
            in_receiving(system)
            system.ask(BAD, attach - 1)
            assert len(system.wire.of(BAD, Closed)) == attach - 1
            system.open(BAD, attach)
    assert system.runtime.core_faults == 5
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert system.answered(BAD, 6)


def test_a_bug_of_no_session_leaves_the_engine_trying(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a session to blame it takes one away at a time, then waits; and is back at once."""
    real = VerifierCore.handle_timer
    monkeypatch.setattr(VerifierCore, "handle_timer", broken)
    system.ask(GOOD)
    assert wait_until(lambda: not system.core.sessions)
    faults = system.runtime.core_faults
    assert 2 <= faults <= 4, "it ran hot"
    monkeypatch.setattr(VerifierCore, "handle_timer", real)
    system.open(GOOD, 2)
    assert system.answered(GOOD, 2)
    assert system.runtime.alive


def test_a_session_whose_closing_fails_is_gone_all_the_same(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VerifierCore, "_forget", broken)
    monkeypatch.setattr(VerifierSession, "receive_draft", broken)
    system.ask(BAD)
    assert wait_until(lambda: system.wire.of(BAD, Closed))
    assert BAD not in system.core.sessions
    assert system.runtime.core_faults == 2
