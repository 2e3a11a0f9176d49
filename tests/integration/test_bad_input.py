"""Whatever is wrong, a person gets one line with cause and mend, and the exit code of DESIGN.md."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.pairs import find_pair, source_file
from cloud_verifier.engine.scripted_target import hashed_script
from edge_agent.scripted_draft import sometimes_right
from tests.brokers import MosquittoBroker, free_port
from tests.commands import FIELDS, Result, call, error_line, run_command
from tests.draft_models import draft_model
from tests.system import Device, PacedTarget, Replica, chooser, continuation, scripted_draft

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("no_settings")]

PAIR = ["--pair", "smollm2", "--threads", "1"]
NOWHERE = "mqtt://127.0.0.1:9"
#: Enough for a command that is right but for the flags that a test adds.
GENERATE = ["generate", "--broker", NOWHERE, *PAIR, "--prompt", "Hello"]
TARGET = ["generate", "--pair", "smollm2", "--threads", "1", "--prompt", "Hello"]
LOCAL = ["generate", "--policy", "local", *PAIR, "--prompt", "Hello", "--json"]


def ask(url: str, *flags: str, pair: str = "smollm2", prompt: str = "Hello") -> Result:
    """``edge-agent generate`` against a running broker."""
    where = ["--broker", url, "--pair", pair, "--threads", "1", "--prompt", prompt]
    return call("edge-agent", "generate", *where, "--timeout", "20", *flags)


# ---- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "No such file"),
        (b'["\xe9"]', "UTF-8"),
        (b'[{"role":', "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "mend the file"),
        (b'{"role": "user", "content": "a"}', "mend the file"),
        (b'[{"role": "user"}]', "mend the file"),
        (b'[{"role": "user", "content": 5}]', "mend the file"),
    ],
)
@pytest.mark.parametrize("program", ["edge-agent", "cloud-verifier"])
def test_broken_messages(program: str, content: bytes | None, word: str, tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    if content is not None:
        file.write_bytes(content)
    flags = (GENERATE if program == "edge-agent" else TARGET)[:-2]
    error_line(call(program, *flags, "--messages", str(file)), 2, str(file), word, program=program)


@pytest.mark.parametrize("program", ["edge-agent", "cloud-verifier"])
def test_messages_for_a_model_without_a_chat_template(program: str, tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    file.write_text('[{"role": "user", "content": "Hello"}]')
    where = ["--broker", NOWHERE] if program == "edge-agent" else []
    flags = ["generate", *where, "--pair", "gemma3", "--threads", "1", "--messages", str(file)]
    error_line(call(program, *flags), 2, "no chat template", "--raw", program=program)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "No such file"),
        ("[1, 2", "is no JSON"),
        ('{"a": 1}', "list of token ids"),
        ("[1, -1]", "list of token ids"),
        ("[1, true]", "list of token ids"),
        ("[]", "no tokens"),
        ("[1, 99999999]", "beyond the target"),
    ],
)
def test_broken_prompt_ids(content: str | None, word: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    if content is not None:
        file.write_text(content)
    flags = [*TARGET[:-2], "--prompt-ids", str(file)]
    error_line(call("cloud-verifier", *flags), 2, word, program="cloud-verifier")


@pytest.fixture(scope="module")
def broken_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that look more or less like models."""
    folder = tmp_path_factory.mktemp("models")
    whole = source_file(find_pair("smollm2")).read_bytes()
    (folder / "half.gguf").write_bytes(whole[: len(whole) // 2])
    (folder / "header.gguf").write_bytes(whole[:5000])
    (folder / "start.gguf").write_bytes(whole[:10])
    (folder / "text.gguf").write_text("This is no model. " * 100)
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "folder.gguf").mkdir()
    (folder / "folder").mkdir()
    (folder / "folder" / "config.json").write_text("{")
    return folder


MODELS = [
    ("missing.gguf", "does not exist"),
    ("half.gguf", "truncated"),
    ("header.gguf", "truncated"),
    ("start.gguf", "truncated"),
    ("text.gguf", "not a GGUF file"),
    ("empty.gguf", "not a GGUF file"),
]


@pytest.mark.parametrize(("name", "word"), [*MODELS, ("folder.gguf", "is a directory")])
def test_broken_draft_models(broken_models: Path, name: str, word: str) -> None:
    model = str(broken_models / name)
    flags = ["generate", "--broker", NOWHERE, "--prompt", "a", "--draft", model]
    error_line(call("edge-agent", *flags), 1, model, word)


@pytest.mark.parametrize(
    ("name", "word"),
    [*MODELS, ("folder.gguf", "no config.json"), ("folder", "folder")],
)
def test_broken_target_models(broken_models: Path, name: str, word: str) -> None:
    model = str(broken_models / name)
    for flags in (["generate", "--prompt", "a"], ["serve", "--broker", NOWHERE]):
        result = call("cloud-verifier", *flags, "--target", model)
        error_line(result, 1, model, word, program="cloud-verifier")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a file there is no directory, for root neither."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIPESD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    error_line(call("edge-agent", *GENERATE), 2, str(tmp_path), "PIPESD_CACHE_DIR")
    result = call("cloud-verifier", *TARGET)
    error_line(result, 2, str(tmp_path), "PIPESD_CACHE_DIR", program="cloud-verifier")
    # Both the demo and its verifier run into it; whoever is first, it is said once.
    error_line(call("edge-agent", "demo"), 2, str(tmp_path), "PIPESD_CACHE_DIR")


# ---- the network ----------------------------------------------------------------------------


def test_no_broker_at_the_address() -> None:
    """One line at once that it waits (case 5), and one when the time is over."""
    url = f"mqtt://127.0.0.1:{free_port()}"
    result = ask(url, "--timeout", "2")
    assert result.code == 3
    assert result.out == ""
    waits, error = result.lines
    assert url in waits
    assert "trying again" in waits
    assert error.startswith("edge-agent: no connection to the broker")
    assert "--broker" in error
    assert "--local allow" in error


def test_a_broker_without_a_verifier(url: str) -> None:
    error_line(ask(url, "--timeout", "2"), 3, "no verifier answered", "start one", "--local allow")


def test_without_a_verifier_local_mode_may_go_on(url: str) -> None:
    result = ask(url, "--timeout", "1", "--local", "allow", "--max-tokens", "8", "--json")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    assert (report["tokens"], report["mode"], report["verified"]) == (8, "local", False)


def test_a_broker_that_wants_a_password(tmp_path: Path) -> None:
    """Nothing gets better by waiting, so it does not wait."""
    passwords = tmp_path / "passwords"
    passwords.write_text("")
    passwords.chmod(0o600)
    port = free_port()
    config = f"listener {port} 127.0.0.1\nallow_anonymous false\npassword_file {passwords}\n"
    user = "user root\n" if os.geteuid() == 0 else ""
    with MosquittoBroker(tmp_path, port=port, config=config + user) as broker:
        error_line(ask(broker.url), 3, "refused the connection", "user name, password")


@pytest.fixture
def replica(url: str) -> Iterator[Callable[..., Replica]]:
    """Makes a scripted verifier for the smollm2 pair's drafts."""
    draft = draft_model("smollm2")
    started: list[Replica] = []

    def start(**target: Any) -> Replica:
        facts = {"vocab_size": draft.vocab_size, "vocab_hash": draft.vocab_hash, **target}
        made = Replica(url, PacedTarget(hashed_script(draft.vocab_size), **facts))
        started.append(made)
        return made.start()

    yield start
    for made in started:
        made.stop()


def test_another_tokenizer_is_refused_and_hurts_nobody(
    url: str, replica: Callable[..., Replica]
) -> None:
    """Case 27; a session of the right family runs on beside it."""
    held = replica(seconds=0.002)
    script = hashed_script(held.target.vocab_size)
    draft = scripted_draft(
        sometimes_right(chooser(script), held.target.vocab_size),
        vocab_size=held.target.vocab_size,
        vocab_hash=held.target.vocab_hash,
    )
    with Device(url, draft) as device:
        running = device.run(max_tokens=100_000)
        assert running.reached(5)
        error_line(ask(url, pair="gemma3"), 4, "vocabulary", "tokenizer", "same family")
        assert running.reached(len(running.tokens) + 20)
        running.generation.cancel()
        tokens = running.wait()
        assert tokens == continuation((1, 2, 3), len(tokens), script)
    assert held.core.stats.refusals == 1


def test_a_prompt_longer_than_the_context(url: str, replica: Callable[..., Replica]) -> None:
    held = replica(context=24)
    error_line(ask(url, prompt="word " * 50), 4, "prompt_too_long", "context of 24", "shorten")
    assert held.core.stats.refusals == 1
    assert held.sessions == 0


def test_a_prompt_longer_than_the_context_of_the_target_alone() -> None:
    flags = [*TARGET[:-1], "word " * 50, "--context", "24"]
    error_line(call("cloud-verifier", *flags), 2, "context 24", "shorten", program="cloud-verifier")


def test_a_prompt_that_fills_the_context_leaves_what_is_left(
    url: str, replica: Callable[..., Replica]
) -> None:
    """Case 29: the answer ends for length where the context does."""
    held = replica(context=48)
    result = ask(url, "--json", "--raw", "--max-tokens", "500", prompt="word " * 30)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["finish_reason"] == "length"
    assert 1 <= report["tokens"] <= 48 - 30 + 1
    assert held.core.stats.refusals == 0


@pytest.mark.parametrize(
    ("prompt", "flags", "word"),
    [
        ("", ["--raw"], "no tokens"),
        ("\udcff", [], "no valid Unicode"),
        ("x" * (1 << 20) + "y", [], "at most 1048576"),
        ("word " * 400, ["--draft-context", "64", "--policy", "local"], "draft model's context"),
    ],
)
def test_prompts_that_cannot_be(prompt: str, flags: list[str], word: str) -> None:
    error_line(call("edge-agent", *GENERATE[:-1], prompt, *flags), 2, word)


@pytest.mark.parametrize(
    ("prompt", "flags", "word"), [("", ["--raw"], "no tokens"), ("\udcff", [], "no valid Unicode")]
)
def test_prompts_that_cannot_be_for_the_target_alone(
    prompt: str, flags: list[str], word: str
) -> None:
    result = call("cloud-verifier", *TARGET[:-1], prompt, *flags)
    error_line(result, 2, word, program="cloud-verifier")


def test_the_draft_alone_works_without_any_broker_and_says_so() -> None:
    result = call("edge-agent", *LOCAL, "--max-tokens", "12")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    assert list(report) == FIELDS
    assert report["mode"] == "local"
    assert report["verified"] is False
    assert report["tokens"] == len(report["token_ids"]) == 12
    assert report["text"]
    assert report["accepted"] == report["forwards"] == 0
    assert report["uplink_bytes"] == report["downlink_bytes"] == report["uplink_messages"] == 0
    assert math.isfinite(report["tpt_ms"])


def test_for_people_the_draft_alone_is_marked_unverified() -> None:
    result = call("edge-agent", *LOCAL[:-1], "--max-tokens", "4")
    assert result.code == 0
    assert result.out.strip()
    assert "none verified (local)" in result.err


def test_an_error_in_a_real_process() -> None:
    """Nothing that a native library says by itself gets between."""
    result = run_command("edge-agent", *GENERATE, "--draft-context", "64", "--timeout", "1")
    assert result.code == 3
    assert result.out == ""
    assert len([line for line in result.lines if line.startswith("edge-agent: ")]) == 1
    assert len(result.lines) <= 2, result.err
    assert "Traceback" not in result.err
    result = run_command("edge-agent", *GENERATE, "--max-tokens", "0")
    error_line(result, 2, "at least one")
    result = run_command("cloud-verifier", *TARGET, "--device", "quantum")
    error_line(result, 2, "quantum", "give cpu", program="cloud-verifier")
