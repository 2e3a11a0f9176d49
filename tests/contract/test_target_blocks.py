"""Targets whose K/V memory is handed out in blocks: no text hangs on where it lies or with whom.

Tables are in one piece, in several, in any order, shared with others; what is compared is bits in
the engine, and texts where the verifier's core hands blocks out.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import LocalProtocolError, ModelError
from broker.messages import Close, DraftBatch, SessionOpen
from broker.sampling import Sampling
from cloud_verifier import reference
from cloud_verifier.core.scheduler import Limits
from cloud_verifier.core.verifier import VerifierCore
from cloud_verifier.engine.scripted_target import ScriptedTarget
from cloud_verifier.engine.slots import BLOCK
from cloud_verifier.engine.target import Target, Work
from cloud_verifier.engine.torch_target import TorchTarget
from cloud_verifier.runtime import config_for
from tests.contract.test_target import (
    CONTEXT,
    GREEDY,
    PLAIN,
    SAMPLED,
    VOCAB,
    scripted_logits,
    sequence_of,
)
from tests.tiny_models import FAMILIES, target_of

SIZES = (1, 5, 30, 64, 70, 128, 150)
OWN = -(-CONTEXT // BLOCK)


def make(name: str, total: int) -> Target:
    if name == "scripted":
        return ScriptedTarget(
            scripted_logits, VOCAB, context=CONTEXT, max_slots=8, block_tokens=BLOCK,
            total_blocks=total,
        )  # fmt: skip
    probe = shared(name)
    assert isinstance(probe, TorchTarget)
    return target_of(name, kv_budget=total * BLOCK * probe.bytes_per_token)


@cache
def shared(name: str) -> Target:
    """With memory for all slots; for tests that name blocks and begin each table at 0."""
    return make(name, 8 * OWN) if name == "scripted" else target_of(name)


@cache
def plain(name: str) -> Target:
    """The same target, of whose blocks none was ever named."""
    return shared.__wrapped__(name)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=3),
    fed=st.integers(1, 40),
    head=st.sampled_from((0, 1, 2)),
    seed=st.integers(0, 10**6),
)
def test_where_a_text_lies_changes_no_bit(
    family: str, sizes: list[int], fed: int, head: int, seed: int
) -> None:
    target, other = shared(family), plain(family)
    assert isinstance(target, TorchTarget)
    assert isinstance(other, TorchTarget)
    draw = random.Random(seed)
    free = list(range(target.total_blocks))
    draw.shuffle(free)
    common = sequence_of(head * BLOCK, seed)
    shared_blocks = tuple(free.pop() for _ in range(head))
    if head:
        target.forward([Work(0, 0, tuple(common), 0, 0, GREEDY, blocks=shared_blocks)])
    texts = [
        [*common, *sequence_of(max(1, min(size, CONTEXT - head * BLOCK - fed)), seed + n)]
        for n, size in enumerate(sizes)
    ]
    lasts = [tuple(sequence_of(min(fed, CONTEXT - len(text)), n)) for n, text in enumerate(texts)]
    works = []
    for slot, (text, last) in enumerate(zip(texts, lasts, strict=True)):
        need = -(-(len(text) + len(last)) // BLOCK) - head
        if draw.random() < 0.5:
            table = tuple(free.pop() for _ in range(need))
        else:
            table = tuple(sorted(free.pop() for _ in range(need)))
        table = shared_blocks + table
        first = Work(slot, len(common), tuple(text[len(common) :]), 0, 0, GREEDY, blocks=table)
        target.forward([first])
        works.append(Work(slot, len(text), last, len(last), 0, GREEDY, blocks=table))
    together = target.logits(works).split([len(last) for last in lasts])
    for text, last, found in zip(texts, lasts, together, strict=True):
        other.forward([Work(7, 0, tuple(text), 0, 0, GREEDY)])
        alone = other.logits([Work(7, len(text), last, len(last), 0, GREEDY)])
        assert torch.equal(found, alone)


@pytest.mark.parametrize("family", ["scripted", *FAMILIES])
def test_a_tree_s_path_is_found_in_any_blocks(family: str) -> None:
    target = shared(family)
    for length in (60, 62, 63, 64):
        prompt = sequence_of(length, 30)
        drafted = sequence_of(6, 31)
        table = (9, 2, 14)
        tree = Work(
            2, 0, (*prompt, *drafted), 7, 3, PLAIN, (-1, 0, 0, 2, 3, 1), blocks=table
        )  # fmt: skip
        target.forward([tree])
        path = (0, 2, 3, 4)
        text = [*prompt, *(drafted[node] for node in path)]
        after = Work(2, len(text), (5, 6), 2, 7, PLAIN, path=path, blocks=table)
        [found] = target.forward([after])
        assert [found] == plain(family).forward([Work(7, 0, (*text, 5, 6), 2, 7, PLAIN)])


@pytest.mark.parametrize("family", ["scripted", "llama"])
def test_wrong_tables_raise_and_change_nothing(family: str) -> None:
    target = shared(family)
    text = tuple(sequence_of(70, 32))
    good = Work(0, 0, text, 1, 0, GREEDY, blocks=(3, 4))
    expected = target.forward([good])
    for blocks in ((3,), (3, 3), (3, -1), (3, target.total_blocks)):
        with pytest.raises(LocalProtocolError):
            target.forward([Work(0, 0, text, 1, 0, GREEDY, blocks=blocks)])
    with pytest.raises(LocalProtocolError, match="used twice"):
        target.forward([good, Work(1, 0, (1, 2), 1, 0, GREEDY, blocks=(4,))])
    with pytest.raises(LocalProtocolError, match="cannot be kept"):
        target.forward([Work(1, 70, (1,), 1, 0, GREEDY, blocks=(4, 3))])
    assert [target.forward([Work(0, 69, text[69:], 1, 0, GREEDY, blocks=(3, 4))])[0]] == expected


@pytest.mark.parametrize("family", ["scripted", "llama"])
def test_a_slot_has_no_blocks_of_its_own_once_blocks_are_handed_out(family: str) -> None:
    """Else the target's own runs would write over what a verifier remembers for others."""
    target = make(family, 8 * OWN)
    text = tuple(sequence_of(70, 34))
    [expected] = target.forward([Work(0, 0, text, 1, 0, GREEDY)])
    target.forward([Work(1, 0, text, 1, 0, GREEDY, blocks=(0, 1))])
    for work in (Work(0, 0, (1, 2), 1, 0, GREEDY), Work(0, 70, (1,), 1, 0, GREEDY)):
        with pytest.raises(LocalProtocolError, match="names no blocks"):
            target.forward([work])
    again = Work(1, 69, text[69:], 1, 0, GREEDY, blocks=(0, 1))
    assert target.forward([again]) == [expected]
    kept_back = tuple(range(4, 4 + OWN))
    steps = reference.generate(target, text[:60], GREEDY, 5, blocks=kept_back)
    assert [step.token for step in steps] == alone(family, text[:60], GREEDY, 5)
    assert target.forward([again]) == [expected]


def test_after_a_failure_shared_blocks_still_hold_what_others_need() -> None:
    target = make("scripted", 10)
    assert isinstance(target, ScriptedTarget)
    head, own = tuple(sequence_of(64, 33)), (1, 2, 3)
    target.forward([Work(0, 0, (*head, *own), 0, 0, GREEDY, blocks=(5, 6))])
    target.fail_at.add(target.forwards + 1)
    with pytest.raises(ModelError):
        target.forward([Work(1, 64, (7, 8), 1, 0, GREEDY, blocks=(5, 7))])
    [found] = target.forward([Work(0, 67, (4,), 1, 0, GREEDY, blocks=(5, 6))])
    assert [found] == target.forward([Work(1, 0, (*head, *own, 4), 1, 0, GREEDY, blocks=(8, 9))])


@cache
def alone(name: str, prompt: tuple[int, ...], sampling: Sampling, count: int) -> list[int]:
    """What the target writes with nobody beside it."""
    steps = reference.generate(plain(name), prompt, sampling, count)
    return [step.token for step in steps]


class Sessions:
    """A verifier's core over a real target with too little memory, and its edges."""

    def __init__(self, name: str, total: int, slots: int) -> None:
        self.name = name
        self.target = make(name, total)
        limits = Limits(forward_tokens=160, prefill_tokens=70)
        config = config_for(self.target, "v1", slots=slots, limits=limits)
        self.core = VerifierCore(config)
        self.now = 0.0

    def open(self, device: str, prompt: tuple[int, ...], sampling: Sampling) -> None:
        opened = SessionOpen(1, prompt, (), sampling, CONTEXT - len(prompt), self.target.vocab_hash)
        self.core.receive(device, "s", opened, self.now)

    def ask(self, device: str, wrong: int) -> None:
        """Three drafts, of which the last ``wrong`` are not what the target would write."""
        held = self.core.sessions.get((device, "s"))  # type: ignore[call-overload]
        if held is None or held.finish is not None or len(held.committed) > 8:
            return
        base = len(held.committed)
        right = alone(self.name, held.prompt, held.sampling, 12)[base : base + 3]
        drafts = (*right[: 3 - wrong], *((token + 1) % VOCAB for token in right[3 - wrong :]))
        epoch = self.core.stats.drafts + 1
        self.core.receive(device, "s", DraftBatch(1, epoch, base, drafts, None, True), self.now)

    def run(self, most: int) -> None:
        """``most`` forwards at most."""
        for _ in range(most):
            forward = self.core.next_effect()
            if forward is None:
                return
            works = [
                Work(
                    seat.slot, seat.plan.keep, seat.plan.tokens, seat.plan.choices,
                    seat.plan.position, seat.session.sampling, blocks=seat.blocks,
                )
                for seat in forward.seats
            ]  # fmt: skip
            self.now += 0.01
            self.core.forward_done(forward, self.target.forward(works), self.now, 0.01)

    def check(self) -> None:
        for held in self.core.sessions.values():
            expected = alone(self.name, held.prompt, held.sampling, 12)
            assert held.committed == expected[: len(held.committed)]


@pytest.mark.parametrize("name", ["scripted", *FAMILIES])
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6), total=st.integers(OWN, 9), slots=st.integers(1, 5))
def test_sharing_and_eviction_change_no_text(name: str, seed: int, total: int, slots: int) -> None:
    draw = random.Random(seed)
    fleet = Sessions(name, total, slots)
    held = fleet.target.bytes_allocated if isinstance(fleet.target, TorchTarget) else 0
    for _ in range(25):
        device = draw.choice("abcde")
        action = draw.random()
        if (device, "s") not in fleet.core.sessions:
            head = sequence_of(draw.choice((0, 64, 70, 128, 140)), draw.choice((40, 40, 41)))
            own = sequence_of(draw.randint(1, 30), draw.randint(0, 2))
            prompt = tuple([*head, *own][: CONTEXT - 20])
            fleet.open(device, prompt, draw.choice((GREEDY, SAMPLED, PLAIN)))
        elif action < 0.1:
            fleet.core.receive(device, "s", Close(1), fleet.now)
        fleet.ask(device, draw.randint(0, 3))
        fleet.run(draw.choice((0, 1, 1, 2, 20)))
        fleet.check()
    fleet.run(400)
    fleet.check()
    table = fleet.core.blocks
    assert all(not session.triggered for session in fleet.core.sessions.values())
    fleet.core.drain()
    assert table.available == table.total == total
    if isinstance(fleet.target, TorchTarget):
        assert fleet.target.bytes_allocated == held
    fleet.target.close()
