"""The llama.cpp engine beyond the contract: bits, limits, files, and the torch engine's text."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker import llama_library
from broker.errors import ConfigError, LocalProtocolError, ModelError
from broker.gguf_header import GgufHeader
from broker.sampling import Sampling
from cloud_verifier import reference
from cloud_verifier.engine import llama_prepare
from cloud_verifier.engine.llama_cells import SPARE, cell_bytes, slot_cells, slots_for
from cloud_verifier.engine.llama_passes import LEAST, Window, plan
from cloud_verifier.engine.llama_rows import ROWS
from cloud_verifier.engine.llama_target import LlamaTarget
from cloud_verifier.engine.llama_text import LlamaText
from cloud_verifier.engine.target import Work
from tests import gguf_models, tiny_gguf
from tests.commands import call, error_line
from tests.tiny_models import CONTEXT, VOCAB, plain_logits, sequence_of

PROGRAM = "cloud-verifier"
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=5)


class Recorder:
    """A target with the logits of slot 2: float32[VOCAB] by sequence position."""

    def __init__(self, target: LlamaTarget) -> None:
        self.target = target
        self.rows: dict[int, np.ndarray] = {}
        self._plain = target._logits
        target._logits = self._keep  # type: ignore[method-assign]

    def _keep(self, row: int) -> Any:
        logits = self._plain(row)
        if self.target._rows._slots[row] == 2:
            self.rows[self.target._rows._positions[row]] = logits[:VOCAB].copy()
        return logits

    def take(self) -> list[np.ndarray]:
        rows = [self.rows[position] for position in sorted(self.rows)]
        self.rows = {}
        return rows


@cache
def tiny(family: str = "llama", dtype: str = "float32") -> Recorder:
    path = gguf_models.gguf_of(family)
    return Recorder(LlamaTarget(path, threads=1, max_slots=8, dtype=dtype))


def draw_work(draw: random.Random, slot: int) -> Work:
    count = draw.choice((1, 1, 3, 5, 8, 40))
    return Work(slot, 0, tuple(sequence_of(count, slot)), draw.randint(0, count), 0, GREEDY)


@pytest.mark.parametrize("family", gguf_models.FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    recorder = tiny(family)
    text = sequence_of(150, 1)
    recorder.target.forward([Work(2, 0, tuple(text[:70]), 0, 0, GREEDY)])
    recorder.target.forward([Work(2, 60, tuple(text[60:]), 90, 0, GREEDY)])
    expected = plain_logits(gguf_models.reference(family), text)[60:].numpy()
    # gemma's GELU is a table of 16 bits in llama.cpp.
    assert np.abs(np.array(recorder.take()) - expected).max() < (
        5e-3 if family == "gemma3" else 1e-4
    )


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 70), min_size=1, max_size=8), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", gguf_models.FAMILIES)
def test_not_a_bit_changes_with_the_cuts_or_the_company(
    family: str, dtype: str, cuts: list[int], seed: int
) -> None:
    recorder = tiny(family, dtype)
    text = sequence_of(CONTEXT, 4)
    recorder.target.forward([Work(2, 0, tuple(text), len(text), 0, GREEDY)])
    whole = recorder.take()
    draw = random.Random(seed)
    start = 0
    for cut in cuts:
        piece = tuple(text[start : start + cut])
        if not piece:
            break
        batch = [Work(2, start, piece, len(piece), 0, GREEDY)]
        batch += [draw_work(draw, slot) for slot in (0, 1, 3, 6, 7) if draw.random() < 0.5]
        draw.shuffle(batch)
        recorder.target.forward(batch)
        start += len(piece)
    found = recorder.take()
    assert len(found) == start
    assert all(np.array_equal(a, b) for a, b in zip(found, whole, strict=False))


@pytest.mark.parametrize("ftype", [1, 2, 7], ids=["f16", "q4_0", "q8_0"])
def test_files_of_other_types_keep_their_bits(ftype: int, tmp_path: Path) -> None:
    lib = llama_library.llama_library()
    settings = lib.llama_model_quantize_default_params()
    settings.ftype = ftype
    path = tmp_path / "other.gguf"
    source = bytes(gguf_models.gguf_of("llama"))
    assert lib.llama_model_quantize(source, bytes(path), ctypes.byref(settings)) == 0
    target = LlamaTarget(path, threads=1, max_slots=4)
    text = sequence_of(60, 4)
    whole = target.logits(Work(2, 0, tuple(text), 60, 0, GREEDY))
    place = 0
    for cut in (1, 2, 1, 7, 13, 1, 35):
        rows = target.logits(Work(1, place, tuple(text[place : place + cut]), cut, 0, GREEDY))
        assert np.array_equal(rows, whole[place : place + cut])
        place += cut
    target.close()


def test_company_that_fills_its_context_and_beyond_one_pass() -> None:
    target = tiny().target
    text = tuple(sequence_of(CONTEXT, 8))
    works = [Work(slot, 0, text, 1, 0, GREEDY) for slot in range(8)]
    [[alone]] = target.forward(works[:1])
    assert len(text) > ROWS
    assert target.forward(works) == [[alone]] * 8
    # All are full, and one of them is verified again between the others.
    short = [Work(slot, CONTEXT - 1 - slot, text[-1 - slot :], 1, 0, GREEDY) for slot in range(8)]
    assert target.forward(short) == [[alone]] * 8


# Passes


@settings(max_examples=200, deadline=None)
@given(
    remaining=st.dictionaries(st.integers(0, 63), st.integers(1, 300), min_size=1),
    multiple=st.sampled_from((1, 4, 8)),
)
def test_every_plan_serves_the_lowest_slot_within_the_limits(
    remaining: dict[int, int], multiple: int
) -> None:
    left = dict(remaining)
    rounds = 0
    while left:
        window = plan(left, multiple=multiple, limit=ROWS, spare=SPARE)
        span = window.last - window.first + 1
        assert window.first == min(left)
        assert window.last in left
        assert span * window.rows <= ROWS
        assert span * window.rows % multiple == 0
        assert window.rows >= LEAST
        for slot in range(window.first, window.last + 1):
            assert window.rows - min(left.get(slot, 0), window.rows) <= SPARE
            left[slot] = left.get(slot, 0) - window.rows
        left = {slot: rows for slot, rows in left.items() if rows > 0}
        rounds += 1
    assert rounds <= sum(-(-rows // LEAST) for rows in remaining.values())


def test_alike_works_share_one_pass_and_far_or_long_ones_do_not() -> None:
    limits = {"multiple": 1, "limit": 128, "spare": 32}
    assert plan(dict.fromkeys(range(8), 5), **limits) == Window(0, 7, 5)
    assert plan({0: 5, 1: 4, 2: 6, 4: 5}, **limits).last == 4
    assert plan({0: 5, 1: 64, 2: 5}, **limits) == Window(0, 2, 5)
    assert plan({0: 2, 60: 2}, **limits) == Window(0, 0, 2)
    assert plan({3: 500}, **limits) == Window(3, 3, 128)


# What is refused


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"dtype": "int8"}, "float32, bfloat16"),
        ({"max_slots": 0}, "1 to 256"),
        ({"max_slots": 257}, "1 to 256"),
        ({"threads": 0}, "at least 1"),
        ({"context": 1}, "at least 2"),
    ],
)
def test_settings_out_of_range(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        LlamaTarget(gguf_models.gguf_of("llama"), **change)


def test_broken_files_are_one_line(tmp_path: Path) -> None:
    whole = tiny_gguf.write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "broken.gguf"
    for content, word in (
        (b"PK", "not a GGUF"),
        (whole[:-5000], "truncated"),
        (whole.replace(b"output_norm", b"autput_norm"), "llama.cpp cannot load"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=word) as caught:
            LlamaTarget(path, threads=1)
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="does not exist"):
        LlamaTarget(tmp_path / "missing.gguf")


def test_an_unknown_architecture(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "odd.gguf", architecture="pipes")
    with pytest.raises(ModelError, match="cannot load"):
        LlamaTarget(path, threads=1)


def test_the_context_is_the_model_s_at_most() -> None:
    target = LlamaTarget(gguf_models.gguf_of("llama"), threads=1, context=10**6, max_slots=1)
    assert target.context == CONTEXT
    target.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        target.forward([Work(0, 0, (1,), 1, 0, GREEDY)])


def test_a_status_of_llama_cpp_starts_the_sessions_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target = LlamaTarget(gguf_models.gguf_of("llama"), threads=1, max_slots=2)
    target.forward([Work(0, 0, (1, 2, 3), 1, 0, GREEDY)])
    with monkeypatch.context() as broken:
        broken.setattr(target, "_decode", lambda batch: -3)
        with pytest.raises(ModelError, match="status -3"):
            target.forward([Work(0, 3, (1,), 1, 0, GREEDY)])
    with pytest.raises(LocalProtocolError, match="holds 0 tokens"):
        target.forward([Work(0, 3, (1,), 1, 0, GREEDY)])
    target.close()


@pytest.fixture
def without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", None)
    llama_library._load.cache_clear()
    yield
    llama_library._load.cache_clear()


def test_a_missing_library_is_named_with_its_extra(without_llama_cpp: None) -> None:
    prompt = ("generate", "--engine", "llama", "--pair", "smollm2", "--prompt", "x")
    error_line(
        call("cloud-verifier", *prompt), 2, "pip install 'pipesd[cloud-llama]'", program=PROGRAM
    )


def test_the_engine_needs_neither_torch_nor_llama_cpp_before_a_model_is_wanted() -> None:
    code = (
        "import sys; import cloud_verifier.engine.llama_target, cloud_verifier.engine.llama_text, "
        "cloud_verifier.engine.llama_prepare; "
        "assert not {'torch', 'transformers', 'llama_cpp', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("flags", "code", "word"),
    [
        (("--target", "some/hub-id"), 2, "serves a .gguf file"),
        (("--target", "missing.gguf"), 1, "does not exist"),
        (("--pair", "smollm2", "--device", "cuda"), 2, "leave out --device"),
        ((), 2, "--target MODEL or --pair"),
    ],
)
def test_wrong_flags_of_the_engine(flags: Sequence[str], code: int, word: str) -> None:
    result = call("cloud-verifier", "generate", "--engine", "llama", "--prompt", "x", *flags)
    error_line(result, code, word, program=PROGRAM)


# Text


def test_text_there_and_back(tmp_path: Path) -> None:
    text = LlamaText(tiny_gguf.write(tmp_path / "tiny.gguf"))
    assert text.has_chat_template
    assert text.decode(text.encode_prompt("ďábelské 🦙 1 a")) == "ďábelské 🦙 1 a"
    chat = text.encode_chat([{"role": "user", "content": "Hi"}])
    assert chat == text.encode_prompt("<|im_start|>Hi<|im_end|>")
    assert text.decode(chat) == "Hi"
    with pytest.raises(ConfigError, match="Unicode"):
        text.encode_prompt("\ud800")
    with pytest.raises(ConfigError, match="bytes"):
        text.encode_prompt("a" * (1 << 21))


def test_a_generation_by_command(tmp_path: Path) -> None:
    path = str(tiny_gguf.write(tmp_path / "tiny.gguf"))
    flags = ("--engine", "llama", "--target", path, "--threads", "1", "--slots", "1", "--json")
    result = call("cloud-verifier", "generate", *flags, "--prompt", "abc", "--max-tokens", "5")
    assert (result.code, result.err) == (0, "")
    assert '"mode": "target"' in result.out


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_a_budget_says_how_many_slots_there_are(dtype: str, item: int) -> None:
    path = gguf_models.gguf_of("llama")
    cell = 2 * 2 * (16 + 16) * item  # layers, K/V heads, key and value
    each = cell * slot_cells(CONTEXT)

    def slots(budget: int) -> LlamaTarget:
        return LlamaTarget(path, threads=1, max_slots=8, dtype=dtype, kv_budget=budget)

    target = slots(3 * each - 1)
    assert (target.max_slots, target.total_blocks, target.block_tokens) == (2, 2, CONTEXT)
    assert [len(row) for row in target.forward([draw_work(random.Random(3), 1)])] != []
    with pytest.raises(LocalProtocolError, match="not one of 2"):
        target.forward([Work(2, 0, (1,), 1, 0, GREEDY)])
    target.close()
    target = slots(100 * each)
    assert target.max_slots == 8
    target.close()
    with pytest.raises(ConfigError, match="holds no session of the whole context: give"):
        slots(each - 1)


def header_of(**metadata: object) -> GgufHeader:
    named = {f"any.{name.replace('__', '.')}": value for name, value in metadata.items()}
    return GgufHeader(3, "any", (), 0, 0, named)


def test_cells_of_models_that_say_little_or_differ_by_layer() -> None:
    facts = {"block_count": 3, "embedding_length": 64, "attention__head_count": 4}
    assert cell_bytes(header_of(**facts), 4) == 3 * 4 * 32 * 4
    assert cell_bytes(header_of(**facts, attention__head_count_kv=2), 2) == 3 * 2 * 32 * 2
    assert cell_bytes(header_of(**facts, attention__head_count_kv=(2, 1, 0)), 4) == 3 * 32 * 4
    lengths = {"attention__key_length": 24, "attention__value_length": 8}
    assert cell_bytes(header_of(**facts, **lengths), 4) == 3 * 4 * 32 * 4
    for silent in ({}, {"block_count": 3}, {**facts, "attention__head_count": 0}):
        assert cell_bytes(header_of(**silent), 4) is None
    with pytest.raises(ConfigError, match="leave out --kv-budget"):
        slots_for(10**9, header_of(), item=4, context=64, max_slots=2, available=None)


def test_cells_for_which_there_is_no_memory_are_refused() -> None:
    """llama.cpp would take them, and the system end the process when they fill."""
    header = header_of(block_count=1, embedding_length=64, attention__head_count=4)
    each = 2 * 64 * 4 * slot_cells(64)

    def slots(budget: int | None, available: int) -> int:
        return slots_for(budget, header, item=4, context=64, max_slots=3, available=available)

    assert slots(None, 3 * each) == slots(10**9, 3 * each) == 3
    assert slots(2 * each, 2 * each) == 2
    with pytest.raises(ConfigError, match="lower --slots or --context"):
        slots(None, 3 * each - 1)
    with pytest.raises(ConfigError, match="lower --kv-budget"):
        slots(10**9, 3 * each - 1)


def test_as_many_slots_as_llama_cpp_can_tell_apart() -> None:
    """It ends the process where it may not have a row of each, which is more than a pass has."""
    target = LlamaTarget(gguf_models.gguf_of("llama"), threads=1, context=32, max_slots=256)
    works = [Work(slot, 0, (slot % VOCAB, 5), 1, 0, GREEDY) for slot in range(256)]
    together = target.forward(works)
    for slot in (0, 127, 128, 255):
        target.free(slot)
        assert target.forward([works[slot]]) == [together[slot]]
    target.close()


# The real pair


def engines_text(target: Any, prompt: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    return [step.token for step in reference.generate(target, tuple(prompt), sampling, count)]


@pytest.mark.models
@pytest.mark.slow
def test_smollm2_says_on_llama_cpp_what_it_says_on_torch() -> None:
    from cloud_verifier.engine.prepare import prepare_target
    from cloud_verifier.engine.torch_target import TorchTarget
    from cloud_verifier.engine.torch_text import TargetText

    directory = str(prepare_target("smollm2"))
    path = llama_prepare.prepare_gguf("smollm2")
    words, own = TargetText(directory), LlamaText(path)
    torch_target = TorchTarget.load(directory, context=256, max_slots=1)
    target = LlamaTarget(path, threads=1, context=256, max_slots=3)
    assert (target.vocab_hash, target.eos_ids) == (torch_target.vocab_hash, torch_target.eos_ids)
    for question, sampling in (("Name three rivers.", GREEDY), ("Tell me a story.", SAMPLED)):
        chat = [{"role": "user", "content": question}]
        prompt = words.encode_chat(chat)
        assert own.encode_chat(chat) == prompt
        expected = engines_text(torch_target, prompt, sampling, 30)
        found = engines_text(target, prompt, sampling, 30)
        assert found == expected
        assert own.decode(found) == words.decode(expected)
        # The same verdict in company, as one draft and as a tree beside it.
        drafted = tuple(found[:-1])
        beside = [Work(slot, 0, tuple(prompt[:9]), 3, 0, GREEDY) for slot in (0, 2)]
        [_, verdict, _] = target.forward(
            [
                beside[0],
                Work(1, 0, (*prompt, *drafted), 1 + len(drafted), 0, sampling),
                beside[1],
            ]
        )
        assert verdict == found
        parents = (-1, *range(5), -1, 6)
        tree = Work(1, len(prompt) - 1, (prompt[-1], *found[:6], 5, 6), 9, 0, sampling, parents)
        assert target.forward([tree])[0][:7] == found[:7]
    target.close()
    torch_target.close()
