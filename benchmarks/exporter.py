"""What a scrape of the fleet's exporter takes: seconds, bytes, memory.

    python -m benchmarks.exporter [--devices N ...] [--rounds N] [--json]

Every device sends all figures and both histograms in each round, so nothing is spared; then the
exporter is scraped over HTTP by another process, plain and compressed. The mark for 1,000 devices:
a scrape takes less than 1 s, and memory does not grow from the first half of the rounds to the
second.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from broker.codec import encode
from broker.figures import BUCKETS, FIGURES
from broker.telemetry import Histogram, Telemetry
from broker.topics import telemetry_topic
from broker.transport import Message, OnEvent, OnMessage
from cloud_verifier.exporter.service import FLEET_PATH, REUSE_S, Exporter, FleetFeed
from cloud_verifier.exporter.table import FleetTable

MARK_S = 1.0
MARK_DEVICES = 1_000
#: Growth of the most memory between the halves, of the whole, that is taken for noise: large pages
#: come and go.
MARK_GROWTH = 0.1


class Feeder:
    """A transport that hands over what it is given, in the caller's thread."""

    bytes_sent = bytes_received = messages_sent = messages_received = 0
    reconnects = dropped = callback_errors = 0
    connected = True

    def start(self, on_message: OnMessage, on_event: OnEvent) -> None:  # noqa: ARG002
        self.deliver = on_message

    def publish(self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False) -> None:
        """An exporter has nothing to say."""

    def subscribe(self, topic_filter: str, *, qos: int = 0) -> None:
        """Everything is delivered anyhow."""

    def unsubscribe(self, topic_filter: str) -> None:
        """As above."""

    def stop(self, timeout: float = 2.0) -> None:
        """Nothing runs."""


def payload(device: int, sequence: int) -> bytes:
    """A device's message, all counters grown, numbers as long as real ones."""
    figures = {
        figure.number: round(figure.number * sequence * 1.37 + device / 7.0, 6)
        for figure in FIGURES
    }
    counts = tuple(sequence * (place % 5) for place in range(len(BUCKETS) + 1))
    histogram = Histogram(counts, 3.14159 * sequence)
    machine = "Raspberry Pi 5 Model B Rev 1.0"
    message = Telemetry(
        f"{device:016x}",
        sequence,
        time.time(),
        figures,
        histogram,
        histogram,
        "0.1.0",
        "SmolLM2-135M-Instruct-Q3_K_M",
        "pipesd",
        machine,
        "pmic",
    )
    return encode(message)


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4_096


def scraper(port: int, orders: Connection) -> None:
    """In a process of its own: seconds and bytes of each page that is asked for."""
    while (order := orders.recv()) is not None:
        path, encoding = order
        begin = time.perf_counter()
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        client.request("GET", path, headers={"Accept-Encoding": encoding})
        answer = client.getresponse()
        body = answer.read()
        client.close()
        orders.send((time.perf_counter() - begin, len(body), answer.status))


def measure(devices: int, rounds: int) -> dict[str, Any]:
    """``rounds`` of telemetry from each device, and scrapes after each."""
    feeder = Feeder()
    exporter = Exporter(FleetFeed(feeder, FleetTable(max_devices=devices)), "127.0.0.1", 0)
    exporter.start()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=scraper, args=(exporter.web.port, theirs), daemon=True)
    child.start()
    pages = {"plain": ("/metrics", "identity"), "gzip": ("/metrics", "gzip")}
    pages["json"] = (FLEET_PATH, "gzip")
    seconds: dict[str, list[float]] = {name: [] for name in pages}
    sizes: dict[str, int] = {}
    taking: list[float] = []
    memory: list[int] = []
    base = resident()
    for sequence in range(1, rounds + 1):
        for device in range(devices):
            message = Message(telemetry_topic(f"device-{device:05d}"), payload(device, sequence))
            begin = time.perf_counter()
            feeder.deliver(message)
            taking.append(time.perf_counter() - begin)
        for name, order in pages.items():
            time.sleep(1.1 * REUSE_S)  # or the page of before would answer
            ours.send(order)
            took, sizes[name], status = ours.recv()
            assert status == 200, status
            seconds[name].append(took)
        del taking[:-10_000]
        memory.append(resident())
    ours.send(None)
    child.join(10)
    lines = exporter.metrics().body.decode().splitlines()
    exporter.stop()
    half = len(memory) // 2
    return {
        "devices": devices,
        "series": sum(line.startswith("pipesd_device_") for line in lines),
        "message_us": 1e6 * statistics.median(taking),
        "seconds": {name: statistics.median(all_) for name, all_ in seconds.items()},
        "worst_seconds": {name: max(all_) for name, all_ in seconds.items()},
        "bytes": sizes,
        "memory_bytes": memory[-1],
        "memory_above_start_bytes": memory[-1] - base,
        "growth_bytes": max(memory[half:]) - max(memory[:half]),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exporter")
    parser.add_argument("--devices", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    if len(args.devices) > 1:
        # A process each, so that none begins with the memory of another.
        flags = ["--rounds", str(args.rounds), *(["--json"] if args.json else [])]
        command = [sys.executable, "-m", "benchmarks.exporter", *flags, "--devices"]
        codes = [subprocess.run([*command, str(n)], check=False).returncode for n in args.devices]
        return max(codes)
    (devices,) = args.devices
    figures = measure(devices, args.rounds)
    if args.json:
        print(json.dumps(figures))
    else:
        seconds, sizes = figures["seconds"], figures["bytes"]
        print(
            f"{devices} devices, {figures['series']} series: "
            f"message {figures['message_us']:.0f} us, "
            f"scrape {seconds['plain']:.3f} s ({sizes['plain'] / 1e6:.1f} MB), "
            f"gzip {seconds['gzip']:.3f} s ({sizes['gzip'] / 1e6:.2f} MB), "
            f"fleet.json {seconds['json']:.3f} s ({sizes['json'] / 1e6:.2f} MB), "
            f"memory {figures['memory_bytes'] / 1e6:.0f} MB, "
            f"growth {figures['growth_bytes'] / 1e6:.1f} MB",
            flush=True,
        )
    if devices > MARK_DEVICES:
        return 0
    allowed = MARK_GROWTH * figures["memory_bytes"]
    slow = max(figures["worst_seconds"].values()) >= MARK_S
    return 1 if slow or figures["growth_bytes"] > allowed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
