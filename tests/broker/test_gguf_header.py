"""Telling a whole GGUF file from a broken one, without native code."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.errors import ModelError
from broker.gguf_header import read_header
from tests import tiny_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def rejected(path: Path) -> str:
    """The one line that the file is rejected with."""
    with pytest.raises(ModelError) as caught:
        read_header(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_a_whole_file(whole: Path) -> None:
    header = read_header(whole)
    assert header.version == 3
    assert header.architecture == "llama"
    assert header.tensors[0] == "token_embd.weight"
    assert len(header.tensors) == 2 + 9 * tiny_gguf.LAYERS
    assert header.metadata["tokenizer.ggml.tokens"] == tiny_gguf.vocabulary()
    assert header.metadata["tokenizer.ggml.token_type"][:4] == (3, 3, 3, 1)
    assert header.metadata["tokenizer.ggml.add_bos_token"] is False
    assert header.metadata["llama.rope.freq_base"] == 10000.0
    tensor_bytes = whole.stat().st_size - header.data_start
    assert header.parameters * 4 <= tensor_bytes < header.parameters * 4 + 32 * len(header.tensors)


def test_a_missing_file(tmp_path: Path) -> None:
    assert "does not exist" in rejected(tmp_path / "none.gguf")


def test_a_directory(tmp_path: Path) -> None:
    assert "is a directory" in rejected(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GG", b"ggml", b"PK\x03\x04 zip", b"\x00" * 100])
def test_another_kind_of_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    assert "is not a GGUF file" in rejected(tmp_path / "model.gguf")


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_another_version(tmp_path: Path, version: int) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 1, 1))
    assert "version" in rejected(tmp_path / "model.gguf")


@pytest.mark.parametrize("part", [4, 10, 24, 100, 3000, 10_000, -4096, -64])
def test_truncated_anywhere(whole: Path, tmp_path: Path, part: int) -> None:
    content = whole.read_bytes()
    (tmp_path / "model.gguf").write_bytes(content[:part])
    assert "truncated" in rejected(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "claims",
    [
        struct.pack("<QQ", 1 << 40, 1),
        struct.pack("<QQ", 1, 1 << 40),
        struct.pack("<QQ", 1, 1) + struct.pack("<Q", 1 << 62),
        struct.pack("<QQ", 1, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 1 << 60),
        struct.pack("<QQ", 1, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 1 << 23),
        struct.pack("<QQ", 1, 1) + struct.pack("<Q1sI", 1, b"k", 99),
        struct.pack("<QQ", 0, 0),
    ],
)
def test_huge_or_nonsensical_claims(tmp_path: Path, claims: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<I", 3) + claims)
    rejected(tmp_path / "model.gguf")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=st.lists(st.tuples(st.integers(4, 4000), st.integers(0, 255)), max_size=8))
def test_damaged_headers_are_read_or_rejected_never_worse(
    whole: Path, tmp_path: Path, damage: list[tuple[int, int]]
) -> None:
    content = bytearray(whole.read_bytes())
    for offset, byte in damage:
        content[offset] = byte
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with contextlib.suppress(ModelError):
        assert read_header(path).architecture is not None
