"""Settings in layers: flags over variables over the file, each with the same checks."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from broker.errors import ConfigError
from broker.settings import Parser, add_config_flag, parse


def build() -> argparse.ArgumentParser:
    parser = Parser(prog="edge-agent")
    parser.add_argument("--version", action="version", version="1")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--max-tokens", type=int, default=128)
    run.add_argument("--policy", choices=("pipesd", "local"), default="pipesd")
    run.add_argument("--broker")
    run.add_argument("--stop", action="append", default=None)
    run.add_argument("--json", action="store_true")
    run.add_argument("-t", "--temperature", type=float, default=0.0)
    add_config_flag(run)
    other = commands.add_parser("other")
    other.add_argument("--speed", type=int, default=1)
    add_config_flag(other)
    return parser


def settle(
    *words: str, environ: dict[str, str] | None = None, file: Path | None = None, toml: str = ""
) -> argparse.Namespace:
    """``run`` with these flags, variables and this file."""
    if file is not None:
        file.write_text(toml, encoding="utf-8")
        words = (*words, "--config", str(file))
    return parse(build(), ["run", *words], program="edge-agent", environ=environ or {})


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "settings.toml"


def test_defaults() -> None:
    found = settle()
    assert (found.max_tokens, found.policy) == (128, "pipesd")
    assert (found.broker, found.stop, found.json) == (None, None, False)


@pytest.mark.parametrize(
    ("words", "environ", "toml", "tokens"),
    [
        ((), {}, "", 128),
        ((), {}, "max-tokens = 5", 5),
        ((), {}, "max_tokens = 5", 5),
        ((), {}, "max-tokens = 5\n[edge-agent]\nmax-tokens = 6", 6),
        ((), {}, "max-tokens = 5\n[cloud-verifier]\nmax-tokens = 6", 5),
        ((), {"PIPESD_MAX_TOKENS": "7"}, "max-tokens = 5", 7),
        (("--max-tokens", "8"), {"PIPESD_MAX_TOKENS": "7"}, "max-tokens = 5", 8),
        (("--max-tokens=8",), {}, "max-tokens = 5", 8),
    ],
)
def test_the_higher_layer_wins(words, environ, toml, tokens, file) -> None:
    assert settle(*words, environ=environ, file=file, toml=toml).max_tokens == tokens


def test_the_file_may_be_named_by_a_variable(file) -> None:
    file.write_text('broker = "mqtt://here"', encoding="utf-8")
    assert settle(environ={"PIPESD_CONFIG": str(file)}).broker == "mqtt://here"


def test_values_of_every_kind(file) -> None:
    toml = 'stop = ["a", "-b"]\njson = true\ntemperature = 1\nbroker = "-x=y"'
    found = settle(file=file, toml=toml)
    assert found.stop == ["a", "-b"]
    assert found.json is True
    assert found.temperature == 1.0
    assert found.broker == "-x=y"


def test_repeatable_flags_replace_what_lower_layers_say(file) -> None:
    assert settle("--stop", "c", file=file, toml='stop = ["a", "b"]').stop == ["c"]
    assert settle(environ={"PIPESD_STOP": "d"}).stop == ["d"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", True),
        ("true", True),
        ("YES", True),
        ("on", True),
        ("0", False),
        ("no", False),
        ("False", False),
        ("off", False),
        ("", False),
    ],
)
def test_switches_in_variables(value, expected) -> None:
    assert settle(environ={"PIPESD_JSON": value}).json is expected


def test_settings_of_other_subcommands_are_no_error(file) -> None:
    assert settle(file=file, toml="speed = 3\nmax-tokens = 4").max_tokens == 4


@pytest.mark.parametrize(
    ("words", "environ", "toml", "said"),
    [
        (("--max-tokens", "x"), {}, "", "invalid int value: 'x'"),
        (("--nonsense",), {}, "", "--nonsense"),
        ((), {"PIPESD_MAX_TOKENS": "many"}, "", "PIPESD_MAX_TOKENS: argument --max-tokens: "),
        ((), {"PIPESD_POLICY": "none"}, "", "PIPESD_POLICY: argument --policy: "),
        ((), {"PIPESD_TEMPERATURE": "hot"}, "", "PIPESD_TEMPERATURE: argument -t/--temperature: "),
        ((), {"PIPESD_JSON": "maybe"}, "", "PIPESD_JSON: --json 'maybe': true or false"),
        ((), {}, "max-tokens = 'x'", "settings.toml: argument --max-tokens: invalid int value"),
        ((), {}, "max-tokens = 5.5", "invalid int value: '5.5'"),
        ((), {}, "policy = 'none'", "invalid choice: 'none'"),
        ((), {}, "json = 'maybe'", "settings.toml: --json 'maybe': true or false"),
        ((), {}, "max-tokns = 5", "unknown setting 'max-tokns'"),
        ((), {}, "[edge-agent]\nmax-tokns = 5", "unknown setting 'max-tokns'"),
        ((), {}, "[edge-agnt]\nmax-tokens = 5", "'edge-agnt' is misplaced"),
        ((), {}, "edge-agent = 5", "'edge-agent' is misplaced"),
        ((), {}, "[edge-agent.broker]\nurl = 5", "a table where a value of --broker is wanted"),
        ((), {}, "max-tokens =", "no valid TOML"),
    ],
)
def test_anything_wrong_is_one_line_about_it(words, environ, toml, said, file) -> None:
    with pytest.raises(ConfigError) as caught:
        settle(*words, environ=environ, file=file, toml=toml)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_file_that_cannot_be_read(tmp_path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read --config"):
            settle("--config", str(path))
    broken = tmp_path / "latin.toml"
    broken.write_bytes(b'broker = "\xe9"')
    with pytest.raises(ConfigError, match="no valid TOML"):
        settle("--config", str(broken))


def test_no_command_is_wrong_usage() -> None:
    with pytest.raises(ConfigError, match="command"):
        parse(build(), [], program="edge-agent", environ={})
