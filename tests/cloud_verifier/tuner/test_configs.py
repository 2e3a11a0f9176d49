"""The retained configs, over a broker in memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.clock import VirtualClock
from broker.codec import decode, encode
from broker.errors import TransportError
from broker.memory import InMemoryBroker, InMemoryTransport
from broker.messages import MAX_POSITION
from broker.telemetry import DeviceConfig
from broker.topics import config_topic
from cloud_verifier.tuner import configs as module
from cloud_verifier.tuner.configs import Configs
from cloud_verifier.tuner.core.space import Pair


class Place:
    """A broker, the tuner's configs, and a device that hears its own."""

    def __init__(self) -> None:
        self.broker = InMemoryBroker(VirtualClock(), 1)
        self.heard: list[DeviceConfig | None] = []
        self.device = InMemoryTransport(self.broker, "pi")
        self.device.subscribe(config_topic("pi"), qos=1)
        self.device.start(self._on_message, lambda _event: None)
        self.configs = Configs(InMemoryTransport(self.broker, "tuner"))
        self.deliver()

    def _on_message(self, message) -> None:
        self.heard.append(decode(message.payload) if message.payload else None)

    def deliver(self) -> None:
        while self.broker.deliver_due(0.0):
            pass

    def retain(self, payload: bytes, device: str = "pi") -> None:
        self.device.publish(config_topic(device), payload, qos=1, retain=True)
        self.deliver()

    def start(self) -> None:
        self.configs.start()
        self.deliver()


def test_a_config_goes_out_retained_and_above_what_the_broker_had() -> None:
    place = Place()
    place.retain(encode(DeviceConfig(41, 0.1, 0.2, 8, "pipesd")))
    place.start()
    assert place.configs.publish("pi", Pair(0.3, 0.4), anew=True) == 42
    place.deliver()
    # What else stood in the config stays.
    assert place.heard[-1] == DeviceConfig(42, 0.3, 0.4, 8, "pipesd")
    later = Configs(InMemoryTransport(place.broker, "later"))
    later.start()
    place.deliver()
    assert later.known("pi") == place.heard[-1]


def test_the_same_pair_is_told_again_only_where_it_is_to_be_acknowledged_anew() -> None:
    place = Place()
    place.start()
    pair = Pair(0.3, 0.4)
    assert place.configs.publish("pi", pair, anew=False) == 1
    assert place.configs.publish("pi", pair, anew=False) == 1
    assert place.configs.publish("pi", pair, anew=True) == 2
    place.deliver()
    assert [config and config.version for config in place.heard] == [1, 2]


def test_what_a_broker_forgot_over_a_restart_is_retained_again() -> None:
    place = Place()
    place.start()
    pair = Pair(0.3, 0.4)
    place.configs.publish("pi", pair, anew=False)
    place.deliver()
    # One that keeps what it retains tells it again, and nothing needs to be sent.
    place.broker.cut("tuner")
    place.broker.restore("tuner")
    place.deliver()
    assert place.configs.publish("pi", pair, anew=False) == 1
    place.broker.cut("tuner")
    place.retain(b"")  # what a broker does that keeps nothing
    place.broker.restore("tuner")
    place.deliver()
    assert place.configs.publish("pi", pair, anew=False) == 2
    place.deliver()
    assert [config and config.version for config in place.heard] == [1, None, 2]


def test_versions_begin_anew_at_the_end_of_the_numbers() -> None:
    place = Place()
    place.retain(encode(DeviceConfig(MAX_POSITION, 0.1, 0.2)))
    place.start()
    assert place.configs.publish("pi", Pair(0.3, 0.4), anew=True) == 1


def test_a_config_that_makes_no_sense_is_counted_and_written_over() -> None:
    place = Place()
    place.retain(b"\x9f\xfd\x74\xf7")
    place.retain(encode(DeviceConfig(3, 0.1, 0.2)), device="_other")
    place.start()
    assert place.configs.rejected == 2
    assert place.configs.known("pi") is None
    assert place.configs.publish("pi", Pair(0.3, 0.4), anew=True) == 1


def test_a_cleared_config_is_gone_for_everybody() -> None:
    place = Place()
    place.start()
    place.configs.publish("pi", Pair(0.3, 0.4), anew=True)
    place.configs.clear("pi")
    place.deliver()
    assert place.heard[-1] is None
    assert place.configs.known("pi") is None


def test_nothing_goes_out_while_the_broker_is_away() -> None:
    place = Place()
    place.start()
    place.broker.cut("tuner")
    place.deliver()
    with pytest.raises(TransportError):
        place.configs.publish("pi", Pair(0.3, 0.4), anew=True)
    place.broker.restore("tuner")
    place.deliver()
    assert place.configs.publish("pi", Pair(0.3, 0.4), anew=True) == 1


def test_the_memory_of_configs_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_CONFIGS", 2)
    place = Place()
    for name in ("a", "b", "c"):
        place.retain(encode(DeviceConfig(1, 0.1, 0.2)), device=name)
    place.start()
    assert place.configs.overflowed == 1


class Raw:
    """Thresholds that no Pair would hold: what a fault elsewhere might bring."""

    def __init__(self, r1: float, r2: float) -> None:
        self.r1, self.r2 = r1, r2


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_whatever_is_asked_for_nothing_outside_zero_and_one_is_published(r1, r2) -> None:
    place = Place()
    place.start()
    place.configs.publish("pi", Raw(r1, r2), anew=True)
    place.deliver()
    config = place.heard[-1]
    assert config is not None
    assert 0.0 < config.r1 < 1.0
    assert 0.0 < config.r2 < 1.0
