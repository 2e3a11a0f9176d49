"""``cloud-verifier exporter``: devices' telemetry from the broker, as series for Prometheus."""

from __future__ import annotations

import argparse
import secrets
import threading
from dataclasses import replace

from broker.command import Stopped
from broker.errors import ConfigError, TransportError
from broker.flags import add_broker_flags, broker_settings
from broker.mqtt_settings import MqttSettings
from broker.settings import Parser, add_config_flag
from broker.transport import ConnectionEvent, ConnectionState
from cloud_verifier.exporter.table import MAX_DEVICES, MAX_PAYLOAD, TTL_S, FleetTable
from cloud_verifier.metrics_flags import MAX_PORT

PORT = 9108
_MOST_DEVICES = 1_000_000


def add_exporter_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """The subcommand and its flags."""
    parser = commands.add_parser("exporter", help="turn the devices' telemetry into metrics")
    add_broker_flags(parser)
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        metavar="N",
        help=f"HTTP port of /metrics ({PORT}; 0: any)",
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="ADDR",
        help="address to listen on (127.0.0.1); there is no password on it",
    )
    add_table_flags(parser)
    add_config_flag(parser)
    parser.add_argument("--verbose", action="store_true", help="debug messages and traces")


def add_table_flags(parser: argparse.ArgumentParser) -> None:
    """What a table of the fleet can be told; see ``table_from``."""
    parser.add_argument(
        "--ttl",
        type=float,
        default=TTL_S,
        metavar="S",
        help=f"seconds after which a silent device's series end ({TTL_S:g})",
    )
    parser.add_argument(
        "--max-devices",
        type=int,
        default=MAX_DEVICES,
        metavar="N",
        help=f"devices at a time; more are left out and counted ({MAX_DEVICES})",
    )


def table_from(args: argparse.Namespace) -> FleetTable:
    """Raises ConfigError for limits that cannot be."""
    if not 0.0 < args.ttl <= 86_400.0:
        raise ConfigError(f"--ttl {args.ttl:g} is outside 0 to 86400 seconds: 60 is usual")
    if not 1 <= args.max_devices <= _MOST_DEVICES:
        raise ConfigError(f"--max-devices {args.max_devices} is outside 1 to {_MOST_DEVICES}")
    return FleetTable(ttl=args.ttl, max_devices=args.max_devices)


def listener_settings(args: argparse.Namespace, role: str) -> MqttSettings:
    """Of a client that only listens; several may run. Raises ConfigError."""
    settings = broker_settings(args, f"{role}-{secrets.token_hex(4)}", None)
    # The broker then keeps larger packets to itself.
    return replace(settings, max_payload=MAX_PAYLOAD)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped by a signal, which is exit code 0.

    Raises ConfigError, or TransportError when the broker lets nobody in.
    """
    try:
        return _run(args)
    except Stopped:
        return 0


def _run(args: argparse.Namespace) -> int:
    if not 0 <= args.port <= MAX_PORT:
        raise ConfigError(f"--port {args.port} is outside 0 to {MAX_PORT}: {PORT} is usual")
    table = table_from(args)
    settings = listener_settings(args, "exporter")
    try:
        from cloud_verifier.exporter.service import Exporter, FleetFeed
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'pipesd[fleet]'") from None
    from broker.mqtt import MqttTransport

    failed: list[ConnectionEvent] = []
    over = threading.Event()

    def on_event(event: ConnectionEvent) -> None:
        if event.state is ConnectionState.FAILED:
            failed.append(event)
            over.set()

    exporter = Exporter(
        FleetFeed(MqttTransport(settings), table, on_event=on_event), args.bind, args.port
    )
    where = f"[{args.bind}]" if ":" in args.bind else args.bind
    try:
        exporter.start()
        print(
            f"exporter serves http://{where}:{exporter.web.port}/metrics for the fleet at "
            f"{settings.url}",
            flush=True,
        )
        over.wait()
    finally:
        exporter.stop()
    raise TransportError(f"no way into the broker at {settings.url}: {failed[0].reason}")
