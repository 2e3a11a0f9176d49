"""The cloud out of reach: an error that says what is missing, or going on alone and coming back."""

from __future__ import annotations

from itertools import pairwise

import pytest

from broker.codec import decode
from broker.errors import Refused, TransportError
from broker.messages import FINISH_LENGTH, REFUSED_BUSY, SessionOpen
from edge_agent.core.effects import SOURCE_LOCAL
from edge_agent.core.session import State
from edge_agent.core.timing import Timing
from tests.sim.world import SimEdge, World, reference, target_token

SHORT = Timing(offline_after=5.0)


def error_of(edge: SimEdge) -> Exception:
    assert edge.finished is not None
    assert edge.finished.reason == "error"
    assert edge.finished.error is not None
    return edge.finished.error


def opens(edge: SimEdge) -> list[SessionOpen]:
    """Each SessionOpen that the edge sends from now on."""
    found: list[SessionOpen] = []
    send = edge.transport.publish

    def publish(topic: str, payload: bytes, *, qos: int) -> None:
        message = decode(payload)
        if isinstance(message, SessionOpen):
            found.append(message)
        send(topic, payload, qos=qos)

    edge.transport.publish = publish  # type: ignore[method-assign]
    return found


# -- forbidden ----------------------------------------------------------------------------------


def test_no_broker() -> None:
    world = World(1)
    edge = world.add_edge(timing=SHORT)
    world.broker.cut("d1")
    world.run()
    error = error_of(edge)
    assert isinstance(error, TransportError)
    assert "no connection to the broker for 5.0 s: start it or check --broker" in str(error)
    assert "--local allow" in str(error)
    assert edge.text == []


def test_a_broker_but_no_verifier() -> None:
    world = World(2)
    edge = world.add_edge(timing=SHORT)
    world.run()
    error = error_of(edge)
    assert isinstance(error, TransportError)
    assert "the broker is there but no verifier answered for 5.0 s: start one" in str(error)
    assert world.clock.now() == pytest.approx(5.0)


@pytest.mark.parametrize("told", [True, False])
def test_the_verifier_dies_and_stays_away(told) -> None:
    world = World(3, delay=(0.001, 0.01))
    world.add_verifier()
    edge = world.add_edge(timing=SHORT, max_tokens=100)
    world.at(1.0, lambda: world.broker.cut("v1", will_delay=0.0 if told else 1e6))
    world.run()
    assert isinstance(error_of(edge), TransportError)
    assert "no verifier answered" in str(error_of(edge))
    assert edge.text == edge.expected[: len(edge.text)] != []
    assert 5.9 < world.clock.now() < 6.2


def test_always_busy() -> None:
    world = World(4, max_sessions=1)
    world.add_verifier()
    first = world.add_edge("d1", max_tokens=400, quality=0.0)
    second = world.add_edge("d2", timing=SHORT)
    world.run()
    first.check()
    error = error_of(second)
    assert isinstance(error, Refused)
    assert error.reason == REFUSED_BUSY
    assert "1 sessions are running here" in str(error)


def test_busy_until_the_other_is_done() -> None:
    world = World(5, max_sessions=1)
    world.add_verifier()
    world.add_edge("d1", max_tokens=60, quality=0.0)
    second = world.add_edge("d2")
    world.run()
    for edge in world.edges:
        edge.check()
    assert second.session.stats.refusals >= 1


# -- allowed ------------------------------------------------------------------------------------


def test_alone_from_the_beginning_to_the_end() -> None:
    world = World(6)
    edge = world.add_edge(timing=SHORT, local="allow", quality=1.0, max_tokens=30)
    world.run()
    assert edge.finished is not None
    assert edge.finished.error is None
    assert edge.finished.reason == FINISH_LENGTH
    assert edge.text == edge.expected
    assert set(edge.sources) == {SOURCE_LOCAL}
    assert edge.session.stats.local_tokens == 30


@pytest.mark.parametrize("quality", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("link", ["d1", "v1"], ids=["edge cut off", "verifier away"])
def test_alone_for_a_while_and_back(link, quality) -> None:
    """What was emitted stays; the cloud goes on from there as the target would."""
    world = World(7, delay=(0.001, 0.01))
    world.add_verifier()
    edge = world.add_edge(
        timing=SHORT, local="allow", quality=quality, max_tokens=120, draft_time=0.1
    )
    sent = opens(edge)
    world.at(1.0, lambda: world.broker.cut(link))
    world.at(9.0, lambda: world.broker.restore(link))
    world.run()
    assert edge.finished is not None
    assert edge.finished.error is None
    assert len(edge.text) == 120

    local = [index for index, source in enumerate(edge.sources) if source == SOURCE_LOCAL]
    first, last = local[0], local[-1]
    assert local == list(range(first, last + 1))  # one stretch, marked
    assert first > 0
    assert last < 119
    assert edge.session.stats.local_tokens == len(local)
    # Before it, the target's text; after it, what the target writes after all that was emitted.
    assert edge.text[:first] == edge.expected[:first]
    emitted = (*edge.config.prompt, *edge.text[: last + 1])
    assert edge.text[last + 1 :] == reference(emitted, 119 - last)
    # The open that was taken held everything emitted until then.
    assert sent[-1].committed == tuple(edge.text[: len(sent[-1].committed)])
    assert first < len(sent[-1].committed) <= last + 1
    assert all(one.attach <= two.attach for one, two in pairwise(sent))


def test_alone_it_ends_where_its_own_context_ends() -> None:
    world = World(8)
    edge = world.add_edge(timing=SHORT, local="allow", context=20, max_tokens=100)
    world.run()
    assert edge.finished is not None
    assert edge.finished.reason == FINISH_LENGTH
    assert len(edge.text) == 18  # the last one needs no place in the draft's cache
    assert edge.session.get_timer() is None


def test_back_while_the_verifier_finds_the_text_too_long() -> None:
    """The target's context is smaller than what was written alone: no error after the fact."""
    world = World(9, context=30)
    edge = world.add_edge(timing=SHORT, local="allow", max_tokens=60, draft_time=0.3)
    world.at(9.5, lambda: world.add_verifier() and None)
    world.run()
    assert edge.finished is not None
    assert edge.finished.reason == FINISH_LENGTH
    assert edge.finished.error is None
    assert len(edge.text) == 60
    assert edge.session.stats.refusals >= 1


# -- demanded -----------------------------------------------------------------------------------


def test_only_local_says_nothing_to_anybody() -> None:
    world = World(10, delay=(0.001, 0.01))
    verifier = world.add_verifier()
    edge = world.add_edge(local="only", max_tokens=30)
    assert edge.session.state is State.LOCAL
    world.run()
    while world.step(within=5.0):
        pass
    assert edge.finished is not None
    assert edge.finished.reason == FINISH_LENGTH
    assert len(edge.text) == 30
    assert set(edge.sources) == {SOURCE_LOCAL}
    assert edge.transport.messages_sent == 0
    assert verifier.core.stats.opens == 0


def test_only_local_needs_no_broker() -> None:
    world = World(11)
    edge = world.add_edge(local="only", quality=1.0, max_tokens=10)
    world.broker.cut("d1")
    world.run()
    assert edge.text == reference((5, 6, 7), 10, target_token)
