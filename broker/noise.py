"""The noise that edge and cloud share: a counter-based hash of (seed, position, token id).

Both sides compute it, so none of it is sent. The same 32 bits come out of numpy here and of torch
in ``cloud_verifier.engine.torch_sampling``; tests hold them together bit by bit.

The hash of one token is three rounds of xor-shift and multiplication, keyed twice: ``k0`` before
the first round, ``k1`` before the last, so that the rows of two positions are not permutations of
one another. Two rounds are too few: for fixed neighbouring ids the pair of hashes, taken over the
positions, then misses independence by 20 standard deviations in 4 million draws; with three rounds
400 million draws show nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASK64 = 2**64 - 1

# (shift, odd multiplier) of each round and the shift that ends the hash; torch uses the same.
ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0x31848BAB))
LAST_SHIFT = 15

_U32 = npt.NDArray[np.uint32]


def _mix64(x: int) -> int:
    # The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits.
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """The two 32-bit keys of one generated position.

    ``seed``: 64 bits, unsigned. ``position``: generated tokens counted from 0. Different positions
    of one seed have different keys, since every step is a bijection of 64 bits.
    """
    mixed = _mix64(_mix64(seed) ^ ((position * 0xD1342543DE82EF95) & MASK64))
    return mixed >> 32, mixed & 0xFFFFFFFF


def hash_ids(
    ids: _U32, key: tuple[int, int], out: _U32 | None = None, scratch: _U32 | None = None
) -> _U32:
    """Hash token ids, uint32[n] -> uint32[n], with the keys of ``noise_key``.

    ``out`` may be ``ids`` itself; ``out`` and ``scratch`` (contents lost) have the shape of ``ids``
    and spare the allocations. Returns ``out``.
    """
    if out is None:
        out = np.empty_like(ids)
    if scratch is None:
        scratch = np.empty_like(ids)
    np.bitwise_xor(ids, np.uint32(key[0]), out=out)
    for index, (shift, factor) in enumerate(ROUNDS):
        if index == len(ROUNDS) - 1:
            np.add(out, np.uint32(key[1]), out=out)
        np.right_shift(out, np.uint32(shift), out=scratch)
        np.bitwise_xor(out, scratch, out=out)
        np.multiply(out, np.uint32(factor), out=out)
    np.right_shift(out, np.uint32(LAST_SHIFT), out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    return out


def exponentials(hashes: _U32) -> npt.NDArray[np.float64]:
    """Standard exponentials from hashes, uint32[n] -> float64[n]; each in [1.1e-10, 23].

    ``w`` is the middle of one of 2^32 equal cells of (0, 1), exact in float64. Winners have small
    exponentials, so precision counts there: in float32 ``1 - w`` rounds to 1 for small ``w``, the
    exponential becomes 0 and wins whatever the probability; ``-log1p(-w)`` in float64 keeps all
    digits.
    """
    w: npt.NDArray[np.float64] = (hashes.astype(np.float64) + 0.5) * 2.0**-32
    result: npt.NDArray[np.float64] = -np.log1p(-w)
    return result
