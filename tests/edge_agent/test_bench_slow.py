"""A slower device drafts the same tokens, later."""

from __future__ import annotations

import pytest

from broker.sampling import Sampling
from edge_agent.bench.slow import SlowDraftModel
from edge_agent.scripted_draft import ScriptedDraftModel


class Time:
    """A clock that only sleeping, and what costs, moves on."""

    def __init__(self) -> None:
        self.now = 3.0

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def draft(time: Time, cost: float) -> ScriptedDraftModel:
    def oracle(sequence, position, sampling):
        time.now += cost
        return sequence[-1] + 1, 0.5

    return ScriptedDraftModel(oracle, 64)


@pytest.mark.parametrize(("cost", "takes"), [(0.01, 0.03), (0.05, 0.05)])
def test_a_token_takes_the_floor_or_its_own_time(cost, takes) -> None:
    time = Time()
    model = SlowDraftModel(draft(time, cost), 0.03, clock=time.read, sleep=time.sleep)
    sequence = model.open()
    for count in (1, 2, 3):
        sequence.eval([7])
        assert sequence.propose(count, Sampling()) == (8, 0.5)
        assert time.now - 3.0 == pytest.approx(count * takes)


def test_it_is_the_same_model_otherwise() -> None:
    time = Time()
    inner = draft(time, 0.0)
    model = SlowDraftModel(inner, 0.03, clock=time.read, sleep=time.sleep)
    for name in ("name", "vocab_size", "context", "vocab_hash", "eos_ids"):
        assert getattr(model, name) == getattr(inner, name)
    sequence = model.open()
    sequence.eval([1, 2, 3])
    sequence.rollback(1)
    assert sequence.length == 1
    sequence.close()
    assert inner.open_sequences == 0
    model.close()
    inner.open()  # not closed with it
