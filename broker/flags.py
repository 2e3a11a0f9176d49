"""Flags that several commands share, and what follows from them."""

from __future__ import annotations

import argparse
import json
import re
import socket
from pathlib import Path
from typing import Any

from broker.errors import ConfigError
from broker.messages import MAX_POSITION
from broker.mqtt_settings import MqttSettings, TlsSettings
from broker.sampling import Sampling
from broker.topics import check_id
from broker.transport import Will

MAX_MESSAGES = 1_000


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int = 128) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"most tokens to write ({max_tokens})",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="F",
        help="0: greedy, always the likeliest token (the default); 1: the model's own spread",
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="only the N likeliest tokens; 0: all"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="F",
        help="only the likeliest tokens that together reach this probability; 1: all",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="F",
        help="only tokens at least this probable relative to the likeliest; 0: all",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="the same seed gives the same text, on any device and verifier (0)",
    )


def sampling_from(args: argparse.Namespace) -> Sampling:
    """Raises ConfigError for values outside their range."""
    if not 1 <= args.max_tokens <= MAX_POSITION:
        limits = f"outside 1 to {MAX_POSITION}"
        raise ConfigError(f"--max-tokens {args.max_tokens} is {limits}: ask for at least one token")
    return Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)


def add_prompt_flags(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "--prompt", metavar="T", default=default, help="a user message, or with --raw plain text"
    )
    group.add_argument(
        "--messages", metavar="FILE", help='JSON list of {"role": ..., "content": ...}; -: stdin'
    )
    group.add_argument(
        "--raw", action="store_true", help="continue the prompt as plain text: no chat template"
    )


def read_messages(path: str) -> list[dict[str, str]]:
    """Chat messages from a JSON file. Raises ConfigError naming file and cause."""
    try:
        raw = Path("/dev/stdin" if path == "-" else path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"cannot read --messages {path}: {cause}") from None
    try:
        messages: list[dict[str, str]] = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--messages {path} is no JSON: {error}") from None
    good = (
        isinstance(messages, list)
        and 0 < len(messages) <= MAX_MESSAGES
        and all(
            isinstance(entry, dict)
            and isinstance(entry.get("role"), str)
            and isinstance(entry.get("content"), str)
            for entry in messages
        )
    )
    if not good:
        raise ConfigError(
            f'--messages {path} is no list of {{"role": "user", "content": "..."}}: mend the file'
        )
    return messages


def check_prompt(args: argparse.Namespace) -> None:
    """Exactly one of --prompt and --messages. Raises ConfigError."""
    if (args.prompt is None) == (args.messages is None):
        raise ConfigError("give either --prompt TEXT or --messages FILE")
    if args.messages is not None and args.raw:
        raise ConfigError("--raw goes with --prompt: messages are rendered by the chat template")


def add_broker_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("broker")
    group.add_argument(
        "--broker", metavar="URL", help="mqtt[s]://[user[:password]@]host[:port] of the broker"
    )
    group.add_argument("--username", metavar="NAME", help="user name for the broker")
    group.add_argument(
        "--password-file",
        metavar="FILE",
        help="file whose first line is the broker password; keeps it out of the process list",
    )
    group.add_argument("--ca-file", metavar="FILE", help="PEM authorities for mqtts://")
    group.add_argument("--cert-file", metavar="FILE", help="PEM certificate of this client")
    group.add_argument("--key-file", metavar="FILE", help="PEM key of this client")
    group.add_argument(
        "--keepalive", type=int, default=15, metavar="S", help="MQTT keep-alive in seconds (15)"
    )


#: Stands for the name of the host; no id can look like it.
HOSTNAME = "@hostname"


def own_id(flag: str, value: str) -> str:
    """``value`` as an id, or, where it is HOSTNAME, what this host is called.

    So replicas that are started from one description (a scaled container) have ids of their own.
    What cannot stand in a topic becomes ``-``. Raises ConfigError.
    """
    if value == HOSTNAME:
        value = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64]
    return check_id(flag, value)


def broker_settings(args: argparse.Namespace, client_id: str, will: Will | None) -> MqttSettings:
    """Raises ConfigError for anything that cannot work."""
    if not args.broker:
        raise ConfigError("--broker is missing: give mqtt://HOST[:PORT], or set PIPESD_BROKER")
    options: dict[str, Any] = {"will": will, "keepalive": args.keepalive}
    if args.username:
        options["username"] = args.username
    if args.password_file:
        try:
            lines = Path(args.password_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            cause = getattr(error, "strerror", None) or "it is no UTF-8 text"
            raise ConfigError(
                f"cannot read --password-file {args.password_file}: {cause}"
            ) from None
        if not lines or not lines[0]:
            raise ConfigError(f"--password-file {args.password_file} is empty: write it there")
        options["password"] = lines[0]
    if args.ca_file or args.cert_file or args.key_file:
        options["tls"] = TlsSettings(args.ca_file, args.cert_file, args.key_file)
    return MqttSettings.from_url(args.broker, client_id, **options)
