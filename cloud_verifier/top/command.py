"""``cloud-verifier top``: the fleet in a terminal, by way of an exporter or of the broker."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from broker.command import Stopped
from broker.errors import ConfigError, RemoteProtocolError, TransportError
from broker.flags import add_broker_flags
from broker.settings import Parser, add_config_flag
from cloud_verifier.exporter.command import add_table_flags, listener_settings, table_from
from cloud_verifier.top.view import SORTS, Readings

if TYPE_CHECKING:
    from rich.console import Console

    from cloud_verifier.top.sources import BrokerSource, Source


def add_top_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """The subcommand and its flags."""
    parser = commands.add_parser("top", help="watch the fleet in this terminal")
    parser.add_argument(
        "--exporter",
        metavar="URL",
        help="http://HOST:PORT of an exporter (http://127.0.0.1:9108, where no --broker is given)",
    )
    add_broker_flags(parser)
    add_table_flags(parser)
    parser.add_argument(
        "--sort",
        choices=SORTS,
        default="tpt",
        help="what comes first: the slowest (tpt), the least accepted, the longest not seen",
    )
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between two looks (2)"
    )
    parser.add_argument("--once", action="store_true", help="one look, then end")
    parser.add_argument("--json", action="store_true", help="one look as a JSON object, then end")
    parser.add_argument(
        "--listen",
        type=float,
        default=6.0,
        metavar="S",
        help="with --broker and one look: seconds to listen before it (6)",
    )
    add_config_flag(parser)
    parser.add_argument("--verbose", action="store_true", help="debug messages and traces")


def run(args: argparse.Namespace) -> int:
    """Show the fleet until interrupted, which is exit code 0; or once.

    Raises ConfigError, TransportError when the broker lets nobody in; for one look also
    TransportError and RemoteProtocolError when there is nothing to see.
    """
    if not 0.1 <= args.interval <= 3_600.0 or not 0.0 <= args.listen <= 3_600.0:
        raise ConfigError("--interval is 0.1 to 3600 seconds, --listen 0 to 3600")
    try:
        from rich.console import Console

        source, broker = _source(args)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'pipesd[fleet]'") from None
    try:
        console = Console(markup=False, highlight=False, emoji=False)
        live = console.is_terminal and not console.is_dumb_terminal
        if live and not args.once and not args.json:
            return _live(args, console, source)
        if not args.once and not args.json:
            print("no terminal here: one look, as with --once", file=sys.stderr)
        if broker is not None:
            broker.wait(args.listen)
        return _once(args, console, source)
    finally:
        source.close()


def _source(args: argparse.Namespace) -> tuple[Source, BrokerSource | None]:
    from cloud_verifier.top.sources import BrokerSource, ExporterSource

    if args.exporter and args.broker:
        raise ConfigError("give either --exporter or --broker")
    if not args.broker:
        return ExporterSource(args.exporter or "http://127.0.0.1:9108"), None
    from broker.mqtt import MqttTransport

    settings = listener_settings(args, "top")
    source = BrokerSource(MqttTransport(settings), table_from(args), settings.url)
    return source, source


def _once(args: argparse.Namespace, console: Console, source: Source) -> int:
    from cloud_verifier.top.screen import show

    view = Readings().view(source.read(), args.sort)
    if args.json:
        print(json.dumps(view.as_json(), allow_nan=False))
    else:
        show(console, view)
    return 0


def _live(args: argparse.Namespace, console: Console, source: Source) -> int:
    from rich.live import Live

    from cloud_verifier.top.screen import screen

    readings, view, trouble = Readings(), None, ""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    view = readings.view(source.read(), args.sort)
                    trouble = ""
                except (TransportError, RemoteProtocolError) as error:
                    if source.over:
                        raise
                    trouble = str(error)
                size = console.size
                live.update(screen(view, size.width, size.height, trouble), refresh=True)
                time.sleep(args.interval)
    except Stopped:
        return 0  # how it is meant to end
