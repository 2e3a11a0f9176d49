"""Edges and verifiers over the in-memory broker under one virtual clock: no threads, no sleeps.

A run jumps from one moment at which anything happens to the next; an error in a callback ends it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from broker.clock import VirtualClock
from broker.memory import Faults, InMemoryBroker
from broker.sampling import Sampling
from cloud_verifier.core.scheduler import Limits
from edge_agent.core.config import SessionConfig
from edge_agent.core.policies import Policy
from edge_agent.core.session import State
from edge_agent.core.timing import Timing
from edge_agent.core.trigger import Thresholds
from edge_agent.scripted_draft import Chooser, Oracle
from tests.sim.actors import SimEdge, SimVerifier
from tests.sim.engine import EOS, VOCAB, reference, target_token

__all__ = ["CALM", "EOS", "VOCAB", "SimEdge", "SimVerifier", "World", "reference", "target_token"]

#: Timer jumps after which a run counts as endless.
MAX_STEPS = 20_000
#: What is left of the network's faults after ``World.heal``.
CALM = Faults(delay=(0.001, 0.01))


class World:
    """Everything of one simulated run; ``seed`` decides the network and the drafts.

    ``next_token``: the target. ``chooser``: the same with position and sampling, if they matter.
    """

    def __init__(
        self,
        seed: int,
        *,
        next_token: Callable[[Sequence[int]], int] = target_token,
        chooser: Chooser | None = None,
        context: int = 512,
        max_sessions: int = 64,
        idle_ttl: float = 300.0,
        limits: Limits | None = None,
        **faults: object,
    ) -> None:
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.broker = InMemoryBroker(self.clock, seed=seed, **faults)  # type: ignore[arg-type]
        self.chooser: Chooser = chooser or (
            lambda sequence, position, sampling: next_token(sequence)
        )
        self.context = context
        self.max_sessions = max_sessions
        self.idle_ttl = idle_ttl
        self.limits = limits or Limits(forward_tokens=64, prefill_tokens=8)
        self.verifiers: list[SimVerifier] = []
        self.edges: list[SimEdge] = []
        self.events: list[tuple[float, Callable[[], None]]] = []
        self.steps = 0
        self._failure: BaseException | None = None

    def guard(self, callback: Callable[[object], None]) -> Callable[[object], None]:
        """A callback whose error ends the run: a transport would only count it."""

        def guarded(argument: object) -> None:
            try:
                callback(argument)
            except Exception as error:  # noqa: BLE001 (raised again by ``step``)
                self._failure = self._failure or error

        return guarded

    def add_verifier(
        self, name: str = "v1", *, slots: int = 4, forward_time: float = 0.05
    ) -> SimVerifier:
        verifier = SimVerifier(self, name, slots, forward_time)
        self.verifiers.append(verifier)
        return verifier

    def add_edge(
        self,
        device: str = "d1",
        *,
        prompt: Sequence[int] = (5, 6, 7),
        max_tokens: int = 40,
        quality: float = 0.7,
        draft: Oracle | None = None,
        draft_time: float = 0.01,
        thresholds: Thresholds | None = None,
        timing: Timing | None = None,
        sampling: Sampling | None = None,
        policy: Policy | None = None,
        bushy: float = 0.0,
        **config: object,
    ) -> SimEdge:
        """``quality``: share of drafted tokens that are right, unless there is a ``draft``."""

        def guess(sequence: Sequence[int], position: int, how: Sampling) -> tuple[int, float]:
            right = self.chooser(sequence, position, how)
            if self.random.random() < quality:
                return right, 0.5 + 0.5 * self.random.random()
            wrong = 1 + (right + self.random.randrange(VOCAB - 2)) % (VOCAB - 1)
            return wrong, 0.9 * self.random.random()

        settings: dict[str, object] = {
            "context": 4096,
            "vocab_hash": "v",
            "vocab_size": VOCAB,
            "eos_ids": frozenset({EOS}),
            **config,
        }
        edge = SimEdge(
            self,
            device,
            SessionConfig(
                prompt=tuple(prompt),
                sampling=sampling or Sampling(),
                max_tokens=max_tokens,
                **settings,  # type: ignore[arg-type]
            ),
            draft or guess,
            draft_time,
            thresholds or Thresholds(),
            timing or Timing(),
            policy,
            bushy,
        )
        self.edges.append(edge)
        edge.work()
        return edge

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do ``action`` at that moment."""
        self.events.append((when, action))
        self.events.sort(key=lambda event: event[0])

    def heal(self) -> None:
        """The network is good again and everybody is back on it."""
        self.broker.faults = CALM
        for actor in (*self.verifiers, *self.edges):
            self.broker.restore(actor.transport.client_id)

    def next_moment(self) -> float | None:
        """When anything happens next; None: never."""
        times = [actor.timer() for actor in (*self.verifiers, *self.edges)]
        times.append(self.broker.next_delivery())
        if self.events:
            times.append(self.events[0][0])
        return min((time for time in times if time is not None), default=None)

    def step(self, within: float = math.inf) -> bool:
        """Jump to the next moment at which anything happens.

        False when nothing ever will, or not in the next ``within`` seconds.
        """
        due = self.next_moment()
        if due is None or due > self.clock.now() + within:
            return False
        self.steps += 1
        self.clock.advance_to(due)
        now = self.clock.now()
        while self.events and self.events[0][0] <= now:
            self.events.pop(0)[1]()
        self.broker.deliver_due(now)
        for actor in (*self.verifiers, *self.edges):
            timer = actor.timer()
            if timer is not None and timer <= now:
                actor.fire()
        if self._failure is not None:
            raise self._failure
        return True

    def run(self, max_steps: int = MAX_STEPS) -> None:
        """Until every edge has finished; asserts that this happens within ``max_steps`` jumps."""
        while not all(edge.session.state is State.DONE for edge in self.edges):
            assert self.steps < max_steps, f"no end after {max_steps} jumps"
            assert self.step(), "everything waits and no timer is armed"
        for edge in self.edges:
            edge.work()
