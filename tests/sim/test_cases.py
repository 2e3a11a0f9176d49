"""Cases that have broken systems like this one, each on its own, over the simulated network."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from broker.codec import decode
from broker.errors import Refused
from broker.memory import Faults
from broker.messages import (
    CLOSED_TOKEN,
    FINISH_LENGTH,
    FINISH_STOP,
    REFUSED_VOCABULARY,
    VERIFY_EAGER,
    VERIFY_MODES,
    VERIFY_TRIGGERED,
    DraftBatch,
    Verdict,
)
from broker.topics import up_topic
from broker.transport import Message
from edge_agent.core.policies import SEND_AT_ONCE, Policy
from edge_agent.core.session import State
from edge_agent.core.timing import Timing
from edge_agent.core.trigger import Thresholds
from tests.sim.world import CALM, EOS, VOCAB, SimEdge, World, target_token

EACH = Thresholds(r1=0.0, r2=0.0, window=1)
NEVER = Thresholds(r1=0.0, r2=0.0, window=512)


def stats_of(edge: SimEdge):
    return edge.session.stats


def listen(world: World, edge: SimEdge, kind: type) -> list:
    """Every message of a kind that reaches the edge from now on."""
    heard = []
    session = edge.session
    original = session.receive

    def receive(message, now):
        if isinstance(message, kind):
            heard.append(message)
        original(message, now)

    session.receive = receive  # type: ignore[method-assign]
    return heard


# -- the network --------------------------------------------------------------------------------


def test_a_thousand_batches_and_a_connection_cut_in_the_middle() -> None:
    """Case 1: each applied once, and the text equals that of an uncut run."""
    texts = []
    for cut in (False, True):
        world = World(1, context=2_000, delay=(0.001, 0.01))
        world.add_verifier(forward_time=0.001)
        edge = world.add_edge(
            max_tokens=1_100,
            thresholds=EACH,
            max_ahead=1,
            quality=0.0,
            verify=VERIFY_TRIGGERED,
        )
        batches = 0

        def count(topic: str, payload: bytes, *, qos: int, sent=edge.transport.publish) -> None:
            nonlocal batches
            batches += isinstance(decode(payload), DraftBatch)
            sent(topic, payload, qos=qos)

        edge.transport.publish = count  # type: ignore[method-assign]
        if cut:
            for when in (3.0, 7.0, 11.0):
                world.at(when, lambda w=world: w.broker.cut("d1"))
                world.at(when + 0.5, lambda w=world: w.broker.restore("d1"))
        world.run(40_000)
        edge.check()
        assert batches >= 1_000
        assert edge.transport.reconnects == (3 if cut else 0)
        texts.append(edge.text)
    assert texts[0] == texts[1]


def test_a_batch_that_overtakes_another_is_never_judged_after_the_wrong_text() -> None:
    """Case 2: batch n+1 before n is answered with Resync, and both are judged in order."""
    world = World(2)
    verifier = world.add_verifier()
    policy = Policy("pipesd", NEVER, sending=SEND_AT_ONCE)
    edge = world.add_edge(policy=policy, quality=1.0, max_tokens=30, max_ahead=24)
    held: list[tuple[str, bytes, int]] = []
    send = edge.transport.publish

    def swap(topic: str, payload: bytes, *, qos: int) -> None:
        """Each odd batch waits until the next one has gone."""
        if isinstance(decode(payload), DraftBatch) and not held:
            held.append((topic, payload, qos))
            return
        send(topic, payload, qos=qos)
        while held:
            first, content, level = held.pop()
            send(first, content, qos=level)

    edge.transport.publish = swap  # type: ignore[method-assign]
    world.run()
    edge.check()
    assert verifier.core.stats.gaps > 0
    assert stats_of(edge).accepted == verifier.core.stats.accepted
    # A draft that is always right is always accepted, so nothing was judged out of place.
    assert verifier.core.stats.judged == verifier.core.stats.accepted


@pytest.mark.parametrize("notice", [True, False], ids=["with its will", "silently"])
@pytest.mark.parametrize("memory", [True, False], ids=["as it was", "empty"])
def test_a_verifier_gone_for_ten_seconds(notice, memory) -> None:
    """Case 10: drafts in flight are answered after it is back, or the session opens again."""
    world = World(3, delay=(0.001, 0.01))
    verifier = world.add_verifier()
    edge = world.add_edge(max_tokens=60)
    world.at(1.0, lambda: world.broker.cut("v1", will_delay=0.0 if notice else 1e6))
    if not memory:
        world.at(6.0, verifier.forget_everything)
    world.at(11.0, lambda: world.broker.restore("v1"))
    world.run()
    edge.check()
    assert 11.0 < world.clock.now() < 40.0


def test_a_second_replica_takes_over_from_a_dead_one() -> None:
    """Case 10: the session moves, with everything committed so far."""
    world = World(4, delay=(0.001, 0.01))
    world.add_verifier("v1")
    edge = world.add_edge(max_tokens=60)
    for _ in range(150):
        world.step()
    done = len(edge.text)
    world.broker.cut("v1", will_delay=1e6)
    other = world.add_verifier("v2")
    world.run()
    edge.check()
    assert edge.session.verifier == "v2"
    assert 0 < done < 60
    assert other.core.stats.committed == 60 - done


def test_messages_that_the_broker_could_not_keep_are_noticed_by_position() -> None:
    """Case 14: a hundred batches in a row are lost while the verifier is away."""
    world = World(5, delay=(0.001, 0.01))
    verifier = world.add_verifier()
    edge = world.add_edge(max_tokens=80, verify=VERIFY_EAGER, thresholds=NEVER, quality=1.0)
    edge.session.trigger.thresholds = Thresholds(r1=0.0, r2=0.0, window=20)
    world.at(0.3, lambda: setattr(world.broker, "faults", Faults(drop=1.0)))
    world.at(4.0, lambda: setattr(world.broker, "faults", CALM))
    world.run()
    edge.check()
    assert stats_of(edge).timeouts > 0
    assert verifier.core.stats.judged == verifier.core.stats.accepted


@pytest.mark.parametrize("verify", VERIFY_MODES)
@pytest.mark.parametrize("loss", [0.2, 0.5])
def test_heavy_loss_costs_time_and_no_token(verify, loss) -> None:
    world = World(6, drop=loss, duplicate=0.3, reorder=0.3, delay=(0.01, 0.2))
    world.add_verifier()
    edge = world.add_edge(max_tokens=60, verify=verify, timing=Timing(offline_after=1e9))
    world.run()
    edge.check()


def test_resync_and_drafts_do_not_answer_each_other_for_ever() -> None:
    """With every message doubled and overtaken, messages stay in proportion to tokens."""
    world = World(7, duplicate=1.0, reorder=0.5, delay=(0.01, 0.3))
    world.add_verifier()
    edge = world.add_edge(max_tokens=60, verify=VERIFY_EAGER)
    world.run()
    edge.check()
    assert edge.transport.messages_sent < 20 * 60
    assert world.verifiers[0].transport.messages_sent < 20 * 60


# -- the text -----------------------------------------------------------------------------------


def ending_at(position: int):
    """A target whose text ends at that position."""

    def choose(sequence: Sequence[int]) -> int:
        return EOS if len(sequence) == 3 + position else target_token(sequence)

    return choose


@pytest.mark.parametrize("after", [False, True], ids=["nothing after it", "drafts after it"])
def test_end_of_text_in_the_middle_of_an_accepted_draft(after) -> None:
    """Case 21: in slot 2 of 5 the text ends there, and the statistics count 2."""
    target = ending_at(1)
    world = World(8, next_token=target)
    verifier = world.add_verifier()

    def draft(sequence, position, sampling):
        token = target(sequence)
        return token, 0.9

    # An edge that knows another end of text drafts on after the target's.
    ends = frozenset({VOCAB - 1}) if after else frozenset({EOS})
    edge = world.add_edge(draft=draft, thresholds=Thresholds(0.0, 0.0, 5), eos_ids=ends)
    world.run()
    edge.check()
    assert len(edge.text) == 2
    assert edge.finished is not None
    assert edge.finished.reason == FINISH_STOP
    assert stats_of(edge).accepted == stats_of(edge).judged == 2
    assert verifier.core.stats.accepted == verifier.core.stats.judged == 2


@pytest.mark.parametrize("quality", [0.0, 1.0, None], ids=["all wrong", "all right", "no draft"])
def test_each_verification_adds_exactly_one_token_of_the_target(quality) -> None:
    """Case 23: none, all or nothing drafted; the simulated engine watches the cache length."""
    world = World(9, delay=(0.001, 0.01))
    verifier = world.add_verifier()
    edge = world.add_edge(quality=quality or 0.0, max_tokens=61, thresholds=Thresholds(0, 0, 4))
    verdicts = listen(world, edge, Verdict)
    edge.draft_fails = quality is None
    world.run()
    edge.check()
    assert stats_of(edge).target_tokens + stats_of(edge).accepted == 61
    for verdict in verdicts[:-1]:
        assert len(verdict.tokens) == verdict.accepted + 1
    if quality:
        assert stats_of(edge).accepted == stats_of(edge).judged > 40
        assert max(len(verdict.tokens) for verdict in verdicts) >= 5
    else:
        assert stats_of(edge).accepted == 0
        assert verifier.core.stats.verdicts == 61


def test_a_draft_like_the_target_is_accepted_whole_and_acceptance_recovers() -> None:
    """Case 25: about 100 %, then forced rejections, then 100 % again."""
    world = World(10, delay=(0.001, 0.01))
    world.add_verifier()
    wrong_at = range(40, 60, 3)

    def draft(sequence, position, sampling):
        right = target_token(sequence)
        return (1 + right % (VOCAB - 1) if position in wrong_at else right), 0.9

    edge = world.add_edge(draft=draft, max_tokens=120, thresholds=Thresholds(0.0, 0.0, 6))
    verdicts = listen(world, edge, Verdict)
    world.run()
    edge.check()

    def shares(first: int, last: int) -> tuple[int, int]:
        chosen = [v for v in verdicts if first <= v.start and v.start + len(v.tokens) <= last]
        return sum(v.accepted for v in chosen), sum(v.judged for v in chosen)

    before, during, later = shares(0, 40), shares(36, 66), shares(64, 120)
    assert before[0] == before[1] > 20
    assert during[0] < during[1]
    assert later[0] == later[1] > 30
    assert stats_of(edge).rolled_back > 0


# -- tokenizers and limits ----------------------------------------------------------------------


def test_another_tokenizer_is_refused_at_the_handshake() -> None:
    """Case 27: and the session beside it goes on."""
    world = World(11)
    verifier = world.add_verifier()
    stranger = world.add_edge("d1", vocab_hash="another")
    friend = world.add_edge("d2")
    world.run()
    friend.check()
    assert stranger.text == []
    assert stranger.finished is not None
    error = stranger.finished.error
    assert isinstance(error, Refused)
    assert (error.reason, error.exit_code) == (REFUSED_VOCABULARY, 4)
    assert verifier.core.stats.refusals == 1


def test_an_id_beyond_the_vocabulary_is_answered_and_the_verifier_lives() -> None:
    """Case 27: the edge's vocabulary is padded beyond the target's and its draft goes there."""
    world = World(12)
    verifier = world.add_verifier()
    bad = world.add_edge("d1", vocab_size=2 * VOCAB, draft=lambda *_: (VOCAB + 3, 0.9))
    good = world.add_edge("d2")
    world.run()
    good.check()
    assert bad.finished is not None
    assert isinstance(bad.finished.error, Refused)
    assert bad.finished.error.reason == CLOSED_TOKEN
    assert verifier.core.stats.rejected["token_out_of_range"] >= 1
    world.heal()
    while world.step(within=10.0):
        pass
    assert not verifier.core.sessions  # both were closed


@pytest.mark.parametrize("verify", VERIFY_MODES)
@pytest.mark.parametrize(
    ("context", "prompt", "ahead", "places"),
    [(64, 10, 100, 54), (100, 24, 256, 76), (64, 63, 24, 1)],
)
def test_drafts_beyond_the_context_are_clipped(verify, context, prompt, ahead, places) -> None:
    """Case 29: context 64 and long drafts; 256 drafts where 76 places are left."""
    world = World(13, context=context)
    world.add_verifier()
    edge = world.add_edge(
        prompt=range(1, prompt + 1),
        max_tokens=300,
        quality=1.0,
        max_ahead=ahead,
        thresholds=NEVER,
        verify=verify,
    )
    for _ in range(400):  # it drafts all it may before it hears of the verifier's limit
        if edge.session.state is State.DONE:
            break
        world.step()
    world.run()
    edge.check()
    assert len(edge.text) == places
    assert edge.finished is not None
    assert edge.finished.reason == FINISH_LENGTH


def test_a_draft_made_before_the_limit_is_known() -> None:
    """Case 29: 100 drafted tokens wait when the verifier appears and says 76."""
    world = World(14, context=100)
    edge = world.add_edge(
        prompt=range(1, 25), max_tokens=300, quality=1.0, max_ahead=256, thresholds=NEVER
    )
    while len(edge.session._window.draft) < 100:
        world.step()
    world.add_verifier()
    world.run()
    edge.check()
    assert len(edge.text) == 76


# -- strangers ----------------------------------------------------------------------------------


def test_garbage_beside_a_running_session_is_counted_and_nothing_else() -> None:
    """Case 41: nine bytes that claim a huge array, ten megabytes, another's messages."""
    world = World(15, delay=(0.001, 0.01))
    verifier = world.add_verifier()
    edge = world.add_edge()
    up = up_topic("d1", "s", "v1")
    rubbish = [bytes.fromhex("9ffd74f7dd74fffdbd"), bytes(10_000_000), b"", b"\x91" * 2_000]

    def attack() -> None:
        for payload in rubbish:
            for topic in (up, "pipesd/1/d1/s/open", "pipesd/1/d1/s/down"):
                message = Message(topic, payload)
                verifier._on_message(message)
                edge._on_message(message)

    for when in (0.0, 0.2, 0.5, 1.0):
        world.at(when, attack)
    world.run()
    edge.check()
    assert edge.rejected == 4 * 12
    assert sum(verifier.core.stats.rejected.values()) == 4 * 12
