"""K/V storage: how it grows, shrinks and is counted, with lists in the place of tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import LocalProtocolError
from cloud_verifier.engine.slots import BLOCK, SlotTable

CONTEXT = 1000


def table(**settings: int) -> SlotTable[list[int]]:
    def move(old: list[int], new: list[int], tokens: int) -> None:
        new[:tokens] = old[:tokens]

    values = {"max_slots": 4, "context": CONTEXT, "bytes_per_token": 10, **settings}
    return SlotTable(**values, make=lambda capacity: [-1] * capacity, move=move)


def fill(slots: SlotTable[list[int]], slot: int, keep: int, tokens: list[int]) -> list[int]:
    end = keep + len(tokens)
    storage = slots.reserve(slot, keep, end)
    storage[keep:end] = tokens
    slots.commit(slot, end)
    return storage


def test_a_short_session_holds_little() -> None:
    slots = table()
    fill(slots, 0, 0, [7] * 3)
    assert slots.bytes_allocated == BLOCK * 10
    fill(slots, 1, 0, [7] * 700)
    assert slots.capacity(1) == 1024
    assert slots.bytes_allocated == (BLOCK + 1024) * 10


def test_a_short_session_after_a_long_one_gives_memory_back() -> None:
    slots = table()
    fill(slots, 0, 0, [7] * 900)
    storage = fill(slots, 0, 0, [8] * 5)
    assert slots.capacity(0) == len(storage) == BLOCK


def test_capacity_doubles_and_keeps_what_is_kept() -> None:
    slots = table()
    tokens = list(range(60))
    fill(slots, 0, 0, tokens)
    storage = fill(slots, 0, 50, list(range(100, 130)))
    assert slots.capacity(0) == 2 * BLOCK
    assert storage[:80] == [*tokens[:50], *range(100, 130)]


def test_nothing_moves_while_a_session_rejects_around_a_boundary() -> None:
    slots = table()
    first = fill(slots, 0, 0, [1] * 126)
    for keep in (124, 127, 129, 122, 120, 63):
        storage = fill(slots, 0, min(keep, slots.length(0)), [2] * 5)
        assert len(storage) == slots.capacity(0)
        if slots.capacity(0) == 2 * BLOCK:
            assert storage is first


def test_the_context_bounds_a_slot_and_all_slots_the_memory() -> None:
    slots = table()
    for slot in range(4):
        fill(slots, slot, 0, [1] * CONTEXT)
    # 1000 tokens are 16 blocks of 64.
    assert slots.bytes_allocated == slots.bytes_limit == 4 * 1024 * 10
    with pytest.raises(LocalProtocolError, match="context"):
        slots.reserve(0, CONTEXT, CONTEXT + 1)


def test_what_is_not_there_cannot_be_kept() -> None:
    slots = table()
    fill(slots, 0, 0, [1] * 10)
    with pytest.raises(LocalProtocolError, match="holds 10 tokens"):
        slots.reserve(0, 11, 12)
    assert slots.length(0) == 10


def test_a_kept_length_is_valid_before_the_forward_ends() -> None:
    slots = table()
    fill(slots, 0, 0, [1] * 10)
    slots.reserve(0, 4, 9)
    assert slots.length(0) == 4


def test_free_gives_everything_back() -> None:
    slots = table()
    for slot in range(4):
        fill(slots, slot, 0, [1] * 100)
    slots.free(2)
    assert (slots.length(2), slots.capacity(2)) == (0, 0)
    assert slots.bytes_allocated == 3 * 128 * 10
    slots.free_all()
    assert slots.bytes_allocated == 0


def test_short_memory_leaves_a_growing_slot_as_it_was() -> None:
    made: list[list[int]] = []

    def make(capacity: int) -> list[int]:
        if capacity > BLOCK:
            raise MemoryError("no more")
        made.append([0] * capacity)
        return made[-1]

    slots = SlotTable(
        max_slots=1,
        context=CONTEXT,
        bytes_per_token=1,
        make=make,
        move=lambda old, new, tokens: None,
    )
    fill(slots, 0, 0, [1] * 40)
    with pytest.raises(MemoryError):
        slots.reserve(0, 40, 90)
    assert (slots.length(0), slots.capacity(0)) == (40, BLOCK)
    assert slots.reserve(0, 40, 41) is made[0]


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, CONTEXT), st.integers(1, 300)), max_size=30
    )
)
def test_what_is_kept_is_what_was_written(steps: list[tuple[int, int, int]]) -> None:
    slots = table(max_slots=2)
    written: list[list[int]] = [[], []]
    for number, (slot, keep, count) in enumerate(steps):
        keep = min(keep, len(written[slot]))
        count = min(count, CONTEXT - keep)
        written[slot] = written[slot][:keep] + [number] * count
        storage = fill(slots, slot, keep, [number] * count)
        assert storage[: len(written[slot])] == written[slot]
        need = max(BLOCK, len(written[slot]))
        assert slots.length(slot) == len(written[slot]) <= slots.capacity(slot) < 4 * 2 * need
