"""The bounded queue between publishing threads and the network thread."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.outbox import MAX_DEATHS, Outbox, Outgoing


def put(outbox: Outbox, number: int, qos: int) -> bool:
    return outbox.offer("t", b"%03d" % number, qos, False)


def drain(outbox: Outbox, *, window_open: bool = True) -> list[int]:
    taken: list[Outgoing] = []
    while (message := outbox.take(window_open)) is not None:
        if message.qos:
            outbox.sent(len(taken) + 1_000, message)
        taken.append(message)
    return [int(message.payload) for message in taken]


def test_order_of_publishing_across_both_kinds() -> None:
    outbox = Outbox(10, 10, 1_000)
    for number, qos in enumerate([0, 1, 1, 0, 1, 0]):
        put(outbox, number, qos)
    assert drain(outbox) == list(range(6))


def test_qos0_passes_a_full_window_only() -> None:
    outbox = Outbox(10, 10, 1_000)
    for number, qos in enumerate([1, 0, 1, 0]):
        put(outbox, number, qos)
    assert drain(outbox, window_open=False) == [1, 3]
    assert drain(outbox) == [0, 2]


def test_limits() -> None:
    outbox = Outbox(2, 3, 1_000)
    assert [put(outbox, number, 0) for number in range(3)] == [True, True, False]
    assert [put(outbox, number, 1) for number in range(4)] == [True, True, True, False]
    drain(outbox)
    assert put(outbox, 9, 0)
    assert not put(outbox, 9, 1), "what is under way counts until acknowledged"
    assert outbox.acknowledged(1_002)
    assert put(outbox, 9, 1)
    assert not outbox.acknowledged(7), "an identifier that nobody used"


def test_bytes_bound_both_kinds_together() -> None:
    outbox = Outbox(100, 100, 12)
    assert put(outbox, 1, 0)
    assert put(outbox, 2, 1)
    assert put(outbox, 3, 0)
    assert not put(outbox, 4, 1)
    assert not put(outbox, 4, 0)


def test_lost_connection_puts_back_in_order_and_forgets_qos0() -> None:
    outbox = Outbox(10, 10, 1_000)
    for number in range(4):
        put(outbox, number, 1)
    for _ in range(2):
        message = outbox.take(True)
        assert message is not None
        outbox.sent(int(message.payload), message)
    put(outbox, 8, 0)
    assert outbox.connection_lost() == 1
    assert outbox.in_flight == 0
    assert drain(outbox) == [0, 1, 2, 3]


def test_message_that_is_oldest_at_every_death_is_given_up() -> None:
    outbox = Outbox(10, 10, 1_000)
    put(outbox, 1, 1)
    put(outbox, 2, 1)
    for death in range(1, MAX_DEATHS + 1):
        assert drain(outbox) == [1, 2]
        assert outbox.connection_lost() == (1 if death == MAX_DEATHS else 0)
    assert drain(outbox) == [2]
    # Deaths while other messages are oldest do not add up.
    outbox = Outbox(10, 10, 1_000)
    for number in range(3 * MAX_DEATHS):
        put(outbox, number, 1) if number < 10 else None
        sent = drain(outbox)
        assert outbox.acknowledged(1_000) == bool(sent)
        assert outbox.connection_lost() == 0


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("offer"), st.integers(0, 1)),
            st.tuples(st.just("take"), st.integers(0, 1)),
            st.tuples(st.just("ack"), st.just(0)),
            st.tuples(st.just("lost"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_nothing_of_qos1_is_lost_and_the_bytes_add_up(steps: list[tuple[str, int]]) -> None:
    outbox = Outbox(5, 5, 40)
    accepted: list[int] = []
    acknowledged: list[int] = []
    under_way: list[int] = []
    given_up = 0
    number = 0
    for what, argument in steps:
        if what == "offer":
            if put(outbox, number, argument) and argument:
                accepted.append(number)
            number += 1
        elif what == "take" and (message := outbox.take(bool(argument))) is not None:
            if message.qos:
                under_way.append(int(message.payload))
                outbox.sent(int(message.payload), message)
        elif what == "ack" and under_way:
            acknowledged.append(under_way.pop(0))
            assert outbox.acknowledged(acknowledged[-1])
        elif what == "lost":
            queued = len(outbox._qos0)
            given_up += outbox.connection_lost() - queued
            under_way.clear()
    assert given_up <= len(steps) // MAX_DEATHS
    outbox.connection_lost()
    rest = drain(outbox)
    assert rest == sorted(rest)
    if not given_up and outbox._deaths < MAX_DEATHS:
        assert sorted(acknowledged + rest) == accepted
    for packet_id in list(outbox._in_flight):
        outbox.acknowledged(packet_id)
    assert outbox.empty
    assert outbox._bytes == 0
