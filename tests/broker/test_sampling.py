"""The numpy sampler against plain definitions, on small and large vocabularies."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.errors import ConfigError, ModelError
from broker.noise import exponentials, hash_ids, noise_key
from broker.sampling import HEAD, Sampler, Sampling

CHI_SQUARE_3 = 16.27  # 3 degrees of freedom, exceeded once in 1,000
INF = float("inf")


def reference_survivors(logits: np.ndarray, sampling: Sampling) -> list[int]:
    """The filters as documented, one token at a time."""
    top = float(logits.max())
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    order = [i for i in order if logits[i] > -INF]
    probs = {i: math.exp(max((float(logits[i]) - top) / sampling.temperature, -1e4)) for i in order}
    if 0 < sampling.top_k < len(logits):
        kth = logits[order[min(sampling.top_k, len(order)) - 1]]
        order = [i for i in order if logits[i] >= kth]
    if sampling.top_p < 1.0:
        total, before, kept = math.fsum(probs[i] for i in order), 0.0, []
        for i in order:
            if kept and before >= sampling.top_p * total:
                break
            kept.append(i)
            before += probs[i]
        order = kept
    return sorted(i for i in order if probs[i] >= sampling.min_p)


def reference_choice(logits: np.ndarray, position: int, sampling: Sampling, ids: list[int]) -> int:
    """The least exponential / probability among ``ids``, in float64."""
    gap = (float(logits.max()) - logits[ids].astype(np.float64)) / sampling.temperature
    noise = exponentials(
        hash_ids(np.array(ids, dtype=np.uint32), noise_key(sampling.seed, position))
    )
    with np.errstate(over="ignore"):
        return ids[int((noise * np.exp(gap)).argmin())]


def random_logits(size: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    probs = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return probs / probs.sum()


# Steps of 1/4 make ties frequent; -inf are masked tokens.
steps = st.integers(-40, 40).map(lambda i: i / 4)
rows = st.lists(st.one_of(steps, steps, steps, st.just(-INF)), min_size=1, max_size=60).filter(
    lambda row: max(row) > -INF
)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 70),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    seed=st.integers(0, 2**64 - 1),
)


def near_a_boundary(logits: np.ndarray, sampling: Sampling, tolerance: float = 1e-6) -> bool:
    """Whether rounding alone decides a filter: the definition then allows both answers."""
    probs = np.sort(np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature))[::-1]
    if sampling.min_p > 0 and np.abs(probs / sampling.min_p - 1).min() < 1e-9:
        return True
    if 0 < sampling.top_k < len(probs):
        probs = probs[probs >= probs[sampling.top_k - 1]]
    if sampling.top_p == 1.0:
        return False
    return bool(np.abs(np.cumsum(probs) / probs.sum() - sampling.top_p).min() < tolerance)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": 101.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_settings_outside_their_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"is (outside|negative)"):
        Sampling(**wrong)


@given(rows, samplings)
@settings(max_examples=300)
def test_survivors_are_those_of_the_definition(row: list[float], sampling: Sampling) -> None:
    logits = np.array(row, dtype=np.float32)
    if near_a_boundary(logits, sampling):
        return
    kept = Sampler(len(row)).survivors(logits, sampling)
    assert kept.tolist() == reference_survivors(logits, sampling)


@pytest.mark.parametrize("size", [900, 1500, 20_000])
@pytest.mark.parametrize("decimals", [1, 6])
@pytest.mark.parametrize("spread", [0.01, 3.0])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_k=7),
        Sampling(0.8, top_k=200, top_p=0.93),
        Sampling(0.7, top_p=0.951),
        Sampling(1.3, top_p=0.999_17),
        Sampling(1.0, min_p=0.0493),
        Sampling(0.9, top_k=800, top_p=0.917, min_p=0.0213),
    ],
)
def test_survivors_of_large_rows(
    size: int, decimals: int, spread: float, sampling: Sampling
) -> None:
    # A flat row (spread 0.01) makes top-p keep most of the vocabulary, far past the first head.
    logits = random_logits(size, spread=spread).round(decimals)
    logits[::17] = -INF
    assert not near_a_boundary(logits, sampling, tolerance=1e-7)
    kept = Sampler(size).survivors(logits, sampling).tolist()
    assert kept == reference_survivors(logits, sampling)


def test_a_flat_row_widens_the_head() -> None:
    size = HEAD * 9
    kept = Sampler(size).survivors(np.zeros(size, dtype=np.float32), Sampling(1.0, top_p=0.5001))
    assert kept.tolist() == list(range(math.ceil(size * 0.5001)))


TIES = np.array([1, 2, 0, 2, 2, -INF, 1], dtype=np.float32)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0), [0, 1, 2, 3, 4, 6]),
        (Sampling(1.0, top_k=1), [1, 3, 4]),  # all that equal the k-th stay
        (Sampling(1.0, top_k=4), [0, 1, 3, 4, 6]),
        (Sampling(1.0, top_k=50), [0, 1, 2, 3, 4, 6]),
        (Sampling(1.0, top_k=6), [0, 1, 2, 3, 4, 6]),  # a masked token never fills a place
        (Sampling(1.0, top_p=1e-9), [1]),  # at least one, of equal ones the lowest id
        (Sampling(1.0, top_p=0.3), [1, 3]),
        (Sampling(1.0, top_k=1, top_p=0.5), [1, 3]),  # the mass is that which top-k left
        (Sampling(1.0, min_p=1.0), [1, 3, 4]),
        (Sampling(1.0, top_p=0.3, min_p=1.0), [1, 3]),
        (Sampling(0.0), [1]),
    ],
)
def test_ties(sampling: Sampling, kept: list[int]) -> None:
    assert Sampler(7).survivors(TIES, sampling).tolist() == kept


@given(rows, samplings, st.integers(0, 2**31))
@settings(max_examples=300)
def test_the_choice_is_the_least_score_of_the_survivors(
    row: list[float], sampling: Sampling, position: int
) -> None:
    logits = np.array(row, dtype=np.float32)
    sampler = Sampler(len(row))
    kept = sampler.survivors(logits, sampling).tolist()
    assert sampler.choose(logits, position, sampling) == reference_choice(
        logits, position, sampling, kept
    )


@pytest.mark.parametrize("size", [1025, 16_384, 16_385, 50_000])
@pytest.mark.parametrize("temperature", [1e-3, 0.3, 1.0, 2.5, 100.0])
def test_the_preselection_never_loses_the_winner(size: int, temperature: float) -> None:
    sampler = Sampler(size)
    logits = random_logits(size, seed=size)
    logits[::5] = -INF
    finite = np.flatnonzero(logits > -INF).tolist()
    for position in range(60):
        sampling = Sampling(temperature, seed=position * 977)
        token = sampler.choose(logits, position, sampling)
        assert token == reference_choice(logits, position, sampling, finite)


@given(rows)
@example([3.0, 3.0, 3.0])
def test_temperature_0_is_the_argmax_and_the_lowest_of_equals(row: list[float]) -> None:
    logits = np.array(row, dtype=np.float32)
    for sampling in (Sampling(), Sampling(top_k=3, top_p=0.5, min_p=0.1, seed=9)):
        assert Sampler(len(row)).choose(logits, 4, sampling) == row.index(max(row))


@pytest.mark.parametrize("size", [200, 5000])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-39, 1e-6])
def test_tiny_temperatures_are_greedy(size: int, temperature: float) -> None:
    sampler, logits = Sampler(size), random_logits(size)
    for sampling in (
        Sampling(temperature),
        Sampling(temperature, top_k=5),
        Sampling(temperature, top_p=0.9),
        Sampling(temperature, min_p=0.2),
    ):
        assert sampler.choose(logits, 3, sampling) == logits.argmax()


@pytest.mark.parametrize("size", [40, 3000])
def test_one_survivor_is_the_argmax(size: int) -> None:
    sampler, logits = Sampler(size), random_logits(size)
    for position in range(50):
        for sampling in (
            Sampling(5.0, top_k=1),
            Sampling(5.0, top_p=1e-12),
            Sampling(5.0, min_p=1),
        ):
            assert sampler.choose(logits, position, sampling) == logits.argmax()


def test_a_huge_temperature_is_nearly_uniform() -> None:
    logits = np.array([0.0, 1.0, 2.0, -INF, 3.0], dtype=np.float32)
    sampler = Sampler(5)
    counts = np.bincount(
        [sampler.choose(logits, position, Sampling(100.0)) for position in range(4000)], minlength=5
    )
    assert counts[3] == 0
    expected = 4000 * softmax(logits, 100.0)[[0, 1, 2, 4]]
    assert ((counts[[0, 1, 2, 4]] - expected) ** 2 / expected).sum() < CHI_SQUARE_3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_winners_follow_the_softmax(temperature: float) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    sampler = Sampler(4)
    sampling = Sampling(temperature, seed=11)
    winners = [sampler.choose(logits, position, sampling) for position in range(8000)]
    expected = 8000 * softmax(logits, temperature)
    counts = np.bincount(winners, minlength=4)
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_3


def test_winners_over_seeds_follow_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    sampler = Sampler(4)
    winners = [sampler.choose(logits, 17, Sampling(1.0, seed=seed)) for seed in range(8000)]
    expected = 8000 * softmax(logits)
    assert ((np.bincount(winners, minlength=4) - expected) ** 2 / expected).sum() < CHI_SQUARE_3


def test_filtered_winners_follow_the_renormalised_softmax() -> None:
    logits = np.log(np.array([0.05, 0.4, 0.02, 0.25, 0.1, 0.18], dtype=np.float32))
    sampler = Sampler(6)
    for sampling, kept in [
        (Sampling(1.0, top_k=4, seed=1), [1, 3, 4, 5]),
        (Sampling(1.0, top_p=0.9, seed=2), [1, 3, 4, 5]),
        (Sampling(1.0, min_p=0.2, seed=3), [1, 3, 4, 5]),
    ]:
        winners = [sampler.choose(logits, position, sampling) for position in range(6000)]
        counts = np.bincount(winners, minlength=6)
        expected = 6000 * softmax(logits[kept])
        assert counts.sum() == counts[kept].sum()
        assert ((counts[kept] - expected) ** 2 / expected).sum() < CHI_SQUARE_3


def test_winners_of_a_large_vocabulary_follow_the_softmax() -> None:
    # Three thousand tokens in four groups of known mass: what the preselection must not bend.
    size = 3000
    probs = np.repeat([0.5, 0.3, 0.15, 0.05], size // 4) / (size // 4)
    sampler, logits = Sampler(size), np.log(probs).astype(np.float32)
    sampling = Sampling(1.0, seed=4)
    groups = [sampler.choose(logits, position, sampling) // 750 for position in range(6000)]
    expected = 6000 * np.array([0.5, 0.3, 0.15, 0.05])
    assert ((np.bincount(groups, minlength=4) - expected) ** 2 / expected).sum() < CHI_SQUARE_3


def test_shared_noise_makes_similar_models_agree() -> None:
    size, draws = 200, 3000
    target = random_logits(size, seed=1, spread=2.0)
    draft = target + random_logits(size, seed=2, spread=0.3)
    target_probs, draft_probs = softmax(target), softmax(draft)
    sampler = Sampler(size)

    def agreement(seed_of: Callable[[int], int]) -> float:
        same = 0
        for position in range(draws):
            token = sampler.choose(target, position, Sampling(1.0, seed=1))
            same += token == sampler.choose(draft, position, Sampling(1.0, seed=seed_of(position)))
        return same / draws

    shared, independent = agreement(lambda _: 1), agreement(lambda position: position + 2)
    best = float(np.minimum(target_probs, draft_probs).sum())  # what any coupling can reach
    noise = 4 * 0.5 / draws**0.5
    assert abs(independent - float((target_probs * draft_probs).sum())) < noise
    assert shared > 5 * independent
    # With total variation d, Gumbel's coupling agrees at least (1 - d) / (1 + d) of the time
    # (Daliri, Musco, Suresh: Coupling without Communication, 2024) and none above 1 - d.
    assert best / (2 - best) - noise < shared < best + noise


def test_confidence_is_the_plain_probability_of_the_choice() -> None:
    for size in (7, 5000):
        logits = random_logits(size)
        logits[3] = -INF
        sampler, probs = Sampler(size), softmax(logits)
        for sampling in (Sampling(), Sampling(0.5, seed=5), Sampling(2.0, top_k=5, seed=6)):
            token, confidence = sampler.choose_with_confidence(logits, 8, sampling)
            assert isinstance(token, int)
            assert token == sampler.choose(logits, 8, sampling)
            assert confidence == pytest.approx(probs[token], rel=1e-5)


def test_extreme_logits_give_no_warning_and_no_nan() -> None:
    limit = float(np.finfo(np.float32).max)
    for size in (4, 2000):
        logits = np.full(size, -limit, dtype=np.float32)
        logits[2], logits[1] = limit, -INF
        sampler = Sampler(size)
        with np.errstate(all="raise", under="ignore"):
            for sampling in (
                Sampling(),
                Sampling(1.0),
                Sampling(100.0, top_k=3),
                Sampling(1.0, top_p=0.5),
                Sampling(1e-300, min_p=0.5),
            ):
                assert sampler.choose_with_confidence(logits, 0, sampling) == (2, 1.0)


@pytest.mark.parametrize(
    "row",
    [
        [-INF, -INF, -INF],
        [0.0, math.nan, 1.0],
        [math.nan, math.nan, math.nan],
        [0.0, INF, 1.0],
    ],
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.5)])
def test_rows_without_a_choice_are_model_errors(row: list[float], sampling: Sampling) -> None:
    logits = np.array(row, dtype=np.float32)
    for call in (Sampler(3).choose, Sampler(3).choose_with_confidence):
        with pytest.raises(ModelError, match="NaN, infinite or all masked"):
            call(logits, 0, sampling)


def test_rows_of_a_wrong_shape_are_model_errors() -> None:
    with pytest.raises(ModelError, match="do not belong together"):
        Sampler(8).choose(np.zeros(7, dtype=np.float32), 0, Sampling())
    with pytest.raises(ModelError, match="do not belong together"):
        Sampler(8).choose(np.zeros((1, 8), dtype=np.float32), 0, Sampling())
    with pytest.raises(ModelError, match="no tokens"):
        Sampler(0)


def test_padded_rows_never_win() -> None:
    # The embedding has 152064 rows where the tokenizer has 151936 entries; scaled down.
    logits = random_logits(64)
    padded = np.concatenate([logits, np.full(8, 50.0, dtype=np.float32)])
    padded[70] = math.nan
    sampler = Sampler(64)
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=4), Sampling(1.0, top_p=0.5)):
        for position in range(20):
            assert sampler.choose(padded, position, sampling) == sampler.choose(
                logits, position, sampling
            )


def test_calls_leave_no_trace_in_each_other_or_in_the_row() -> None:
    size = 3000
    logits, other = random_logits(size, 1), random_logits(size, 2)
    before = logits.copy()
    logits.setflags(write=False)
    used = Sampler(size)
    settings_ = [Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(1.0, top_k=9), Sampling()]
    for sampling in settings_:
        used.choose_with_confidence(other, 5, Sampling(1.0, top_k=500, top_p=0.5))
        assert used.choose(logits, 5, sampling) == Sampler(size).choose(logits, 5, sampling)
    assert np.array_equal(logits, before)


def test_other_float_types_are_taken_as_float32() -> None:
    logits = random_logits(2000).astype(np.float16)
    sampler = Sampler(2000)
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.9)):
        expected = sampler.choose(logits.astype(np.float32), 1, sampling)
        assert sampler.choose(logits, 1, sampling) == expected
        assert sampler.choose(logits.astype(np.float64), 1, sampling) == expected
