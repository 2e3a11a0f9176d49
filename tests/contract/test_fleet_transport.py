"""The delivery contract of ``broker.transport`` on connections that share a thread.

The tests are those of every other transport; here the one thread that publishes also carries.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.mqtt_fleet import CONNECTORS, FILES_PER_DEVICE, FleetNetwork, FleetTransport
from broker.mqtt_settings import MqttSettings
from broker.transport import ConnectionEvent, ConnectionState, Message, Transport, Will
from tests.broker.scripted_broker import CONNECT, Connection, ScriptedBroker
from tests.brokers import MosquittoBroker, RealHarness, Relay, free_port
from tests.contract.test_transport import (  # noqa: F401 (collected here as well)
    test_birth_and_farewell,
    test_callbacks_that_raise_are_counted_and_the_loop_lives,
    test_connected_means_subscribed,
    test_counters_count_payload_bytes,
    test_cut_in_the_middle,
    test_empty_and_binary_payloads,
    test_full_queue_is_an_error_that_names_it,
    test_goodbye_without_farewell_speaks_no_will,
    test_illegal_filters_are_refused,
    test_illegal_topics_are_refused_before_anything_is_sent,
    test_largest_payload_passes,
    test_late_own_will_does_not_leave_the_device_offline,
    test_messages_arrive_once_and_in_order,
    test_one_hears_oneself,
    test_own_status_can_be_listened_to_as_well,
    test_publish_before_connected,
    test_publish_subscribe_and_stop_inside_callbacks,
    test_retained_message_reaches_late_subscribers_until_cleared,
    test_second_client_with_the_same_id,
    test_shared_subscription_gives_each_message_to_exactly_one,
    test_subscribe_and_unsubscribe_while_connected,
    test_subscriptions_are_back_after_a_cut,
    test_too_large_is_a_local_error_and_the_link_stays_up,
    test_wildcards,
    test_will_heard_while_connected_is_answered_with_birth,
    test_will_is_spoken_when_the_connection_dies,
    test_will_works_after_a_takeover,
)


class FleetHarness(RealHarness):
    name = "fleet"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.network = FleetNetwork()

    def _transport(
        self, client_id: str, will: Will | None, relayed: bool, settings: dict[str, Any]
    ) -> Transport:
        url = self.url
        if relayed:
            relay = self.relays[client_id] = Relay(self.port)
            url = f"mqtt://127.0.0.1:{relay.port}"
        options: dict[str, Any] = {"backoff_min": 0.05, "backoff_max": 0.2, **settings}
        made = MqttSettings.from_url(url, client_id, will=will, **options)
        return self.network.transport(made)

    def until(self, condition: Callable[[], object], timeout: float = 10.0) -> bool:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() >= deadline:
                return False
            self.network.poll(0.01)
        return True

    def settle(self) -> None:
        self.until(lambda: False, 0.2)

    def close(self) -> None:
        self.network.close(1.0)
        for relay in self.relays.values():
            relay.close()


@pytest.fixture
def harness(mosquitto: MosquittoBroker) -> Iterator[FleetHarness]:
    made = FleetHarness(mosquitto.url)
    yield made
    made.close()


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_many_devices_take_one_descriptor_each_and_no_thread(harness: FleetHarness) -> None:
    assert harness.until(lambda: True)
    threads, open_files = threading.active_count(), files()
    assert sum(thread.name.startswith("connect-") for thread in threading.enumerate()) == CONNECTORS
    peers = [harness.peer(harness.topic(f"d{n}/+"), started=False) for n in range(100)]
    for peer in peers:
        peer.start()
    assert harness.until(lambda: all(peer.transport.connected for peer in peers))
    assert threading.active_count() == threads
    assert files() - open_files == len(peers) * FILES_PER_DEVICE
    for number, peer in enumerate(peers):
        peer.transport.publish(harness.topic(f"d{(number + 1) % 100}/x"), b"%d" % number)
    assert harness.until(lambda: all(peer.messages for peer in peers))
    assert [peer.payloads for peer in peers] == [[b"%d" % ((n - 1) % 100)] for n in range(100)]


def test_everybody_says_goodbye_and_nothing_stays(harness: FleetHarness) -> None:
    watcher = harness.peer(harness.topic("+/status"))
    network = FleetNetwork()
    devices: list[FleetTransport] = []
    for number in range(10):
        topic = harness.topic(f"{number}/status")
        will = Will(topic, b"offline", birth=b"online", farewell=b"")
        client = f"{harness.root}-{number}"
        device = network.transport(MqttSettings.from_url(harness.url, client, will=will))
        device.start(lambda message: None, lambda event: None)
        devices.append(device)
    deadline = time.monotonic() + 10.0
    while not all(device.connected for device in devices):
        assert time.monotonic() < deadline
        network.poll(0.01)
    assert network.close(5.0) == 0
    assert all(device.gone and not device.connected for device in devices)
    assert harness.until(lambda: len(watcher.messages) == 20)
    assert sorted(watcher.payloads) == [b""] * 10 + [b"online"] * 10
    late = harness.peer(harness.topic("+/status"))
    harness.settle()
    assert late.messages == [], "an empty retained message takes the status away"


def test_a_broker_that_is_not_there_is_an_event_and_comes_back(tmp_path: Path) -> None:
    port = free_port()
    harness = FleetHarness(f"mqtt://127.0.0.1:{port}")
    peer = harness.peer("t", qos=1, started=False).start()
    assert harness.until(lambda: peer.events)
    peer.transport.publish("t", b"kept", qos=1)
    with MosquittoBroker(tmp_path, port=port):
        assert harness.until(lambda: peer.payloads == [b"kept"])
    assert harness.until(lambda: not peer.transport.connected)
    with MosquittoBroker(tmp_path, port=port):
        assert harness.until(lambda: peer.transport.connected)
        peer.transport.publish("t", b"again", qos=1)
        assert harness.until(lambda: peer.payloads[-1:] == [b"again"])
        assert peer.states == [
            ConnectionState.DISCONNECTED,
            ConnectionState.CONNECTED,
            ConnectionState.DISCONNECTED,
            ConnectionState.CONNECTED,
        ]
        assert peer.transport.reconnects == 1
        harness.close()


def test_a_broker_that_talks_nonsense_costs_its_own_connection_only(harness: FleetHarness) -> None:
    good = harness.peer(harness.topic("good"))

    def script(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        if kind == CONNECT:
            connection.raw(b"\x30\x05\xff\xff\xff\xff\xff" * 3)

    with ScriptedBroker(script) as nonsense:
        settings = MqttSettings.from_url(nonsense.url, "victim", backoff_min=0.05, backoff_max=0.1)
        victim = harness.network.transport(settings)
        events: list[ConnectionEvent] = []
        victim.start(lambda message: None, events.append)
        assert harness.until(lambda: len(nonsense.connections) >= 3), "it goes on trying"
        assert events[0].state is ConnectionState.DISCONNECTED
        good.transport.publish(harness.topic("good"), b"still here")
        assert harness.until(
            lambda: good.messages == [Message(harness.topic("good"), b"still here")]
        )


def test_credentials_that_are_refused_end_it_for_good(harness: FleetHarness) -> None:
    def script(connection: Connection, kind: int, flags: int, body: bytes) -> None:
        if kind == CONNECT:
            connection.send(0x20, b"\0\x86\0")

    with ScriptedBroker(script) as strict:
        transport = harness.network.transport(MqttSettings.from_url(strict.url, "nobody"))
        events: list[ConnectionEvent] = []
        transport.start(lambda message: None, events.append)
        assert harness.until(lambda: transport.gone)
        assert [event.state for event in events] == [ConnectionState.FAILED]
        assert events[0].reason_code == 0x86


def test_a_stop_while_connecting_leaves_nothing_open(mosquitto: MosquittoBroker) -> None:
    before = files()
    network = FleetNetwork()
    transport = network.transport(MqttSettings.from_url(mosquitto.url, "hasty"))
    transport.start(lambda message: None, lambda event: None)
    network.poll(0.0)
    assert network.close(2.0) == 0
    assert files() == before
