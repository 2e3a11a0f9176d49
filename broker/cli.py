"""``fleet-broker``: brokers for a fleet.

``fleet-broker embedded`` runs the embedded broker in the foreground and prints its URL, one line on
standard output. Exit codes: 0 done, 2 wrong usage or configuration, 1 anything else.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from broker.embedded import EmbeddedBroker
from broker.errors import PipesdError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return _embedded(options.host, options.port, options.max_payload)
    except PipesdError as error:
        print(f"fleet-broker: {error}", file=sys.stderr)
        return 2 if error.exit_code == 2 else 1


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of repeating the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}: see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fleet-broker", description="Brokers for a fleet.")
    commands = parser.add_subparsers(dest="command", required=True)
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
    return parser


def _embedded(host: str, port: int, max_payload: int) -> int:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: ended.set())
    with EmbeddedBroker(host, port, max_payload=max_payload) as broker:
        print(broker.url, flush=True)
        while not ended.wait(0.5):
            if not broker.alive:
                print("fleet-broker: the broker's process ended by itself", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
