"""(19) TLS to a broker: names and addresses are verified, and nothing is taken on trust."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.errors import ConfigError
from broker.mqtt import MqttSettings, MqttTransport, TlsSettings
from broker.transport import ConnectionState
from tests.brokers import MosquittoBroker, Peer, free_port, require, wait_until

CONNECTED, DISCONNECTED = ConnectionState.CONNECTED, ConnectionState.DISCONNECTED


class Authority:
    """A private certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        require("openssl", shutil.which("openssl") is not None)
        self.folder = folder
        self.ca = str(folder / "ca.pem")
        self._key = str(folder / "ca.key")
        self._run(
            f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
            f"-subj /CN=test-ca -keyout {self._key} -out {self.ca}"
        )

    def issue(self, name: str, alternatives: str) -> tuple[str, str]:
        """Certificate and key files for these subject alternative names."""
        base = self.folder / name
        extensions = base.with_suffix(".ext")
        extensions.write_text(f"subjectAltName={alternatives}\n")
        self._run(
            f"req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN={name} "
            f"-keyout {base}.key -out {base}.csr"
        )
        self._run(
            f"x509 -req -in {base}.csr -CA {self.ca} -CAkey {self._key} -CAcreateserial -days 2 "
            f"-extfile {extensions} -out {base}.pem"
        )
        return f"{base}.pem", f"{base}.key"

    def _run(self, arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments.split()], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def broker(authority: Authority) -> Iterator[tuple[int, int, int]]:
    """Ports of listeners: name and address certified; name only; client certificate required."""
    both = authority.issue("both", "DNS:localhost,IP:127.0.0.1")
    name = authority.issue("name", "DNS:localhost")
    ports = [free_port() for _ in range(4)]
    config = f"per_listener_settings true\nuser root\nlistener {ports[3]} 127.0.0.1\n"
    for port, (certificate, key) in zip(ports, (both, name, both), strict=False):
        config += (
            f"listener {port} 127.0.0.1\nallow_anonymous true\n"
            f"certfile {certificate}\nkeyfile {key}\ncafile {authority.ca}\n"
        )
    config += "require_certificate true\n"
    with MosquittoBroker(authority.folder, port=ports[3], config=config):
        yield ports[0], ports[1], ports[2]


def connect(url: str, tls: TlsSettings | None) -> Peer:
    settings = MqttSettings.from_url(url, "tls", tls=tls, backoff_min=0.05, backoff_max=0.1)
    peer = Peer(MqttTransport(settings), "tls")
    peer.transport.subscribe("tls/#")
    return peer.start()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_by_name_and_by_address(
    broker: tuple[int, int, int], authority: Authority, host: str
) -> None:
    peer = connect(f"mqtts://{host}:{broker[0]}", TlsSettings(ca_file=authority.ca))
    assert wait_until(lambda: peer.transport.connected), peer.events
    # More than one TLS record, so that decrypted bytes wait while the socket is quiet.
    payloads = [b"%d" % number * 20_000 for number in range(20)]
    for payload in payloads:
        peer.transport.publish("tls/x", payload, qos=1)
    assert wait_until(lambda: peer.payloads == payloads)
    live = peer.transport._link._socket  # type: ignore[attr-defined]
    assert live.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    assert live.version() in ("TLSv1.2", "TLSv1.3")
    peer.transport.stop()


def test_address_that_the_certificate_does_not_name(
    broker: tuple[int, int, int], authority: Authority
) -> None:
    trusted = TlsSettings(ca_file=authority.ca)
    by_address = connect(f"mqtts://127.0.0.1:{broker[1]}", trusted)
    by_name = connect(f"mqtts://localhost:{broker[1]}", trusted)
    assert wait_until(lambda: by_name.transport.connected)
    assert wait_until(lambda: by_address.events)
    assert by_address.states == [DISCONNECTED]
    assert "certificate was not accepted" in by_address.events[0].reason
    assert "127.0.0.1" in by_address.events[0].reason
    for peer in (by_address, by_name):
        peer.transport.stop()


def test_unknown_authority(broker: tuple[int, int, int]) -> None:
    peer = connect(f"mqtts://localhost:{broker[0]}", None)
    assert wait_until(lambda: peer.events)
    assert peer.states == [DISCONNECTED]
    assert "certificate was not accepted" in peer.events[0].reason
    peer.transport.stop()


def test_client_certificate(broker: tuple[int, int, int], authority: Authority) -> None:
    url = f"mqtts://localhost:{broker[2]}"
    certificate, key = authority.issue("pi-7", "DNS:pi-7")
    with_one = connect(url, TlsSettings(authority.ca, certificate, key))
    without = connect(url, TlsSettings(authority.ca))
    assert wait_until(lambda: with_one.transport.connected)
    assert wait_until(lambda: without.events)
    assert not without.transport.connected
    assert without.states == [DISCONNECTED]
    for peer in (with_one, without):
        peer.transport.stop()


def test_tls_towards_a_plain_listener_and_back(
    broker: tuple[int, int, int], mosquitto: MosquittoBroker, authority: Authority
) -> None:
    plain = connect(f"mqtt://localhost:{broker[0]}", None)
    tls = connect(f"mqtts://localhost:{mosquitto.port}", TlsSettings(authority.ca))
    for peer in (plain, tls):
        assert wait_until(lambda: peer.events)  # noqa: B023
        assert peer.states[0] is DISCONNECTED
        peer.transport.stop()


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("good", "DNS:good")
    other = authority.issue("other", "DNS:other")[1]
    noise = tmp_path / "noise.pem"
    noise.write_bytes(b"no certificate")
    locked = tmp_path / "locked.key"
    done = subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes128", "-passout", "pass:x", "-out", str(locked)],
        capture_output=True,
    )
    assert done.returncode == 0
    cases = [
        (TlsSettings(ca_file=str(tmp_path / "absent.pem")), "absent.pem"),
        (TlsSettings(ca_file=str(noise)), "noise.pem"),
        (TlsSettings(authority.ca, certificate, other), "other.key"),
        (TlsSettings(authority.ca, str(noise), None), "noise.pem"),
        (TlsSettings(authority.ca, certificate, str(locked)), "locked.key"),
        (TlsSettings(authority.ca, None, key), "certificate"),
    ]
    for tls, named in cases:
        with pytest.raises(ConfigError, match=named) as raised:
            MqttTransport(MqttSettings.from_url("mqtts://localhost", "x", tls=tls))
        assert "\n" not in str(raised.value)
