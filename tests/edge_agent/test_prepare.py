"""The draft's file: found, checked, or requantised once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from broker.errors import ConfigError, ModelError
from broker.gguf_header import read_header
from broker.pairs import PAIRS
from edge_agent import prepare
from tests import tiny_gguf

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPESD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class TestResolve:
    def test_a_given_file_is_used_as_it_is(self, tmp_path: Path) -> None:
        path = tiny_gguf.write(tmp_path / "tiny.gguf")
        assert prepare.resolve_draft(str(path)) == path

    def test_the_home_directory_is_understood(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        path = tiny_gguf.write(tmp_path / "tiny.gguf")
        assert prepare.resolve_draft("~/tiny.gguf") == path

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "does not exist"),
            (b"PK\x03\x04", "is not a GGUF file"),
            (b"GGUF\x03\x00\x00\x00\x01", "is truncated"),
        ],
    )
    def test_a_broken_file_is_one_line(
        self, tmp_path: Path, content: bytes | None, message: str
    ) -> None:
        path = tmp_path / "model.gguf"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ModelError, match=message) as caught:
            prepare.resolve_draft(str(path))
        assert "\n" not in str(caught.value)

    def test_one_of_draft_and_pair_is_needed(self) -> None:
        with pytest.raises(ConfigError, match=r"--draft FILE\.gguf or --pair NAME"):
            prepare.resolve_draft("")
        with pytest.raises(ConfigError, match="not both"):
            prepare.resolve_draft("x.gguf", "smollm2")

    def test_unknown_names_are_refused_before_any_work(self, own_cache: Path) -> None:
        with pytest.raises(ConfigError, match="unknown pair"):
            prepare.resolve_draft(None, "llama")
        with pytest.raises(ConfigError, match="unknown draft quantisation"):
            prepare.resolve_draft(None, "smollm2", "q8_0")
        assert not own_cache.exists()


class TestRequantise:
    def test_a_file_that_llama_cpp_refuses_fails_the_step(
        self, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(tiny_gguf.write(tmp_path / "tiny.gguf").read_bytes()[:5000])
        monkeypatch.setattr(prepare, "source_file", lambda pair, progress: broken)
        monkeypatch.setattr(prepare, "check_source", lambda pair, path: None)
        with pytest.raises(ModelError, match=r"requantising SmolLM2.* to q2_k failed") as caught:
            prepare.prepare_draft("smollm2", "q2_k", lambda _: None)
        assert "\n" not in str(caught.value)
        assert list((own_cache / "models").glob(".*.tmp-*")) == []

    def test_damaged_packages_are_noticed_before_the_step(
        self, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = tiny_gguf.write(tmp_path / "tiny.gguf")
        monkeypatch.setattr(prepare, "source_file", lambda pair, progress: other)
        with pytest.raises(ModelError, match="is not the known SmolLM2"):
            prepare.prepare_draft("smollm2", "q2_k", lambda _: None)


@pytest.mark.models
class TestPairs:
    def test_the_draft_is_made_once_and_is_smaller(
        self, own_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = list[str]()
        path = prepare.prepare_draft("smollm2", "q2_k", lines.append)
        assert own_cache in path.parents
        assert path.stat().st_size < PAIRS["smollm2"].size
        assert read_header(path).metadata["general.file_type"] == 10
        assert lines[0].startswith("preparing draft smollm2 q2_k (once, about ")
        lines.clear()
        monkeypatch.setattr(prepare, "run_step", lambda *a, **k: pytest.fail("built again"))
        assert prepare.resolve_draft(None, "smollm2", "q2_k", lines.append) == path
        assert lines == []

    def test_the_source_itself_can_be_the_draft(self) -> None:
        path = prepare.prepare_draft("smollm2", "source", lambda _: None)
        assert path.name == PAIRS["smollm2"].file
        assert path.stat().st_size == PAIRS["smollm2"].size

    @pytest.mark.parametrize("pair", sorted(PAIRS))
    def test_each_pair_has_a_default_draft(self, pair: str) -> None:
        header = read_header(prepare.prepare_draft(pair, progress=lambda _: None))
        assert header.metadata["general.file_type"] == 12

    def test_the_command_prints_the_path(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "edge_agent.prepare", "--pair", "smollm2", "--quant", "q3_k_m"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        assert Path(done.stdout.strip()).is_file()

    def test_the_command_refuses_in_one_line_with_status_2(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "edge_agent.prepare", "--quant", "q9"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "unknown draft quantisation 'q9'" in done.stderr
