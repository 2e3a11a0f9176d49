"""The metrics of a verifier that is a process of its own, with a device and a broker that goes."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from broker import load_text
from broker.codec import encode
from broker.messages import SessionOpen
from broker.mqtt import MqttSettings, MqttTransport
from broker.sampling import Sampling
from broker.topics import open_topic
from tests.brokers import MosquittoBroker, free_port, wait_until
from tests.commands import PATIENCE, ROOT, clean_environment

PREFIX = "pipesd_verifier_"


def page(port: int, path: str) -> tuple[int, str]:
    """Status and text; status 0: nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5.0) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def values(port: int) -> dict[str, float]:
    """Sums over the labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page(port, "/metrics")[1]):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_a_verifier_is_seen_from_outside(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--id", "seen", "--metrics-port", str(port), "--watts", "5")
    with MosquittoBroker(tmp_path) as broker:
        command = [sys.executable, "-m", "cloud_verifier.scripted", "--broker", broker.url, *flags]
        process = subprocess.Popen(command, env=clean_environment(), cwd=ROOT)
        device = MqttTransport(MqttSettings.from_url(broker.url, "device"))
        try:
            assert wait_until(lambda: page(port, "/healthz")[0] == 200, PATIENCE)
            device.start(lambda message: None, lambda event: None)
            opened = SessionOpen(1, (5, 6, 7), (), Sampling(), 20, load_text.VOCAB_HASH, ask=True)
            device.publish(open_topic("d", "s"), encode(opened), qos=1)
            assert wait_until(lambda: values(port)[PREFIX + "committed_tokens_total"] > 0, PATIENCE)
            found = values(port)
            assert found[PREFIX + "sessions"] == 1
            assert found[PREFIX + "forwards_total"] == found[PREFIX + "batch_tokens_count"] > 0
            assert found[PREFIX + "mqtt_received_messages_total"] >= 1
            assert found[PREFIX + "process_resident_memory_bytes"] > 1e6
            assert 'verifier="seen"' in page(port, "/metrics")[1]

            broker.stop()
            assert wait_until(lambda: page(port, "/healthz")[0] == 503, PATIENCE)
            assert values(port)[PREFIX + "broker_connected"] == 0
            broker.start()
            assert wait_until(lambda: page(port, "/healthz")[0] == 200, PATIENCE)
            assert values(port)[PREFIX + "mqtt_reconnects_total"] == 1

            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
            assert page(port, "/healthz")[0] == 0
        finally:
            device.stop()
            if process.poll() is None:
                process.kill()
                process.wait()
