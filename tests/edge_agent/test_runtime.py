"""The driver with a draft model that is slow to read a prompt, under a clock of the test's own."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from broker.clock import VirtualClock
from broker.codec import decode
from broker.messages import SessionOpen
from broker.sampling import Sampling
from broker.topics import down_topic
from broker.transport import ConnectionEvent, ConnectionState, Message
from edge_agent import generation as module
from edge_agent.core.trigger import Thresholds
from edge_agent.draft import Proposal
from edge_agent.generation import PREFILL_TOKENS, Request
from edge_agent.runtime import Agent
from edge_agent.unconnected import UnconnectedTransport

PROMPT = tuple(range(1, 5 * PREFILL_TOKENS))


class Wire(UnconnectedTransport):
    """Keeps what is published."""

    def __init__(self) -> None:
        super().__init__()
        self.published: list[object] = []

    def publish(self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False) -> None:
        self.published.append(decode(payload))


class SlowDraft:
    """A tenth of a second a token; the link comes up while it reads the first piece."""

    name, vocab_size, context, vocab_hash = "slow", 10_000, 4096, "v"
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, clock: VirtualClock, wire: Wire) -> None:
        self.length = 0
        self.agent: Agent | None = None
        self.seen: list[tuple[int, int]] = []  # tokens in the cache, messages sent until then
        self._clock = clock
        self._wire = wire

    def open(self) -> SlowDraft:
        return self

    def eval(self, tokens: Sequence[int]) -> None:
        self.seen.append((self.length, len(self._wire.published)))
        if self.length == 0:
            assert self.agent is not None
            self.agent._on_event(ConnectionEvent(ConnectionState.CONNECTED))
        self.length += len(tokens)
        self._clock.advance_to(self._clock.now() + 0.4 * len(tokens))

    def rollback(self, length: int) -> None:
        self.length = length

    def propose(self, position: int, sampling: Sampling) -> Proposal:
        return Proposal(1, 0.9)

    def close(self) -> None:
        """Nothing to free."""


def test_session_opens_while_a_long_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINK_PATIENCE", 0.0)
    clock, wire = VirtualClock(), Wire()
    draft = SlowDraft(clock, wire)
    agent = draft.agent = Agent(wire, draft, "d", clock=clock)
    generation = agent.generate(Request(PROMPT))
    core = generation._core
    # Ends the generation once the prompt is read.
    monkeypatch.setattr(draft, "propose", lambda *_: (core.cancel(), Proposal(1, 0.9))[1])
    assert list(generation) == []
    assert clock.now() > core.timing.offline_after
    assert generation.finish == "cancelled"
    assert draft.length == len(PROMPT)
    assert draft.seen[:2] == [(0, 0), (PREFILL_TOKENS, 1)]
    assert isinstance(wire.published[0], SessionOpen)


def test_cancelling_ends_the_reading_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINK_PATIENCE", 0.0)
    clock, wire = VirtualClock(), Wire()
    draft = SlowDraft(clock, wire)
    agent = draft.agent = Agent(wire, draft, "d", clock=clock)
    generation = agent.generate(Request(PROMPT))
    read = draft.eval

    def eval_and_cancel(tokens: Sequence[int]) -> None:
        read(tokens)
        generation.cancel()

    monkeypatch.setattr(draft, "eval", eval_and_cancel)
    assert list(generation) == []
    assert generation.finish == "cancelled"
    assert draft.length == PREFILL_TOKENS


def test_thresholds_change_while_a_generation_runs() -> None:
    clock, wire = VirtualClock(), Wire()
    generation = Agent(wire, SlowDraft(clock, wire), "d", clock=clock).generate(Request(PROMPT))
    trigger = generation._core.trigger
    generation.set_thresholds(Thresholds(0.0, 0.0, 64))
    assert trigger.observe(0.1) is None
    generation.set_thresholds(Thresholds(0.0, 0.9, 64))
    assert trigger.observe(0.8) == "token"
    generation.set_thresholds(Thresholds(0.95, 0.0, 64))
    assert trigger.observe(0.9) == "sequence"
    generation.close()


def test_the_first_dropped_message_of_a_kind_is_said(caplog: pytest.LogCaptureFixture) -> None:
    clock, wire = VirtualClock(), Wire()
    agent = Agent(wire, SlowDraft(clock, wire), "d", clock=clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            agent._on_message(Message(down_topic("d", "s"), b"\x9f\xfd\x74\xf7"))
    assert agent.rejected == {"msgpack": 3}
    assert len(caplog.records) == 1
    assert "msgpack" in caplog.text
