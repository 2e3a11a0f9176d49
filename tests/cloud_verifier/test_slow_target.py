"""A slower target is the same target, later."""

from __future__ import annotations

import pytest

from broker.errors import ConfigError
from broker.sampling import Sampling
from cloud_verifier.engine.scripted_target import ScriptedTarget, hashed_script
from cloud_verifier.engine.slow_target import SlowTarget
from cloud_verifier.engine.target import Work

BATCH = [Work(0, 0, (1, 2, 3), 2, 0, Sampling())]


class Time:
    """A clock that sleeping moves on, and each forward by ``cost``."""

    def __init__(self, cost: float) -> None:
        self.now = 5.0
        self.cost = cost
        self.slept: list[float] = []

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Costly(ScriptedTarget):
    def __init__(self, time: Time) -> None:
        super().__init__(script=hashed_script(64), vocab_size=64)
        self.time = time

    def forward(self, batch):
        self.time.now += self.time.cost
        return super().forward(batch)


@pytest.mark.parametrize(
    ("cost", "floor", "takes", "sleeps"),
    [(0.02, 0.05, 0.05, 1), (0.08, 0.05, 0.08, 0), (0.02, 0.0, 0.02, 0)],
)
def test_a_forward_takes_the_floor_or_its_own_time(cost, floor, takes, sleeps) -> None:
    time = Time(cost)
    target = SlowTarget(Costly(time), floor, clock=time.read, sleep=time.sleep)
    plain = ScriptedTarget(script=hashed_script(64), vocab_size=64)
    assert target.forward(BATCH) == plain.forward(BATCH)
    assert time.now - 5.0 == pytest.approx(takes)
    assert len(time.slept) == sleeps


def test_everything_else_is_the_target_s() -> None:
    time = Time(0.0)
    inner = Costly(time)
    target = SlowTarget(inner, 0.01)
    for name in ("name", "vocab_size", "context", "vocab_hash", "eos_ids", "max_slots"):
        assert getattr(target, name) == getattr(inner, name)
    target.close()


@pytest.mark.parametrize("floor", [-0.001, 61.0, float("nan")])
def test_a_floor_that_cannot_be_is_refused(floor) -> None:
    with pytest.raises(ConfigError, match="--forward-floor-ms"):
        SlowTarget(Costly(Time(0.0)), floor)
