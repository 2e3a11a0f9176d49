"""The broker's address and what goes with it."""

from __future__ import annotations

import pytest

from broker.errors import ConfigError
from broker.mqtt import MqttSettings, TlsSettings
from broker.transport import Will


def test_plain_and_secure_defaults() -> None:
    plain = MqttSettings.from_url("mqtt://broker.example", "pi")
    assert (plain.host, plain.port, plain.tls) == ("broker.example", 1883, None)
    secure = MqttSettings.from_url("mqtts://broker.example/", "pi")
    assert (secure.port, secure.tls) == (8883, TlsSettings())
    private = MqttSettings.from_url("mqtts://b:1", "pi", tls=TlsSettings("ca.pem"))
    assert (private.port, private.tls) == (1, TlsSettings("ca.pem"))


def test_credentials_are_decoded_and_options_win() -> None:
    settings = MqttSettings.from_url("mqtt://pi%401:p%3Aw%2F@[::1]:1884", "pi")
    assert (settings.username, settings.password) == ("pi@1", "p:w/")
    assert (settings.host, settings.port) == ("::1", 1884)
    assert settings.url == "mqtt://[::1]:1884"
    other = MqttSettings.from_url("mqtt://u:x@h", "pi", username="v", password="y", keepalive=5)
    assert (other.username, other.password, other.keepalive) == ("v", "y", 5)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:1883",
        "http://localhost",
        "mqtt://",
        "mqtt://:1883",
        "mqtt://host:0",
        "mqtt://host:99999",
        "mqtt://host:port",
        "mqtt://host/topic",
        "mqtt://host?x=1",
        "mqtt://host#x",
        "mqtt://[::1",
        "mqtt://user:hunter2@host/topic",
        "tcp://user:hunter2@host",
    ],
)
def test_broken_urls_are_one_line_without_the_password(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        MqttSettings.from_url(url, "pi")
    assert "\n" not in str(raised.value)
    assert "hunter2" not in str(raised.value)
    assert "mqtt" in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        {"client_id": ""},
        {"client_id": "a\0b"},
        {"password": "x"},
        {"keepalive": 0},
        {"keepalive": 70_000},
        {"backoff_min": 0.0},
        {"backoff_min": 2.0, "backoff_max": 1.0},
        {"connect_timeout": 0.0},
        {"max_queued": 0},
        {"max_payload": 0},
        {"max_payload": 2**28},
        {"max_payload": 2000, "max_queued_bytes": 1000},
        {"will": Will("a/#", b"x")},
    ],
)
def test_values_that_cannot_work(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        MqttSettings(**{"host": "h", "client_id": "c", **options})  # type: ignore[arg-type]


def test_tls_files_need_a_secure_url() -> None:
    with pytest.raises(ConfigError, match="mqtts"):
        MqttSettings.from_url("mqtt://h", "c", tls=TlsSettings("ca.pem"))


def test_password_is_not_shown() -> None:
    settings = MqttSettings.from_url("mqtt://u:hunter2@h", "c")
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in settings.url
