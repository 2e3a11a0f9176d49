"""The ``cloud-verifier`` command: ``serve`` one replica, or ``generate`` with the target alone."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from broker import __version__
from broker.command import Stopped, raise_on_signals, run, set_up_logging
from broker.errors import ConfigError
from broker.flags import (
    add_broker_flags,
    add_prompt_flags,
    add_sampling_flags,
    broker_settings,
    check_prompt,
    own_id,
    read_messages,
    sampling_from,
)
from broker.pairs import PAIRS
from broker.settings import Parser, add_config_flag, parse
from cloud_verifier import reference
from cloud_verifier.engine.kv_budget import parse_size
from cloud_verifier.exporter import command as exporter
from cloud_verifier.metrics_flags import add_metrics_flags, open_metrics
from cloud_verifier.serving import serve_with
from cloud_verifier.top import command as top
from cloud_verifier.tuner import command as tuner

if TYPE_CHECKING:
    from cloud_verifier.engine.target import Target
    from cloud_verifier.engine.torch_parallel import ParallelTarget, Ranks

PROGRAM = "cloud-verifier"
#: Seconds that an ordinary end may take once standard input has ended.
_END_S = 20.0

ENGINES = ("torch", "llama")
#: Sessions with a cache, by engine: llama.cpp allocates a whole context for each.
_SLOTS = {"torch": 64, "llama": 16}


class Words(Protocol):
    """The target's own tokenizer, whichever engine reads it."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode_prompt(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM, description="Decide with the target model which drafts are right."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="serve sessions from a broker until stopped")
    add_broker_flags(serve)
    _add_target_flags(serve)
    serve.add_argument(
        "--id",
        default="verifier-1",
        metavar="ID",
        help="this replica's id (verifier-1); @hostname: what this host is called",
    )
    serve.add_argument(
        "--max-sessions", type=int, default=256, metavar="N", help="sessions held at a time (256)"
    )
    serve.add_argument(
        "--max-sessions-per-device",
        type=int,
        default=32,
        metavar="N",
        help="of one device (32); it is told to come back later for more",
    )
    serve.add_argument(
        "--idle-ttl",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds without a word after which a session is forgotten (300)",
    )
    serve.add_argument(
        "--tensor-parallel",
        action="store_true",
        help="under torchrun: one replica whose target is cut over all of its processes",
    )
    serve.add_argument(
        "--forward-floor-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="emulation, for measurements: each forward takes at least MS milliseconds (0: off)",
    )
    add_metrics_flags(serve)
    _add_common(serve)

    generate = commands.add_parser(
        "generate", help="the target alone: the text that every split run must equal"
    )
    add_prompt_flags(generate)
    generate.add_argument(
        "--prompt-ids", metavar="FILE", help="JSON list of token ids instead of a text; -: stdin"
    )
    add_sampling_flags(generate)
    _add_target_flags(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object at the end")
    _add_common(generate)
    exporter.add_exporter_parser(commands)
    top.add_top_parser(commands)
    tuner.add_tune_parser(commands)
    return parser


def _add_target_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target model")
    group.add_argument("--target", metavar="M", help="directory, hub id or GGUF file of the model")
    group.add_argument("--pair", choices=sorted(PAIRS), help="the target of a demo pair instead")
    group.add_argument(
        "--engine",
        choices=ENGINES,
        default="torch",
        help="torch (default), or llama: llama.cpp on a .gguf file, for CPUs",
    )
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="precision of the forward; float32 (default) equals target-only text exactly",
    )
    group.add_argument("--device", default="cpu", metavar="D", help="torch device (cpu)")
    group.add_argument(
        "--context",
        type=int,
        default=None,
        metavar="N",
        help="tokens per session (torch: the model's, llama: 2048 of them)",
    )
    group.add_argument(
        "--slots",
        type=int,
        default=None,
        metavar="N",
        help="sessions with a K/V cache (torch: 64, llama: 16)",
    )
    group.add_argument(
        "--kv-budget",
        default=None,
        metavar="SIZE",
        help="memory for K/V of all sessions, like 512MiB or 2G (what --slots and --context take; "
        "torch: at most half of what is available)",
    )
    group.add_argument(
        "--threads", type=int, default=None, metavar="N", help="CPU threads of a forward (all)"
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    parser.add_argument(
        "--until-eof",
        action="store_true",
        help="end when standard input does: for a parent that must not leave this behind",
    )
    parser.add_argument("--verbose", action="store_true", help="debug messages and traces")


def find_target(args: argparse.Namespace) -> str:
    """The directory, hub id or file of the target that the flags name, prepared where need be.

    Raises ConfigError or ModelError.
    """
    if (args.target is None) == (args.pair is None):
        raise ConfigError(f"give either --target MODEL or --pair {'|'.join(sorted(PAIRS))}")
    if args.slots is None:
        args.slots = _SLOTS[args.engine]
    if args.slots < 1 or (args.context is not None and args.context < 2):
        raise ConfigError("--slots is at least 1 and --context at least 2")
    _kv_budget(args)
    if args.threads is not None and args.threads < 1:
        raise ConfigError(f"--threads {args.threads} is below 1: leave it out for all cores")
    if args.engine == "llama":
        from cloud_verifier.engine.llama_prepare import resolve_gguf

        if args.device != "cpu":
            raise ConfigError(
                f"--engine llama computes on the CPU: leave out --device {args.device}"
            )
        return str(resolve_gguf(args.target, args.pair, args.dtype))
    from cloud_verifier.engine.prepare import resolve_target

    return resolve_target(args.target, args.pair)


def _kv_budget(args: argparse.Namespace) -> int | None:
    """Bytes of --kv-budget; None: it was not given. Raises ConfigError."""
    return None if args.kv_budget is None else parse_size(args.kv_budget)


def load_target(args: argparse.Namespace, source: str) -> Target:
    """The target that lies in ``source``, with the settings of the flags.

    Raises ConfigError or ModelError.
    """
    if args.engine == "llama":
        from cloud_verifier.engine.llama_target import LlamaTarget

        return LlamaTarget(
            source,
            dtype=args.dtype,
            context=args.context,
            max_slots=args.slots,
            threads=args.threads,
            kv_budget=_kv_budget(args),
        )
    try:
        from cloud_verifier.engine.torch_target import TorchTarget
    except ModuleNotFoundError as error:
        raise _not_installed(error) from None
    return TorchTarget.load(
        source,
        dtype=args.dtype,
        device=args.device,
        context=args.context,
        max_slots=args.slots,
        threads=args.threads,
        kv_budget=_kv_budget(args),
    )


def load_words(args: argparse.Namespace, source: str) -> Words:
    """The tokenizer of the target in ``source``. Raises ConfigError or ModelError."""
    if args.engine == "llama":
        from cloud_verifier.engine.llama_text import LlamaText

        return LlamaText(source)
    try:
        from cloud_verifier.engine.torch_text import TargetText

        return TargetText(source)
    except ModuleNotFoundError as error:
        raise _not_installed(error) from None


def _not_installed(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"{error.name} is not installed: pip install 'pipesd[cloud]'")


def _ranks(args: argparse.Namespace) -> Ranks | None:
    """This process among those of torchrun; None: it is a replica by itself. Raises ConfigError."""
    if not args.tensor_parallel:
        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") != "1":
            raise ConfigError(
                "torchrun started several processes under one --id: add --tensor-parallel"
            )
        return None
    if args.engine != "torch":
        raise ConfigError(f"--tensor-parallel is for --engine torch: leave out {args.engine}")
    try:
        from cloud_verifier.engine.torch_parallel import Ranks
    except ModuleNotFoundError as error:
        raise _not_installed(error) from None
    return Ranks(args.device)


def _load_part(args: argparse.Namespace, ranks: Ranks) -> ParallelTarget:
    """This rank's part of the target. Raises ConfigError or ModelError."""
    from cloud_verifier.engine.torch_parallel import ParallelTarget

    return ParallelTarget.join(
        find_target(args),
        ranks,
        dtype=args.dtype,
        device=args.device,
        context=args.context,
        max_slots=args.slots,
        threads=args.threads,
        kv_budget=_kv_budget(args),
    )


def serve(args: argparse.Namespace) -> int:
    try:
        return _serve(args)
    except Stopped:
        return 0  # how a service is meant to end, also while its model still loads


def _serve(args: argparse.Namespace) -> int:
    from cloud_verifier.engine.slow_target import check_floor

    args.id = own_id("--id", args.id)
    if min(args.max_sessions, args.max_sessions_per_device) < 1 or not args.idle_ttl > 0:
        raise ConfigError("--max-sessions[-per-device] is at least 1 and --idle-ttl above 0 s")
    check_floor(args.forward_floor_ms / 1000.0)
    broker_settings(args, f"verifier-{args.id}", None)  # wrong usage before a minute of loading
    ranks = _ranks(args)
    if args.until_eof and (ranks is None or ranks.first):
        _end_at_eof()
    if ranks is not None and not ranks.first:
        with contextlib.closing(_load_part(args, ranks)) as part:
            part.follow()
            return 0
    on_gpu = args.engine == "torch" and args.device.startswith("cuda")
    with open_metrics(args, gpu=on_gpu) as metrics:  # a taken port, before a minute of loading
        if ranks is None:
            with contextlib.closing(load_target(args, find_target(args))) as target:
                return serve_with(args, target, metrics=metrics)
        with contextlib.closing(_load_part(args, ranks)) as part:
            return serve_with(args, part, lambda: part.lost, metrics)


def _end_at_eof() -> None:
    """From now on the end of standard input stops this process as SIGTERM does."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_END_S)
        os._exit(1)

    threading.Thread(target=watch, name="until-eof", daemon=True).start()


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


def generate(args: argparse.Namespace) -> int:
    sampling = sampling_from(args)
    ids: tuple[int, ...] | None = None
    if args.prompt_ids is None:
        check_prompt(args)
    else:
        ids = _read_ids(args)
    if args.until_eof:
        _end_at_eof()
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


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def work() -> int:
        args = parse(build_parser(), argv, program=PROGRAM)
        set_up_logging(args.verbose)
        raise_on_signals()
        works = {"serve": serve, "generate": generate, "exporter": exporter.run}
        works |= {"top": top.run, "tune": tuner.run}
        return works[args.command](args)

    return run(work, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
