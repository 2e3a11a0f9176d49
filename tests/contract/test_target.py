"""What every target keeps to: scripted, torch over several families, llama.cpp over two.

The reference is a plain forward over the whole sequence, without cache or company, and the choice
that ``torch_sampling`` makes from its last row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import LocalProtocolError, ModelError
from broker.sampling import Sampling
from cloud_verifier.engine.llama_target import LlamaTarget
from cloud_verifier.engine.scripted_target import ScriptedTarget
from cloud_verifier.engine.target import Target, Work
from cloud_verifier.engine.torch_sampling import choose
from cloud_verifier.engine.trees import depths, lineage
from tests import gguf_models
from tests.tiny_models import CONTEXT, FAMILIES, ROWS, VOCAB, model_of, plain_logits, target_of

GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=11)
PLAIN = Sampling(temperature=1.0, seed=2**63 + 5)
SAMPLINGS = {"greedy": GREEDY, "top-p": SAMPLED, "unfiltered": PLAIN}


def scripted_logits(sequence: Sequence[int]) -> np.ndarray:
    """Rows as a model with a padded embedding has them; the last 50 tokens and the place count."""
    seed = hash((len(sequence), *sequence[-50:])) & 0xFFFFFFFF
    return np.random.default_rng(seed).normal(size=ROWS).astype(np.float32) * 2


def scripted(**settings: int) -> ScriptedTarget:
    values = {"vocab_size": VOCAB, "context": CONTEXT, "max_slots": 8, **settings}
    return ScriptedTarget(scripted_logits, **values)


@dataclass(frozen=True)
class Subject:
    """One implementation. ``last_row(sequence)``: float32[VOCAB] of the reference.

    ``model``: the reference in transformers, where it is one.
    """

    make: Callable[..., Target]
    last_row: Callable[[Sequence[int]], torch.Tensor]
    model: Callable[[], Any] | None = None

    def choice(self, sequence: Sequence[int], position: int, sampling: Sampling) -> int:
        return choose(self.last_row(sequence)[None], position, sampling)[0]

    def text(self, prompt: Sequence[int], count: int, sampling: Sampling) -> list[int]:
        tokens: list[int] = []
        for position in range(count):
            tokens.append(self.choice([*prompt, *tokens], position, sampling))
        return tokens


def torch_subject(family: str) -> Subject:
    return Subject(
        lambda **settings: target_of(family, **settings),
        lambda sequence: plain_logits(model_of(family), sequence)[-1],
        lambda: model_of(family),
    )


def llama_subject(family: str) -> Subject:
    def make(**settings: Any) -> LlamaTarget:
        return LlamaTarget(gguf_models.gguf_of(family), threads=1, max_slots=8, **settings)

    return Subject(
        make,
        lambda sequence: plain_logits(gguf_models.reference(family), sequence)[-1],
        lambda: gguf_models.reference(family),
    )


SUBJECTS = {
    "scripted": Subject(scripted, lambda s: torch.from_numpy(scripted_logits(s)[:VOCAB])),
    **{family: torch_subject(family) for family in FAMILIES},
    **{f"llama.cpp-{family}": llama_subject(family) for family in gguf_models.FAMILIES},
}


@cache
def shared_target(name: str) -> Target:
    """For tests that begin each slot at 0 and leave no trace, which one of them shows."""
    return SUBJECTS[name].make()


@pytest.fixture(params=SUBJECTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def subject(name: str) -> Subject:
    return SUBJECTS[name]


@pytest.fixture
def target(name: str) -> Target:
    return shared_target(name)


def sequence_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


def prefill(target: Target, slot: int, tokens: Sequence[int]) -> None:
    assert target.forward([Work(slot, 0, tuple(tokens), 0, 0, GREEDY)]) == [[]]


def test_the_port_is_there(target: Target) -> None:
    assert (target.vocab_size, target.context, target.max_slots) == (VOCAB, CONTEXT, 8)
    assert target.name
    assert len(target.vocab_hash) == 16
    assert target.eos_ids == frozenset()
    assert target.forward([]) == []


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_forty_tokens_equal_plain_decoding(
    subject: Subject, target: Target, sampling: Sampling
) -> None:
    # Case 24: the windows of the sliding families are 8 tokens.
    prompt = sequence_of(5, 1)
    expected = subject.text(prompt, 40, sampling)
    assert len(set(expected)) > 5, "the reference says too little to compare with"
    found: list[int] = []
    fed, keep = tuple(prompt), 0
    for position in range(40):
        [[token]] = target.forward([Work(3, keep, fed, 1, position, sampling)])
        found.append(token)
        keep, fed = keep + len(fed), (token,)
    assert found == expected


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_a_verified_draft_gives_the_choice_after_each_token(
    subject: Subject, target: Target, sampling: Sampling
) -> None:
    text = sequence_of(70, 2)
    prefill(target, 0, text[:50])
    [found] = target.forward([Work(0, 50, tuple(text[50:70]), 20, 7, sampling)])
    assert found == [subject.choice(text[: 51 + i], 7 + i, sampling) for i in range(20)]


def test_choices_are_of_the_last_tokens(subject: Subject, target: Target) -> None:
    text = sequence_of(30, 3)
    [found] = target.forward([Work(0, 0, tuple(text), 2, 4, PLAIN)])
    assert found == [subject.choice(text[:29], 4, PLAIN), subject.choice(text, 5, PLAIN)]


def test_prefill_in_chunks_is_prefill(subject: Subject, target: Target) -> None:
    text = sequence_of(150, 4)
    for chunk in (150, 64, 63, 7):
        for start in range(0, 150, chunk):
            piece = tuple(text[start : start + chunk])
            choices = 1 if start + chunk >= 150 else 0
            [found] = target.forward([Work(1, start, piece, choices, 0, GREEDY)])
        assert found == [subject.choice(text, 0, GREEDY)], f"chunks of {chunk}"


def test_rejected_tokens_are_forgotten(subject: Subject, target: Target) -> None:
    # Case 23: none, some and all of a draft rejected, and an empty draft.
    prompt = sequence_of(60, 5)
    prefill(target, 0, prompt[:-1])
    held, pending = 59, [prompt[-1]]
    text = list(prompt)
    for position, (drafted, kept) in enumerate([(5, 5), (5, 2), (5, 0), (0, 0), (6, 1)]):
        draft = sequence_of(drafted, 100 + position)
        [found] = target.forward(
            [Work(0, held, (*pending, *draft), drafted + 1, position, SAMPLED)]
        )
        text += draft[:kept]
        assert found[kept] == subject.choice(text, position + kept, SAMPLED)
        pending = [found[kept]]
        held = len(text)
        text += pending


def test_another_session_leaves_no_trace(subject: Subject, target: Target) -> None:
    text = sequence_of(12, 6)
    prefill(target, 2, sequence_of(140, 7))
    [found] = target.forward([Work(2, 0, tuple(text), 12, 0, PLAIN)])
    assert found == [subject.choice(text[: i + 1], i, PLAIN) for i in range(12)]


def test_three_and_fifty_tokens_in_one_forward(subject: Subject, target: Target) -> None:
    # Case 30.
    short, long = sequence_of(43, 8), sequence_of(50, 9)
    prefill(target, 0, short[:40])
    alone_long = target.forward([Work(1, 0, tuple(long), 50, 0, SAMPLED)])
    alone_short = target.forward([Work(0, 40, tuple(short[40:]), 3, 9, PLAIN)])
    together = target.forward(
        [Work(0, 40, tuple(short[40:]), 3, 9, PLAIN), Work(1, 0, tuple(long), 50, 0, SAMPLED)]
    )
    assert together == alone_short + alone_long
    assert together[0] == [subject.choice(short[: 41 + i], 9 + i, PLAIN) for i in range(3)]


Plan = list[tuple[int, int, int]]  # tokens rejected before, tokens fed, choices at most
PLANS = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from((1, 1, 2, 5, 6, 33, 50, 64)), st.integers(0, 8)),
    min_size=1,
    max_size=4,
)


def works_of(plan: Plan, slot: int) -> list[Work]:
    works = []
    length = position = 0
    for number, (rejected, fed, choices) in enumerate(plan):
        keep = max(0, length - rejected)
        fed = min(fed, CONTEXT - keep)
        if fed == 0:
            break
        tokens = tuple(sequence_of(fed, 1000 * slot + number))
        sampling = (GREEDY, SAMPLED, PLAIN)[slot % 3]
        works.append(Work(slot, keep, tokens, min(choices, fed), position, sampling))
        length, position = keep + fed, position + 1
    return works


@settings(max_examples=20, deadline=None)
@given(plans=st.lists(PLANS, min_size=2, max_size=8), late=st.lists(st.integers(0, 2), max_size=8))
@pytest.mark.parametrize("company", SUBJECTS)
def test_company_changes_nothing(company: str, plans: list[Plan], late: list[int]) -> None:
    target = shared_target(company)
    sessions = [works_of(plan, slot) for slot, plan in enumerate(plans)]
    alone = [[target.forward([work])[0] for work in works] for works in sessions]
    starts = [*late, *[0] * len(sessions)]
    together: list[list[list[int]]] = [[] for _ in sessions]
    for turn in range(8):
        batch = [
            works[turn - start]
            for works, start in zip(sessions, starts, strict=False)
            if 0 <= turn - start < len(works)
        ]
        for work, chosen in zip(batch, target.forward(batch), strict=True):
            together[work.slot].append(chosen)
    assert together == alone


# Trees


def chain_choices(
    target: Target, prompt: Sequence[int], branch: Sequence[int], position: int, sampling: Sampling
) -> list[int]:
    """What the target chooses after the prompt and each token of one branch, in slot 7."""
    work = Work(7, 0, (*prompt, *branch), 1 + len(branch), position, sampling)
    return target.forward([work])[0]


def check_tree(
    target: Target,
    prompt: Sequence[int],
    parents: tuple[int, ...],
    drafted: Sequence[int],
    sampling: Sampling,
    *,
    pending: int = 1,
    company: Sequence[Work] = (),
) -> None:
    """A tree in slot 2 against its chains; ``pending`` tokens of the prompt are fed with it."""
    held = len(prompt) - pending
    if held:
        prefill(target, 2, prompt[:held])
    tokens = (*prompt[held:], *drafted)
    tree = Work(2, held, tokens, 1 + len(parents), 5, sampling, parents)
    found = target.forward([*company, tree])[len(company)]
    leaves = set(range(len(parents))) - set(parents)
    for leaf in leaves or {-1}:
        path = lineage(parents, leaf)
        expected = chain_choices(target, prompt, [drafted[node] for node in path], 5, sampling)
        assert [found[0], *(found[1 + node] for node in path)] == expected


TREES = {
    "two branches": (-1, 0, 1, 0, 3),
    "two roots": (-1, -1, 0, 1),
    "nested": (-1, 0, 0, 1, 1, 2, 5, 5, -1, 8),
    "a chain": (-1, 0, 1, 2),
    "only leaves": (-1, -1, -1),
    "no draft": (),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES.keys())
def test_a_tree_gives_what_its_chains_give(
    target: Target, parents: tuple[int, ...], sampling: Sampling
) -> None:
    # The second prompt ends before a block of K/V, the third within the first windows.
    for length in (40, 62, 3):
        check_tree(
            target, sequence_of(length, 20), parents, sequence_of(len(parents), 21), sampling
        )


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, ...]:
    count = draw(st.integers(1, 14))
    return tuple(draw(st.integers(-1, node - 1)) for node in range(count))


@settings(max_examples=25, deadline=None)
@given(
    parents=trees(),
    path_seed=st.integers(0, 10**6),
    length=st.integers(1, 100),
    pending=st.integers(1, 3),
    beside=st.integers(0, 3),
)
@pytest.mark.parametrize("engine", SUBJECTS)
def test_generation_goes_on_exactly_behind_a_tree(
    engine: str, parents: tuple[int, ...], path_seed: int, length: int, pending: int, beside: int
) -> None:
    target = shared_target(engine)
    prompt = sequence_of(length, 22)
    drafted = sequence_of(len(parents), 23)
    company = [Work(slot, 0, tuple(sequence_of(9, slot)), 2, 0, PLAIN) for slot in (1, 3, 5)]
    check_tree(
        target,
        prompt,
        parents,
        drafted,
        PLAIN,
        pending=min(pending, length),
        company=company[:beside],
    )
    draw = random.Random(path_seed)
    path = lineage(parents, draw.randrange(-1, len(parents)))
    path = path[: draw.randint(0, len(path))]
    keep = length + len(path) - draw.choice((0, 0, 0, 1)) * bool(path)
    text = [*prompt, *(drafted[node] for node in path)][:keep]
    # Another tree right behind, then a chain.
    second = (-1, 0, 0, 1)
    more = sequence_of(5, 24)
    work = Work(2, keep, tuple(more), 5, 9, PLAIN, second, tuple(path))
    [found] = target.forward([work])
    for leaf in (2, 3):
        branch = lineage(second, leaf)
        expected = chain_choices(
            target, [*text, more[0]], [more[1 + node] for node in branch], 9, PLAIN
        )
        assert [found[0], *(found[1 + node] for node in branch)] == expected
    text += [more[0], more[1], more[3]]
    [found] = target.forward([Work(2, len(text), (8, 9), 2, 12, PLAIN, path=(0, 2))])
    assert found == chain_choices(target, [*text, 8], [9], 12, PLAIN)


def test_a_choice_s_position_follows_from_its_depth(target: Target) -> None:
    # Two children with one token: the same choice, with the noise of the same position.
    prompt = tuple(sequence_of(10, 25))
    for seed in range(20):
        sampling = Sampling(temperature=1.0, seed=seed)
        [found] = target.forward([Work(2, 0, (*prompt, 4, 4), 3, 3, sampling, (-1, -1))])
        assert found[1] == found[2]
    assert depths((-1, -1, 1)) == [0, 0, 1]


def test_without_a_path_the_tree_is_forgotten(target: Target) -> None:
    prompt = sequence_of(10, 26)
    target.forward([Work(2, 0, (*prompt, 4, 5, 6), 4, 3, PLAIN, (-1, 0, 0))])
    with pytest.raises(LocalProtocolError, match="holds 10 tokens"):
        target.forward([Work(2, 11, (7,), 1, 3, PLAIN)])
    [found] = target.forward([Work(2, 10, (7,), 1, 3, PLAIN)])
    assert found == chain_choices(target, [*prompt, 7], [], 3, PLAIN)
    with pytest.raises(LocalProtocolError, match="no branch"):
        target.forward([Work(2, 11, (7,), 1, 3, PLAIN, path=(0,))])


@pytest.mark.parametrize(
    ("parents", "tokens", "choices", "word"),
    [
        ((-1, 1), 3, 3, "before its parent"),
        ((-1, 2, 1), 4, 4, "before its parent"),
        ((-2, 0), 3, 3, "before its parent"),
        ((-1, 0), 3, 2, "ask after each"),
        ((-1, 0, 1, 2), 4, 4, "one must stand before"),
    ],
)
def test_illegal_trees_raise(
    target: Target, parents: tuple[int, ...], tokens: int, choices: int, word: str
) -> None:
    prefill(target, 0, sequence_of(5, 27))
    with pytest.raises(LocalProtocolError, match=word) as caught:
        target.forward([Work(0, 5, (1, 2, 3, 4)[:tokens], choices, 0, PLAIN, parents)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", [(1,), (0, 0), (0, 2), (0, 1, 1), (-1,), (3,)])
def test_a_path_that_is_no_branch_raises(target: Target, path: tuple[int, ...]) -> None:
    target.forward([Work(0, 0, (1, 2, 3, 4), 4, 0, PLAIN, (-1, 0, -1))])
    with pytest.raises(LocalProtocolError, match="no branch"):
        target.forward([Work(0, 1, (5,), 1, 0, PLAIN, path=path)])


def test_padded_rows_never_win(name: str, subject: Subject) -> None:
    # Case 27: the tokenizer is smaller than the embedding.
    if name == "scripted":
        target: Target = ScriptedTarget(
            lambda s: np.where(np.arange(ROWS) < VOCAB, scripted_logits(s), np.float32(99.0)),
            VOCAB,
        )
    else:
        target = subject.make()
        assert subject.model is not None
        model = subject.model()
        winners = {
            int(model(input_ids=torch.tensor([sequence_of(3, seed)])).logits[0, -1].argmax())
            for seed in range(60)
        }
        assert any(token >= VOCAB for token in winners), "the padding would not win anyway"
    for seed in range(60):
        text = tuple(sequence_of(3, seed))
        for sampling in (GREEDY, PLAIN):
            [found] = target.forward([Work(0, 0, text, 3, 0, sampling)])
            assert max(found) < VOCAB
    target.close()


GOOD = (1, 2, 3)
WRONG = {
    "slot below": Work(-1, 0, GOOD, 1, 0, GREEDY),
    "slot beyond": Work(8, 0, GOOD, 1, 0, GREEDY),
    "no tokens": Work(1, 0, (), 0, 0, GREEDY),
    "more choices than tokens": Work(1, 0, GOOD, 4, 0, GREEDY),
    "choices below 0": Work(1, 0, GOOD, -1, 0, GREEDY),
    "keep more than is held": Work(1, 41, GOOD, 1, 0, GREEDY),
    "keep below 0": Work(1, -1, GOOD, 1, 0, GREEDY),
    "beyond the context": Work(1, 40, (1,) * (CONTEXT - 39), 1, 0, GREEDY),
    "id of the padding": Work(1, 0, (1, VOCAB), 1, 0, GREEDY),
    "id beyond the embedding": Work(1, 0, (1, 10**9), 1, 0, GREEDY),
    "id below 0": Work(1, 0, (-1, 1), 1, 0, GREEDY),
    "position below 0": Work(1, 0, GOOD, 1, -1, GREEDY),
    "position beyond the noise": Work(1, 0, GOOD, 1, 2**31, GREEDY),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_illegal_work_raises_and_changes_nothing(
    subject: Subject, target: Target, wrong: Work
) -> None:
    text = sequence_of(43, 10)
    prefill(target, 0, text[:40])
    prefill(target, 1, text[:40])
    with pytest.raises(LocalProtocolError) as caught:
        target.forward([Work(0, 0, GOOD, 1, 0, GREEDY), wrong])
    assert "\n" not in str(caught.value)
    for slot in (0, 1):
        [found] = target.forward([Work(slot, 40, tuple(text[40:]), 1, 0, GREEDY)])
        assert found == [subject.choice(text, 0, GREEDY)]


def test_a_slot_twice_in_a_batch_raises(target: Target) -> None:
    with pytest.raises(LocalProtocolError, match="twice"):
        target.forward([Work(0, 0, GOOD, 1, 0, GREEDY), Work(0, 0, GOOD, 1, 0, GREEDY)])


def test_the_context_can_be_filled_to_the_last_place(subject: Subject, target: Target) -> None:
    text = sequence_of(CONTEXT, 11)
    prefill(target, 0, text[:-1])
    [found] = target.forward([Work(0, CONTEXT - 1, (text[-1],), 1, 0, GREEDY)])
    assert found == [subject.choice(text, 0, GREEDY)]
    with pytest.raises(LocalProtocolError, match="context"):
        target.forward([Work(0, CONTEXT, (1,), 1, 1, GREEDY)])


def test_a_failed_forward_empties_its_slots_and_no_other(
    name: str, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = subject.make()
    text = sequence_of(20, 12)
    for slot in (0, 1, 2):
        prefill(target, slot, text)
    works = [Work(slot, 20, (5, 6), 1, 0, GREEDY) for slot in (0, 1)]
    with monkeypatch.context() as broken:
        if isinstance(target, ScriptedTarget):
            target.fail_at.add(target.forwards + 1)
        else:

            def fail(*_: object, **__: object) -> None:
                raise RuntimeError("out of memory:\nno bytes left")

            if isinstance(target, LlamaTarget):
                broken.setattr(target, "_decode", fail)
            else:
                broken.setattr(target._model.model.layers[-1], "forward", fail)  # type: ignore[attr-defined]
        with pytest.raises(ModelError) as caught:
            target.forward(works)
        assert "\n" not in str(caught.value)
    for work in works:
        with pytest.raises(LocalProtocolError, match="holds 0 tokens"):
            target.forward([work])
    again = [Work(slot, 0, (*text, 5, 6), 1, 0, GREEDY) for slot in (0, 1)]
    other = Work(2, 20, (5, 6), 1, 0, GREEDY)
    expected = [subject.choice([*text, 5, 6], 0, GREEDY)]
    assert target.forward([*again, other]) == [expected] * 3
    target.close()


def test_close_is_idempotent(subject: Subject) -> None:
    target = subject.make()
    target.close()
    target.close()
