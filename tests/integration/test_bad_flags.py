"""Wrong flags, variables and configuration files: one line, exit code 2, nothing started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import call, error_line

pytestmark = pytest.mark.usefixtures("no_settings")

NOWHERE = "mqtt://127.0.0.1:9"
PAIR = ["--pair", "smollm2", "--threads", "1"]
#: Enough for a command that is right but for the flags that a test adds.
GENERATE = ["generate", "--broker", NOWHERE, *PAIR, "--prompt", "Hello"]
TARGET = ["generate", "--pair", "smollm2", "--threads", "1", "--prompt", "Hello"]
SERVE = ["serve", "--broker", NOWHERE, "--pair", "smollm2"]
LOCAL = ["generate", "--policy", "local", *PAIR, "--prompt", "Hello", "--json"]

SAMPLING = [
    ("--max-tokens=0", "at least one"),
    ("--max-tokens=-1", "at least one"),
    ("--max-tokens=1e3", "invalid int value"),
    (f"--max-tokens={2**40}", "2147483647"),
    ("--temperature=-1", "0 is greedy"),
    ("--temperature=nan", "0 is greedy"),
    ("--temperature=inf", "0 is greedy"),
    ("--temperature=hot", "invalid float value"),
    ("--top-p=0", "1 turns it off"),
    ("--top-p=1.5", "1 turns it off"),
    ("--top-p=-0.1", "1 turns it off"),
    ("--top-p=nan", "1 turns it off"),
    ("--top-k=-1", "0 turns it off"),
    ("--min-p=-0.1", "0 turns it off"),
    ("--min-p=2", "0 turns it off"),
    ("--min-p=nan", "0 turns it off"),
    ("--seed=-1", "choose another"),
    (f"--seed={2**64}", "choose another"),
]
SESSION = [
    ("--r1=2", "0 turns it off"),
    ("--r1=nan", "0 turns it off"),
    ("--r2=-1", "0 turns it off"),
    ("--window=0", "1 to 512"),
    ("--max-ahead=0", "1 to 512"),
    ("--max-ahead=513", "1 to 512"),
    ("--min-survival=nan", "0 turns it off"),
    ("--threads=0", "leave it out"),
    ("--draft-context=0", "leave it out"),
    ("--stop=", "leave it out"),
    ("--verify=never", "eager"),
    ("--frobnicate", "--help"),
]
BROKER = [
    ("--broker=", "PIPESD_BROKER"),
    ("--broker=http://host", "mqtt[s]://"),
    ("--broker=mqtt://", "mqtt[s]://"),
    ("--broker=mqtt://host:70000", "mqtt[s]://"),
    ("--broker=mqtt://host/path", "mqtt[s]://"),
    ("--keepalive=0", "1 to 65535"),
    ("--ca-file=/missing.pem", "use mqtts://"),
    ("--password-file=/missing", "No such file"),
]
DEVICE_IDS = ["a/b", "a+b", "a#", "#", "+", "_a", "", "ž", "a b", "x" * 65, "a\n"]


@pytest.mark.parametrize(("flag", "word"), [*SAMPLING, *SESSION, *BROKER])
def test_wrong_flags_of_a_generation(flag: str, word: str) -> None:
    error_line(call("edge-agent", *GENERATE, flag), 2, word)


@pytest.mark.parametrize(("flag", "word"), [*SAMPLING, *SESSION, ("--target-threads=0", "leave")])
def test_wrong_flags_of_the_demo_start_nothing(flag: str, word: str) -> None:
    error_line(call("edge-agent", "demo", flag), 2, word)


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        *SAMPLING,
        ("--slots=0", "at least 1"),
        ("--slots=99999999999", "above 65536"),
        ("--context=1", "at least 2"),
        ("--kv-budget=much", "like 512M or 2G"),
        ("--kv-budget=1K", "holds no session of the whole context: give"),
        ("--threads=0", "leave it out"),
        ("--dtype=int8", "bfloat16"),
    ],
)
def test_wrong_flags_of_the_target_alone(flag: str, word: str) -> None:
    error_line(call("cloud-verifier", *TARGET, flag), 2, word, program="cloud-verifier")


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        *BROKER,
        ("--id=a/b", "A-Z a-z"),
        ("--id=", "A-Z a-z"),
        ("--max-sessions=0", "at least 1"),
        ("--max-sessions-per-device=0", "at least 1"),
        ("--idle-ttl=0", "above 0"),
        ("--idle-ttl=nan", "above 0"),
        ("--slots=0", "at least 1"),
    ],
)
def test_wrong_flags_of_a_verifier(flag: str, word: str) -> None:
    error_line(call("cloud-verifier", *SERVE, flag), 2, word, program="cloud-verifier")


@pytest.mark.parametrize("device", DEVICE_IDS)
def test_device_ids_that_cannot_stand_in_a_topic(device: str) -> None:
    """Case 11."""
    error_line(
        call("edge-agent", *GENERATE, f"--device-id={device}"), 2, "--device-id", repr(device)
    )


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["generate"], "--prompt TEXT or --messages FILE"),
        (["generate", "--prompt", "a"], "--broker is missing"),
        (["generate", "--broker", NOWHERE], "--prompt TEXT or --messages FILE"),
        (["generate", "--broker", NOWHERE, "--prompt", "a"], "--draft FILE.gguf or --pair NAME"),
        ([*GENERATE, "--messages", "x"], "either"),
        ([*GENERATE, "--draft", "x"], "not both"),
        ([*GENERATE[:-2], "--raw", "--messages", "x"], "--raw goes with --prompt"),
    ],
)
def test_what_is_missing_or_too_much(flags: list[str], word: str) -> None:
    error_line(call("edge-agent", *flags), 2, word)


# ---- configuration --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "No such file"),
        (b"max-tokens = ", "no valid TOML"),
        (b"\xff\xfe", "no valid TOML"),
        (b"max-tokenz = 5", "'max-tokenz'"),
        (b"[edge-agent]\nmax-tokenz = 5", "'max-tokenz'"),
        (b"[edge_agent]\nmax-tokens = 5", "'edge_agent'"),
        (b"edge-agent = 5", "'edge-agent'"),
        (b"max-tokens = 'many'", "invalid int value"),
        (b"max-tokens = [1, 2", "no valid TOML"),
        (b"max-tokens = 0", "at least one"),
        (b"temperature = nan", "0 is greedy"),
        (b"policy = 'best'", "invalid choice"),
        (b"json = 'perhaps'", "true or false"),
        (b"[edge-agent.max-tokens]\na = 1", "a table"),
    ],
)
def test_broken_configuration_files(content: bytes | None, word: str, tmp_path: Path) -> None:
    file = tmp_path / "pipesd.toml"
    if content is not None:
        file.write_bytes(content)
    error_line(call("edge-agent", *GENERATE, "--config", str(file)), 2, word)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("PIPESD_MAX_TOKENS", "many", "invalid int value"),
        ("PIPESD_TEMPERATURE", "-1", "0 is greedy"),
        ("PIPESD_TOP_P", "nan", "1 turns it off"),
        ("PIPESD_JSON", "perhaps", "true or false"),
        ("PIPESD_DEVICE_ID", "a/b", "'a/b'"),
        ("PIPESD_CONFIG", "/missing.toml", "No such file"),
    ],
)
def test_broken_variables(
    name: str, value: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    error_line(call("edge-agent", *GENERATE), 2, word)


@pytest.mark.models
def test_flags_win_over_variables_and_those_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pipesd.toml"
    file.write_text("max-tokens = 9\ntemperature = 1.0\n[edge-agent]\nmax-tokens = 3\n")

    def tokens(*flags: str) -> int:
        result = call("edge-agent", *LOCAL, *flags)
        assert result.code == 0, result.err
        return int(json.loads(result.out)["tokens"])

    assert tokens("--config", str(file)) == 3
    monkeypatch.setenv("PIPESD_MAX_TOKENS", "4")
    assert tokens("--config", str(file)) == 4
    monkeypatch.setenv("PIPESD_CONFIG", str(file))
    assert tokens("--max-tokens", "5") == 5
    monkeypatch.delenv("PIPESD_MAX_TOKENS")
    assert tokens() == 3


def test_a_way_to_verify_that_the_policy_does_not_leave_open() -> None:
    flags = ["--policy=vanilla", "--verify=eager"]
    error_line(call("edge-agent", *GENERATE, *flags), 2, "--verify eager with --policy vanilla")
