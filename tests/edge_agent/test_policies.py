"""Every policy changes when tokens arrive and what crosses the link, never the text."""

from __future__ import annotations

import pytest

from broker.codec import decode
from broker.errors import ConfigError
from broker.messages import DraftBatch, Resync
from edge_agent.core.effects import SOURCE_TARGET
from edge_agent.core.policies import POLICIES, SEND_HELD, Policy, find_policy
from edge_agent.core.trigger import Thresholds, Trigger
from tests.sim.world import SimEdge, World, reference

JUDGED = [name for name in POLICIES if name != "local"]


def run(policy: Policy, *, quality: float = 0.8, seed: int = 3, **faults: object) -> SimEdge:
    world = World(seed, delay=(0.01, 0.01), **faults)
    world.add_verifier()
    edge = world.add_edge(
        policy=policy,
        quality=quality,
        max_tokens=80,
        max_ahead=policy.max_ahead,
        min_survival=policy.min_survival,
    )
    world.run()
    return edge


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("quality", [0.0, 0.8, 1.0])
def test_the_text_is_the_same_under_every_policy(name: str, quality: float) -> None:
    edge = run(find_policy(name), quality=quality)
    assert edge.text == reference(edge.config.prompt, 80)
    assert edge.session.finish == "length"


@pytest.mark.parametrize("name", JUDGED)
def test_the_text_survives_a_bad_network_under_every_policy(name: str) -> None:
    for seed in range(5):
        edge = run(find_policy(name), seed=seed, drop=0.2, duplicate=0.2, reorder=0.2)
        assert edge.text == reference(edge.config.prompt, 80)


def test_cloud_drafts_nothing_and_asks_once() -> None:
    edge = run(find_policy("cloud"))
    assert edge.session.stats.drafted == 0
    assert set(edge.sources) == {SOURCE_TARGET}
    assert edge.session.stats.forwards == 80
    # The request, and SessionOpen and Close beside it.
    assert edge.transport.messages_sent == 3


def test_a_policy_that_holds_sends_one_message_a_round() -> None:
    for name in ("vanilla", "hsl", "edgellm"):
        policy = find_policy(name)
        assert policy.sending == SEND_HELD
        edge = run(policy, quality=1.0)
        stats = edge.session.stats
        asked = (
            stats.triggers_token
            + stats.triggers_sequence
            + stats.triggers_window
            + stats.triggers_end
        )
        # Plus SessionOpen, Close, and what was drafted before the session was taken on.
        assert edge.transport.messages_sent <= asked + 3, name


def test_vanilla_drafts_its_window_and_then_waits() -> None:
    world = World(1, delay=(0.02, 0.02))
    world.add_verifier()
    edge = world.add_edge(policy=find_policy("vanilla"), quality=1.0, max_tokens=60)
    most = 0
    while edge.finished is None:
        assert world.step()
        if edge.session.awaiting:
            most = max(most, len(edge.session._window.draft))
    assert most == 6
    assert edge.text == reference(edge.config.prompt, 60)


def test_pipesd_drafts_on_while_a_verdict_is_awaited() -> None:
    drafted = {}
    for proactive in (True, False):
        policy = Policy("x", Thresholds(0.0, 0.0, 4), proactive=proactive)
        world = World(1, delay=(0.02, 0.02))
        world.add_verifier()
        edge = world.add_edge(policy=policy, quality=1.0, max_tokens=60)
        world.run()
        drafted[proactive] = world.clock.now()
        assert edge.text == reference(edge.config.prompt, 60)
    assert drafted[True] < drafted[False]


def test_edgellm_halves_r1_after_a_full_acceptance() -> None:
    trigger = Trigger(Thresholds(0.5, 0.0, 64))
    trigger.adapt(4, 4, 4)
    assert trigger.thresholds.r1 == pytest.approx(0.25)


def test_edgellm_raises_r1_by_the_rejected_share_of_the_product() -> None:
    trigger = Trigger(Thresholds(0.5, 0.0, 64))
    for confidence in (0.9, 0.8, 0.6):
        fired = trigger.observe(confidence)
    assert fired == "sequence"
    trigger.asked(3)
    trigger.observe(0.1)  # asks again before the verdict; that product is not the one judged
    trigger.asked(4)
    trigger.adapt(3, 1, 3)
    assert trigger.thresholds.r1 == pytest.approx(min(1.0, 0.5 / 0.432 ** (2 / 3)))


def test_edgellm_keeps_r1_within_its_bounds() -> None:
    trigger = Trigger(Thresholds(0.5, 0.0, 64))
    for _ in range(100):
        trigger.adapt(4, 4, 4)
    assert trigger.thresholds.r1 == pytest.approx(1e-9)
    for _ in range(100):
        trigger.observe(1e-9)
        trigger.asked(4)
        trigger.adapt(4, 0, 4)
    assert trigger.thresholds.r1 == 1.0


def test_an_empty_verdict_leaves_r1_alone() -> None:
    trigger = Trigger(Thresholds(0.5, 0.0, 64))
    trigger.adapt(0, 0, 0)
    assert trigger.thresholds.r1 == 0.5


def test_a_verdict_adapts_r1_only_where_the_policy_says_so() -> None:
    changed = {}
    for name in ("edgellm", "pipesd"):
        edge = run(find_policy(name))
        changed[name] = edge.session.trigger.thresholds != edge.session.policy.thresholds
    assert changed == {"edgellm": True, "pipesd": False}


def test_unknown_names_and_ways_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipesd"):
        find_policy("magic")
    with pytest.raises(ConfigError):
        Policy("x", sending="sometimes")


def test_what_is_sent_is_only_drafts_and_resyncs(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: set[type] = set()
    world = World(4, delay=(0.01, 0.01), drop=0.2)
    world.add_verifier()
    edge = world.add_edge(policy=find_policy("pipesd"), max_tokens=40)
    publish = edge.transport.publish

    def spy(topic: str, payload: bytes, **options: object) -> None:
        if "/up/" in topic:
            kinds.add(type(decode(payload)))
        publish(topic, payload, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(edge.transport, "publish", spy)
    world.run()
    assert {DraftBatch} <= kinds
    assert {kind.__name__ for kind in kinds} <= {"DraftBatch", "Resync", "Close"}
    assert Resync in kinds
