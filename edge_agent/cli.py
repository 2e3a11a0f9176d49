"""The ``edge-agent`` command: ``demo`` on one machine, ``generate`` against a cloud, ``bench``."""

from __future__ import annotations

import argparse
import re
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from broker import __version__
from broker.command import raise_on_signals, run, set_up_logging
from broker.errors import ConfigError
from broker.flags import (
    add_broker_flags,
    add_prompt_flags,
    add_sampling_flags,
    check_prompt,
    read_messages,
    sampling_from,
)
from broker.messages import VERIFY_STREAM
from broker.pairs import PAIRS, SOURCE_QUANT
from broker.settings import Parser, add_config_flag, parse
from edge_agent.core.config import (
    DEFAULT_MAX_AHEAD,
    DEFAULT_MIN_SURVIVAL,
    DEFAULT_VERIFY,
    LOCAL_FORBID,
    LOCAL_MODES,
    LOCAL_ONLY,
    VERIFY_CHOICES,
)
from edge_agent.core.policies import POLICIES, find_policy
from edge_agent.core.timing import Timing
from edge_agent.core.trigger import DEFAULT_R1, DEFAULT_R2, Thresholds
from edge_agent.device_config import DEFAULT_POLICY, TUNABLES
from edge_agent.device_flags import add_device_flags, add_work_flags
from edge_agent.draft import TextModel
from edge_agent.text import StopMatcher

if TYPE_CHECKING:
    from edge_agent.generation import Request
    from edge_agent.llama_draft import LlamaDraftModel
    from edge_agent.llama_text import LlamaText

PROGRAM = "edge-agent"
DEMO_PROMPT = "Explain in a few sentences why the sky is blue."
DRAFT_QUANTS = ("q2_k", "q3_k_m", SOURCE_QUANT)


def build_parser() -> argparse.ArgumentParser:
    from edge_agent.bench.command import add_bench_flags
    from edge_agent.bench.fleet_command import add_fleet_flags

    parser = Parser(
        prog=PROGRAM, description="Draft on this device, let a big model in the cloud decide."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo", help="broker, verifier and this agent on one machine, with real models"
    )
    add_prompt_flags(demo)
    add_sampling_flags(demo)
    _add_draft_flags(demo, default_pair="smollm2")
    demo.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="precision of the target (float32)",
    )
    demo.add_argument(
        "--target-threads", type=int, default=None, metavar="N", help="CPU threads of the target"
    )
    demo.add_argument(
        "--no-alone", action="store_true", help="leave out the run of the target alone at the end"
    )
    _add_session_flags(demo)
    _add_common(demo)

    generate = commands.add_parser("generate", help="write against a running cloud")
    add_broker_flags(generate)
    generate.add_argument(
        "--device-id", metavar="ID", default=None, help="this device's id (from the host name)"
    )
    add_prompt_flags(generate)
    add_work_flags(generate)
    add_sampling_flags(generate)
    _add_draft_flags(generate)
    _add_session_flags(generate)
    generate.add_argument(
        "--local",
        choices=tuple(mode for mode in LOCAL_MODES if mode != LOCAL_ONLY),
        default=LOCAL_FORBID,
        help="when the cloud is out of reach: forbid (default; an error) or allow (go on with the "
        "draft model alone, marked as unverified)",
    )
    generate.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds of silence after which the cloud counts as out of reach (30)",
    )
    add_device_flags(generate)
    _add_common(generate)

    bench = commands.add_parser(
        "bench", help="compare the policies over emulated links, with real models"
    )
    add_bench_flags(bench)
    _add_draft_flags(bench)
    add_fleet_flags(bench)
    _add_common(bench)
    return parser


def _add_draft_flags(parser: argparse.ArgumentParser, default_pair: str | None = None) -> None:
    group = parser.add_argument_group("draft model")
    if default_pair is None:
        group.add_argument("--draft", metavar="M", help="GGUF file of the draft model")
        group.add_argument("--pair", choices=sorted(PAIRS), help="the draft of a demo pair instead")
    else:
        group.add_argument(
            "--pair",
            choices=sorted(PAIRS),
            default=default_pair,
            help=f"which demo pair ({default_pair})",
        )
    group.add_argument(
        "--draft-quant", choices=DRAFT_QUANTS, default=None, help="quantisation of a pair's draft"
    )
    group.add_argument(
        "--threads", type=int, default=None, metavar="N", help="CPU threads of the draft model"
    )
    group.add_argument(
        "--draft-context", type=int, default=None, metavar="N", help="tokens that the draft holds"
    )


def _add_session_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("session")
    group.add_argument(
        "--stop", action="append", default=[], metavar="T", help="end before this text; repeatable"
    )
    group.add_argument(
        "--policy",
        choices=tuple(POLICIES),
        default=None,
        help="when to ask and to draft on: pipesd (default), vanilla, hsl or edgellm; cloud: the "
        "target alone, streamed; local: the draft alone, nothing leaves the device",
    )
    group.add_argument(
        "--r1",
        type=float,
        default=None,
        metavar="F",
        help=f"ask for a verdict when the product of confidences falls to F ({DEFAULT_R1}, or "
        "the policy's)",
    )
    group.add_argument(
        "--r2",
        type=float,
        default=None,
        metavar="F",
        help=f"ask for a verdict when one confidence falls to F ({DEFAULT_R2}, or the policy's)",
    )
    group.add_argument(
        "--window",
        type=int,
        default=None,
        metavar="N",
        help="ask after N drafted tokens at most (16, or the policy's)",
    )
    group.add_argument(
        "--max-ahead",
        type=int,
        default=None,
        metavar="N",
        help=f"most unverified tokens ({DEFAULT_MAX_AHEAD}, or the policy's)",
    )
    group.add_argument(
        "--min-survival",
        type=float,
        default=None,
        metavar="F",
        help="pause drafting while a verdict is awaited and the chance of the whole draft is below "
        f"F ({DEFAULT_MIN_SURVIVAL})",
    )
    group.add_argument(
        "--verify",
        choices=[choice for choice in VERIFY_CHOICES if choice != VERIFY_STREAM],
        default=DEFAULT_VERIFY,
        help="what the verifier does when it would idle: nothing (triggered), judge tokens that "
        "nobody asked for (eager), also write on by itself (ahead), or that only where the link "
        f"is slower than the target ({DEFAULT_VERIFY}, the default)",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_config_flag(parser)
    parser.add_argument("--verbose", action="store_true", help="debug messages and traces")


def default_device_id() -> str:
    """The host name, with what cannot be part of a topic replaced by ``-``."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname()).strip("-_")[:64]
    return name or "device"


def check_draft_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError for values that cannot be."""
    for name in ("threads", "draft_context"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} is below 1: leave it out")


def load_draft(args: argparse.Namespace, progress: Callable[[str], None]) -> LlamaDraftModel:
    """The draft model that the flags name. Raises ConfigError or ModelError."""
    check_draft_flags(args)
    try:
        from edge_agent.llama_draft import LlamaDraftModel
        from edge_agent.prepare import resolve_draft
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'pipesd[edge]'") from None
    path = resolve_draft(getattr(args, "draft", None), args.pair, args.draft_quant, progress)
    return LlamaDraftModel(path, context=args.draft_context, threads=args.threads)


def encode_prompt(args: argparse.Namespace, text: TextModel) -> tuple[int, ...]:
    """The prompt's token ids, by the chat template where the model has one."""
    if args.messages is not None:
        return tuple(text.encode_chat(read_messages(args.messages)))
    if args.raw or not text.has_chat_template:
        return tuple(text.encode_prompt(args.prompt))
    return tuple(text.encode_chat([{"role": "user", "content": args.prompt}]))


def strips_space(args: argparse.Namespace, text: LlamaText) -> bool:
    """Whether the answer's first word brings a space that is not part of it (SentencePiece)."""
    chat = args.messages is not None or (text.has_chat_template and not args.raw)
    return chat and text.adds_space_prefix


def request_from(args: argparse.Namespace, prompt: tuple[int, ...]) -> Request:
    """Raises ConfigError for values that cannot be."""
    from edge_agent.generation import Request

    StopMatcher(args.stop)
    timeout = getattr(args, "timeout", 30.0)
    if not 0.0 < timeout <= 86_400.0:
        raise ConfigError(f"--timeout {timeout} is outside 0 to 86400 seconds")
    policy = find_policy(args.policy or DEFAULT_POLICY)
    if policy.verify is not None and args.verify not in (DEFAULT_VERIFY, policy.verify):
        raise ConfigError(f"--verify {args.verify} with --policy {policy.name}: leave it out")
    own = policy.thresholds
    thresholds = Thresholds(
        own.r1 if args.r1 is None else args.r1,
        own.r2 if args.r2 is None else args.r2,
        own.window if args.window is None else args.window,
    )
    return Request(
        prompt=prompt,
        max_tokens=args.max_tokens,
        sampling=sampling_from(args),
        policy=policy,
        thresholds=thresholds,
        timing=Timing(offline_after=timeout),
        max_ahead=args.max_ahead,
        min_survival=args.min_survival,
        verify=args.verify,
        local=getattr(args, "local", LOCAL_FORBID),
        tunable=frozenset(name for name in TUNABLES if getattr(args, name) is None),
    )


def generate(args: argparse.Namespace) -> int:
    from edge_agent.generate_command import run_generate

    return run_generate(args)


def demo(args: argparse.Namespace) -> int:
    from edge_agent.demo import run_demo

    request_from(args, (0,))
    check_draft_flags(args)
    if args.prompt is None and args.messages is None:
        args.prompt = DEMO_PROMPT
    check_prompt(args)
    if args.target_threads is not None and args.target_threads < 1:
        raise ConfigError(f"--target-threads {args.target_threads} is below 1: leave it out")
    return run_demo(args)


def bench(args: argparse.Namespace) -> int:
    if args.fleet is not None:
        from edge_agent.bench.fleet_command import run_fleet

        return run_fleet(args)
    from edge_agent.bench.command import run_bench

    check_draft_flags(args)
    return run_bench(args, load_draft)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def work() -> int:
        args = parse(build_parser(), argv, program=PROGRAM)
        set_up_logging(args.verbose)
        raise_on_signals()
        return {"demo": demo, "generate": generate, "bench": bench}[args.command](args)

    return run(work, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
