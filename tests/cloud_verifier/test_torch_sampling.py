"""The torch sampler against the numpy one and against transformers' own filters."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from broker import noise
from broker.errors import LocalProtocolError, ModelError
from broker.sampling import HEAD, Sampler, Sampling
from cloud_verifier.engine import torch_sampling
from cloud_verifier.engine.torch_sampling import choose, choose_many, survivors

CHI_SQUARE_3 = 16.27  # 3 degrees of freedom, exceeded once in 1,000
INF = float("inf")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True, params=["as shipped", "tensors"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in main memory usually go through numpy: tests run the tensors' code on them as well."""
    if request.param == "tensors":
        monkeypatch.setattr(torch_sampling, "_ROW_BY_ROW", frozenset())


FILTERS = [
    Sampling(1.0),
    Sampling(0.8, top_k=7),
    Sampling(1.0, top_k=600),
    Sampling(0.7, top_p=0.951),
    Sampling(1.3, top_p=0.9917),
    Sampling(1.0, min_p=0.0493),
    Sampling(0.9, top_k=40, top_p=0.917, min_p=0.0213),
    Sampling(1.1, top_k=800, top_p=0.613),
    Sampling(1.7, top_p=0.877, min_p=0.0031),
]

steps = st.integers(-40, 40).map(lambda i: i / 4)  # ties are frequent
tied_rows = st.lists(st.one_of(steps, steps, st.just(-INF)), min_size=1, max_size=50).filter(
    lambda row: max(row) > -INF
)
any_sampling = st.builds(
    Sampling,
    temperature=st.one_of(st.just(0.0), st.floats(0.05, 5.0)),
    top_k=st.integers(0, 60),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    seed=st.integers(0, 2**64 - 1),
)


def random_logits(rows: int, size: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal((rows, size)) * spread
    return torch.from_numpy(values.astype(np.float32))


def numpy_choices(logits: torch.Tensor, position: int, sampling: Sampling) -> list[int]:
    sampler = Sampler(logits.shape[1])
    return [
        sampler.choose(row, position + i, sampling) for i, row in enumerate(logits.float().numpy())
    ]


def unsigned(hashes: torch.Tensor) -> list[int]:
    return (hashes.long() & 0xFFFFFFFF).tolist()


@pytest.mark.parametrize("device", DEVICES)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_hash_is_bit_identical(device: str, seed: int, position: int, ids: list[int]) -> None:
    key = noise.noise_key(seed, position)
    expected = noise.hash_ids(np.array(ids, dtype=np.uint32), key)
    k0, k1 = torch.tensor(key, dtype=torch.int64, device=device).int()
    hashes = torch_sampling.hash_ids(
        torch.tensor(ids, dtype=torch.int32, device=device), k0[None], k1[None]
    )
    assert unsigned(hashes) == expected.tolist()
    values = torch_sampling.exponentials(hashes).cpu().numpy()
    assert np.allclose(values, noise.exponentials(expected), rtol=1e-14, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_whole_rows_are_bit_identical(device: str) -> None:
    size = 152_064
    keys = [noise.noise_key(9, position) for position in range(3)]
    words = torch.tensor(keys, dtype=torch.int64, device=device).int()
    ids = torch.arange(size, dtype=torch.int32, device=device)[None]
    hashes = torch_sampling.hash_ids(ids, words[:, :1], words[:, 1:])
    for row, key in zip(hashes, keys, strict=True):
        expected = noise.hash_ids(np.arange(size, dtype=np.uint32), key)
        assert unsigned(row) == expected.tolist()
    assert ids[0, 5].item() == 5, "the ids are left as they were"


def transformers_survivors(logits: torch.Tensor, sampling: Sampling) -> list[list[int]]:
    ids = torch.zeros((1, 1), dtype=torch.long)
    scores = TemperatureLogitsWarper(sampling.temperature)(ids, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    return [row.nonzero()[:, 0].tolist() for row in scores > -INF]


@pytest.mark.parametrize("size", [5, 300, 4000])
@pytest.mark.parametrize("sampling", FILTERS)
def test_survivors_are_those_of_numpy_and_transformers(size: int, sampling: Sampling) -> None:
    logits = random_logits(20, size, seed=size)
    kept = survivors(logits, sampling)
    sampler = Sampler(size)
    assert kept == [sampler.survivors(row, sampling).tolist() for row in logits.numpy()]
    theirs = transformers_survivors(logits, sampling)
    # transformers adds up to 4000 float32 values from the small end; at a top-p boundary its
    # rounding may move the last token, and no more than that.
    differing = [(a, b) for a, b in zip(kept, theirs, strict=True) if a != b]
    assert all(len(set(a) ^ set(b)) == 1 for a, b in differing)
    assert len(differing) <= (1 if sampling.top_p < 1.0 and size == 4000 else 0)


def test_transformers_applies_the_filters_in_this_order() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.2, 0.15, 0.13, 0.12]]))
    # Top-p before top-k would keep two tokens of the first, min-p before top-p two of the second.
    for sampling, kept in [
        (Sampling(1.0, top_k=3, top_p=0.5), [0]),
        (Sampling(1.0, top_p=0.7, min_p=0.35), [0, 1, 2]),
    ]:
        assert survivors(logits, sampling) == transformers_survivors(logits, sampling) == [kept]


@pytest.mark.parametrize("device", DEVICES)
def test_ties(device: str) -> None:
    logits = torch.tensor([[1, 2, 0, 2, 2, -INF, 1]] * 2, device=device)
    for sampling, kept in [
        (Sampling(1.0), [0, 1, 2, 3, 4, 6]),
        (Sampling(1.0, top_k=1), [1, 3, 4]),
        (Sampling(1.0, top_k=4), [0, 1, 3, 4, 6]),
        (Sampling(1.0, top_k=6), [0, 1, 2, 3, 4, 6]),
        (Sampling(1.0, top_p=1e-9), [1]),
        (Sampling(1.0, top_p=0.3), [1, 3]),
        (Sampling(1.0, top_k=1, top_p=0.5), [1, 3]),
        (Sampling(1.0, min_p=1.0), [1, 3, 4]),
        (Sampling(0.0), [1]),
    ]:
        assert survivors(logits, sampling) == [kept, kept]


def test_transformers_keeps_the_same_ties_at_the_kth_place() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, 2.0, 2.0, 1.0]])
    for k in range(1, 7):
        sampling = Sampling(1.0, top_k=k)
        assert survivors(logits, sampling) == transformers_survivors(logits, sampling)


@pytest.mark.parametrize("device", DEVICES)
def test_ties_wider_than_the_head(device: str) -> None:
    size = HEAD * 20
    flat = torch.zeros((2, size), device=device)
    flat[1, ::2] = 1.0
    everything = list(range(size))
    assert survivors(flat, Sampling(1.0, top_k=5)) == [everything, everything[::2]]
    half = math.ceil(size * 0.5001)
    assert survivors(flat, Sampling(1.0, top_p=0.5001))[0] == everything[:half]
    assert survivors(flat, Sampling(1.0, top_k=5, top_p=0.5001))[0] == everything[:half]
    assert survivors(flat, Sampling(1.0, min_p=0.5)) == [everything, everything[::2]]


@given(st.lists(tied_rows, min_size=1, max_size=4), any_sampling, st.integers(0, 2**31 - 10))
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_numpy_and_torch_keep_and_choose_alike(
    rows: list[list[float]], sampling: Sampling, position: int
) -> None:
    size = max(map(len, rows))
    logits = torch.tensor([row + [-INF] * (size - len(row)) for row in rows])
    sampler = Sampler(size)
    assert survivors(logits, sampling) == [
        sampler.survivors(row, sampling).tolist() for row in logits.numpy()
    ]
    assert choose(logits, position, sampling) == numpy_choices(logits, position, sampling)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [97, 5000, 49_152])
@pytest.mark.parametrize("sampling", [*FILTERS, Sampling(0.3), Sampling(100.0), Sampling(1e-300)])
def test_winners_of_random_rows_are_the_same(device: str, size: int, sampling: Sampling) -> None:
    # Both compare in float64, so only rivals that tie within 1e-12 may be taken for one another:
    # fewer than one token in 10^10, none here.
    logits = random_logits(60, size, seed=size)
    logits[:, ::9] = -INF
    assert choose(logits.to(device), 3, sampling) == numpy_choices(logits, 3, sampling)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0, seed=1), [0, 1, 2, 3]),
        (Sampling(0.7, seed=2), [0, 1, 2, 3]),
        (Sampling(1.0, top_k=4, seed=3), [0, 1, 2, 3]),
        (Sampling(1.0, top_p=0.85, seed=4), [0, 1, 2, 3]),
        (Sampling(1.0, min_p=0.2, seed=5), [0, 1, 2, 3]),
    ],
)
def test_winners_follow_the_softmax(device: str, sampling: Sampling, kept: list[int]) -> None:
    probs = torch.tensor([0.4, 0.25, 0.18, 0.1, 0.04, 0.03])
    if not sampling.filtered:
        probs = probs[:4]
    logits = probs.log().to(device).expand(8000, -1)
    counts = np.bincount(choose(logits, 0, sampling), minlength=len(probs))
    expected = probs[kept].double().numpy() ** (1 / sampling.temperature)
    expected *= 8000 / expected.sum()
    assert counts[kept].sum() == 8000
    assert ((counts[kept] - expected) ** 2 / expected).sum() < CHI_SQUARE_3


@pytest.mark.parametrize("device", DEVICES)
def test_a_packed_batch_equals_its_sessions_alone(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = Sampling()
    work = [
        (3, 0, greedy),
        (1, 7, Sampling(1.0, seed=1)),
        (0, 5, Sampling(1.0, seed=2)),
        (9, 100, Sampling(0.8, top_p=0.93, seed=3)),
        (2, 4, greedy),
        (4, 2**31 - 9, Sampling(0.8, top_k=700, seed=2**64 - 1)),
        (5, 0, Sampling(1.2, seed=4)),
        (6, 11, Sampling(2.0, min_p=0.013, seed=5)),
    ]
    logits = random_logits(sum(n for n, _, _ in work), 3001).to(device)
    alone: list[list[int]] = []
    start = 0
    for n, position, sampling in work:
        part = logits[start : start + n]
        alone.append([choose(row[None], position + i, sampling)[0] for i, row in enumerate(part)])
        start += n
    assert choose_many(logits, work) == alone
    assert alone[0] == logits[:3].argmax(-1).tolist()
    # However the rows fall into chunks.
    for budget in (1, 3001 * 4, 3001 * 7):
        monkeypatch.setattr(torch_sampling, "_CHUNK", {"cpu": budget, "cuda": budget})
        assert choose_many(logits, work) == alone


def test_rows_are_consecutive_positions() -> None:
    row = random_logits(1, 50)
    sampling = Sampling(1.5, seed=6)
    together = choose(row.expand(30, -1), 5, sampling)
    assert together == [choose(row, 5 + i, sampling)[0] for i in range(30)]
    assert len(set(together)) > 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_is_raised_to_float32_first(dtype: torch.dtype) -> None:
    logits = random_logits(12, 4000).to(dtype)
    for sampling in [Sampling(), *FILTERS]:
        assert choose(logits, 1, sampling) == choose(logits.float(), 1, sampling)
        assert choose(logits, 1, sampling) == numpy_choices(logits, 1, sampling)


def test_padded_rows_are_cut_without_a_copy_by_the_caller() -> None:
    padded = random_logits(6, 1000)
    padded[:, 900:] = 99.0
    for sampling in [Sampling(), *FILTERS]:
        expected = numpy_choices(padded[:, :900].contiguous(), 2, sampling)
        assert choose(padded[:, :900], 2, sampling) == expected
        assert max(expected) < 900


def test_temperature_0_takes_the_first_of_equal_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-INF, -INF, 0.0]])
    assert choose(logits, 0, Sampling()) == [1, 0, 2]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-39])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits(4, 2000)
    for sampling in (
        Sampling(temperature),
        Sampling(temperature, top_k=5),
        Sampling(temperature, top_p=0.9, min_p=0.2),
    ):
        assert choose(logits, 0, sampling) == logits.argmax(-1).tolist()


def test_one_survivor_is_the_argmax() -> None:
    logits = random_logits(40, 2000)
    for sampling in (Sampling(5.0, top_k=1), Sampling(5.0, top_p=1e-12), Sampling(5.0, min_p=1.0)):
        assert choose(logits, 0, sampling) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.5)])
def test_rows_without_a_choice_are_model_errors(bad: float, sampling: Sampling) -> None:
    logits = random_logits(3, 10)
    logits[1] = bad
    with pytest.raises(ModelError, match="NaN, infinite or all masked"):
        choose(logits, 0, sampling)


def test_one_nan_in_a_row_is_a_model_error() -> None:
    logits = random_logits(3, 5000)
    logits[2, 4321] = math.nan
    with pytest.raises(ModelError, match="NaN, infinite or all masked"):
        choose(logits, 0, Sampling())


def test_numbers_that_do_not_add_up_are_refused() -> None:
    logits = random_logits(3, 10)
    with pytest.raises(LocalProtocolError, match="a row for each"):
        choose_many(logits, [(2, 0, Sampling())])
    with pytest.raises(LocalProtocolError, match="a row for each"):
        choose_many(logits[0], [(3, 0, Sampling())])
    assert choose_many(logits[:0], []) == []
    assert choose_many(logits[:0], [(0, 0, Sampling(1.0))]) == [[]]


def test_threads_do_not_share_buffers() -> None:
    logits = random_logits(8, 3000)
    work = [Sampling(1.0, seed=seed) for seed in range(40)]
    expected = [choose(logits, 0, sampling) for sampling in work]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda sampling: choose(logits, 0, sampling), work)) == expected


def test_logits_that_carry_gradients_are_taken() -> None:
    logits = random_logits(2, 100)
    assert choose(logits.clone().requires_grad_(), 0, Sampling(1.0)) == choose(
        logits, 0, Sampling(1.0)
    )
