"""What the tests of the whole system share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.brokers import MosquittoBroker
from tests.commands import clean_environment


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Mosquitto of this module alone: it meets no replicas of others."""
    folder = tmp_path_factory.mktemp("mosquitto")
    with MosquittoBroker(folder, "max_queued_messages 100000") as broker:
        yield broker.url


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of whoever runs the tests are no part of them."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
