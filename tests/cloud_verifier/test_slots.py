"""How far blocks are valid, and what tables of them a work may name."""

from __future__ import annotations

import pytest

from broker.errors import ConfigError, LocalProtocolError
from broker.sampling import Sampling
from cloud_verifier.engine.slots import Blocks
from cloud_verifier.engine.target import Work


def work(keep: int, count: int, blocks: tuple[int, ...] = (), slot: int = 0) -> Work:
    return Work(slot, keep, (1,) * count, 0, 0, Sampling(), blocks=blocks)


def blocks(total: int = 9, **settings: int) -> Blocks:
    """Four slots of 40 tokens in blocks of 16."""
    values = {"max_slots": 4, "context": 40, "block_tokens": 16, "total": total, **settings}
    return Blocks(**values)


def test_a_slot_has_blocks_of_its_own_as_far_as_there_is_memory() -> None:
    memory = blocks(total=8)
    assert memory.own(0) == (0, 1, 2)
    assert memory.table(work(0, 1, slot=1)) == (3, 4, 5)
    assert memory.table(work(0, 1, (7, 2), slot=1)) == (7, 2)
    memory.check([work(0, 17, slot=2)])
    with pytest.raises(LocalProtocolError, match="slot 2: 2 blocks hold no 33 tokens"):
        memory.check([work(0, 33, slot=2)])
    with pytest.raises(LocalProtocolError, match="slot 3: 0 blocks"):
        memory.check([work(0, 1, slot=3)])


def test_a_context_that_does_not_fit_says_what_would() -> None:
    with pytest.raises(ConfigError, match="give 3 at least"):
        blocks(total=2)
    blocks(total=3)


def test_a_table_is_valid_up_to_its_first_gap() -> None:
    memory = blocks()
    table = (4, 0, 7)
    memory.commit(table, 0, 35)
    assert memory.length(work(35, 1, table)) == 35
    assert memory.length(work(0, 1, (4, 7))) == 16 + 3
    assert memory.length(work(0, 1, (7, 4))) == 3
    memory.commit(table, 20, 22)
    assert memory.length(work(0, 1, table)) == 22
    assert memory.length(work(0, 1, (7,))) == 0, "what lay behind is forgotten"
    memory.clear()
    assert memory.length(work(0, 1, table)) == 0


def test_shared_blocks_before_the_start_are_left_alone() -> None:
    memory = blocks()
    memory.commit((1, 2), 0, 32)
    memory.commit((1, 5), 16, 20)
    assert memory.length(work(0, 1, (1, 2))) == 32
    assert memory.length(work(0, 1, (1, 5))) == 20


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([work(0, 17, (1,))], "1 blocks hold no 17 tokens"),
        ([work(0, 5, (9,))], "not one of 9"),
        ([work(0, 5, (-1,))], "not one of 9"),
        ([work(0, 5, (3, 3))], "used twice"),
        ([work(16, 5, (3, 4)), work(0, 5, (4,), slot=1)], "used twice"),
        ([work(15, 5, (3, 4)), work(16, 5, (3, 5), slot=1)], "used twice"),
    ],
)
def test_wrong_tables_raise(batch: list[Work], words: str) -> None:
    with pytest.raises(LocalProtocolError, match=words):
        blocks().check(batch)


def test_whole_blocks_before_what_is_fed_may_be_shared() -> None:
    blocks().check([work(16, 5, (3, 4)), work(17, 5, (3, 5), slot=1)])


def test_who_names_blocks_for_some_works_names_them_for_all() -> None:
    memory = blocks()
    with pytest.raises(LocalProtocolError, match="some works only"):
        memory.check([work(0, 5, (3,)), work(0, 5, slot=1)])
    assert not memory.handed_out
    memory.check([work(0, 5, slot=1)])
    memory.check([work(0, 5, (3,))])
    assert memory.handed_out
    with pytest.raises(LocalProtocolError, match="slot 1 names no blocks"):
        memory.check([work(0, 5, slot=1)])
    memory.clear()
    assert memory.table(work(0, 5, slot=1)) == (3, 4, 5)
