"""The flags of a replica's metrics; nothing of Prometheus is loaded before they ask for it."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from broker import __version__
from broker.errors import ConfigError
from broker.sensors import BackgroundSampler, Sampler, add_watts_flag, check_watts

if TYPE_CHECKING:
    from cloud_verifier.metrics import VerifierMetrics

MAX_PORT = 65_535


def add_metrics_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("metrics")
    group.add_argument(
        "--metrics-port",
        type=int,
        default=0,
        metavar="N",
        help="port of /metrics and /healthz; 0: none (the default)",
    )
    group.add_argument(
        "--metrics-bind",
        default="127.0.0.1",
        metavar="ADDR",
        help="address at which it listens (127.0.0.1: this machine only)",
    )
    add_watts_flag(group)


def open_metrics(
    args: argparse.Namespace, *, gpu: bool = False
) -> contextlib.AbstractContextManager[VerifierMetrics | None]:
    """What serves the metrics that the flags ask for; it holds None where they ask for none.

    ``gpu``: the target computes on one, so that its energy is meant. Raises ConfigError, also where
    the port is taken.
    """
    watts = check_watts(args.watts)
    if not 0 <= args.metrics_port <= MAX_PORT:
        raise ConfigError(f"--metrics-port {args.metrics_port} is outside 0 to {MAX_PORT}")
    if args.metrics_port == 0:
        return contextlib.nullcontext()
    try:
        from cloud_verifier.metrics import VerifierMetrics
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--metrics-port: {error.name} is not installed: pip install 'pipesd[cloud]'"
        ) from None
    sampler = BackgroundSampler(Sampler(watts=watts, gpu=gpu))
    return VerifierMetrics(args.metrics_bind, args.metrics_port, sampler)


def build_labels(verifier: str, target: str, engine: str, dtype: str) -> dict[str, str]:
    """The labels of ``pipesd_verifier_build_info``."""
    return {
        "version": __version__,
        "verifier": verifier,
        "target": target,
        "engine": engine,
        "dtype": dtype,
    }
