"""Blocks of K/V memory: handed out, shared, remembered and forgotten, and that none leaks."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.messages import Close
from cloud_verifier.core.block_table import BlockTable
from cloud_verifier.core.scheduler import Limits
from tests.cloud_verifier.hand import Hand, attached, continuation

SIZE = 8
HEAD = tuple(range(1, 41))  # five blocks


def text_of(tokens: tuple[int, ...]) -> Any:
    return lambda start, end: tokens[start:end]


def filled(table: BlockTable[str], owner: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """``owner`` holds these tokens, by itself where they are not known."""
    text = text_of(tokens)
    table.resume(owner, 0, text, len(tokens))
    table.grow(owner, len(tokens))
    table.note(owner, len(tokens), text)
    return table.table(owner)


def hand_of(*devices: str, total: int = 40, **changes: Any) -> Hand:
    return attached(*devices, block_tokens=SIZE, total_blocks=total, **changes)


def test_a_short_session_holds_only_its_blocks() -> None:
    table: BlockTable[str] = BlockTable(10, SIZE)
    assert filled(table, "a", HEAD[:9]) == (0, 1)
    assert table.available == 8
    table.note("a", 8, text_of(HEAD))
    assert table.table("a") == (0,), "what lies behind is given back"
    assert table.available == 9


def test_tables_grow_without_gaps_beside_each_other() -> None:
    table: BlockTable[str] = BlockTable(64, SIZE)
    for end in range(SIZE, 9 * SIZE, SIZE):
        for owner in "abcd":
            table.grow(owner, end)
    for owner in "abcd":
        blocks = table.table(owner)
        assert blocks == tuple(range(blocks[0], blocks[0] + 8))


def test_what_begins_alike_is_shared_by_whole_blocks() -> None:
    table: BlockTable[str] = BlockTable(20, SIZE)
    first = filled(table, "a", HEAD)
    other = (*HEAD[:20], 90, 91, 92, 93, 94)
    cached, adopted = table.resume("b", 0, text_of(other), 24)
    assert (cached, adopted) == (16, 16)
    assert table.table("b") == first[:2]
    table.grow("b", 25)
    assert table.table("b")[:2] == first[:2]
    assert not set(table.table("b")[2:]) & set(first)
    # The same tokens elsewhere in a text are another content.
    assert table.resume("c", 0, text_of(HEAD[8:]), 32) == (0, 0)


def test_without_sharing_every_text_is_computed() -> None:
    table: BlockTable[str] = BlockTable(20, SIZE, share=False)
    first = filled(table, "a", HEAD)
    assert table.resume("b", 0, text_of(HEAD), 24) == (0, 0)
    assert table.upcoming("b", 0, text_of(HEAD), 24) is None
    table.grow("b", 24)
    assert not set(table.table("b")) & set(first)
    table.release("a")
    assert (table.remembered, table.available) == (0, 17)
    hand = hand_of("a", "b", share_prefixes=False)
    hand.run()
    assert hand.core.stats.shared_tokens == 0


def test_the_blocks_of_a_session_that_left_are_kept_until_somebody_needs_them() -> None:
    table: BlockTable[str] = BlockTable(6, SIZE)
    blocks = filled(table, "a", HEAD)
    table.release("a")
    assert (table.available, table.remembered) == (6, 5)
    assert table.resume("b", 0, text_of(HEAD), 39) == (32, 32)
    assert table.table("b") == blocks[:4]
    table.release("b")
    # The end of a text goes first.
    table.grow("c", 3 * SIZE)
    assert table.forgotten == 2
    assert table.resume("d", 0, text_of(HEAD), 39) == (24, 24)
    table.release("d", remember=False)
    assert table.remembered == 0
    assert table.resume("d", 0, text_of(HEAD), 39) == (0, 0)


def test_a_block_that_others_may_use_is_not_written_to() -> None:
    table: BlockTable[str] = BlockTable(20, SIZE)
    blocks = filled(table, "a", HEAD)
    # Attached again with a text that parts at 20, in the third block.
    other = (*HEAD[:20], *range(50, 70))
    assert table.resume("a", 20, text_of(other), 39) == (16, 0)
    table.grow("a", 40)
    assert table.table("a")[:2] == blocks[:2]
    table.note("a", 40, text_of(other))
    assert table.resume("b", 0, text_of(other), 40) == (40, 40)
    assert table.resume("c", 0, text_of(HEAD), 40)[0] in (16, 40)


def test_two_that_computed_the_same_at_once_go_on_from_either() -> None:
    table: BlockTable[str] = BlockTable(20, SIZE)
    for owner in "ab":
        table.grow(owner, 16)
    for owner in "ab":
        table.note(owner, 16, text_of(HEAD))
    table.grow("b", 24)
    table.note("b", 24, text_of(HEAD))
    assert table.resume("a", 16, text_of(HEAD), 40) == (24, 8)


# In the core


def test_one_of_several_computes_a_common_beginning() -> None:
    hand = hand_of()
    for device in "abcd":
        hand.open(device, prompt=(*HEAD, *(ord(device) - 40,) * 3))
    first = hand.forward()
    assert hand.seated(first) == ["a"]
    hand.finish(first)
    second = hand.forward()
    assert hand.seated(second) == ["b", "c", "d"]
    assert [seat.plan.keep for seat in second.seats] == [40, 40, 40]
    hand.finish(second)
    stats = hand.core.stats
    assert (stats.shared_tokens, stats.prefilled_tokens) == (120, 42 + 3 * 2)
    for device in "abcd":
        hand.ask(device)
    hand.run()
    for device in "abcd":
        held = hand.held(device)
        assert held.committed == continuation(held.prompt, 1)


def test_a_session_that_comes_back_finds_what_nobody_needed_meanwhile() -> None:
    hand = hand_of()
    hand.open("a", prompt=HEAD, max_tokens=3)
    hand.ask("a")
    hand.run()
    hand.receive("a", Close(1))
    hand.open("b", prompt=HEAD)
    hand.run()
    assert hand.core.stats.shared_tokens == 32


def test_who_wants_a_verdict_takes_the_blocks_of_who_is_idle() -> None:
    hand = hand_of(total=12, context=90)
    hand.open("a", prompt=tuple(range(1, 61)))
    hand.run()
    hand.open("b", prompt=tuple(range(2, 62)))
    hand.run()
    assert hand.held("a").cached == 59
    assert hand.held("b").cached == 32, "a mere prefill takes what is left and no more"
    hand.ask("b")
    hand.run()
    assert hand.core.slots.evictions == 1
    assert hand.held("a").cached == 32, "and finds again what was not needed"
    assert hand.held("b").committed == continuation(hand.held("b").prompt, 1)
    hand.ask("a")
    hand.run()
    assert hand.held("a").committed == continuation(hand.held("a").prompt, 1)


def test_sessions_that_do_not_fit_together_take_turns() -> None:
    hand = hand_of(total=12, context=90, limits=Limits(prefill_tokens=16))
    prompts = {device: tuple(range(n, n + 70)) for n, device in enumerate("abc", 1)}
    for device, prompt in prompts.items():
        hand.open(device, prompt=prompt)
    for turn in range(1, 5):
        for device in prompts:
            hand.ask(device)
        hand.run()
        for device, prompt in prompts.items():
            assert hand.held(device).committed == continuation(prompt, turn)


class Fleet(RuleBasedStateMachine):
    """Sessions with common heads come, ask, fail, return and go; ``Hand`` compares the contents."""

    def __init__(self) -> None:
        super().__init__()
        limits = Limits(forward_tokens=40, prefill_tokens=20)
        self.hand = hand_of(total=13, context=100, slots=3, limits=limits)
        self.attach = dict.fromkeys("abcde", 0)
        self.running: Any = None

    @rule(
        device=st.sampled_from("abcde"), head=st.integers(0, 40), own=st.integers(0, 20),
        keep=st.booleans(),
    )  # fmt: skip
    def opens(self, device: str, head: int, own: int, keep: bool) -> None:
        self.attach[device] += 1
        key = (device, "s")
        held = self.hand.core.sessions.get(key)  # type: ignore[call-overload]
        prompt = (*HEAD[:head], *(70 + ord(device) % 8,) * own) or (1,)
        committed: tuple[int, ...] = ()
        if keep and held is not None:
            prompt, committed = held.prompt, tuple(held.committed[: len(held.committed) - own % 3])
        self.hand.open(
            device, attach=self.attach[device], prompt=prompt, committed=committed, max_tokens=40
        )

    @rule(device=st.sampled_from("abcde"), wrong=st.integers(0, 3))
    def asks(self, device: str, wrong: int) -> None:
        held = self.hand.core.sessions.get((device, "s"))  # type: ignore[call-overload]
        if held is not None:
            right = continuation([*held.prompt, *held.committed], 3)
            drafts = [*right[: 3 - wrong], *([1] * wrong)]
            self.hand.ask(
                device, *drafts, attach=self.attach[device], epoch=self.hand.core.stats.drafts + 1
            )

    @rule(device=st.sampled_from("abcde"))
    def leaves(self, device: str) -> None:
        self.hand.receive(device, Close(self.attach[device]))

    @rule()
    @precondition(lambda self: self.running is None)
    def begins(self) -> None:
        self.running = self.hand.core.next_effect()

    @rule(fails=st.sampled_from((False, False, False, True)))
    @precondition(lambda self: self.running is not None)
    def ends(self, fails: bool) -> None:
        forward, self.running = self.running, None
        if fails:
            for seat in forward.seats:  # what is written to is spoilt
                for block in seat.blocks[seat.plan.keep // SIZE :]:
                    self.hand.blocks[block] = self.hand.blocks[block][: seat.plan.keep % SIZE]
            self.hand.core.forward_failed(forward)
        else:
            self.hand.finish(forward)

    @invariant()
    def nothing_is_lost_and_nothing_twice(self) -> None:
        core = self.hand.core
        table = core.blocks
        held = [block for each in core.sessions.values() for block in set(table.table(each))]
        assert table.available == table.total - len(set(held))
        assert len(table._tables) <= len(core.slots)
        assert len(table._index) == len(table._contents) <= table.total
        for session in core.sessions.values():
            assert len(table.table(session)) * SIZE >= session.cached

    @invariant()
    def every_text_is_exact(self) -> None:
        for held in self.hand.core.sessions.values():
            text = [*held.prompt, *held.committed]
            assert text == [*held.prompt, *continuation(held.prompt, len(held.committed))]

    def teardown(self) -> None:
        if self.running is not None:
            self.hand.finish(self.running)
        for key in list(self.hand.core.sessions):
            self.hand.core._forget(key)
        assert self.hand.core.blocks.available == 13


TestFleet = Fleet.TestCase
TestFleet.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
