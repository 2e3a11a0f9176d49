"""How the next token is chosen, by both sides alike.

The wire carries ``Sampling``; ``Sampler`` is the numpy implementation (draft side, llama.cpp
targets, scripted models). The torch twin is ``cloud_verifier.engine.torch_sampling``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from broker.errors import ConfigError

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 are off.

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
                f"temperature {self.temperature} is outside 0 to 100: 0 is greedy, 1 the model's own"
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
