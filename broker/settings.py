"""Settings from flags, ``PIPESD_*`` variables and a TOML file; flags win, then variables.

A command builds its ``argparse`` parser as usual and calls ``parse``; what it cannot do without
it checks afterwards, since a lower layer may hold it. For an option ``--max-tokens`` the variable
is ``PIPESD_MAX_TOKENS`` and the TOML key ``max-tokens`` (or ``max_tokens``), at the top level or in
a table named like the program (``[edge-agent]``, ``[cloud-verifier]``).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from broker.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

PREFIX = "PIPESD_"
#: Commands that may have a table of their own in a configuration file.
PROGRAMS = ("edge-agent", "cloud-verifier", "fleet-broker")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports wrong usage as ConfigError: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: see {self.prog} --help")


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with the same settings; flags and PIPESD_* variables win over it",
    )


def read_toml(path: str) -> dict[str, Any]:
    """The file's content. Raises ConfigError naming file and cause."""
    try:
        with Path(path).open("rb") as file:
            content: dict[str, Any] = tomllib.load(file)
            return content
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is no valid TOML: {error}") from None


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    *,
    program: str,
    environ: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """Parse ``argv`` with the layers below it. Raises ConfigError for anything wrong in any layer.

    The values of lower layers go through the same ``type`` and ``choices`` as flags do.
    """
    environ = os.environ if environ is None else environ
    given = parser.parse_args(argv)
    chosen = _leaf(parser, given)
    config = getattr(given, "config", None) or environ.get(f"{PREFIX}CONFIG")
    table: dict[str, Any] = {}
    if config:
        content = read_toml(config)
        for name, value in content.items():
            if isinstance(value, dict) != (name in PROGRAMS):
                known = ", ".join(f"[{table}]" for table in PROGRAMS)
                raise ConfigError(f"{config}: {name!r} is misplaced: settings, or tables {known}")
        table = {k: v for k, v in content.items() if k not in PROGRAMS}
        table.update(content.get(program, {}))
        _check_names(table, parser, config)
    extra: list[str] = []
    origins: dict[str, str] = {}  # by the name that argparse gives an option in its errors
    for action in chosen:
        if isinstance(action, argparse._AppendAction) and getattr(given, action.dest):
            continue  # it would add to what the flags say
        name = max(action.option_strings, key=len)
        key = name.lstrip("-")
        variable = PREFIX + key.upper().replace("-", "_")
        if variable in environ:
            value, origin = environ[variable], variable
        else:
            value, origin = table.get(key, table.get(key.replace("-", "_"))), f"{config}"
        if value is not None:
            extra += _as_flags(action, name, value, origin)
            origins[f"argument {'/'.join(action.option_strings)}: "] = origin
    if not extra:
        return given
    # Later flags win in argparse, so the lower layers stand right behind the subcommand.
    words = list(sys.argv[1:] if argv is None else argv)
    cut = 0
    for depth in range(8):
        command = getattr(given, "command" if depth == 0 else f"command{depth}", None)
        if command is None or command not in words[cut:]:
            break
        cut = words.index(command, cut) + 1
    try:
        return parser.parse_args(words[:cut] + extra + words[cut:])
    except ConfigError as error:
        # The flags alone were fine, so a lower layer is wrong: say which.
        where = [o for named, o in origins.items() if str(error).startswith(named)]
        raise ConfigError(": ".join([*where, str(error)])) from None


def _leaf(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[argparse.Action]:
    """The options of the (sub)command that was given, without --help and --config."""
    found: list[argparse.Action] = []
    while True:
        below: argparse.ArgumentParser | None = None
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                below = action.choices.get(getattr(given, action.dest, None) or "")
            elif action.option_strings and action.dest not in ("help", "config", "version"):
                found.append(action)
        if below is None:
            return found
        parser = below


def _check_names(table: Mapping[str, Any], parser: argparse.ArgumentParser, config: str) -> None:
    """A misspelt key must not pass in silence; keys of other subcommands are fine."""
    known: set[str] = set()
    todo = [parser]
    while todo:
        for action in todo.pop()._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += action.choices.values()
            known.update(option.lstrip("-") for option in action.option_strings)
    for key in table:
        if key.replace("_", "-") not in known:
            raise ConfigError(f"{config}: unknown setting {key!r}: see --help for the names")


def _as_flags(action: argparse.Action, name: str, value: Any, where: str) -> list[str]:
    if action.nargs == 0:
        text = str(value).lower()
        if text in ("1", "true", "yes", "on"):
            return [name]
        if text in ("0", "false", "no", "off", ""):
            return []
        raise ConfigError(f"{where}: {name} {value!r}: true or false is wanted")
    if isinstance(value, dict):
        raise ConfigError(f"{where}: a table where a value of {name} is wanted")
    # With an equals sign: a value may begin with a dash.
    return [f"{name}={item}" for item in (value if isinstance(value, list) else [value])]
