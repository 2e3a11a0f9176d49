"""The flags of a device that belongs to a fleet: what it tells, what it keeps, what it writes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from broker.errors import ConfigError
from broker.flags import check_prompt
from broker.sensors import add_watts_flag, check_watts

if TYPE_CHECKING:
    from edge_agent.telemetry import Upkeep

#: Seconds between two messages of telemetry unless somebody says otherwise, and at most.
TELEMETRY_S, MAX_TELEMETRY_S = 5.0, 3_600.0
MIN_TELEMETRY_S = 0.1
MAX_PORT = 65_535
MAX_PAUSE_S = 86_400.0
MAX_REPEAT = 1_000_000_000


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    """Telemetry, metrics and state."""
    group = parser.add_argument_group(
        "fleet",
        "The device follows the thresholds, window and policy that the fleet's tuner publishes for "
        "it; what --r1, --r2, --window or --policy say wins over that.",
    )
    group.add_argument(
        "--telemetry-interval",
        type=float,
        default=TELEMETRY_S,
        metavar="S",
        help=f"seconds between two messages with this device's figures ({TELEMETRY_S:g}); 0: none",
    )
    group.add_argument(
        "--state-file",
        metavar="PATH",
        default=None,
        help="where the last config and what was learnt of the link are kept over a restart, or "
        "none (a file of this device id in the user's state directory)",
    )
    group.add_argument(
        "--metrics-port",
        type=int,
        default=0,
        metavar="N",
        help="port of this device's own /metrics and /healthz; 0: none (the default)",
    )
    group.add_argument(
        "--metrics-bind",
        default="127.0.0.1",
        metavar="ADDR",
        help="address at which it listens (127.0.0.1: this machine only)",
    )
    add_watts_flag(group)


def add_work_flags(parser: argparse.ArgumentParser) -> None:
    """Prompts one after the other."""
    group = parser.add_argument_group("many prompts")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help='JSONL, {"prompt": TEXT} a line, optional "id" and "chat": written one after the '
        "other over one connection, instead of --prompt",
    )
    group.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="go through the prompts N times, 0: for ever (1); more than once, a text that fails "
        "is said and the next one tried",
    )
    group.add_argument(
        "--pause", type=float, default=0.0, metavar="S", help="seconds between two texts (0)"
    )


def check_device_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError for values that cannot be."""
    interval = args.telemetry_interval
    if interval != 0.0 and not MIN_TELEMETRY_S <= interval <= MAX_TELEMETRY_S:
        raise ConfigError(
            f"--telemetry-interval {interval:g} is outside {MIN_TELEMETRY_S:g} to "
            f"{MAX_TELEMETRY_S:g} seconds: 0 turns it off"
        )
    if not 0 <= args.metrics_port <= MAX_PORT:
        raise ConfigError(f"--metrics-port {args.metrics_port} is outside 0 to {MAX_PORT}")
    if args.state_file == "":
        raise ConfigError("--state-file is empty: give a path, or none")
    check_watts(args.watts)


def check_work_flags(args: argparse.Namespace) -> None:
    """Exactly one source of prompts, and how often. Raises ConfigError."""
    if args.prompts is None:
        check_prompt(args)
    elif args.prompt is not None or args.messages is not None:
        raise ConfigError("--prompts stands alone: leave --prompt and --messages out")
    if not 0 <= args.repeat <= MAX_REPEAT:
        raise ConfigError(f"--repeat {args.repeat} is outside 0 to {MAX_REPEAT}: 0 is for ever")
    if not 0.0 <= args.pause <= MAX_PAUSE_S:
        raise ConfigError(f"--pause {args.pause:g} is outside 0 to {MAX_PAUSE_S:g} seconds")


def upkeep_from(args: argparse.Namespace, device: str) -> Upkeep:
    """What the agent does beside its generations."""
    from broker.sensors import Sampler
    from edge_agent.telemetry import Upkeep, state_path

    tells = args.telemetry_interval > 0.0 or args.metrics_port > 0
    return Upkeep(
        telemetry_s=args.telemetry_interval,
        state=state_path(args.state_file, device),
        sampler=Sampler(watts=args.watts) if tells else None,
    )
