"""``cloud-verifier generate``: the target alone, the text that every split run must equal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.errors import ConfigError
from broker.flags import check_prompt, read_messages, sampling_from
from cloud_verifier import reference
from cloud_verifier.target_flags import Words, find_target, load_target, load_words


def _read_ids(args: argparse.Namespace) -> tuple[int, ...]:
    """The token ids of --prompt-ids; with --until-eof one line is all that standard input holds."""
    if args.prompt is not None or args.messages is not None:
        raise ConfigError("--prompt-ids stands alone: leave out --prompt and --messages")
    path = args.prompt_ids
    try:
        if path != "-":
            raw = Path(path).read_text(encoding="utf-8")
        else:
            raw = sys.stdin.readline() if args.until_eof else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"cannot read --prompt-ids {path}: {cause}") from None
    try:
        ids: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--prompt-ids {path} is no JSON: {error}") from None
    if not isinstance(ids, list) or any(type(token) is not int or token < 0 for token in ids):
        raise ConfigError(f"--prompt-ids {path} is no list of token ids: mend it")
    return tuple(ids)


def _prompt(args: argparse.Namespace, text: Words) -> tuple[int, ...]:
    """The prompt's token ids, by the chat template where the model has one."""
    if args.messages is not None:
        return tuple(text.encode_chat(read_messages(args.messages)))
    if args.raw or not text.has_chat_template:
        return tuple(text.encode_prompt(args.prompt))
    return tuple(text.encode_chat([{"role": "user", "content": args.prompt}]))


def run_generate(args: argparse.Namespace, end_at_eof: Callable[[], None]) -> int:
    """The command. ``end_at_eof``: what --until-eof asks for, once standard input was read.

    Raises ConfigError or ModelError.
    """
    sampling = sampling_from(args)
    ids: tuple[int, ...] | None = None
    if args.prompt_ids is None:
        check_prompt(args)
    else:
        ids = _read_ids(args)
    if args.until_eof:
        end_at_eof()
    source = find_target(args)
    words = load_words(args, source)
    prompt = _prompt(args, words) if ids is None else ids  # wrong input before a minute of loading
    target = load_target(args, source)
    try:
        if prompt and max(prompt) >= target.vocab_size:
            top = f"ids go from 0 to {target.vocab_size - 1}"
            raise ConfigError(f"--prompt-ids: token {max(prompt)} is beyond the target: {top}")
        tokens: list[int] = []
        first = last = 0.0
        finish = "cancelled"
        shown = 0
        for step in reference.generate(target, prompt, sampling, args.max_tokens):
            tokens.append(step.token)
            first = first or step.seconds
            last, finish = step.seconds, step.finish or finish
            if not args.json:
                text = words.decode(tokens)
                if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                    print(text[shown:], end="", flush=True)
                    shown = len(text)
        if args.json:
            # A character that the end cut short is no text, here as little as on an edge.
            text = words.decode(tokens).removesuffix("\N{REPLACEMENT CHARACTER}")
            print(json.dumps(_report(text, tokens, finish, first, last)))
        else:
            print()
            rate = 1000.0 * last / len(tokens)
            print(f"{len(tokens)} tokens, {rate:.1f} ms each, {finish}", file=sys.stderr)
    finally:
        target.close()
    return 0


def _report(
    text: str, tokens: list[int], finish: str, first: float, last: float
) -> dict[str, object]:
    """The object of DESIGN.md, Commands; nothing was drafted and nothing was sent."""
    return {
        "text": text,
        "token_ids": tokens,
        "finish_reason": finish,
        "tokens": len(tokens),
        "ttft_ms": round(first * 1000.0, 2),
        "tpt_ms": round(last * 1000.0 / len(tokens), 2),
        "drafted": 0,
        "accepted": 0,
        "forwards": len(tokens),
        "uplink_bytes": 0,
        "downlink_bytes": 0,
        "uplink_messages": 0,
        "mode": "target",
        "verified": True,
    }
