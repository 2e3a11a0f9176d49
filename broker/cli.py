"""``fleet-broker``: brokers for a fleet.

``fleet-broker embedded`` runs the embedded broker in the foreground and prints its URL, one line on
standard output. Exit codes as of the other commands (docs/running.md).
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from broker import __version__
from broker.command import run
from broker.embedded import EmbeddedBroker
from broker.settings import Parser, add_config_flag, parse

PROGRAM = "fleet-broker"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""

    def work() -> int:
        args = parse(_parser(), argv, program=PROGRAM)
        return _embedded(args.host, args.port, args.max_payload)

    return run(work, PROGRAM)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="Brokers for a fleet.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    embedded = commands.add_parser(
        "embedded",
        help="run the embedded broker until Ctrl-C",
        description="Run the embedded broker (rumqttd) until Ctrl-C. It has no access control: "
        "keep it on this machine or a network that you trust.",
    )
    embedded.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    embedded.add_argument("--port", type=int, default=1883, help="0: a free one (%(default)s)")
    embedded.add_argument(
        "--max-payload",
        type=int,
        default=1024 * 1024,
        metavar="BYTES",
        help="largest payload that it takes (%(default)s)",
    )
    add_config_flag(embedded)
    return parser


def _embedded(host: str, port: int, max_payload: int) -> int:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: ended.set())
    with EmbeddedBroker(host, port, max_payload=max_payload) as broker:
        print(broker.url, flush=True)
        while not ended.wait(0.5):
            if not broker.alive:
                print(f"{PROGRAM}: the broker's process ended by itself", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
