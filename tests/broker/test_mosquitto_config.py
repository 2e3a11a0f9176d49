"""The configuration that is shipped for Mosquitto, started as it is but for the port."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import broker
from broker.errors import TransportError
from broker.mqtt import MqttSettings, MqttTransport
from tests.brokers import MosquittoBroker, Peer, free_port, wait_until

SHIPPED = Path(broker.__file__).parent / "mosquitto" / "mosquitto.conf"


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MosquittoBroker]:
    port = free_port("0.0.0.0")
    text, count = re.subn(r"(?m)^listener 1883\b", f"listener {port}", SHIPPED.read_text())
    assert count == 1
    with MosquittoBroker(tmp_path_factory.mktemp("shipped"), port=port, config=text) as started:
        yield started


def other_address() -> str | None:
    """An address of this machine that is not loopback; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def connected(host: str, port: int) -> Peer:
    peer = Peer(MqttTransport(MqttSettings.from_url(f"mqtt://{host}:{port}", "shipped")), "")
    peer.transport.subscribe("shipped/#")
    peer.start()
    assert wait_until(lambda: peer.transport.connected), peer.events
    return peer


def test_listens_on_every_address(shipped: MosquittoBroker) -> None:
    """(12) Without a listener line Mosquitto 2 would serve loopback only."""
    table = Path("/proc/net/tcp")
    if not table.exists():
        pytest.skip("no /proc/net/tcp on this system")
    listening = [
        line.split()[1] for line in table.read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    assert f"00000000:{shipped.port:04X}" in listening


def test_other_hosts_are_served(shipped: MosquittoBroker) -> None:
    """(12) As far as one machine can tell: by its outer address."""
    address = other_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    peer = connected(address, shipped.port)
    peer.transport.publish("shipped/x", b"hello")
    assert wait_until(lambda: peer.payloads == [b"hello"])
    peer.transport.stop()


def test_limits_are_announced(shipped: MosquittoBroker) -> None:
    """(17) The largest payload that we send passes, and clients learn where the limit is."""
    peer = connected("127.0.0.1", shipped.port)
    peer.transport.publish("shipped/x", b"x" * 1024 * 1024, qos=1)
    assert wait_until(lambda: bool(peer.messages))
    peer.transport.stop()
    settings = MqttSettings.from_url(shipped.url, "shipped", max_payload=2 * 1024 * 1024)
    greedy = Peer(MqttTransport(settings), "").start()
    assert wait_until(lambda: greedy.transport.connected)
    with pytest.raises(TransportError, match="limit"):
        greedy.transport.publish("shipped/x", b"x" * 1_200_000)
    greedy.transport.stop()


def test_nagle_is_off_on_the_brokers_side(shipped: MosquittoBroker) -> None:
    assert re.search(r"(?m)^set_tcp_nodelay true$", SHIPPED.read_text())
