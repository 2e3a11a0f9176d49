"""Random schedules over the whole protocol: whatever the network, the verifiers and the draft do,
each session writes exactly what the target alone would, and ends.

The default set of schedules is the same each time; another number (``--schedules N``) makes new
ones each time, and ``--hypothesis-seed`` repeats them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from broker.memory import Faults
from cloud_verifier.core.scheduler import Limits
from edge_agent.core.config import VERIFY_CHOICES
from edge_agent.core.policies import (
    SEND_AT_ONCE,
    Policy,
    cloud,
    edgellm,
    hsl,
    pipesd,
    vanilla,
)
from edge_agent.core.timing import Timing
from edge_agent.core.trigger import Thresholds
from tests.sim.world import SimEdge, World, target_token

#: Lossy schedules must not take a bad network for an absent cloud; test_offline.py does that.
PATIENT = Timing(offline_after=1e9)
DEFAULT_SCHEDULES = 2_000
MAX_EDGES = 3
#: What would make an edge believe that no verifier keeps it (MAX_FRUITLESS) stays rarer than that.
MAX_TROUBLES = 6
#: Likewise for an edge that hears that the target failed on its session (MAX_ERRORS).
MAX_FAILURES = 2
#: Seconds in which nothing happens that a schedule does not wait out.
DULL = 400.0
#: Jumps that a healed world may take to its end: this many, and as many more per missing token.
END_JUMPS, TOKEN_JUMPS = 2_000, 100


def at_once() -> Policy:
    """PipeSD that sends each token as it is drafted."""
    return replace(pipesd(), sending=SEND_AT_ONCE)


def once() -> Policy:
    """EdgeLLM that has one request at a time."""
    return replace(edgellm(), ask_again=512)


#: The policies that leave the judgement to a verifier; None: pipesd with the thresholds below.
JUDGING = (vanilla, hsl, edgellm, cloud, at_once, once)

chances = st.sampled_from([0.0, 0.05, 0.15, 0.4])
thresholds = st.builds(
    Thresholds,
    r1=st.sampled_from([0.0, 0.35, 0.9]),
    r2=st.sampled_from([0.0, 0.4, 1.0]),
    window=st.sampled_from([1, 4, 16]),
)
faults = st.builds(
    Faults,
    drop=chances,
    duplicate=chances,
    reorder=chances,
    delay=st.sampled_from([(0.001, 0.02), (0.01, 0.4), (0.0, 0.0)]),
)
edges = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 12).map(lambda size: tuple(range(1, size + 1))),
        "max_tokens": st.sampled_from([40, 24, 12, 2, 1]),
        "quality": st.sampled_from([0.8, 0.5, 0.95, 1.0, 0.0]),
        "draft_time": st.sampled_from([0.005, 0.0, 0.05]),
        "thresholds": thresholds,
        "max_ahead": st.sampled_from([24, 100, 3, 1]),
        "min_survival": st.sampled_from([0.2, 0.0, 0.0, 1.0]),
        "verify": st.sampled_from(VERIFY_CHOICES),
        "ask_first": st.booleans(),
        "context": st.sampled_from([4096, 4096, 4096, 20]),
        "bushy": st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        "policy": st.sampled_from([None, None, None, *JUDGING]).map(lambda make: make and make()),
    }
)


class Protocol(RuleBasedStateMachine):
    """Edges, replicas and a network that the rules make worse; the end makes it good again."""

    def __init__(self) -> None:
        super().__init__()
        self.troubles = 0
        self.failures = 0

    @initialize(
        seed=st.integers(0, 2**32),
        faults=faults,
        context=st.sampled_from([512, 512, 30, 14]),
        slots=st.sampled_from([4, 2, 1]),
        limits=st.builds(
            Limits,
            st.sampled_from([64, 16, 3]),
            st.sampled_from([64, 8, 1]),
            st.sampled_from([32, 4, 1]),
        ),
        max_sessions=st.sampled_from([64, 64, 64, 1]),
        idle_ttl=st.sampled_from([300.0, 10.0]),
        stop_share=st.sampled_from([0, 20, 200]),
        forward_time=st.sampled_from([0.02, 0.3, 0.0]),
        first=st.lists(edges, min_size=1, max_size=MAX_EDGES),
    )
    def begin(
        self, seed, faults, context, slots, limits, max_sessions, idle_ttl, stop_share,
        forward_time, first,
    ) -> None:  # fmt: skip
        self.world = World(
            seed,
            next_token=partial(target_token, stop_share=stop_share),
            context=context,
            max_sessions=max_sessions,
            idle_ttl=idle_ttl,
            limits=limits,
        )
        self.world.broker.faults = faults
        self.replica = {"slots": slots, "forward_time": forward_time}
        self.world.add_verifier("v1", **self.replica)
        for edge in first:
            self._add(edge)

    def _add(self, edge: dict[str, object]) -> None:
        self.world.add_edge(f"d{len(self.world.edges)}", timing=PATIENT, **edge)

    @precondition(lambda self: len(self.world.edges) < MAX_EDGES)
    @rule(edge=edges)
    def another_edge(self, edge) -> None:
        self._add(edge)

    @rule(jumps=st.sampled_from([100, 25, 5]))
    def run_some(self, jumps) -> None:
        for _ in range(jumps):
            if not self.world.step(within=DULL):
                break

    @rule(faults=faults)
    def other_weather(self, faults) -> None:
        self.world.broker.faults = faults

    @precondition(lambda self: len(self.world.verifiers) < 2)
    @rule()
    def second_replica(self) -> None:
        self.world.add_verifier("v2", **self.replica)

    @rule(which=st.integers(0, MAX_EDGES - 1), back=st.booleans())
    def cut_edge(self, which, back) -> None:
        """The edge's connection dies, or comes back."""
        self._cut(f"d{which}", back)

    @rule(
        which=st.integers(0, 1),
        back=st.booleans(),
        will_delay=st.sampled_from([0.0, 0.2, 5.0, 1e6]),
    )
    def cut_verifier(self, which, back, will_delay) -> None:
        """The verifier's connection dies, or comes back; its will is told at once, late or never.

        A late one may come when the verifier is back already.
        """
        if back or self._trouble():
            self._cut(f"v{which + 1}", back, will_delay)

    def _cut(self, name: str, back: bool, will_delay: float = 0.0) -> None:
        if back:
            self.world.broker.restore(name)
        else:
            self.world.broker.cut(name, will_delay)

    @rule(which=st.integers(0, 1), how=st.sampled_from(["die", "restart", "fail"]))
    def verifier_trouble(self, which, how) -> None:
        """It loses its memory, hands everything back, or its model fails once."""
        verifier = self.world.verifiers[which % len(self.world.verifiers)]
        if not self._trouble():
            return
        if how == "die":
            verifier.forget_everything()
        elif how == "restart":
            verifier.restart()
        elif self.failures < MAX_FAILURES:
            self.failures += 1
            verifier.fail_forwards += 1

    def _trouble(self) -> bool:
        """Whether one more is allowed."""
        self.troubles += 1
        return self.troubles <= MAX_TROUBLES

    @rule(which=st.integers(0, MAX_EDGES - 1), what=st.integers(0, 7))
    def edge_trouble(self, which, what) -> None:
        """Its draft model fails from now on, or nobody wants the rest."""
        edge = self.world.edges[which % len(self.world.edges)]
        if what == 0:
            edge.draft_fails = True
        elif what == 1:
            edge.session.cancel()
            edge.work()

    @rule(which=st.integers(0, MAX_EDGES - 1), limits=thresholds)
    def retune(self, which, limits) -> None:
        edge = self.world.edges[which % len(self.world.edges)]
        edge.session.trigger.thresholds = limits

    @invariant()
    def what_is_written_is_the_targets(self) -> None:
        for edge in self._edges():
            assert edge.text == edge.expected[: len(edge.text)]

    def _edges(self) -> list[SimEdge]:
        return self.world.edges if hasattr(self, "world") else []

    def teardown(self) -> None:
        """The network is mended; every session ends soon and has the whole text."""
        if not self._edges():
            return
        world = self.world
        world.heal()
        missing = sum(len(edge.expected) - len(edge.text) for edge in world.edges)
        world.run(world.steps + END_JUMPS + TOKEN_JUMPS * missing)
        for edge in world.edges:
            if edge.finished is not None and edge.finished.reason == "cancelled":
                assert edge.text == edge.expected[: len(edge.text)]
            else:
                edge.check()
        for verifier in world.verifiers:
            assert len(verifier.core.sessions) <= world.max_sessions


@pytest.mark.timeout(3_600)
def test_random_schedules(request: pytest.FixtureRequest) -> None:
    """Exactness and an end for each of ``--schedules`` random schedules."""
    number = request.config.getoption("--schedules")
    run_state_machine_as_test(
        Protocol,
        settings=settings(
            max_examples=number,
            stateful_step_count=20,
            derandomize=number == DEFAULT_SCHEDULES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
