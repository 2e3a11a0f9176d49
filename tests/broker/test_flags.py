"""Ids that commands give themselves."""

from __future__ import annotations

import socket

import pytest

from broker.errors import ConfigError
from broker.flags import HOSTNAME, own_id


def test_an_id_that_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "host")
    assert own_id("--id", "v1") == "v1"
    with pytest.raises(ConfigError, match="--id 'a/b'"):
        own_id("--id", "a/b")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("3f2a9c1b7d5e", "3f2a9c1b7d5e"),
        ("gpu-1.rack_2.example", "gpu-1-rack_2-example"),
        ("ä+#/", "----"),
        ("x" * 70, "x" * 64),
    ],
)
def test_hostname_stands_for_the_host(
    monkeypatch: pytest.MonkeyPatch, host: str, expected: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert own_id("--id", HOSTNAME) == expected


def test_a_host_without_a_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    with pytest.raises(ConfigError, match="--id ''"):
        own_id("--id", HOSTNAME)
