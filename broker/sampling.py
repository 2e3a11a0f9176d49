"""How the next token is chosen, by both sides alike.

The wire carries ``Sampling``; ``Sampler`` is the numpy implementation (draft side, llama.cpp
targets, scripted models). The torch twin is ``cloud_verifier.engine.torch_sampling``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from broker.errors import ConfigError, ModelError
from broker.noise import exponentials, hash_ids, noise_key

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 are off.

    The text is a pure function of target, prompt and these settings, ``seed`` (64 bits, unsigned)
    included. Raises ConfigError for values outside their range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise ConfigError(
                f"temperature {self.temperature} is outside 0 to 100: 0 is greedy, 1 usual"
            )
        if not 0 <= self.top_k <= 2**31 - 1:
            raise ConfigError(f"top-k {self.top_k} is negative: 0 turns it off")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise ConfigError(f"top-p {self.top_p} is outside (0, 1]: 1 turns it off")
        if not (math.isfinite(self.min_p) and 0.0 <= self.min_p <= 1.0):
            raise ConfigError(f"min-p {self.min_p} is outside [0, 1]: 0 turns it off")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"seed {self.seed} is outside 0 to 2^64-1: choose another")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether any of top-k, top-p, min-p leaves tokens out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


# Vocabulary is hashed in blocks whose buffers stay in the second-level cache: four times faster
# than whole rows at 152k tokens.
_BLOCK = 16384

# Below this many tokens the exact scores of all cost less than the preselection.
_SMALL = 1024

# Relative room for the rounding of the float32 preselection; its true error is below 1e-5.
SLACK = 1.0 + 2.0**-12

# Tokens that are looked at first for top-p, and by how much the head grows when they are too few.
HEAD = 512
WIDEN = 8

# Group maxima give a lower bound for the k-th best logit; this many tokens share a group.
_GROUP = 64

FLOAT32_MAX = float(np.finfo(np.float32).max)

_F32 = npt.NDArray[np.float32]
_F64 = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.intp]


class Sampler:
    """Chooses tokens from rows of logits with the shared noise. Not thread-safe: owns its buffers.

    ``vocab_size``: number of entries of the tokenizer. Rows may be longer (padded embeddings); only
    ``logits[:vocab_size]`` count. Logits of -inf are masked tokens and are never chosen.

    Sampling takes the token with the least ``exponential / target_probs`` among the survivors of
    the filters, which is the same as Gumbel's argmax and draws exactly from the filtered softmax.
    The filters are those of transformers, in its order; each keeps the head of the list sorted by
    falling logit, equal logits by rising id:

    - temperature divides the logits (0: the argmax, the lowest id among equals);
    - top-k keeps the k best, and all that equal the k-th;
    - top-p keeps a token while the mass before it, within what top-k left, is below ``top_p``;
      at least one. Of equal tokens at the end the lower ids stay (transformers leaves that open);
    - min-p keeps tokens whose probability is at least ``min_p`` times the best one's.

    The last comparison is done in float64, so that the winner does not hang on how a library
    rounds ``exp``. Rows that hold NaN or +inf, or nothing above -inf, raise ModelError.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ModelError(f"vocabulary of {vocab_size} tokens: the model file has no tokens")
        self.vocab_size = vocab_size
        block = min(vocab_size, _BLOCK)
        self._ids = np.arange(vocab_size, dtype=np.uint32)
        self._work = np.empty(vocab_size, dtype=np.float32)
        self._close = np.empty(vocab_size, dtype=np.bool_)
        self._hashes = np.empty(block, dtype=np.uint32)
        self._scratch = np.empty(block, dtype=np.uint32)
        self._uniforms = np.empty(block, dtype=np.float32)

    def choose(self, logits: npt.NDArray[np.floating], position: int, sampling: Sampling) -> int:
        """The token at generated position ``position``; ``logits``: float32[>= vocab_size]."""
        row, best = self._row(logits)
        return self._choose(row, best, position, sampling)

    def choose_with_confidence(
        self, logits: npt.NDArray[np.floating], position: int, sampling: Sampling
    ) -> tuple[int, float]:
        """As ``choose``, with the token's plain softmax probability (temperature 1, no filters)."""
        row, best = self._row(logits)
        token = self._choose(row, best, position, sampling)
        with np.errstate(over="ignore"):
            own = float(np.exp(row[token] - row[best]))
            return token, own / float(self._exp(row, best, 1.0).sum())

    def survivors(self, logits: npt.NDArray[np.floating], sampling: Sampling) -> _Ids:
        """Rising ids of the tokens that may win: intp[n], n >= 1."""
        row, best = self._row(logits)
        if sampling.greedy:
            return np.array([best], dtype=np.intp)
        if not sampling.filtered:
            return np.flatnonzero(row > -np.inf)
        with np.errstate(over="ignore"):
            return self._filter(row, best, sampling)

    def _row(self, logits: npt.NDArray[np.floating]) -> tuple[_F32, int]:
        if logits.ndim != 1 or logits.shape[0] < self.vocab_size:
            raise ModelError(
                f"logits of shape {logits.shape} for {self.vocab_size} tokens: "
                "model and tokenizer do not belong together"
            )
        row = logits[: self.vocab_size].astype(np.float32, copy=False)
        best = int(row.argmax())  # the first NaN, if there is one
        if not np.isfinite(row[best]):
            raise ModelError(
                f"logits with a maximum of {row[best]} (NaN, infinite or all masked): "
                "the model file is damaged or its precision too low"
            )
        return row, best

    def _choose(self, row: _F32, best: int, position: int, sampling: Sampling) -> int:
        if sampling.greedy:
            return best
        key = noise_key(sampling.seed, position)
        with np.errstate(
            over="ignore"
        ):  # far below the best logit exp() overflows to inf: no rival
            if sampling.filtered:
                rivals = self._filter(row, best, sampling)
            else:
                rivals = self._rivals(row, best, key, sampling.temperature)
            scores = self._scores(row, best, rivals, key, sampling.temperature)
            return int(rivals[scores.argmin()])

    def _scores(
        self, row: _F32, best: int, ids: _Ids, key: tuple[int, int], temperature: float
    ) -> _F64:
        # exponential / probability of the tokens ``ids``, relative to the best one's probability.
        gap = float(row[best]) - row[ids].astype(np.float64)
        return exponentials(hash_ids(self._ids[ids], key)) * np.exp(gap / temperature)

    def _rivals(self, row: _F32, best: int, key: tuple[int, int], temperature: float) -> _Ids:
        """The few tokens of the whole vocabulary that can win, winner included.

        A uniform w is less than its exponential, so w / probability bounds each score from below
        without a logarithm. Whoever lies above the true score of the least bound has lost.
        """
        if self.vocab_size <= _SMALL:
            return np.flatnonzero(row > -np.inf)
        bounds = self._work
        top = row[best]
        inverse = np.float32(min(1.0 / temperature, FLOAT32_MAX))
        for start in range(0, self.vocab_size, _BLOCK):
            part = slice(start, start + _BLOCK)
            ids = self._ids[part]
            uniforms = self._uniforms[: len(ids)]
            hashes = hash_ids(
                ids, key, out=self._hashes[: len(ids)], scratch=self._scratch[: len(ids)]
            )
            np.add(hashes, np.float32(0.5), out=uniforms, dtype=np.float32, casting="same_kind")
            np.multiply(uniforms, np.float32(2.0**-32), out=uniforms)
            bound = bounds[part]
            np.subtract(top, row[part], out=bound)
            np.multiply(bound, inverse, out=bound)
            np.exp(bound, out=bound)
            np.multiply(bound, uniforms, out=bound)
        lead = np.array([bounds.argmin()], dtype=np.intp)
        limit = float(self._scores(row, best, lead, key, temperature)[0]) * SLACK
        return np.flatnonzero(np.less_equal(bounds, np.float32(limit), out=self._close))

    def _exp(self, row: _F32, best: int, temperature: float) -> _F32:
        # Probabilities relative to the best one, float32[vocab_size], in the work buffer.
        np.subtract(row, row[best], out=self._work)
        if temperature != 1.0:
            inverse = np.float32(min(1.0 / temperature, FLOAT32_MAX))
            np.multiply(self._work, inverse, out=self._work)
        return np.exp(self._work, out=self._work)

    def _filter(self, row: _F32, best: int, sampling: Sampling) -> _Ids:
        # Each filter keeps the head of the same order, so the shortest head is what survives; top-p
        # alone needs to know the mass that top-k left.
        top = float(row[best])
        temperature = sampling.temperature
        total: float | None = None
        if 0 < sampling.top_k < self.vocab_size:
            ids = self._top_k(row, sampling.top_k)
        else:
            floor = sampling.min_p
            if sampling.top_p < 1.0:
                total = float(self._exp(row, best, temperature).sum(dtype=np.float64))
                # What lies at or behind a token weighs at most vocab_size times the token, and
                # more than 1 - top_p where the token stays: a floor without any sorting.
                floor = max(floor, (1.0 - sampling.top_p) * total / self.vocab_size)
            ids = self._at_least(row, top, floor, temperature)
        logits = row[ids]
        if sampling.top_p < 1.0:
            keep = self._top_p(logits, top, sampling, total)
            ids, logits = ids[keep], logits[keep]
        if sampling.min_p > 0.0:
            ids = ids[_probs(logits, top, temperature) >= sampling.min_p]
        return ids

    def _at_least(self, row: _F32, top: float, floor: float, temperature: float) -> _Ids:
        # Tokens whose probability is at least floor times the best one's, and a few just below.
        if floor <= 0.0:
            return np.flatnonzero(row > -np.inf)
        edge = np.float32(top + temperature * (math.log(min(floor, 1.0)) - 1e-3))
        return np.flatnonzero(row >= np.nextafter(edge, np.float32(-np.inf)))

    def _top_k(self, row: _F32, k: int) -> _Ids:
        groups = self.vocab_size // _GROUP
        if k <= groups // 2:
            # k groups have a maximum at or above the k-th best maximum, so k tokens have.
            maxima = row[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
            maxima.partition(groups - k)
            ids = np.flatnonzero(row >= maxima[groups - k])
        else:
            ids = np.arange(self.vocab_size, dtype=np.intp)
        logits = row[ids]
        kth = np.partition(logits, len(ids) - k)[len(ids) - k]
        kept: _Ids = ids[(logits >= kth) & (logits > -np.inf)]
        return kept

    def _top_p(
        self, logits: _F32, top: float, sampling: Sampling, total: float | None
    ) -> npt.NDArray[np.bool_]:
        """Which of ``logits`` (rising ids) stay. ``total``: mass of all, None: of ``logits``."""
        size = HEAD
        if total is None:
            total = float(_probs(logits, top, sampling.temperature).sum())
        limit = sampling.top_p * total
        head = logits
        while size < len(logits):
            head = np.partition(logits, len(logits) - size)[len(logits) - size :]
            if float(_probs(head, top, sampling.temperature).sum()) >= limit:
                break
            head, size = logits, size * WIDEN
        ordered = np.sort(head)[::-1]
        mass = np.cumsum(_probs(ordered, top, sampling.temperature))
        count = min(int(np.searchsorted(mass, limit)) + 1, len(ordered))
        last = ordered[count - 1]
        keep: npt.NDArray[np.bool_] = logits > last
        # Equal logits at the end: the lower ids stay.
        room = count - int(np.count_nonzero(keep))
        keep[np.flatnonzero(logits == last)[:room]] = True
        return keep


def _probs(logits: _F32, top: float, temperature: float) -> _F64:
    # Relative to the best token's probability; float64, so that both sides cut at the same token.
    return np.exp((logits.astype(np.float64) - top) / temperature)
