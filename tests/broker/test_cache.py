"""The cache of prepared models: once, whole, and mended when damaged."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from broker import cache
from broker.errors import ConfigError, ModelError

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0

# A builder in a process of its own: says when it began, goes on when told to, counts its runs.
BUILDER = """
import sys, time
from pathlib import Path
from broker.cache import prepare_once

yard = Path(sys.argv[1])

def build(directory):
    (directory / "half.bin").write_bytes(b"half")
    with (yard / "builds").open("a") as file:
        file.write("built\\n")
    (yard / "begun").touch()
    while not (yard / "go").exists():
        time.sleep(0.02)
    (directory / "half.bin").rename(directory / "model.bin")

print(prepare_once("model", build, label="the model"))
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("PIPESD_CACHE_DIR", str(directory))
    return directory


class Builder:
    """Writes one file and counts its runs."""

    def __init__(self, content: bytes = b"weights") -> None:
        self.content = content
        self.runs = 0

    def __call__(self, directory: Path) -> None:
        self.runs += 1
        (directory / "sub").mkdir()
        (directory / "model.bin").write_bytes(self.content)
        (directory / "sub" / "config.json").write_text("{}")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "models").glob(".*.tmp-*"))


class TestDirectory:
    def test_the_variable_wins(self, own_cache: Path) -> None:
        assert cache.cache_dir() == own_cache
        assert cache.models_dir() == own_cache / "models"

    def test_a_relative_or_home_path_becomes_absolute(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("PIPESD_CACHE_DIR", "~/models")
        assert cache.cache_dir() == tmp_path / "models"
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PIPESD_CACHE_DIR", "here")
        assert cache.cache_dir() == tmp_path / "here"

    def test_an_empty_variable_is_none(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("PIPESD_CACHE_DIR", " ")
        assert cache.cache_dir().name == "pipesd"


class TestOnce:
    def test_the_second_call_builds_and_says_nothing(self) -> None:
        build, lines = Builder(), list[str]()
        first = cache.prepare_once("model", build, lines.append, label="target x", about_s=30)
        assert (first / "model.bin").read_bytes() == b"weights"
        assert (first / "sub" / "config.json").read_text() == "{}"
        assert lines[0] == "preparing target x (once, about 30 s) ..."
        assert lines[1].startswith("target x: done in ")
        lines.clear()
        assert cache.prepare_once("model", build, lines.append, label="target x") == first
        assert build.runs == 1
        assert lines == []

    def test_the_manifest_says_what_it_was_made_from_and_with(self) -> None:
        directory = cache.prepare_once(
            "model", Builder(), lambda _: None, inputs={"sha256": "ab"}, tools=("numpy", "no-such")
        )
        manifest = json.loads((directory / cache.MANIFEST).read_text())
        assert manifest["inputs"] == {"sha256": "ab"}
        assert set(manifest["files"]) == {"model.bin", "sub/config.json"}
        assert manifest["files"]["model.bin"]["sha256"] == cache.sha256_of(directory / "model.bin")
        assert "numpy" in manifest["made_with"]
        assert "no-such" not in manifest["made_with"]

    def test_other_inputs_make_it_again(self) -> None:
        build, lines = Builder(), list[str]()
        cache.prepare_once("model", build, lines.append, inputs={"recipe": "1"})
        cache.prepare_once("model", build, lines.append, inputs={"recipe": "2"})
        assert build.runs == 2
        assert "model in the cache was made from something else; preparing it again" in lines

    def test_a_failed_build_leaves_nothing_and_the_next_call_tries_again(
        self, own_cache: Path
    ) -> None:
        def fail(directory: Path) -> None:
            (directory / "model.bin").write_bytes(b"half")
            raise ModelError("no such architecture")

        with pytest.raises(ModelError, match="no such architecture"):
            cache.prepare_once("model", fail, lambda _: None)
        assert leftovers(own_cache) == []
        build = Builder()
        cache.prepare_once("model", build, lambda _: None)
        assert build.runs == 1

    def test_ctrl_c_leaves_nothing(self, own_cache: Path) -> None:
        def interrupt(directory: Path) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            cache.prepare_once("model", interrupt, lambda _: None)
        assert leftovers(own_cache) == []
        assert cache.prepare_once("model", Builder(), lambda _: None).is_dir()

    def test_a_build_that_writes_nothing_is_an_error(self) -> None:
        with pytest.raises(ModelError, match="wrote no files"):
            cache.prepare_once("model", lambda _: None, lambda _: None)

    def test_artefacts_may_be_built_inside_one_another(self) -> None:
        inner = Builder(b"source")

        def outer(directory: Path) -> None:
            source = cache.prepare_once("source", inner, lambda _: None)
            (directory / "model.bin").write_bytes((source / "model.bin").read_bytes())

        directory = cache.prepare_once("model", outer, lambda _: None)
        assert (directory / "model.bin").read_bytes() == b"source"

    def test_everyone_may_read_what_was_prepared(self) -> None:
        def build(directory: Path) -> None:
            (directory / "model.bin").write_bytes(b"x")
            (directory / "model.bin").chmod(0o600)

        directory = cache.prepare_once("model", build, lambda _: None)
        assert directory.stat().st_mode & 0o777 == 0o755
        assert (directory / "model.bin").stat().st_mode & 0o777 == 0o644
        assert (directory / cache.MANIFEST).stat().st_mode & 0o777 == 0o644

    @pytest.mark.parametrize("name", ["", "a/b", "..", "a.tmp-b", "a b", "x" * 121])
    def test_names_that_could_leave_the_directory_are_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match="cannot name"):
            cache.prepare_once(name, Builder(), lambda _: None)


class TestDamage:
    @pytest.fixture
    def build(self) -> Builder:
        return Builder()

    @pytest.fixture
    def lines(self) -> list[str]:
        return []

    @pytest.fixture
    def prepared(self, build: Builder, lines: list[str]) -> Path:
        directory = cache.prepare_once("model", build, lines.append)
        lines.clear()
        return directory

    def again(self, build: Builder, lines: list[str], verify: bool = False) -> None:
        cache.prepare_once("model", build, lines.append, verify=verify)

    def test_a_truncated_file(self, prepared: Path, build: Builder, lines: list[str]) -> None:
        (prepared / "model.bin").write_bytes(b"wei")
        self.again(build, lines)
        assert build.runs == 2
        assert (prepared / "model.bin").read_bytes() == b"weights"
        assert lines[0] == (
            "model in the cache is damaged (model.bin has 3 bytes, not 7); preparing it again"
        )

    def test_a_changed_file_of_the_same_size(
        self, prepared: Path, build: Builder, lines: list[str]
    ) -> None:
        (prepared / "model.bin").write_bytes(b"WEIGHTS")
        os.utime(prepared / "model.bin", (1e9, 1e9))
        self.again(build, lines)
        assert build.runs == 2
        assert (prepared / "model.bin").read_bytes() == b"weights"
        assert "does not match its hash" in lines[0]

    def test_damage_that_keeps_size_and_time_is_seen_by_verify(
        self, prepared: Path, build: Builder, lines: list[str]
    ) -> None:
        state = (prepared / "model.bin").stat()
        (prepared / "model.bin").write_bytes(b"WEIGHTS")
        os.utime(prepared / "model.bin", ns=(state.st_atime_ns, state.st_mtime_ns))
        self.again(build, lines)
        assert build.runs == 1
        self.again(build, lines, verify=True)
        assert build.runs == 2
        assert (prepared / "model.bin").read_bytes() == b"weights"

    def test_a_missing_file(self, prepared: Path, build: Builder, lines: list[str]) -> None:
        (prepared / "sub" / "config.json").unlink()
        self.again(build, lines)
        assert build.runs == 2
        assert (prepared / "sub" / "config.json").exists()

    @pytest.mark.parametrize(
        "manifest",
        [
            b"",
            b"{",
            b"[]",
            b'{"format": 1}',
            b'{"format": 99, "inputs": {}, "files": {}}',
            b'{"format": 1, "inputs": {}, "files": {"model.bin": {"size": "7"}}}',
            b'{"format": 1, "inputs": {}, "files": {"model.bin": 7}}',
            b"\xff\xfe",
            b" " * (2 << 20),
        ],
    )
    def test_a_damaged_manifest(
        self, prepared: Path, build: Builder, lines: list[str], manifest: bytes
    ) -> None:
        (prepared / cache.MANIFEST).write_bytes(manifest)
        self.again(build, lines)
        assert build.runs == 2
        assert lines[0] == "model in the cache has a damaged manifest; preparing it again"

    def test_no_manifest(self, prepared: Path, build: Builder, lines: list[str]) -> None:
        (prepared / cache.MANIFEST).unlink()
        self.again(build, lines)
        assert build.runs == 2

    def test_a_file_in_the_place_of_the_directory(
        self, build: Builder, lines: list[str], own_cache: Path
    ) -> None:
        (own_cache / "models").mkdir(parents=True)
        (own_cache / "models" / "model").write_bytes(b"?")
        self.again(build, lines)
        assert (own_cache / "models" / "model" / "model.bin").exists()
        assert leftovers(own_cache) == []

    def test_a_copied_cache_is_hashed_once_and_then_trusted(
        self, prepared: Path, build: Builder, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        os.utime(prepared / "model.bin", (1e9 + 0.5, 1e9 + 0.5))
        hashed = list[Path]()

        def count(path: Path) -> str:
            hashed.append(path)
            return original(path)

        original = cache.sha256_of
        monkeypatch.setattr(cache, "sha256_of", count)
        self.again(build, lines)
        self.again(build, lines)
        assert hashed == [prepared / "model.bin"]
        assert build.runs == 1
        assert lines == []

    def test_times_in_whole_seconds_are_taken_as_they_are(
        self, prepared: Path, build: Builder, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seconds = (prepared / "model.bin").stat().st_mtime_ns // 10**9
        os.utime(prepared / "model.bin", (seconds, seconds))
        monkeypatch.setattr(cache, "sha256_of", lambda path: pytest.fail("hashed"))
        self.again(build, lines)
        assert build.runs == 1


class TestTrouble:
    def test_a_cache_below_a_regular_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("PIPESD_CACHE_DIR", str(tmp_path / "file" / "cache"))
        with pytest.raises(ConfigError) as caught:
            cache.prepare_once("model", Builder(), lambda _: None)
        assert str(tmp_path / "file" / "cache") in str(caught.value)
        assert "PIPESD_CACHE_DIR" in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
    def test_an_unwritable_cache(
        self, number: int, monkeypatch: pytest.MonkeyPatch, own_cache: Path
    ) -> None:
        def refuse(path: Path, *arguments: object, **options: object) -> None:
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(Path, "mkdir", refuse)
        with pytest.raises(ConfigError, match="PIPESD_CACHE_DIR") as caught:
            cache.prepare_once("model", Builder(), lambda _: None)
        assert str(own_cache) in str(caught.value)

    def test_a_prepared_cache_works_where_nothing_can_be_written(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = cache.prepare_once("model", Builder(), lambda _: None)
        os.utime(directory / "model.bin", (1e9, 1e9))

        def refuse(*arguments: object, **options: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        for name in ("mkdir", "rename", "replace", "unlink", "chmod"):
            monkeypatch.setattr(Path, name, refuse)
        monkeypatch.setattr(cache.os, "utime", refuse)
        monkeypatch.setattr(cache.tempfile, "mkstemp", refuse)
        assert cache.prepare_once("model", Builder(), lambda _: None) == directory

    def test_a_full_disk_while_building(self, own_cache: Path) -> None:
        def build(directory: Path) -> None:
            with open("/dev/full", "wb", buffering=0) as full:
                full.write(b"weights")

        with pytest.raises(ConfigError, match="is full") as caught:
            cache.prepare_once("model", build, lambda _: None)
        assert str(own_cache) in str(caught.value)
        assert "PIPESD_CACHE_DIR" in str(caught.value)
        assert leftovers(own_cache) == []

    def test_a_disk_that_a_child_filled(
        self, monkeypatch: pytest.MonkeyPatch, own_cache: Path
    ) -> None:
        def build(directory: Path) -> None:
            monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
            raise ModelError("requantising failed: iostream error")

        with pytest.raises(ConfigError, match="is full"):
            cache.prepare_once("model", build, lambda _: None)

    def test_a_child_that_says_the_disk_is_full(self) -> None:
        def build(directory: Path) -> None:
            raise ModelError(
                "converting x failed: I/O error: No space left on device (os error 28)"
            )

        with pytest.raises(ConfigError, match="is full"):
            cache.prepare_once("model", build, lambda _: None)

    def test_too_little_space_is_said_before_the_work(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        build = Builder()
        monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=10 << 20))
        with pytest.raises(ConfigError, match=r"needs about 500 MB and .* has 10 MB free"):
            cache.prepare_once("model", build, lambda _: None, needs_bytes=500 << 20)
        assert build.runs == 0

    def test_a_source_that_cannot_be_read_is_not_the_caches_fault(self, tmp_path: Path) -> None:
        def build(directory: Path) -> None:
            (tmp_path / "gone.gguf").read_bytes()

        with pytest.raises(ModelError, match=r"cannot read .*gone\.gguf"):
            cache.prepare_once("model", build, lambda _: None)


class TestForgetting:
    def test_the_longest_unused_go_and_recent_ones_stay(self, own_cache: Path) -> None:
        lines = list[str]()
        for n in range(5):
            directory = cache.prepare_once(f"gguf-{n}", Builder(), lambda _: None)
            if n < 4:
                used = time.time() - 7200 + n
                os.utime(directory / cache.MANIFEST, (used, used))
        other = cache.prepare_once("target", Builder(), lambda _: None)
        assert cache.forget_oldest("gguf-", 3, lines.append) == 2
        names = sorted(path.name for path in (own_cache / "models").glob("gguf-*"))
        assert names == ["gguf-2", "gguf-3", "gguf-4"]
        assert len(lines) == 2
        assert "gguf-0" in lines[0]
        assert cache.forget_oldest("gguf-", 0, lines.append) == 2
        assert (own_cache / "models" / "gguf-4").is_dir()
        assert other.is_dir()

    def test_a_use_is_remembered(self) -> None:
        directory = cache.prepare_once("gguf-0", Builder(), lambda _: None)
        os.utime(directory / cache.MANIFEST, (1e9, 1e9))
        cache.prepare_once("gguf-0", Builder(), lambda _: None)
        assert cache.forget_oldest("gguf-", 0, lambda _: None) == 0


class TestProcesses:
    @pytest.fixture
    def start(self, tmp_path: Path, own_cache: Path) -> Iterator[Callable[[], subprocess.Popen]]:
        script = tmp_path / "build.py"
        script.write_text(BUILDER)
        started = list[subprocess.Popen]()

        def run() -> subprocess.Popen:
            process = subprocess.Popen(
                [sys.executable, str(script), str(tmp_path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            started.append(process)
            return process

        yield run
        for process in started:
            process.kill()
            process.communicate()

    def test_two_at_once_do_the_work_once(
        self, start: Callable[[], subprocess.Popen], tmp_path: Path, own_cache: Path
    ) -> None:
        first = start()
        wait_for((tmp_path / "begun").exists)
        second = start()
        assert second.stderr is not None
        waiting = second.stderr.readline()
        assert waiting == "waiting for another process that is preparing the model ...\n"
        (tmp_path / "go").touch()
        for process, said in ((first, True), (second, False)):
            out, err = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, err
            assert out.strip() == str(own_cache / "models" / "model")
            assert ("preparing the model (once) ..." in err) == said
        assert (tmp_path / "builds").read_text() == "built\n"
        assert leftovers(own_cache) == []

    def test_one_killed_half_way_costs_the_next_nothing_but_the_work(
        self, start: Callable[[], subprocess.Popen], tmp_path: Path, own_cache: Path
    ) -> None:
        first = start()
        wait_for((tmp_path / "begun").exists)
        first.send_signal(signal.SIGKILL)
        first.wait(DEADLINE_S)
        assert len(leftovers(own_cache)) == 1
        assert not (own_cache / "models" / "model").exists()
        (tmp_path / "go").touch()
        second = start()
        out, err = second.communicate(timeout=DEADLINE_S)
        assert second.returncode == 0, err
        assert (Path(out.strip()) / "model.bin").read_bytes() == b"half"
        assert leftovers(own_cache) == []
        assert "waiting" not in err

    def test_the_one_that_waits_takes_over_from_one_that_is_killed(
        self, start: Callable[[], subprocess.Popen], tmp_path: Path, own_cache: Path
    ) -> None:
        first = start()
        wait_for((tmp_path / "begun").exists)
        second = start()
        assert second.stderr is not None
        assert "waiting" in second.stderr.readline()
        first.send_signal(signal.SIGKILL)
        (tmp_path / "go").touch()
        out, err = second.communicate(timeout=DEADLINE_S)
        assert second.returncode == 0, err
        assert (Path(out.strip()) / "model.bin").exists()
        assert (tmp_path / "builds").read_text() == "built\nbuilt\n"
        assert leftovers(own_cache) == []
