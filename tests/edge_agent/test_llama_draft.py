"""The llama.cpp draft: broken files, rollback over windows, failures inside llama.cpp."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker import llama_library
from broker.errors import ConfigError, ModelError
from broker.sampling import Sampling
from edge_agent import llama_draft
from edge_agent.draft import Proposal
from edge_agent.llama_draft import LlamaDraft, LlamaDraftModel
from tests.draft_models import draft_file, draft_model

pytestmark = pytest.mark.models

GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=1)

STORY = (
    "The lighthouse keeper wrote in his log every evening. He noted the wind, the ships, the "
    "birds, and sometimes the mood of the sea. One night the lamp went out, and he walked up all "
    "two hundred steps with a candle in his hand. "
) * 16


@pytest.fixture(scope="module")
def smollm2() -> LlamaDraftModel:
    return draft_model("smollm2")


@pytest.fixture(scope="module")
def gemma3() -> LlamaDraftModel:
    return draft_model("gemma3")


def run(model: LlamaDraftModel, *chunks: list[int]) -> tuple[Proposal, Proposal]:
    """What a fresh sequence proposes after these evaluations."""
    draft = model.open()
    try:
        for chunk in chunks:
            draft.eval(chunk)
        return draft.propose(3, GREEDY), draft.propose(3, SAMPLED)
    finally:
        draft.close()


class TestFiles:
    def refused(self, path: Path) -> str:
        with pytest.raises(ModelError) as caught:
            LlamaDraftModel(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
        return str(caught.value)

    def test_missing(self, tmp_path: Path) -> None:
        assert "does not exist" in self.refused(tmp_path / "none.gguf")

    def test_a_directory(self, tmp_path: Path) -> None:
        assert "directory" in self.refused(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"G", b"GGUF", b"GGUF\3\0\0\0", b"\x7fELF" * 99])
    def test_no_gguf(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        self.refused(path)

    def test_truncated(self, tmp_path: Path) -> None:
        data = draft_file("smollm2").read_bytes()
        for size in (30, 5_000, 1_000_000, len(data) // 2, len(data) - 1):
            path = tmp_path / f"{size}.gguf"
            path.write_bytes(data[:size])
            assert "truncated" in self.refused(path)

    def test_a_kind_that_llama_cpp_does_not_know(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def text(value: str) -> bytes:
            return struct.pack("<Q", len(value)) + value.encode()

        key = text("general.architecture") + struct.pack("<I", 8) + text("perpetuum")
        path = tmp_path / "odd.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + bytes(64))
        assert "perpetuum" in self.refused(path)
        assert capfd.readouterr() == ("", "")

    def test_nothing_is_printed(self, capfd: pytest.CaptureFixture[str]) -> None:
        model = LlamaDraftModel(draft_file("smollm2"), context=64, threads=1)
        model.open().eval([5])
        model.close()
        assert capfd.readouterr() == ("", "")

    def test_importing_does_not_load_llama_cpp(self) -> None:
        code = (
            "import sys, edge_agent.llama_draft, edge_agent.text, edge_agent.scripted_draft\n"
            "heavy = {'llama_cpp', 'jinja2', 'torch', 'transformers'} & set(sys.modules)\n"
            "sys.exit(', '.join(heavy) or 0)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    @pytest.mark.parametrize("chosen", [None, "active"])
    def test_the_environment_is_left_alone(
        self, monkeypatch: pytest.MonkeyPatch, chosen: str | None
    ) -> None:
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        if chosen is None:
            monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        else:
            monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
        with llama_library._patient_openmp():
            assert os.environ["OMP_WAIT_POLICY"] == (chosen or "passive")
        assert os.environ.get("OMP_WAIT_POLICY") == chosen


class TestSettings:
    @pytest.mark.parametrize("name", ["context", "threads", "max_sequences"])
    def test_out_of_range(self, name: str) -> None:
        with pytest.raises(ConfigError, match="0"):
            LlamaDraftModel(draft_file("smollm2"), **{name: 0})

    def test_the_context_is_at_most_what_the_model_was_trained_for(self) -> None:
        model = LlamaDraftModel(draft_file("smollm2"), context=10**9, threads=1)
        assert model.context == 8192
        model.close()

    def test_description(self, smollm2: LlamaDraftModel, gemma3: LlamaDraftModel) -> None:
        assert smollm2.vocab_size == 49152
        assert gemma3.vocab_size == 262144
        assert smollm2.vocab_hash != gemma3.vocab_hash
        assert {0, 2} <= smollm2.eos_ids  # <|endoftext|>, <|im_end|>
        assert {1, 106} <= gemma3.eos_ids  # <eos>, <end_of_turn>
        assert 212 not in gemma3.eos_ids  # </s>, an HTML tag there

    def test_a_model_that_cannot_roll_back_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lib = llama_draft.llama_library()
        monkeypatch.setattr(lib, "llama_memory_seq_rm", lambda *_: False)
        with pytest.raises(ModelError, match="roll back"):
            LlamaDraftModel(draft_file("smollm2"), context=64, threads=1)

    def test_no_memory_for_another_sequence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = LlamaDraftModel(draft_file("smollm2"), context=64, threads=1, max_sequences=2)
        lib = llama_draft.llama_library()
        first = model.open()
        with monkeypatch.context() as patched:
            patched.setattr(lib, "llama_init_from_model", lambda *_: None)
            for _ in range(3):
                with pytest.raises(ModelError, match="64 tokens"):
                    model.open()
        second = model.open()  # what failed did not use a place up
        first.eval([5])
        second.eval([5])
        model.close()


class TestEvaluation:
    def test_confidence_is_the_plain_probability(self, smollm2: LlamaDraftModel) -> None:
        draft = smollm2.open()
        draft.eval(smollm2.text.encode_prompt("The capital of France is"))
        logits = draft._logits
        assert logits is not None
        assert logits.shape == (49152,)
        probs = np.exp(logits.astype(np.float64) - logits.max())
        probs /= probs.sum()
        for sampling in (GREEDY, SAMPLED):
            token, confidence = draft.propose(0, sampling)
            assert confidence == pytest.approx(probs[token], rel=1e-4)
        assert draft.propose(0, GREEDY).token == int(logits.argmax())
        assert smollm2.text.piece(draft.propose(0, GREEDY).token) == b" Paris"
        draft.close()

    def test_only_one_row_of_logits_and_nobody_can_write_it(self, smollm2: LlamaDraftModel) -> None:
        draft = smollm2.open()
        addresses = set()
        for chunk in ([5] * 600, [6], [7, 8]):
            draft.eval(chunk)
            addresses.add(draft._address)
        assert len(addresses) == 1
        assert draft._logits is not None
        with pytest.raises(ValueError, match="read-only"):
            draft._logits[0] = 1.0
        draft.close()

    def test_long_prompts_are_fed_in_batches(self, smollm2: LlamaDraftModel) -> None:
        ids = smollm2.text.encode_prompt(STORY)[:600]
        assert run(smollm2, ids) == run(smollm2, ids[:512], ids[512:])

    def test_a_context_used_before_leaves_no_trace(self, smollm2: LlamaDraftModel) -> None:
        ids = smollm2.text.encode_prompt(STORY)[:40]
        model = LlamaDraftModel(draft_file("smollm2"), context=700, threads=1)
        fresh = run(model, ids)
        dirty = model.open()
        dirty.eval(list(range(10, 650)))
        dirty.close()
        assert run(model, ids) == fresh
        model.close()

    def test_two_threads_draft_at_once(self, smollm2: LlamaDraftModel) -> None:
        ids = smollm2.text.encode_prompt(STORY)
        chunks = [[ids[:30], *([t] for t in ids[30:42])], [ids[50:90], *([t] for t in ids[90:102])]]
        alone = [run(smollm2, *part) for part in chunks]
        together: dict[int, Any] = {}

        def work(index: int) -> None:
            together[index] = run(smollm2, *chunks[index])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [together[0], together[1]] == alone


class TestRollback:
    """After a rollback nothing of the forgotten tokens is left, sliding windows included."""

    # gemma3's window is 512 tokens: a rollback from 600 to 40 needs cells that had left it.
    @pytest.mark.parametrize("keep", [40, 520])
    def test_far_back_over_the_window(self, gemma3: LlamaDraftModel, keep: int) -> None:
        ids = gemma3.text.encode_prompt(STORY)[:600]
        again = ids[7]
        draft = gemma3.open()
        draft.eval(ids[:keep])
        draft.eval(ids[keep:])
        draft.rollback(keep)
        draft.eval([again])
        rolled = draft.propose(3, GREEDY), draft.propose(3, SAMPLED)
        draft.close()
        assert rolled == run(gemma3, ids[:keep], [again])

    def test_further_back_than_a_window_sized_cache_holds(self) -> None:
        # llama.cpp's small cache keeps window + batch = 1024 cells, and forgets the rest.
        model = LlamaDraftModel(draft_file("gemma3"), context=1280, threads=1)
        ids = model.text.encode_prompt(STORY * 2)
        draft = model.open()
        draft.eval(ids[:200])
        draft.eval(ids[200:1240])
        draft.rollback(200)
        draft.eval([ids[7]])
        rolled = draft.propose(3, GREEDY), draft.propose(3, SAMPLED)
        draft.close()
        fresh = run(model, ids[:200], [ids[7]])
        model.close()
        assert rolled == fresh

    def test_a_whole_prefill_again(self, gemma3: LlamaDraftModel) -> None:
        ids = gemma3.text.encode_prompt(STORY)[:600]
        draft = gemma3.open()
        draft.eval(ids)
        first = draft.propose(3, GREEDY)
        draft.rollback(0)
        draft.eval(ids)
        assert draft.propose(3, GREEDY) == first
        draft.close()

    def test_drafting_in_rounds(self, smollm2: LlamaDraftModel) -> None:
        ids = smollm2.text.encode_prompt(STORY)[:60]
        draft = smollm2.open()
        draft.eval(ids[:20])
        for start, end in pairwise(range(20, 60, 4)):
            for wrong in (9, 99, 999):
                draft.eval([wrong])
            draft.rollback(start)
            for token in ids[start:end]:
                draft.eval([token])
        rolled = draft.propose(3, GREEDY), draft.propose(3, SAMPLED)
        draft.close()
        assert rolled == run(smollm2, ids[:20], *([token] for token in ids[20:56]))


class TestFailures:
    """Whatever happens inside a decode, the cache is what it was before the call."""

    @pytest.fixture
    def draft(self, smollm2: LlamaDraftModel) -> LlamaDraft:
        draft = smollm2.open()
        yield draft
        draft.close()

    def break_second_call(self, draft: LlamaDraft, act: Callable[[], int]) -> None:
        decode = draft._decode
        calls = 0

        def broken(*arguments: Any) -> int:
            nonlocal calls
            calls += 1
            return int(decode(*arguments)) if calls != 2 else act()

        draft._decode = broken

    @pytest.mark.parametrize("status", [1, 2, -1, -3])
    def test_llama_cpp_fails_half_way(
        self, smollm2: LlamaDraftModel, draft: LlamaDraft, status: int
    ) -> None:
        ids = smollm2.text.encode_prompt(STORY)
        decode = draft._decode
        draft.eval(ids[:20])
        self.break_second_call(draft, lambda: status)
        with pytest.raises(ModelError, match=f"status {status}"):
            draft.eval(ids[20:700])
        draft._decode = decode
        assert draft.length == 20
        draft.eval(ids[20:30])
        assert draft.propose(3, GREEDY) == run(smollm2, ids[:20], ids[20:30])[0]

    def test_interrupted_half_way(self, smollm2: LlamaDraftModel, draft: LlamaDraft) -> None:
        def interrupt() -> int:
            raise KeyboardInterrupt

        ids = smollm2.text.encode_prompt(STORY)
        decode = draft._decode
        draft.eval(ids[:20])
        self.break_second_call(draft, interrupt)
        with pytest.raises(KeyboardInterrupt):
            draft.eval(ids[20:700])
        draft._decode = decode
        assert draft.length == 20
        draft.eval(ids[20:30])
        assert draft.propose(3, GREEDY) == run(smollm2, ids[:20], ids[20:30])[0]

    def test_nan_logits_are_an_error(self, draft: LlamaDraft) -> None:
        draft.eval([5])
        draft._logits = np.full(49152, np.nan, dtype=np.float32)
        with pytest.raises(ModelError):
            draft.propose(0, GREEDY)
