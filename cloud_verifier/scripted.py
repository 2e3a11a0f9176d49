"""A verifier without a model, for load tests: ``python -m cloud_verifier.scripted``.

Everything but the target is what ``cloud-verifier serve`` runs: the MQTT transport, the core, the
scheduler, the threads. The target writes the text of ``broker.load_text``; a forward costs nothing,
or ``--forward-ms``. When it ends it prints its counters as one JSON line on standard error; with
``--until-eof`` also for each line on its standard input.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from broker import load_text
from broker.command import Stopped, raise_on_signals, run, set_up_logging
from broker.errors import ConfigError, ModelError, TransportError
from broker.flags import add_broker_flags, broker_settings
from broker.settings import Parser, add_config_flag, parse
from broker.topics import check_id
from broker.transport import ConnectionEvent, ConnectionState
from cloud_verifier.engine.scripted_target import ScriptedTarget
from cloud_verifier.engine.slow_target import SlowTarget, check_floor
from cloud_verifier.engine.target import Target
from cloud_verifier.metrics_flags import add_metrics_flags, build_labels, open_metrics
from cloud_verifier.runtime import VerifierRuntime, config_for, online_status, status_will

if TYPE_CHECKING:
    from cloud_verifier.metrics import VerifierMetrics

PROGRAM = "scripted-verifier"
#: How the line of counters begins.
STATS = "scripted-verifier counters "
CONTEXT = 1 << 17
MAX_SESSIONS = 100_000
#: Seconds that sessions which are being closed have for it, once standard input has ended.
_SETTLE_S = 3.0
_END_S = 20.0


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM, description="Serve a text without a model behind it: for load tests only."
    )
    add_broker_flags(parser)
    parser.add_argument("--id", default="scripted-1", metavar="ID", help="this replica's id")
    parser.add_argument(
        "--max-sessions", type=int, default=256, metavar="N", help="sessions held at a time (256)"
    )
    parser.add_argument(
        "--slots", type=int, metavar="N", help="sessions with a cache (as many as --max-sessions)"
    )
    parser.add_argument(
        "--idle-ttl", type=float, default=300.0, metavar="S", help="as cloud-verifier serve (300)"
    )
    parser.add_argument(
        "--forward-ms", type=float, default=0.0, metavar="MS", help="what a forward takes (0)"
    )
    parser.add_argument(
        "--until-eof", action="store_true", help="end when standard input does, sessions closed"
    )
    add_metrics_flags(parser)
    add_config_flag(parser)
    parser.add_argument("--verbose", action="store_true", help="debug messages and traces")
    return parser


def make_target(slots: int, forward_s: float) -> Target:
    """The target; a forward takes at least ``forward_s`` seconds. Raises ConfigError."""
    target = ScriptedTarget(
        script=load_text.next_token,
        vocab_size=load_text.VOCAB_SIZE,
        vocab_hash=load_text.VOCAB_HASH,
        eos_ids=(load_text.END,),
        context=CONTEXT,
        max_slots=slots,
        name="scripted text",
    )
    return SlowTarget(target, forward_s) if forward_s > 0.0 else target


def counters(runtime: VerifierRuntime) -> dict[str, Any]:
    """Plain values: what the core counted, and the sessions and slots that are still held."""
    stats = runtime.core.stats
    found: dict[str, Any] = {
        name: getattr(stats, name)
        for name in type(stats).__dataclass_fields__
        if isinstance(getattr(stats, name), int | float)
    }
    found["rejected"] = dict(stats.rejected)
    found["evictions"] = runtime.core.slots.evictions
    found["sessions_left"] = len(runtime.core.sessions)
    found["slots_left"] = len(runtime.core.slots)
    found["publish_failures"] = runtime.publish_failures
    found["core_faults"] = runtime.core_faults
    return found


def serve(args: argparse.Namespace) -> int:
    """Until stopped. Raises ConfigError or TransportError."""
    with open_metrics(args) as metrics:
        return _serve(args, metrics)


def _serve(args: argparse.Namespace, metrics: VerifierMetrics | None) -> int:
    from broker.mqtt import MqttTransport

    verifier = check_id("--id", args.id)
    slots = args.max_sessions if args.slots is None else args.slots
    if not 1 <= args.max_sessions <= MAX_SESSIONS or not 1 <= slots <= MAX_SESSIONS:
        raise ConfigError(f"--max-sessions and --slots are 1 to {MAX_SESSIONS}")
    if not args.idle_ttl > 0.0:
        raise ConfigError("--idle-ttl is above 0 seconds")
    forward_s = check_floor(args.forward_ms / 1000.0)
    broker_settings(args, f"verifier-{verifier}", None)
    target = make_target(slots, forward_s)
    config = config_for(target, verifier, max_sessions=args.max_sessions, idle_ttl=args.idle_ttl)
    will = status_will(verifier, online_status(config, target.name))
    settings = broker_settings(args, f"verifier-{verifier}", will)
    failed: list[ConnectionEvent] = []
    over = threading.Event()

    def on_event(event: ConnectionEvent) -> None:
        if event.state is ConnectionState.FAILED:
            failed.append(event)
            over.set()

    runtime = VerifierRuntime(MqttTransport(settings), target, config, on_event=on_event)
    if metrics is not None:
        metrics.watch(runtime, build_labels(verifier, target.name, "scripted", "none"))
    ended = threading.Event()
    if args.until_eof:
        _end_at_eof(ended, lambda: _say(counters(runtime)))
    runtime.start()
    try:
        while not over.wait(0.2):
            if not runtime.alive:
                raise ModelError("the engine ended by itself: see the trace above, start again")
            if ended.is_set():
                _settle(runtime)
                break
    except Stopped:
        pass  # how a service is meant to end
    finally:
        found = counters(runtime)
        runtime.stop()
        target.close()
    if failed:
        raise TransportError(f"no way into the broker at {settings.url}: {failed[0].reason}")
    _say(found)
    return 0


def _say(found: dict[str, Any]) -> None:
    print(STATS + json.dumps(found), file=sys.stderr, flush=True)


def _settle(runtime: VerifierRuntime) -> None:
    """Devices that have just left have told the broker so; let it arrive."""
    deadline = time.monotonic() + _SETTLE_S
    while runtime.core.sessions and time.monotonic() < deadline:
        time.sleep(0.02)


def _end_at_eof(ended: threading.Event, answer: Callable[[], None]) -> None:
    """From now on the end of standard input sets ``ended``, and ends what does not heed it.

    What comes on it before that is answered with ``answer``.
    """

    def watch() -> None:
        while os.read(0, 4096):
            answer()
        ended.set()
        time.sleep(_END_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_END_S)
        os._exit(1)

    threading.Thread(target=watch, name="until-eof", daemon=True).start()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def work() -> int:
        args = parse(build_parser(), argv, program="cloud-verifier")
        set_up_logging(args.verbose)
        raise_on_signals()
        return serve(args)

    return run(work, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
