"""Replicas and devices over a real broker in one process, with scripted models or real ones."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from broker.mqtt import MqttSettings, MqttTransport
from broker.transport import ConnectionEvent, ConnectionState, OnEvent, OnMessage
from cloud_verifier.engine.scripted_target import Script, ScriptedTarget, hashed_script
from cloud_verifier.engine.target import Target, Work
from cloud_verifier.runtime import VerifierRuntime, config_for, online_status, status_will
from edge_agent.core.trigger import Thresholds
from edge_agent.draft import DraftModel
from edge_agent.generation import Generation, Request
from edge_agent.runtime import Agent, device_will
from edge_agent.scripted_draft import Chooser, Oracle, ScriptedDraftModel
from edge_agent.telemetry import Upkeep
from tests.brokers import Relay, wait_until

#: Seconds for what takes a moment on a quiet machine.
PATIENCE = 60.0

VOCAB = 256
VOCAB_HASH = "scripted"
SCRIPT = hashed_script(VOCAB)
PROMPT = (1, 2, 3)
#: A verdict for each token, none of which is drafted before the last one is answered.
ONE_BY_ONE = Thresholds(0.0, 0.0, 1)


def chooser(script: Script = SCRIPT) -> Chooser:
    """What the scripted target says, in the form that oracles want."""
    return lambda sequence, position, sampling: script(sequence)


def text_script(prompt_length: int, tokens: Sequence[int], end: int) -> Script:
    """Writes ``tokens`` after any prompt of that length, then ``end`` for ever."""

    def script(sequence: Sequence[int]) -> int:
        at = len(sequence) - prompt_length
        return tokens[at] if at < len(tokens) else end

    return script


def continuation(prompt: Sequence[int], count: int, script: Script = SCRIPT) -> list[int]:
    """The first ``count`` tokens that the scripted target alone would write."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(script(sequence))
    return sequence[len(prompt) :]


class PacedTarget(ScriptedTarget):
    """A scripted target that takes ``seconds`` for a forward."""

    def __init__(self, script: Script = SCRIPT, *, seconds: float = 0.0, **options: Any) -> None:
        settings: dict[str, Any] = {
            "vocab_size": VOCAB,
            "vocab_hash": VOCAB_HASH,
            "context": 1 << 20,
            **options,
        }
        super().__init__(script=script, **settings)
        self.seconds = seconds

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        """As ScriptedTarget.forward, later."""
        if self.seconds:
            time.sleep(self.seconds)
        return super().forward(batch)


def scripted_draft(oracle: Oracle, **options: Any) -> ScriptedDraftModel:
    settings: dict[str, Any] = {"vocab_hash": VOCAB_HASH, "context": 1 << 20, **options}
    return ScriptedDraftModel(oracle, settings.pop("vocab_size", VOCAB), **settings)


# ---- both sides in this process -------------------------------------------------------------


class WatchedTransport(MqttTransport):
    """Keeps the connection events; with ``relay`` its connection can be cut."""

    def __init__(self, settings: MqttSettings, relay: Relay | None) -> None:
        super().__init__(settings)
        self.relay = relay
        self.events: list[ConnectionEvent] = []

    def start(self, on_message: OnMessage, on_event: OnEvent) -> None:
        def watch(event: ConnectionEvent) -> None:
            self.events.append(event)
            on_event(event)

        super().start(on_message, watch)

    @property
    def states(self) -> list[ConnectionState]:
        return [event.state for event in self.events]

    def cut(self) -> None:
        """The TCP connection dies; a new one is let through."""
        assert self.relay is not None
        self.relay.cut()

    def vanish(self) -> None:
        """The connection dies without a goodbye, and no new one comes through."""
        assert self.relay is not None
        self.relay.open = False
        self.relay.cut()

    def come_back(self) -> None:
        assert self.relay is not None
        self.relay.open = True


def _transport(url: str, client: str, relayed: bool, options: dict[str, Any]) -> WatchedTransport:
    relay = Relay(int(url.rpartition(":")[2])) if relayed else None
    where = url if relay is None else f"mqtt://127.0.0.1:{relay.port}"
    settings = {"backoff_min": 0.1, "backoff_max": 0.5, **options}
    return WatchedTransport(MqttSettings.from_url(where, client, **settings), relay)


class Replica:
    """One verifier; use it as a context manager. ``config``: fields of VerifierConfig."""

    def __init__(
        self,
        url: str,
        target: Target,
        name: str = "",
        *,
        relayed: bool = False,
        transport: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self.name = name or f"v-{secrets.token_hex(3)}"
        self.target = target
        facts = config_for(target, self.name, **config)
        will = status_will(self.name, online_status(facts, target.name))
        options = {"will": will, **(transport or {})}
        self.transport = _transport(url, f"verifier-{self.name}", relayed, options)
        self.runtime = VerifierRuntime(self.transport, target, facts)
        self.core = self.runtime.core

    def start(self, *, connected: bool = True) -> Replica:
        self.runtime.start()
        if connected:
            assert wait_until(lambda: self.transport.connected, PATIENCE), self.transport.events
        return self

    def stop(self) -> None:
        self.runtime.stop()
        if self.transport.relay is not None:
            self.transport.relay.close()

    @property
    def sessions(self) -> int:
        return len(self.core.sessions)

    def __enter__(self) -> Replica:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class Device:
    """One device; use it as a context manager."""

    def __init__(
        self,
        url: str,
        draft: DraftModel,
        name: str = "",
        *,
        relayed: bool = False,
        transport: Mapping[str, Any] | None = None,
        upkeep: Upkeep | None = None,
    ) -> None:
        self.name = name or f"d-{secrets.token_hex(3)}"
        options = {"will": device_will(self.name, draft.name), **(transport or {})}
        self.transport = _transport(url, f"device-{self.name}", relayed, options)
        self.agent = Agent(self.transport, draft, self.name, upkeep=upkeep)

    def start(self, *, connected: bool = True) -> Device:
        self.agent.start()
        if connected:
            assert wait_until(lambda: self.transport.connected, PATIENCE), self.transport.events
        return self

    def stop(self) -> None:
        self.agent.stop()
        if self.transport.relay is not None:
            self.transport.relay.close()

    def generate(
        self, prompt: Sequence[int] = PROMPT, max_tokens: int = 64, **request: Any
    ) -> Generation:
        return self.agent.generate(Request(tuple(prompt), max_tokens, **request))

    def run(self, prompt: Sequence[int] = PROMPT, max_tokens: int = 64, **request: Any) -> Running:
        """A generation in a thread of its own."""
        return Running(self.generate(prompt, max_tokens, **request))

    def write(
        self, prompt: Sequence[int] = PROMPT, max_tokens: int = 64, **request: Any
    ) -> list[int]:
        """All tokens of a generation."""
        return collect(self.generate(prompt, max_tokens, **request))

    def __enter__(self) -> Device:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def collect(
    generation: Generation, on_commit: Callable[[list[int]], None] | None = None
) -> list[int]:
    """Iterate to the end; asserts that each token is committed once and in its place."""
    tokens: list[int] = []
    for commit in generation:
        assert commit.start == len(tokens), "a token committed twice, or one left out"
        assert len(commit.tokens) == len(commit.sources)
        tokens += commit.tokens
        if on_commit is not None:
            on_commit(tokens)
    assert tokens == generation.tokens
    return tokens


class Running:
    """A generation that a thread iterates over."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.tokens: list[int] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            collect(self.generation, self._take)
        except BaseException as error:  # noqa: BLE001  (raised again where it is waited for)
            self._error = error

    def _take(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)

    def reached(self, count: int, timeout: float = PATIENCE) -> bool:
        """Whether ``count`` tokens were committed in time."""
        wait_until(lambda: len(self.tokens) >= count or not self._thread.is_alive(), timeout)
        return len(self.tokens) >= count

    def wait(self, timeout: float = PATIENCE) -> list[int]:
        """The tokens. Raises what ended it."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"no end after {timeout} s: {self.generation.stats}"
        if self._error is not None:
            raise self._error
        return self.tokens
