"""The ``cloud-verifier`` command: ``serve`` one replica, or ``generate`` with the target alone."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from broker import __version__
from broker.command import Stopped, raise_on_signals, run, set_up_logging
from broker.errors import ConfigError
from broker.flags import (
    add_broker_flags,
    add_prompt_flags,
    add_sampling_flags,
    broker_settings,
    own_id,
)
from broker.settings import Parser, add_config_flag, parse
from cloud_verifier.exporter import command as exporter
from cloud_verifier.metrics_flags import add_metrics_flags, open_metrics
from cloud_verifier.serving import serve_with
from cloud_verifier.target_flags import (
    add_target_flags,
    find_target,
    kv_budget,
    load_target,
    not_installed,
)
from cloud_verifier.top import command as top
from cloud_verifier.tuner import command as tuner

if TYPE_CHECKING:
    from cloud_verifier.engine.torch_parallel import ParallelTarget, Ranks

PROGRAM = "cloud-verifier"
#: Seconds that an ordinary end may take once standard input has ended.
_END_S = 20.0


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM, description="Decide with the target model which drafts are right."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="serve sessions from a broker until stopped")
    add_broker_flags(serve)
    add_target_flags(serve)
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
    serve.add_argument(
        "--no-prefix-sharing",
        action="store_true",
        help="compute every prompt anew, also where one that begins alike is in memory: for "
        "measurements, since the first of them would pay for all",
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
    add_target_flags(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object at the end")
    _add_common(generate)
    exporter.add_exporter_parser(commands)
    top.add_top_parser(commands)
    tuner.add_tune_parser(commands)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    parser.add_argument(
        "--until-eof",
        action="store_true",
        help="end when standard input does: for a parent that must not leave this behind",
    )
    parser.add_argument("--verbose", action="store_true", help="debug messages and traces")


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
        raise not_installed(error) from None
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
        kv_budget=kv_budget(args),
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


def generate(args: argparse.Namespace) -> int:
    from cloud_verifier.generate_command import run_generate

    return run_generate(args, _end_at_eof)


def _end_at_eof() -> None:
    """From now on the end of standard input stops this process as SIGTERM does."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_END_S)
        os._exit(1)

    threading.Thread(target=watch, name="until-eof", daemon=True).start()


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
