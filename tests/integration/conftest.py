"""A broker for each module here, so that no module meets the replicas of another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers import MosquittoBroker


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Mosquitto."""
    folder = tmp_path_factory.mktemp("mosquitto")
    with MosquittoBroker(folder, "max_queued_messages 100000") as broker:
        yield broker.url
