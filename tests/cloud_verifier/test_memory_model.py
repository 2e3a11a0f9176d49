"""A verifier's core and a scripted target over a model of K/V memory, driven at random.

The model knows of each place in memory which text ends there. Before a forward runs, every place
that a session is about to read must hold the session's own text; what a forward is writing, or has
half written when it fails, is marked. Sessions open, attach again with other texts, close and draft
while forwards run; forwards fail; memory is short; long prompts begin alike.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import LocalProtocolError, ModelError
from broker.messages import Close, DraftBatch, Resync, SessionOpen
from broker.sampling import Sampling
from cloud_verifier.core.scheduler import Limits
from cloud_verifier.core.verifier import SessionKey, VerifierCore
from cloud_verifier.engine.scripted_target import ScriptedTarget
from cloud_verifier.engine.target import Work
from cloud_verifier.engine.trees import trunk
from cloud_verifier.runtime import config_for, works_of

SIZE = 8
CONTEXT = 96
OWN = CONTEXT // SIZE
VOCAB = 100
SLOTS = 6
HEAD = tuple(range(1, 61))
GREEDY = Sampling()
LIMITS = Limits(forward_tokens=48, prefill_tokens=20, unasked_tokens=8)


def next_token(sequence: Sequence[int]) -> int:
    """Hangs on the whole sequence, so that a wrong memory shows."""
    return 1 + (sum(sequence) * 7 + len(sequence) * 13 + sequence[0] * 3) % (VOCAB - 1)


def continuation(text: Sequence[int], number: int) -> list[int]:
    sequence = list(text)
    for _ in range(number):
        sequence.append(next_token(sequence))
    return sequence[len(text) :]


class Places:
    """Which text ends at each place of memory: a hash of it, or that nobody can tell."""

    def __init__(self, total: int) -> None:
        self._ends: list[int | None] = [None] * (total * SIZE)

    @staticmethod
    def chain(text: Sequence[int]) -> list[int]:
        """The hash of each beginning of ``text``."""
        ends: list[int] = []
        for token in text:
            ends.append(hash((ends[-1] if ends else 0, token)))
        return ends

    def _at(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // SIZE] * SIZE + position % SIZE

    def read(self, blocks: Sequence[int], count: int) -> list[int | None]:
        return [self._ends[self._at(blocks, position)] for position in range(count)]

    def spoil(self, blocks: Sequence[int], start: int, end: int) -> None:
        for position in range(start, end):
            self._ends[self._at(blocks, position)] = None

    def move(self, old: Sequence[int], place: int, new: Sequence[int], goal: int) -> None:
        self._ends[self._at(new, goal)] = self._ends[self._at(old, place)]

    def write(
        self, blocks: Sequence[int], keep: int, tokens: Sequence[int], before: int | None = None
    ) -> None:
        """``tokens`` from ``keep`` on, behind what ends at ``before`` (else the place before)."""
        before = keep - 1 if before is None else before
        end = self._ends[self._at(blocks, before)] if before >= 0 else 0
        for offset, token in enumerate(tokens):
            end = None if end is None else hash((end, token))
            self._ends[self._at(blocks, keep + offset)] = end


@dataclass
class World:
    """One replica and the devices a to f, each with one session at a time."""

    seed: int
    total: int
    slots: int
    now: float = 0.0
    epoch: int = 1
    attaches: dict[str, int] = field(default_factory=dict)
    opened: dict[str, tuple[int, ...]] = field(default_factory=dict)  # text that it opened with
    trees: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # by slot

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.target = ScriptedTarget(
            script=next_token, vocab_size=VOCAB, context=CONTEXT, max_slots=SLOTS,
            block_tokens=SIZE, total_blocks=self.total,
        )  # fmt: skip
        self.places = Places(self.total)
        config = config_for(self.target, "v1", slots=self.slots, limits=LIMITS, idle_ttl=5.0)
        self.core = VerifierCore(config)

    # -- what devices do ------------------------------------------------------------------------

    def prompt(self) -> tuple[int, ...]:
        """Long heads that many have, parting in the middle of blocks and at their ends."""
        head = HEAD[: self.draw.choice((0, 8, 20, 40, 41, 47, 48, 60))]
        return (*head, *(self.draw.choice((70, 71)) for _ in range(self.draw.randint(1, 9))))

    def open(self, device: str) -> None:
        """A new session, or the one that is there attached again with what it has, or local."""
        held = self.core.sessions.get(SessionKey(device, "s"))
        attach = self.attaches[device] = self.attaches.get(device, 0) + 1
        prompt, committed = self.prompt(), list[int]()
        if held is not None and self.draw.random() < 0.8:
            prompt, committed = held.prompt, list(held.committed)
            change = self.draw.random()
            if change < 0.3 and committed:  # heard less than was committed
                del committed[self.draw.randrange(len(committed)) :]
            elif change < 0.6:  # went on alone, not as the target would
                del committed[self.draw.randint(0, len(committed)) :]
                committed += [self.draw.randint(1, 99) for _ in range(self.draw.randint(1, 12))]
        committed = committed[: max(0, CONTEXT - len(prompt) - 12)]
        most = CONTEXT - len(prompt)
        opened = SessionOpen(
            attach, prompt, tuple(committed), GREEDY, most, self.target.vocab_hash,
            ask=self.draw.random() < 0.5,
        )  # fmt: skip
        self.core.receive(device, "s", opened, self.now)
        if SessionKey(device, "s") in self.core.sessions:
            self.opened[device] = (*prompt, *committed)

    def speak(self, device: str) -> None:
        held = self.core.sessions.get(SessionKey(device, "s"))
        if held is None:
            return
        attach, base = held.attach, len(held.committed)
        what = self.draw.random()
        if what < 0.12:
            self.core.receive(device, "s", Close(attach), self.now)
        elif what < 0.2:
            have = self.draw.randint(0, base)
            self.core.receive(device, "s", Resync(attach, 0, have), self.now)
        else:
            drafts, parents = self.drafts((*held.prompt, *held.committed))
            asks = not drafts or self.draw.random() < 0.8
            self.epoch += self.draw.randint(0, 1)
            goes_on = asks and self.draw.random() < 0.2
            batch = DraftBatch(attach, self.epoch, base, drafts, parents, asks, goes_on)
            self.core.receive(device, "s", batch, self.now)

    def drafts(self, text: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """A chain or a tree of drafts behind ``text``, some of which are right."""
        right = continuation(text, 12)
        if self.draw.random() < 0.5:
            count, good = self.draw.randint(0, 12), self.draw.randint(0, 12)
            return tuple(t if n < good else t % 98 + 2 for n, t in enumerate(right[:count])), None
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for node in range(self.draw.randint(1, 14)):
            parent = self.draw.choice((node - 1, self.draw.randint(-1, node - 1)))
            depth = 0 if parent < 0 else depths[parent] + 1
            if depth >= len(right):
                break
            token = right[depth] if self.draw.random() < 0.7 else self.draw.randint(1, 99)
            if token not in (t for t, p in zip(tokens, parents, strict=True) if p == parent):
                tokens.append(token)
                parents.append(parent)
                depths.append(depth)
            else:
                break
        return tuple(tokens), tuple(parents)

    def anything(self) -> None:
        self.now += self.draw.choice((0.0, 0.01, 0.3))
        device = self.draw.choice("abcdef")
        if self.draw.random() < 0.35:
            self.open(device)
        else:
            self.speak(device)
        if self.draw.random() < 0.1:
            self.core.handle_timer(self.now)
        self.core.messages_to_send(self.now)

    # -- what the engine does -------------------------------------------------------------------

    def run(self, *, fails: bool = False, meanwhile: int = 0) -> bool:
        """One forward, with messages while it runs; whether there was one."""
        forward = self.core.next_effect()
        if forward is None:
            return False
        works = works_of(forward)
        for seat in forward.seats:
            written = set(seat.blocks[seat.session.settled // SIZE :])
            for other in forward.seats:
                assert other is seat or not written & set(other.blocks), (
                    "others read what it writes"
                )
        for work in works:
            self.settle(work)
        for work, seat in zip(works, forward.seats, strict=True):
            text = (*seat.session.prompt, *seat.session.committed)
            expected = self.places.chain(text[: work.keep])
            found = self.places.read(work.blocks, work.keep)
            assert found == expected, "it would read another text"
        for work in works:
            self.places.spoil(work.blocks, work.keep, work.keep + len(work.tokens))
        for _ in range(meanwhile):
            self.anything()
            assert self.core.next_effect() is None
        self.now += 0.01
        if fails:
            self.target.fail_at.add(self.target.forwards + 1)
            with pytest.raises(ModelError):
                self.target.forward(works)
            self.core.forward_failed(forward)
            return True
        for work in works:
            self.write(work)
        self.core.forward_done(forward, self.target.forward(works), self.now, 0.01)
        return True

    def settle(self, work: Work) -> None:
        """Move the accepted path of the slot's last tree to where the text goes on."""
        base, table = self.trees.pop(work.slot, (0, ()))
        for place, node in enumerate(work.path):
            self.places.move(table, base + node, work.blocks, base + place)

    def write(self, work: Work) -> None:
        chain = trunk(work)
        self.places.write(work.blocks, work.keep, work.tokens[:chain])
        base = work.keep + chain
        for node, token in enumerate(work.tokens[chain:]):
            before = base + work.parents[node] if work.parents and work.parents[node] >= 0 else -1
            self.places.write(work.blocks, base + node, (token,), max(before, base - 1))
        if work.parents:
            self.trees[work.slot] = base, work.blocks

    def run_by_itself(self) -> None:
        """The target's own text in a slot of its own, as a person with the engine at hand would."""
        text = tuple(self.draw.randint(1, 99) for _ in range(self.draw.randint(1, CONTEXT)))
        with suppress(LocalProtocolError):
            self.target.forward([Work(0, 0, text, 0, 0, GREEDY)])
            self.places.write(range(OWN), 0, text)

    # -- what must hold -------------------------------------------------------------------------

    def check(self) -> None:
        used: list[int] = []
        for key, held in self.core.sessions.items():
            text = self.opened[key.device]
            assert held.text(0, len(text)) == text
            assert held.text(len(text), held.length) == tuple(
                continuation(text, held.length - len(text))
            )
            table = self.core.blocks.table(held)
            assert len(table) * SIZE >= held.cached
            used += table
        assert len(set(used)) + self.core.blocks.available == self.total


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), total=st.integers(OWN, 4 * OWN), slots=st.integers(1, SLOTS))
def test_every_session_reads_its_own_text(seed: int, total: int, slots: int) -> None:
    world = World(seed, total, slots)
    for _ in range(120):
        step = world.draw.random()
        if step < 0.4:
            world.anything()
        elif step < 0.42:
            world.run_by_itself()
        else:
            world.run(fails=step < 0.47, meanwhile=world.draw.choice((0, 0, 1, 3)))
        world.check()
    for _ in range(400):
        if not world.run():
            break
        world.check()
    assert all(not held.triggered for held in world.core.sessions.values()), "somebody starves"
    world.core.drain()
    assert world.core.blocks.available == total


@pytest.mark.parametrize(("tree", "shared"), [(False, 56), (True, 40)])
def test_what_was_computed_in_or_behind_a_tree_is_not_shared(tree: bool, shared: int) -> None:
    """It differs by a rounding, which is no business of other sessions."""
    world = World(0, 24, 2)
    prompt = HEAD[:43]
    text = (*prompt, *continuation(prompt, 18))

    def open_and_ask(device: str, known: int, drafts: int) -> None:
        opened = SessionOpen(1, text[:known], (), GREEDY, 40, world.target.vocab_hash)
        world.core.receive(device, "s", opened, world.now)
        tokens, parents = text[known : known + drafts], None
        if tree:
            tokens, parents = (*tokens, 99), (*range(-1, drafts - 1), -1)
        batch = DraftBatch(1, 1, 0, tokens, parents, True)
        world.core.receive(device, "s", batch, world.now)
        while world.run():
            pass

    open_and_ask("a", 43, 8)
    world.core.receive("a", "s", DraftBatch(1, 1, 9, text[52:61], None, True), world.now)
    while world.run():
        pass
    assert world.core.stats.shared_tokens == 0
    open_and_ask("b", 60, 1)
    assert world.core.stats.shared_tokens == shared
    assert world.core.stats.shared_blocks == shared // SIZE
