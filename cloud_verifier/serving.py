"""What ``cloud-verifier serve`` does once its target is loaded."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from broker.command import Stopped
from broker.errors import ModelError, TransportError
from broker.flags import broker_settings
from broker.transport import ConnectionEvent, ConnectionState

if TYPE_CHECKING:
    from cloud_verifier.engine.target import Target
    from cloud_verifier.metrics import VerifierMetrics


def serve_with(
    args: argparse.Namespace,
    target: Target,
    lost: Callable[[], str | None] = lambda: None,
    metrics: VerifierMetrics | None = None,
) -> int:
    """Serve with ``target`` until stopped by a signal; returns the exit code.

    ``args``: of ``cloud-verifier serve``, checked. ``lost()``: why the engine ended by itself,
    where the target knows. ``metrics`` show this replica from then on. The target is left open.
    Raises ConfigError, ModelError when the engine ended, TransportError when the broker lets nobody
    in.
    """
    from broker.mqtt import MqttTransport
    from cloud_verifier.engine.slow_target import SlowTarget
    from cloud_verifier.metrics_flags import build_labels
    from cloud_verifier.runtime import VerifierRuntime, config_for, online_status, status_will

    verifier = args.id
    if args.forward_floor_ms > 0.0:
        target = SlowTarget(target, args.forward_floor_ms / 1000.0)
    config = config_for(
        target,
        verifier,
        max_sessions=args.max_sessions,
        max_sessions_per_device=args.max_sessions_per_device,
        idle_ttl=args.idle_ttl,
        share_prefixes=not args.no_prefix_sharing,
    )
    will = status_will(verifier, online_status(config, target.name))
    settings = broker_settings(args, f"verifier-{verifier}", will)
    failed: list[ConnectionEvent] = []
    over = threading.Event()
    announced = threading.Event()

    def on_event(event: ConnectionEvent) -> None:
        if event.state is ConnectionState.FAILED:
            failed.append(event)
            over.set()
        elif event.state is ConnectionState.CONNECTED and not announced.is_set():
            announced.set()
            print(
                f"verifier {verifier} serves {target.name} ({args.dtype}) at {settings.url}\n"
                f"K/V memory for {target.total_blocks * target.block_tokens} tokens "
                f"({target.total_blocks} blocks of {target.block_tokens}) of up to "
                f"{target.max_slots} sessions, {target.context} of each",
                flush=True,
            )

    runtime = VerifierRuntime(MqttTransport(settings), target, config, on_event=on_event)
    if metrics is not None:
        metrics.watch(runtime, build_labels(verifier, target.name, args.engine, args.dtype))
    runtime.start()
    try:
        while not over.wait(1.0):
            if not runtime.alive:
                cause = lost() or "the engine ended by itself: see the trace above"
                raise ModelError(f"{cause}, start again")
    except Stopped:
        pass  # how a service is meant to end
    finally:
        runtime.stop()
    if failed:
        raise TransportError(f"no way into the broker at {settings.url}: {failed[0].reason}")
    return 0
