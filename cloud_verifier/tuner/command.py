"""``cloud-verifier tune``: the autotuner, and what an operator does by hand."""

from __future__ import annotations

import argparse
import fnmatch
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from broker.command import Stopped
from broker.errors import ConfigError, TransportError
from broker.flags import add_broker_flags, broker_settings, own_id
from broker.settings import Parser, add_config_flag
from broker.transport import ConnectionEvent, ConnectionState

if TYPE_CHECKING:
    from broker.metrics_http import MetricsServer
    from cloud_verifier.tuner.service import Tuner
    from cloud_verifier.tuner.sources import Source

PORT = 9109
EXPORTER = "http://127.0.0.1:9108"
#: The paper's number of trials.
TRIALS, MAX_TRIALS = 16, 1_000
SAMPLERS = ("gp", "tpe", "random")


def add_tune_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """The subcommand, its own subcommands and their flags."""
    parser = commands.add_parser(
        "tune", help="find each device's best thresholds; status, pin, unpin and reset by hand"
    )
    add_broker_flags(parser)
    add_storage_flags(parser)
    source = parser.add_argument_group("where the devices' figures come from")
    source.add_argument("--prometheus", metavar="URL", help="a Prometheus that scrapes an exporter")
    source.add_argument(
        "--exporter", metavar="URL", help=f"an exporter itself, without Prometheus ({EXPORTER})"
    )
    group = parser.add_argument_group("tuning")
    group.add_argument(
        "--id",
        default="tuner-1",
        metavar="ID",
        help="this tuner's id (tuner-1); @hostname: what this host is called",
    )
    group.add_argument(
        "--devices", default="*", metavar="PATTERN", help="which devices, as a shell pattern (*)"
    )
    group.add_argument(
        "--trials",
        type=int,
        default=TRIALS,
        metavar="N",
        help=f"trials of a search; half as many where a class is known ({TRIALS})",
    )
    group.add_argument(
        "--min-tokens",
        type=int,
        default=50,
        metavar="N",
        help="committed tokens that a trial is measured over at least (50)",
    )
    group.add_argument(
        "--interval", type=float, default=5.0, metavar="S", help="seconds between readings (5)"
    )
    group.add_argument(
        "--parallel", type=int, default=16, metavar="N", help="devices searched at a time (16)"
    )
    group.add_argument(
        "--max-devices", type=int, default=10_000, metavar="N", help="devices known (10000)"
    )
    group.add_argument(
        "--ttl", type=float, default=60.0, metavar="S", help="silence of a device that is away (60)"
    )
    group.add_argument(
        "--drift",
        type=float,
        default=0.2,
        metavar="F",
        help="share by which TPT or link must move for a new search (0.2)",
    )
    group.add_argument(
        "--drift-hold", type=float, default=60.0, metavar="S", help="and for how long (60)"
    )
    group.add_argument(
        "--cooldown",
        type=float,
        default=300.0,
        metavar="S",
        help="least seconds from one search on a device to the next (300)",
    )
    group.add_argument(
        "--sampler",
        choices=SAMPLERS,
        default="gp",
        help="how trials are chosen: gp (default; needs torch), tpe, random",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=0,
        metavar="N",
        help=f"port of /metrics (usually {PORT}); 0: none (the default)",
    )
    parser.add_argument(
        "--metrics-bind", default="127.0.0.1", metavar="ADDR", help="address of it (127.0.0.1)"
    )
    _add_common(parser)
    by_hand = parser.add_subparsers(dest="command1", metavar="ACTION")
    status = by_hand.add_parser("status", help="how far each device is")
    status.add_argument("device", nargs="?", metavar="DEVICE", help="one device, with its trials")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    add_storage_flags(status)
    _add_common(status)
    pin = by_hand.add_parser("pin", help="hold a device at these thresholds")
    pin.add_argument("--r1", type=float, metavar="F", help="sequence threshold, inside 0 to 1")
    pin.add_argument("--r2", type=float, metavar="F", help="token threshold, inside 0 to 1")
    unpin = by_hand.add_parser("unpin", help="let a pinned device be tuned again")
    reset = by_hand.add_parser("reset", help="forget what was found for a device, and its config")
    for action in (pin, unpin, reset):
        action.add_argument("device", metavar="DEVICE", help="its id, as tune status shows it")
        add_broker_flags(action)
        add_storage_flags(action)
        _add_common(action)
    above = {option.dest for option in parser._actions}
    for action in (status, pin, unpin, reset):
        for option in action._actions:
            if option.dest in above and option.dest != "help":
                # Its default would undo what was said before the action's name.
                option.default = argparse.SUPPRESS


def add_storage_flags(parser: argparse.ArgumentParser) -> None:
    """Where studies, leases and pins are."""
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="sqlite:///FILE (a file in the user's data directory), or postgresql://... for more "
        "than one tuner",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    parser.add_argument("--verbose", action="store_true", help="debug messages and traces")


def run(args: argparse.Namespace) -> int:
    """Tune until stopped by a signal, which is exit code 0; or do one thing by hand.

    Raises ConfigError, TransportError when the broker lets nobody in, StudyError when the storage
    fails under an operator's command.
    """
    if args.command1 is not None:
        from cloud_verifier.tuner import operator

        return operator.run(args)
    try:
        return _run(args)
    except Stopped:
        return 0


def _source(args: argparse.Namespace) -> Callable[[], Source]:
    if args.prometheus and args.exporter:
        raise ConfigError("give either --prometheus or --exporter, not both")
    from cloud_verifier.tuner.sources import ExporterSource, PrometheusSource

    timeout = max(2.0, min(10.0, args.interval))
    if args.prometheus:
        return lambda: PrometheusSource(args.prometheus, timeout=timeout)
    return lambda: ExporterSource(args.exporter or EXPORTER, timeout=timeout)


def _check(args: argparse.Namespace) -> None:
    args.id = own_id("--id", args.id)
    if not 1 <= args.trials <= MAX_TRIALS:
        raise ConfigError(f"--trials {args.trials} is outside 1 to {MAX_TRIALS}: {TRIALS} is usual")
    if not 0.1 <= args.interval <= 3600.0:
        raise ConfigError(f"--interval {args.interval:g} is outside 0.1 to 3600 seconds")
    if not 0 <= args.metrics_port <= 65_535:
        raise ConfigError(f"--metrics-port {args.metrics_port} is outside 0 to 65535")


def _run(args: argparse.Namespace) -> int:
    _check(args)
    from cloud_verifier.tuner.core.messages import TunerSettings

    settings = TunerSettings(
        min_tokens=args.min_tokens,
        # Two readings at least: the first one after the acknowledgement begins the measurement.
        min_seconds=min(5.0, args.interval),
        ack_s=max(20.0, 6.0 * args.interval),
        ttl_s=args.ttl,
        drift=args.drift,
        drift_hold_s=args.drift_hold,
        cooldown_s=args.cooldown,
        max_cooldown_s=max(3600.0, args.cooldown),
        parallel=args.parallel,
        max_devices=args.max_devices,
    )
    broker = broker_settings(args, f"tuner-{args.id}", None)
    make_source = _source(args)
    from broker.mqtt import MqttTransport
    from cloud_verifier.tuner.configs import Configs
    from cloud_verifier.tuner.core.fleet import TunerCore
    from cloud_verifier.tuner.database import Database, default_url
    from cloud_verifier.tuner.optuna_studies import OptunaStudies, check_sampler
    from cloud_verifier.tuner.registry import LEASE_S, Registry, prior_pairs
    from cloud_verifier.tuner.service import Tuner

    # Progress is what a person looks at here; other modules keep to warnings.
    logging.getLogger("cloud_verifier.tuner").setLevel(
        logging.DEBUG if args.verbose else logging.INFO
    )
    over = threading.Event()
    failed: list[ConnectionEvent] = []

    def on_event(event: ConnectionEvent) -> None:
        if event.state is ConnectionState.FAILED:
            failed.append(event)
            over.set()

    sampler = check_sampler(args.sampler)
    database = Database(args.storage or default_url())
    lease_s = max(LEASE_S, 6.0 * args.interval)
    owner = f"{args.id}@{socket.gethostname()[:40]}/{secrets.token_hex(4)}"
    registry = Registry(database, owner, lease_s=lease_s)
    source = make_source()
    configs = Configs(MqttTransport(broker), on_event)
    core = TunerCore(
        settings,
        wanted=lambda device: fnmatch.fnmatchcase(device, args.devices),
        longest_step=3.0 * args.interval,
    )
    studies = OptunaStudies(
        database,
        trials=args.trials,
        sampler=sampler,
        prior=lambda device, kind: prior_pairs(registry.latest.values(), device, kind),
    )
    tuner = Tuner(core, source, studies, registry, configs, interval=args.interval, lease_s=lease_s)
    web = _serve(args, tuner)
    try:
        configs.start()
        print(
            f"tuner {args.id} tunes {args.devices} at {broker.url}, studies in {database.shown}",
            flush=True,
        )
        tuner.run(over)
    finally:
        if web is not None:
            web.close()
        configs.stop()
        source.close()
        database.close()
    raise TransportError(f"no way into the broker at {broker.url}: {failed[0].reason}")


def _serve(args: argparse.Namespace, tuner: Tuner) -> MetricsServer | None:
    """The tuner's /metrics, where they are wanted."""
    if args.metrics_port == 0:
        return None
    from broker.metrics_http import MetricsServer, Page
    from cloud_verifier.tuner.figures import TunerFigures

    figures = TunerFigures(tuner)

    def render(_accept: str) -> Page:
        return Page(figures.text().encode(), "text/plain; version=0.0.4; charset=utf-8")

    web = MetricsServer(args.metrics_bind, args.metrics_port, render)
    web.start()
    return web
