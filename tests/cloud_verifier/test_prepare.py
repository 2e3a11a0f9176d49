"""The target's directory: found, checked, or converted from GGUF once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from broker.errors import ConfigError, ModelError
from broker.gguf_header import GgufHeader, read_header
from broker.pairs import PAIRS
from broker.vocabulary import vocab_hash
from cloud_verifier.engine import prepare
from tests import tiny_gguf

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPESD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class TestResolve:
    def test_a_model_directory_and_a_hub_id_are_used_as_they_are(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert prepare.resolve_target(str(tmp_path)) == str(tmp_path)
        for name in ("gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-0.5B"):
            assert prepare.resolve_target(name) == name

    def test_a_directory_without_a_model_says_what_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"has no config\.json"):
            prepare.resolve_target(str(tmp_path))

    @pytest.mark.parametrize(
        "name", ["/no/such/dir", "./model", "~/none", "org/name/too/deep", "model.gguf", "a b"]
    )
    def test_a_path_that_is_not_there(self, name: str) -> None:
        with pytest.raises(ModelError, match="does not exist"):
            prepare.resolve_target(name)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is not a GGUF file"),
            (b"PK\x03\x04", "is not a GGUF file"),
            (b"GGUF\x03\x00\x00\x00\x01", "is truncated"),
        ],
    )
    def test_a_broken_file_is_one_line(
        self, own_cache: Path, tmp_path: Path, content: bytes, message: str
    ) -> None:
        path = tmp_path / "model.bin"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message) as caught:
            prepare.resolve_target(str(path))
        assert "\n" not in str(caught.value)

    def test_a_truncated_gguf_is_noticed_before_the_conversion(
        self, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tiny_gguf.write(tmp_path / "tiny.gguf")
        os.truncate(path, path.stat().st_size - 1000)
        monkeypatch.setattr(prepare, "run_step", lambda *a, **k: pytest.fail("started"))
        with pytest.raises(ModelError, match="is truncated"):
            prepare.resolve_target(str(path))

    def test_one_of_target_and_pair_is_needed(self) -> None:
        with pytest.raises(ConfigError, match="--target MODEL or --pair NAME"):
            prepare.resolve_target(None)
        with pytest.raises(ConfigError, match="--target MODEL or --pair NAME"):
            prepare.resolve_target("")
        with pytest.raises(ConfigError, match="not both"):
            prepare.resolve_target("gpt2", "smollm2")
        with pytest.raises(ConfigError, match="unknown pair"):
            prepare.resolve_target(None, "llama")

    def test_a_part_of_a_split_file_is_refused(
        self, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        header = GgufHeader(3, "llama", (), 0, 0, {"split.count": 2})
        monkeypatch.setattr(prepare, "read_header", lambda path: header)
        with pytest.raises(ModelError, match="one part of a split GGUF"):
            prepare.gguf_to_dir(tmp_path / "model-00001-of-00002.gguf")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A tiny GGUF converted for real, in a cache of its own."""
    base = tmp_path_factory.mktemp("conversion")
    source = tiny_gguf.write(base / "Tiny model.Q8.gguf")
    lines = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPESD_CACHE_DIR", str(base / "cache"))
        directory = Path(prepare.resolve_target(str(source), progress=lines.append))
    return SimpleNamespace(base=base, source=source, directory=directory, lines=lines)


class TestConversion:
    def test_it_is_done_once_per_content(
        self, converted: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIPESD_CACHE_DIR", str(converted.base / "cache"))
        assert [line.split(" (")[0] for line in converted.lines[:1]] == [
            "preparing target Tiny model.Q8.gguf"
        ]
        monkeypatch.setattr(prepare, "run_step", lambda *a, **k: pytest.fail("converted again"))
        lines = list[str]()
        assert prepare.gguf_to_dir(converted.source, lines.append) == converted.directory
        assert lines == []
        assert converted.directory.name.startswith("gguf-Tiny-model-Q8-")

    def test_another_content_under_the_same_name_is_another_model(
        self, converted: SimpleNamespace, tmp_path: Path
    ) -> None:
        header = read_header(converted.source)
        before = prepare._fingerprint(converted.source, header)
        other = tiny_gguf.write(tmp_path / converted.source.name, seed=1)
        state = converted.source.stat()
        os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert other.stat().st_size == state.st_size
        assert prepare._fingerprint(other, read_header(other)) != before

    def test_weights_are_the_files_own_in_float32(self, converted: SimpleNamespace) -> None:
        model = AutoModelForCausalLM.from_pretrained(converted.directory)
        assert model.dtype == torch.float32
        assert not hasattr(model.config, "quantization_config")
        assert model.config.max_position_embeddings == tiny_gguf.CONTEXT
        reference = AutoModelForCausalLM.from_pretrained(
            converted.source.parent, gguf_file=converted.source.name, dtype=torch.float32
        )
        ids = torch.arange(3, 40)[None]
        with torch.inference_mode():
            assert torch.equal(model(ids).logits, reference(ids).logits)

    def test_both_end_tokens_end_a_text(self, converted: SimpleNamespace) -> None:
        assert GenerationConfig.from_pretrained(converted.directory).eos_token_id == [0, 2]

    def test_the_tokenizer_survives(self, converted: SimpleNamespace) -> None:
        tokenizer = AutoTokenizer.from_pretrained(converted.directory)
        assert prepare.tokenizer_tokens(tokenizer) == tiny_gguf.vocabulary()
        assert tokenizer.chat_template == tiny_gguf.CHAT_TEMPLATE
        assert tokenizer.bos_token_id == 1
        assert tokenizer.eos_token_id == 2
        # No BOS of its own, digits cut off before the merges as llama.cpp does.
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(" a 1<|im_end|>")["input_ids"])
        assert tokens == ["Ġa", "Ġ", "1", "<|im_end|>"]

    def test_the_vocabulary_hash_is_that_of_the_file(self, converted: SimpleNamespace) -> None:
        tokenizer = AutoTokenizer.from_pretrained(converted.directory)
        tokens = read_header(converted.source).metadata["tokenizer.ggml.tokens"]
        assert vocab_hash(prepare.tokenizer_tokens(tokenizer)) == vocab_hash(tokens)

    def test_entries_past_the_embedding_are_left_out(self, converted: SimpleNamespace) -> None:
        tokenizer = AutoTokenizer.from_pretrained(converted.directory)
        assert prepare.tokenizer_tokens(tokenizer, 5) == tiny_gguf.vocabulary()[:5]
        rows = len(tiny_gguf.vocabulary())
        assert len(prepare.tokenizer_tokens(tokenizer, rows + 100)) == rows

    def test_an_unknown_architecture_is_one_line(self, own_cache: Path, tmp_path: Path) -> None:
        path = tiny_gguf.write(tmp_path / "odd.gguf", architecture="plamo")
        lines = list[str]()
        with pytest.raises(ModelError, match=r"converting odd\.gguf failed: .*plamo") as caught:
            prepare.gguf_to_dir(path, lines.append)
        assert "\n" not in str(caught.value)
        assert list((own_cache / "models").glob(".*.tmp-*")) == []


class TestEndIds:
    def header(self, **metadata: Any) -> GgufHeader:
        return GgufHeader(
            3, "llama", (), 0, 0, {f"tokenizer.ggml.{key}": v for key, v in metadata.items()}
        )

    def test_named_and_known_ends_are_joined(self) -> None:
        header = self.header(
            eos_token_id=1,
            eot_token_id=4,
            tokens=["x", "<eos>", "<end_of_turn>", "</s>", "<odd>"],
            token_type=(1, 3, 3, 4, 3),
        )
        # Id 3 is spelled like an end but is an ordinary HTML tag in this vocabulary.
        assert prepare.end_ids(header) == [1, 2, 4]

    def test_a_file_that_names_none_has_none(self) -> None:
        assert prepare.end_ids(self.header(tokens=["a"])) == []


def test_large_models_are_stored_in_half_the_space(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    asked = list[str]()

    def convert(source: Path, directory: Path, dtype: str) -> None:
        asked.append(dtype)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(prepare, "_convert_in_child", convert)
    prepare.gguf_to_dir(path, lambda _: None)
    monkeypatch.setattr(prepare, "_FLOAT32_PARAMETERS", 1000)
    prepare.gguf_to_dir(path, lambda _: None)
    assert asked == ["float32", "bfloat16"]


def test_importing_the_module_loads_no_model_library() -> None:
    code = (
        "import sys, cloud_verifier.engine.prepare; "
        "print([m for m in ('torch', 'transformers', 'gguf', 'llama_cpp') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.models
@pytest.mark.parametrize("pair", sorted(PAIRS))
class TestPairs:
    def test_the_prepared_target_has_what_a_verifier_needs(self, pair: str) -> None:
        directory = prepare.prepare_target(pair)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        ends = GenerationConfig.from_pretrained(directory).eos_token_id
        first = tokenizer("Hello")["input_ids"][0]
        if pair == "smollm2":
            assert ends == [0, 2]
            assert tokenizer.convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|im_end|>"]
            assert first != tokenizer.bos_token_id
            assert tokenizer.chat_template is not None
        else:
            assert tokenizer.convert_ids_to_tokens(ends) == ["<eos>", "<end_of_turn>"]
            assert first == tokenizer.bos_token_id == 2
            assert tokenizer.chat_template is None

    def test_it_is_there_in_no_time_the_second_time(
        self, pair: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = prepare.prepare_target(pair)
        monkeypatch.setattr(prepare, "run_step", lambda *a, **k: pytest.fail("converted again"))
        lines = list[str]()
        assert prepare.resolve_target(None, pair, lines.append) == str(directory)
        assert lines == []
