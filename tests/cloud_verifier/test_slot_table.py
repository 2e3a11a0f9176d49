"""Who holds which slot, and who must give one up."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cloud_verifier.core.slot_table import SlotTable


def anybody(owner: str) -> bool:
    return True


def test_free_slots_first_then_the_least_recently_used() -> None:
    table: SlotTable[str] = SlotTable(2)
    assert table.acquire("a", anybody) == (0, None)
    assert table.acquire("b", anybody) == (1, None)
    assert table.acquire("a", anybody) == (0, None)  # b is older now
    assert table.acquire("c", anybody) == (1, "b")
    assert table.evictions == 1
    assert table.get("b") is None


def test_looking_counts_as_use() -> None:
    table: SlotTable[str] = SlotTable(2)
    table.acquire("a", anybody)
    table.acquire("b", anybody)
    table.get("a")
    assert table.acquire("c", anybody) == (1, "b")


def test_only_whom_the_caller_allows_gives_up() -> None:
    table: SlotTable[str] = SlotTable(2)
    table.acquire("a", anybody)
    table.acquire("b", anybody)
    assert table.acquire("c", lambda owner: False) is None
    assert table.acquire("c", lambda owner: owner == "b") == (1, "b")
    assert len(table) == 2


def test_released_slots_are_free_again() -> None:
    table: SlotTable[str] = SlotTable(1)
    table.acquire("a", anybody)
    table.release("a")
    table.release("a")
    assert table.acquire("b", lambda owner: False) == (0, None)
    assert table.evictions == 0


def test_a_slot_passes_to_an_heir() -> None:
    table: SlotTable[str] = SlotTable(1)
    table.acquire("a", anybody)
    table.hand_over("a", "b")
    assert table.get("a") is None
    assert table.get("b") == 0
    assert table.owner_of(0) == "b"
    table.hand_over("nobody", "c")
    assert table.get("c") is None


class Table(RuleBasedStateMachine):
    """Random use: a slot has one owner, an owner one slot, and none is ever lost."""

    names = st.sampled_from("abcdef")

    def __init__(self) -> None:
        super().__init__()
        self.table: SlotTable[str] = SlotTable(3)
        self.owners: dict[str, int] = {}

    @rule(name=names, spared=st.sets(names))
    def acquire(self, name, spared) -> None:
        place = self.table.acquire(name, lambda owner: owner not in spared)
        if place is None:
            assert name not in self.owners
            assert len(self.owners) == 3
            assert set(self.owners) <= spared
            return
        slot, loser = place
        if loser is not None:
            assert loser not in spared
            assert self.owners.pop(loser) == slot
        assert self.owners.setdefault(name, slot) == slot

    @rule(name=names)
    def release(self, name) -> None:
        self.table.release(name)
        self.owners.pop(name, None)

    @rule(old=names, new=names)
    def hand_over(self, old, new) -> None:
        if new not in self.owners:
            self.table.hand_over(old, new)
            if old in self.owners:
                self.owners[new] = self.owners.pop(old)

    @invariant()
    def one_slot_each(self) -> None:
        assert len(self.table) == len(self.owners) <= 3
        assert sorted(set(self.owners.values())) == sorted(self.owners.values())
        for slot in range(3):
            assert self.owners.get(self.table.owner_of(slot) or "", slot) == slot


TestTable = Table.TestCase
