"""The flags that name the target and its memory, and the model that they load."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from broker.errors import ConfigError
from broker.pairs import PAIRS
from cloud_verifier.engine.kv_budget import parse_size

if TYPE_CHECKING:
    from cloud_verifier.engine.target import Target

ENGINES = ("torch", "llama")
#: Sessions with a cache, by engine: llama.cpp allocates a whole context for each.
_SLOTS = {"torch": 64, "llama": 16}
_MAX_SLOTS = 65_536


class Words(Protocol):
    """The target's own tokenizer, whichever engine reads it."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode_prompt(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


def add_target_flags(parser: argparse.ArgumentParser) -> None:
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
        "torch: at most a quarter of what is available)",
    )
    group.add_argument(
        "--threads", type=int, default=None, metavar="N", help="CPU threads of a forward (all)"
    )


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
    if args.slots > _MAX_SLOTS:
        raise ConfigError(f"--slots {args.slots} is above {_MAX_SLOTS}: start more replicas")
    kv_budget(args)
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


def kv_budget(args: argparse.Namespace) -> int | None:
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
            kv_budget=kv_budget(args),
        )
    try:
        from cloud_verifier.engine.torch_target import TorchTarget
    except ModuleNotFoundError as error:
        raise not_installed(error) from None
    return TorchTarget.load(
        source,
        dtype=args.dtype,
        device=args.device,
        context=args.context,
        max_slots=args.slots,
        threads=args.threads,
        kv_budget=kv_budget(args),
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
        raise not_installed(error) from None


def not_installed(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"{error.name} is not installed: pip install 'pipesd[cloud]'")
