"""What the system itself costs: rounds over a real broker between models that cost nothing.

    python -m benchmarks.loopback [--broker mosquitto|embedded] [--rounds N] [--json]

The verifier runs in a process of its own, as in a fleet. A round is one draft batch out and its
verdict back; the edge's clock times it from publishing to having applied the verdict. The mark for
Mosquitto is a median of at most 2 ms.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from broker.embedded import EmbeddedBroker
from broker.errors import ConfigError
from broker.mqtt import MqttSettings, MqttTransport
from broker.sampling import Sampling
from cloud_verifier.engine.target import Work
from cloud_verifier.runtime import VerifierRuntime, config_for, online_status, status_will
from edge_agent.core.trigger import Thresholds
from edge_agent.draft import Proposal
from edge_agent.generation import Request
from edge_agent.runtime import Agent, device_will

VOCAB = 50_000
DRAFT = 4  # tokens per round
MARK_MS = 2.0  # median of a round over Mosquitto


class FreeTarget:
    """A scripted target that costs nothing; a token is its position, so drafts can be right."""

    name = "scripted"
    vocab_size = VOCAB
    context = 1_000_000
    vocab_hash = "loopback"
    eos_ids: frozenset[int] = frozenset()
    max_slots = 4
    block_tokens = context
    total_blocks = max_slots

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        return [[(work.position + i) % VOCAB for i in range(work.choices)] for work in batch]

    def close(self) -> None:
        """Nothing to free."""


class FreeDraft:
    """A scripted draft that costs nothing and is always right."""

    def __init__(self) -> None:
        self.length = 0

    def eval(self, tokens: Sequence[int]) -> None:
        self.length += len(tokens)

    def rollback(self, length: int) -> None:
        self.length = length

    def propose(self, position: int, sampling: Sampling) -> Proposal:  # noqa: ARG002
        return Proposal(position % VOCAB, 0.99)

    def close(self) -> None:
        """Nothing to free."""


class FreeDraftModel:
    name = "scripted"
    vocab_size = VOCAB
    context = 1_000_000
    vocab_hash = "loopback"
    eos_ids: frozenset[int] = frozenset()

    def open(self) -> FreeDraft:
        return FreeDraft()

    def close(self) -> None:
        """Nothing to free."""


@contextmanager
def mosquitto() -> Iterator[str]:
    """A Mosquitto on a free loopback port; its URL."""
    program = shutil.which(
        "mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/opt/homebrew/sbin"
    )
    if program is None:
        raise ConfigError("mosquitto is not installed: install it or use --broker embedded")
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        config = Path(folder) / "mosquitto.conf"
        config.write_text(
            f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n"
        )
        process = subprocess.Popen([program, "-c", str(config)], stderr=subprocess.DEVNULL)
        try:
            for _ in range(250):
                with socket.socket() as attempt:
                    if attempt.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.02)
            yield f"mqtt://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


@contextmanager
def embedded() -> Iterator[str]:
    with EmbeddedBroker() as broker:
        yield broker.url


def serve(url: str) -> None:
    """The verifier's process: until standard input ends."""
    target = FreeTarget()
    config = config_for(target, "loopback")
    will = status_will("loopback", online_status(config, target.name))
    settings = MqttSettings.from_url(url, "verifier-loopback", will=will)
    runtime = VerifierRuntime(MqttTransport(settings), target, config)
    runtime.start()
    sys.stdin.read()
    runtime.stop()


def measure(url: str, rounds: int) -> dict[str, float]:
    """Milliseconds per round (median, p99) and payload bytes up per committed token."""
    draft = FreeDraftModel()
    settings = MqttSettings.from_url(url, "device-bench", will=device_will("bench", draft.name))
    agent = Agent(MqttTransport(settings), draft, "bench")
    agent.start()
    try:
        # max_ahead = window: one batch of DRAFT tokens, then wait; every verdict ends one round.
        request = Request(
            prompt=(1,),
            max_tokens=rounds * (DRAFT + 1),
            thresholds=Thresholds(0.0, 0.0, DRAFT),
            max_ahead=DRAFT,
        )
        generation = agent.generate(request)
        times: list[float] = []
        tokens = 0
        last = None
        for commit in generation:
            now = time.perf_counter()
            if last is not None:
                times.append((now - last) * 1000.0)
            last = now
            tokens += len(commit.tokens)
        times = sorted(times[min(50, len(times) // 10) :])
        return {
            "rounds": len(times),
            "median_ms": statistics.median(times),
            "p99_ms": times[int(len(times) * 0.99)],
            "uplink_bytes_per_token": generation.traffic.uplink_bytes / tokens,
            "tokens_per_round": tokens / generation.stats.forwards,
        }
    finally:
        agent.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loopback", description=__doc__)
    parser.add_argument("--broker", choices=("mosquitto", "embedded"), action="append")
    parser.add_argument("--rounds", type=int, default=1000, metavar="N")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return 0
    results: dict[str, dict[str, float]] = {}
    for name in args.broker or ("mosquitto", "embedded"):
        with {"mosquitto": mosquitto, "embedded": embedded}[name]() as url:
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.loopback", "--serve", url],
                stdin=subprocess.PIPE,
            )
            try:
                results[name] = measure(url, args.rounds)
            finally:
                assert child.stdin is not None
                child.stdin.close()
                child.wait()
    met = results.get("mosquitto", {}).get("median_ms", 0.0) <= MARK_MS
    if args.json:
        print(json.dumps(results))
        return 0 if met else 1
    for name, row in results.items():
        print(
            f"{name:>10}: round {row['median_ms']:.2f} ms median, {row['p99_ms']:.2f} ms p99 "
            f"over {row['rounds']:.0f} rounds of {row['tokens_per_round']:.1f} tokens, "
            f"{row['uplink_bytes_per_token']:.1f} bytes up per token"
        )
    print(f"  mark: {MARK_MS:g} ms median over Mosquitto: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
