"""A target cut over several processes: the same choices as in one, in any company, and one end."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from broker.errors import ConfigError
from cloud_verifier.engine.torch_parallel import Ranks, _check_heads
from tests.brokers import MosquittoBroker, wait_until
from tests.cloud_verifier.test_torch_target import kernels_sum_rows_alike
from tests.commands import (
    MODULES,
    Child,
    below,
    call,
    clean_environment,
    error_line,
    run_command,
    still_alive,
)
from tests.tiny_models import model_of

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PATIENCE = 180.0


def directory_of(family: str, path: Path) -> Path:
    """A tiny model with a tokenizer of 97 tokens, as a person would have it on disk."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{i}": i for i in range(97)}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0"))
    ).save_pretrained(path)
    copy.deepcopy(model_of(family)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory_of("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    broker = MosquittoBroker(tmp_path_factory.mktemp("mosquitto"))
    broker.start()
    yield broker.url
    broker.stop()


def run_ranks(folder: Path, goal: Path, *what: str) -> dict[str, Any]:
    """What rank 0 of two wrote."""
    run = subprocess.run(
        [
            *TORCHRUN,
            *("--standalone", "--nproc-per-node", "2"),
            *("-m", "tests.cloud_verifier.ranks", str(folder), str(goal), *what),
        ],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(goal.read_text())
    return found


# The same choices


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases, and a window
def test_two_ranks_choose_what_one_process_chooses(family: str, tmp_path: Path) -> None:
    found = run_ranks(directory_of(family, tmp_path / family), tmp_path / "found.json")
    assert found["wrong"] == 0
    assert found["refused"] == "LocalProtocolError"
    # Partial products are added in another grouping than whole ones.
    assert found["difference"] < 1e-4 * found["spread"]
    assert found["heads"] == [2, 4]
    assert found["bytes_per_token"][1] == 2 * found["bytes_per_token"][0]
    if kernels_sum_rows_alike(torch.float32):
        assert all(found["same_bits"]), found["same_bits"]


# The command


def parallel(url: str, ranks: int, *flags: str) -> list[str]:
    return [
        *TORCHRUN,
        *("--standalone", "--nproc-per-node", str(ranks), "-m", MODULES["cloud-verifier"]),
        *("serve", "--tensor-parallel", "--broker", url, "--threads", "1", *flags),
    ]


class Served:
    """A replica over several ranks."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=clean_environment(),
                start_new_session=True,
            )
        self.ranks: list[int] = []
        self._seen: set[Child] = set()

    def __enter__(self) -> Served:
        ready = wait_until(
            lambda: " serves " in self.out or self.process.poll() is not None, PATIENCE
        )
        assert ready, self.err[-3000:]
        assert self.process.poll() is None, self.err[-3000:]
        self._seen = below(self.process.pid)
        by_rank: dict[int, int] = {}
        for child in self._seen:
            environment = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
            ranks = [part[5:] for part in environment if part.startswith(b"RANK=")]
            if ranks and "cloud_verifier" in child.what:
                by_rank[int(ranks[0])] = child.pid
        self.ranks = [by_rank[rank] for rank in sorted(by_rank)]
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._seen:
            if child.alive:
                os.kill(child.pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """The launcher's code, once every rank has ended."""
        code = self.process.wait(60)
        assert still_alive(self._seen, 20) == []
        return code

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def lines(self) -> list[str]:
        """Of standard error, those that are ours."""
        return [line for line in self.err.splitlines() if line.startswith("cloud-verifier: ")]


@pytest.mark.slow
@pytest.mark.models
def test_three_ranks_serve_the_text_of_one_process(url: str, tmp_path: Path) -> None:
    what = ["--pair", "smollm2", "--threads", "1", "--prompt", "Name three colours."]
    what += ["--max-tokens", "20", "--json"]
    with Served(parallel(url, 3, "--pair", "smollm2", "--id", "tp"), tmp_path) as served:
        assert len(served.ranks) == 3
        assert served.out.count(" serves ") == 1
        told = run_command(
            "edge-agent", "generate", "--broker", url, "--timeout", "120", *what, timeout=PATIENCE
        )
        assert told.code == 0, told.err
        os.kill(served.ranks[0], signal.SIGTERM)
        assert served.end() == 0
        assert served.lines == []
    alone = run_command("cloud-verifier", "generate", *what, timeout=PATIENCE)
    assert json.loads(told.out)["token_ids"] == json.loads(alone.out)["token_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["first", "other"])
def test_a_killed_rank_ends_the_replica(
    victim: int, url: str, tiny_llama: Path, tmp_path: Path
) -> None:
    with Served(parallel(url, 2, "--target", str(tiny_llama)), tmp_path) as served:
        os.kill(served.ranks[victim], signal.SIGKILL)
        assert served.end() != 0
        if victim == 1:  # rank 0 lives to say it
            assert [line for line in served.lines if "a rank had gone" in line], served.err


@pytest.mark.slow
def test_a_rank_that_stands_still_ends_the_replica(tiny_llama: Path, tmp_path: Path) -> None:
    found = run_ranks(tiny_llama, tmp_path / "found.json", "stall")
    assert found["ended"] == 2
    assert "a rank failed" in found["lost"]


@pytest.mark.slow
def test_a_stopped_launcher_ends_all_ranks_in_order(
    url: str, tiny_llama: Path, tmp_path: Path
) -> None:
    with Served(parallel(url, 2, "--target", str(tiny_llama)), tmp_path) as served:
        os.killpg(served.process.pid, signal.SIGINT)  # as a terminal does
        served.end()  # the launcher's own code after a signal is not ours to choose
        assert served.lines == []


# Refusals

SERVE = ["serve", "--broker", "mqtt://127.0.0.1:9", "--pair", "smollm2"]


def test_without_a_launcher_it_is_one_line() -> None:
    done = call("cloud-verifier", *SERVE, "--tensor-parallel")
    error_line(done, 2, "torchrun --nproc-per-node", program="cloud-verifier")


def test_several_replicas_under_one_id_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = call("cloud-verifier", *SERVE)
    error_line(done, 2, "--id", "add --tensor-parallel", program="cloud-verifier")


def test_llama_cpp_cuts_nothing() -> None:
    done = call("cloud-verifier", *SERVE, "--engine", "llama", "--tensor-parallel")
    error_line(done, 2, "--engine torch", program="cloud-verifier")


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_a_process_outside_torchrun_is_no_rank(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        Ranks("cpu", environment)


def test_one_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuts nothing"):
        Ranks("cpu", {"RANK": "0", "WORLD_SIZE": "1"})


def test_a_device_that_transformers_would_not_take_is_refused() -> None:
    other = "cpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(ConfigError, match="--device"):
        Ranks(other, {"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "count", "mend"),
    [
        (9, 3, 2, "start 3 processes"),
        (32, 8, 3, "start 2 or 4 or 8 processes"),
        (8, 1, 2, "serve it in one"),
    ],
)
def test_heads_that_cannot_be_dealt_out(heads: int, kv_heads: int, count: int, mend: str) -> None:
    config: Any = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    with pytest.raises(ConfigError, match=mend):
        _check_heads(config, count)


def test_heads_that_can() -> None:
    _check_heads(SimpleNamespace(num_attention_heads=9, num_key_value_heads=3), 3)
    _check_heads(SimpleNamespace(num_attention_heads=8), 4)


# A signal while the model loads


def test_a_service_stopped_while_it_loads_ends_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: False, 10)

    monkeypatch.setattr("cloud_verifier.cli.find_target", lambda args: "somewhere")
    monkeypatch.setattr("cloud_verifier.cli.load_target", load)
    done = call("cloud-verifier", *SERVE)
    assert (done.code, done.out, done.err) == (0, "", "")
