"""The relay between the project's own transport and a real broker."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from broker.codec import decode, encode
from broker.messages import DraftBatch, Verdict
from broker.topics import down_topic, up_topic
from broker.transport import ConnectionState, Message
from edge_agent.bench.link import Link, find_scenario
from edge_agent.bench.relay import EmulatedLink
from tests.brokers import MosquittoBroker, MosquittoHarness, Peer, wait_until

#: Seconds that a busy machine may add to a median.
SLACK = 0.05
DRAFT = DraftBatch(1, 0, 0, (101, 202, 303), verify=True)
VERDICT = Verdict(1, 0, 0, (101, 202, 303, 404), accepted=3, judged=3)


class Device:
    """An agent's transport behind an emulated link, and a verifier that answers at once."""

    def __init__(self, broker: MosquittoBroker, link: Link, **options: Any) -> None:
        self._harness = MosquittoHarness(broker.url)
        self.up = up_topic(self._harness.root, "s", "v")
        self.down = down_topic(self._harness.root, "s")
        self.heard: list[bytes] = []
        self.verifier = self._harness.peer(self.up)
        self.verifier.reply = self._answer
        self.relay = EmulatedLink("127.0.0.1", broker.port, link, **options).start()
        self._harness.url = self.relay.url
        self.agent: Peer = self._harness.peer(self.down, client_id="", keepalive=5)
        # The subscription is on its way when the connection is up.
        assert wait_until(lambda: self._reached())

    def _reached(self) -> bool:
        self.verifier.transport.publish(self.down, b"hello")
        return wait_until(lambda: b"hello" in self.agent.payloads, 0.5)

    def _answer(self, message: Message) -> None:
        self.heard.append(message.payload)
        self.verifier.transport.publish(self.down, encode(VERDICT))

    def round_trip(self) -> float:
        """Seconds from a draft to its verdict."""
        seen = len(self.verdicts)
        begin = time.monotonic()
        self.agent.transport.publish(self.up, encode(DRAFT))
        assert wait_until(lambda: len(self.verdicts) > seen)
        return time.monotonic() - begin

    @property
    def verdicts(self) -> list[Verdict]:
        return [
            decoded
            for payload in self.agent.payloads
            if payload != b"hello" and isinstance(decoded := decode(payload), Verdict)
        ]

    def close(self) -> None:
        self._harness.close()
        self.relay.close()


MakeDevice = Callable[..., Device]


@pytest.fixture
def device(mosquitto: MosquittoBroker) -> Iterator[MakeDevice]:
    made: list[Device] = []

    def make(link: Link, **options: Any) -> Device:
        made.append(Device(mosquitto, link, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("name", ["loopback", "wifi", "4g"])
def test_a_draft_and_its_verdict_take_what_the_scenario_says(device, name: str) -> None:
    link = find_scenario(name).link
    one = device(link)
    expected = link.startup_s + 2 * link.delay_s
    taken = statistics.median(one.round_trip() for _ in range(9))
    assert expected <= taken < expected + SLACK
    stats = one.relay.stats()
    assert (stats.opaque, stats.errors, stats.lost) == (0, 0, 0)


def test_drafts_sent_at_once_leave_one_start_up_apart_and_are_under_way_together(device) -> None:
    one = device(Link(delay_s=0.1, startup_s=0.02))
    before = len(one.relay.passages_up())
    begin = time.monotonic()
    for _ in range(5):
        one.agent.transport.publish(one.up, encode(DRAFT))
    assert wait_until(lambda: len(one.verdicts) == 5)
    taken = time.monotonic() - begin
    assert 5 * 0.02 + 0.2 <= taken < 5 * 0.02 + 0.2 + 4 * SLACK
    crossed = one.relay.passages_up()[before:]
    assert len(crossed) == 5
    for earlier, later in itertools.pairwise(crossed):
        assert later.start >= earlier.departed
        assert later.start < earlier.arrived
    assert all(begin <= passage.sent for passage in crossed)


def test_qos_1_is_charged_once_and_its_acknowledgement_is_free(device) -> None:
    one = device(Link(startup_s=0.03))
    before = one.relay.stats()
    for _ in range(3):
        one.agent.transport.publish(one.up, encode(DRAFT), qos=1)
    assert wait_until(lambda: len(one.heard) == 3)
    after = one.relay.stats()
    assert after.messages_up - before.messages_up == 3
    assert after.busy_up_s - before.busy_up_s == pytest.approx(0.09)


def test_full_probabilities_take_the_authors_time_and_arrive_as_sent(device) -> None:
    scenario = find_scenario("S1").with_wire("full-probs")
    one = device(scenario.link, pad_bytes_per_token=scenario.pad_bytes_per_token)
    taken = statistics.median(one.round_trip() for _ in range(3))
    expected = 3 * 0.116 + scenario.link.startup_s + 2 * scenario.link.delay_s
    assert expected <= taken < expected + SLACK
    assert set(one.heard) == {encode(DRAFT)}
    assert one.relay.stats().padding_bytes == 3 * 3 * 290_000


def test_after_a_cut_the_agent_comes_back_by_itself(device) -> None:
    one = device(Link(delay_s=0.01))
    one.relay.cut(for_s=0.3)
    assert wait_until(lambda: one.agent.states.count(ConnectionState.CONNECTED) == 2)
    assert wait_until(lambda: one._reached())
    assert one.round_trip() >= 0.02
    assert one.relay.stats().cuts == 1
    assert one.relay.stats().connections >= 2


def test_a_session_opening_of_the_largest_kind_crosses_in_pieces(device) -> None:
    one = device(Link(up_bps=80e6, delay_s=0.01))
    large = bytes(range(256)) * 2_000
    one.agent.transport.publish(one.up, large)
    assert wait_until(lambda: large in one.heard)
    passage = one.relay.passages_up()[-1]
    assert passage.size > len(large)
    assert passage.arrived - passage.start >= len(large) * 8 / 80e6 + 0.01
