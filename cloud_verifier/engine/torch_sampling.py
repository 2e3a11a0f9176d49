"""The torch twin of ``broker.sampling.Sampler``: whole packed batches of rows, on CPU or CUDA.

The rules are told there and are the same here: the hash is bit-identical, the filters cut at the
same tokens, and the last comparison is in float64, so that both sides choose alike. Everything runs
over all rows of a batch at once, whatever settings their sessions have.

Rows in main memory go through ``Sampler`` itself, one by one: its blocks stay in the cache and need
no second thread, which made it three to ten times faster than the tensors on two busy cores.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from broker.errors import LocalProtocolError, ModelError
from broker.noise import LAST_SHIFT, ROUNDS, noise_key
from broker.sampling import FLOAT32_MAX, HEAD, SLACK, WIDEN, Sampler, Sampling

# Devices whose rows numpy reads in place.
_ROW_BY_ROW = frozenset({"cpu"})

# Logits that are handled at a time; sampling takes about 20 bytes for each of them.
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 25}


class _Samplers(threading.local):
    """The sampler of each thread: its buffers are for one caller at a time."""

    latest: Sampler | None = None

    def get(self, vocab_size: int) -> Sampler:
        if self.latest is None or self.latest.vocab_size != vocab_size:
            self.latest = Sampler(vocab_size)
        return self.latest


_samplers = _Samplers()


@torch.inference_mode()
def choose(logits: Tensor, position: int, sampling: Sampling) -> list[int]:
    """The tokens at generated positions ``position``, ``position + 1``, ... , one for each row.

    ``logits``: floating[rows, vocabulary], cut to the tokenizer's vocabulary by the caller and
    computed in float32 whatever their type. Raises ModelError where a row holds NaN or +inf, or
    nothing above -inf.
    """
    return choose_many(logits, [(logits.shape[0], position, sampling)])[0]


@torch.inference_mode()
def choose_many(logits: Tensor, rows: Sequence[tuple[int, int, Sampling]]) -> list[list[int]]:
    """As ``choose`` for the packed rows of many sessions; one list of tokens for each session.

    ``rows``: (number of rows, position of the first, settings) of each session, in the order of
    ``logits``: floating[total rows, vocabulary]. Raises LocalProtocolError when the numbers do not
    add up, ModelError as ``choose``.
    """
    settings = [(position + i, sampling) for n, position, sampling in rows for i in range(n)]
    if logits.ndim != 2 or logits.shape[0] != len(settings) or logits.shape[1] < 1:
        raise LocalProtocolError(
            f"logits of shape {tuple(logits.shape)} for {len(settings)} choices: a row for each"
        )
    step = max(1, _CHUNK.get(logits.device.type, _CHUNK["cpu"]) // logits.shape[1])
    choose_chunk = _choose_rows if logits.device.type in _ROW_BY_ROW else _choose_chunk
    tokens: list[int] = []
    for start in range(0, len(settings), step):
        stop = start + step
        tokens += choose_chunk(logits[start:stop].float(), settings[start:stop])
    result: list[list[int]] = []
    end = 0
    for n, _, _ in rows:
        result.append(tokens[end : end + n])
        end += n
    return result


@torch.inference_mode()
def survivors(logits: Tensor, sampling: Sampling) -> list[list[int]]:
    """Rising ids of the tokens that may win, for each row of ``logits``: floating[rows, vocab]."""
    z = logits.float()
    best, tokens = _best(z)
    if sampling.greedy:
        return [[token] for token in tokens.tolist()]
    if sampling.filtered:
        row, ids = _filter(z, _Rows.of(z, best, [(0, sampling)] * z.shape[0]))
    else:
        row, ids = (z > -torch.inf).nonzero(as_tuple=True)
    return [ids[row == i].tolist() for i in range(z.shape[0])]


def hash_ids(ids: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    """``broker.noise.hash_ids``: int32 tensors that broadcast -> int32 with the bits of the uint32.

    Signed 32-bit products have the same low bits as unsigned ones, at a tenth of the price of
    masked 64-bit ones on a CPU; only the right shift, which repeats the sign, has to be masked.
    """
    x = ids ^ k0
    for index, (shift, factor) in enumerate(ROUNDS):
        if index == len(ROUNDS) - 1:
            x = x.add_(k1)
        x = _xor_shift(x, shift).mul_(_signed(factor))
    return _xor_shift(x, LAST_SHIFT)


def exponentials(hashes: Tensor) -> Tensor:
    """``broker.noise.exponentials``: the int32 bit patterns of ``hash_ids`` -> float64."""
    w = ((hashes.long() & 0xFFFFFFFF).double() + 0.5) * 2.0**-32
    return -torch.log1p(-w)


def _xor_shift(x: Tensor, shift: int) -> Tensor:
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


@lru_cache(maxsize=8)
def _vocabulary(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class _Rows:
    """What each of R rows is sampled with; tensors of shape [R, 1] on the device of the logits."""

    best: Tensor  # float32, the largest logit
    k0: Tensor  # int32, as k1: the noise keys
    k1: Tensor
    temperature: Tensor  # float64
    inverse: Tensor  # float32, of the temperature, finite
    settings: list[tuple[int, Sampling]]

    @staticmethod
    def of(z: Tensor, best: Tensor, settings: list[tuple[int, Sampling]]) -> _Rows:
        keys = [noise_key(s.seed, position) for position, s in settings]
        words = torch.tensor([[_signed(k0), _signed(k1)] for k0, k1 in keys], dtype=torch.int32)
        temperatures = [[s.temperature] for _, s in settings]
        inverses = [[min(1.0 / t, FLOAT32_MAX)] for (t,) in temperatures]
        words = words.to(z.device)
        return _Rows(
            best=best[:, None],
            k0=words[:, :1],
            k1=words[:, 1:],
            temperature=torch.tensor(temperatures, dtype=torch.float64, device=z.device),
            inverse=torch.tensor(inverses, dtype=torch.float32, device=z.device),
            settings=settings,
        )

    def column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.best.device)[:, None]


def _best(z: Tensor) -> tuple[Tensor, Tensor]:
    # max() passes NaN on and gives the first of equal maxima.
    best, tokens = z.max(dim=-1)
    if not bool(torch.isfinite(best).all()):
        raise ModelError(
            "logits are NaN, infinite or all masked: "
            "the model is damaged or its precision too low, try --dtype float32"
        )
    return best, tokens


def _choose_rows(z: Tensor, settings: list[tuple[int, Sampling]]) -> list[int]:
    sampler = _samplers.get(z.shape[1])
    rows = z.detach().numpy()
    return [
        sampler.choose(row, position, sampling)
        for row, (position, sampling) in zip(rows, settings, strict=True)
    ]


def _choose_chunk(z: Tensor, settings: list[tuple[int, Sampling]]) -> list[int]:
    best, tokens = _best(z)
    for filtered in (False, True):
        chosen = [i for i, (_, s) in enumerate(settings) if not s.greedy and s.filtered is filtered]
        if not chosen:
            continue
        index = torch.tensor(chosen, device=z.device)
        part = z if len(chosen) == len(settings) else z[index]
        rows = _Rows.of(part, best[index], [settings[i] for i in chosen])
        cells = _filter(part, rows) if filtered else _rivals(part, rows)
        tokens[index] = _winners(part, rows, *cells)
    return tokens.tolist()


def _scores(z: Tensor, rows: _Rows, row: Tensor, ids: Tensor) -> Tensor:
    # exponential / probability of the cells (row, id), relative to the probability of the row's
    # best token; float64[cells].
    noise = exponentials(hash_ids(ids.int(), rows.k0[row, 0], rows.k1[row, 0]))
    gap = rows.best[row, 0].double() - z[row, ids].double()
    return noise * torch.exp(gap / rows.temperature[row, 0])


def _winners(z: Tensor, rows: _Rows, row: Tensor, ids: Tensor) -> Tensor:
    # The least score of each row; of equal scores the lowest id.
    count, size = z.shape
    scores = _scores(z, rows, row, ids)
    least = torch.full((count,), torch.inf, dtype=torch.float64, device=z.device)
    least.scatter_reduce_(0, row, scores, "amin")
    first = scores == least[row]
    tokens = torch.full((count,), size - 1, dtype=torch.int64, device=z.device)
    return tokens.scatter_reduce_(0, row[first], ids[first], "amin")


def _rivals(z: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
    """The few cells (row, id) that can win without filters; see ``Sampler`` for the bound."""
    count, size = z.shape
    hashes = hash_ids(_vocabulary(size, z.device)[None], rows.k0, rows.k1)
    uniforms = hashes.float()
    uniforms.add_(hashes < 0, alpha=2**32).add_(0.5).mul_(2.0**-32)
    bounds = (rows.best - z).mul_(rows.inverse).exp_().mul_(uniforms)
    lead = bounds.argmin(dim=-1)
    every = torch.arange(count, device=z.device)
    limit = (_scores(z, rows, every, lead) * SLACK).float()
    row, ids = (bounds <= limit[:, None]).nonzero(as_tuple=True)
    return row, ids


def _filter(z: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
    """The cells (row, id) that the filters leave in, row by row with rising ids."""
    count, size = z.shape
    settings = [s for _, s in rows.settings]
    best = rows.best.double()
    top_k = [s.top_k if 0 < s.top_k < size else size for s in settings]
    k = torch.tensor(top_k, device=z.device)[:, None]
    top_p = rows.column([s.top_p if s.top_p < 1.0 else torch.inf for s in settings])
    min_p = rows.column([s.min_p for s in settings])
    whole = torch.ones_like(best)
    if any(s.top_p < 1.0 and n == size for s, n in zip(settings, top_k, strict=True)):
        whole = (z - rows.best).mul_(rows.inverse).exp_().sum(-1, dtype=torch.float64)[:, None]
    # Only the head of each row is sorted, and more of it while some filter reaches its end.
    length = min(size, max([HEAD, *(n + 1 for n in top_k if n < size)]))
    while True:
        head = z.topk(length, dim=-1).values
        kth = head.gather(1, (k - 1).clamp(max=length - 1))
        inside = ((head >= kth) | (k == size)) & (head > -torch.inf)
        probs = torch.exp((head.double() - best) / rows.temperature) * inside
        mass = probs.cumsum(-1)
        before = torch.cat((torch.zeros_like(best), mass[:, :-1]), dim=-1)
        total = torch.where(k < size, mass[:, -1:], whole)
        keep = inside & (before < top_p * total) & (probs >= min_p)
        at_end = keep[:, -1:] | (inside[:, -1:] & (k < size))
        if length == size or not bool(at_end.any()):
            break
        length = min(size, length * WIDEN)
    kept = keep.sum(-1, keepdim=True)
    last = head.gather(1, kept - 1)
    room = kept - (head > last).sum(-1, keepdim=True)
    row, ids = (z >= last).nonzero(as_tuple=True)
    # Equal logits at the end: the lower ids stay. A tie's rank in its row is its rank among all
    # ties less the ties of the rows before.
    tied = z[row, ids] == last[row, 0]
    ties = torch.zeros(count, dtype=torch.int64, device=z.device).index_add_(0, row, tied.long())
    rank = tied.cumsum(0) - (ties.cumsum(0) - ties)[row]
    stay = ~tied | (rank <= room[row, 0])
    return row[stay], ids[stay]
