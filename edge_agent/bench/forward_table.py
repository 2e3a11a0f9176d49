"""What a forward of the target costs by its number of tokens, as measured."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from broker.errors import ConfigError

#: Entries of one table, and samples that one is made from.
MAX_ENTRIES, MAX_SAMPLES = 4_096, 1_000_000
#: Seconds that a forward may take.
MAX_SECONDS = 3_600.0


@dataclass(frozen=True, slots=True)
class ForwardTable:
    """``entries``: (tokens in the forward, seconds), ascending in both; at least one.

    Between entries a straight line; beyond the last one the line that fits all entries best; below
    the first its seconds. Raises ConfigError.
    """

    entries: tuple[tuple[int, float], ...]
    _tokens: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _slope: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.entries) <= MAX_ENTRIES:
            raise ConfigError(
                f"forward times: {len(self.entries)} entries, 1 to {MAX_ENTRIES} are wanted"
            )
        last, least = 0, 0.0
        for tokens, seconds in self.entries:
            if type(tokens) is not int or tokens <= last:
                raise ConfigError(f"forward times: {tokens!r} tokens do not come after {last}")
            if isinstance(seconds, bool) or not isinstance(seconds, int | float):
                raise ConfigError(f"forward times: {seconds!r} is no number of seconds")
            if not least <= seconds <= MAX_SECONDS:
                raise ConfigError(
                    f"forward times: {seconds} s for {tokens} tokens, after {least} s for {last}"
                )
            last, least = tokens, seconds
        object.__setattr__(self, "_tokens", tuple(tokens for tokens, _ in self.entries))
        object.__setattr__(self, "_slope", _slope(self.entries))

    def seconds(self, tokens: int) -> float:
        """Seconds of a forward of so many tokens."""
        entries = self.entries
        after = bisect_left(self._tokens, tokens)
        if after == len(entries):
            last, seconds = entries[-1]
            return seconds + self._slope * (tokens - last)
        if after == 0 or entries[after][0] == tokens:
            return entries[after][1]
        (left, low), (right, high) = entries[after - 1], entries[after]
        return low + (high - low) * (tokens - left) / (right - left)

    @classmethod
    def from_samples(cls, samples: Iterable[tuple[int, float]]) -> ForwardTable:
        """From (tokens, seconds) of single forwards: the median of each number of tokens.

        Where more tokens seem to cost less, which is noise, neighbours share their weighted mean.
        Samples that are no times are left out. Raises ConfigError when none is left.
        """
        groups: dict[int, list[float]] = {}
        for count, (tokens, seconds) in enumerate(samples):
            if count >= MAX_SAMPLES:
                break
            if tokens >= 1 and 0.0 <= seconds <= MAX_SECONDS:
                groups.setdefault(int(tokens), []).append(float(seconds))
        if not groups:
            raise ConfigError("forward times: no sample: run at least one verification")
        # Pools of neighbours that must not fall: (seconds, weight, numbers of tokens).
        pools: list[tuple[float, int, list[int]]] = []
        for tokens in sorted(groups):
            own = groups[tokens]
            pool = (statistics.median(own), len(own), [tokens])
            while pools and pools[-1][0] > pool[0]:
                value, weight, members = pools.pop()
                total = weight + pool[1]
                mean = (value * weight + pool[0] * pool[1]) / total
                pool = (mean, total, members + pool[2])
            pools.append(pool)
        entries = [(tokens, value) for value, _, members in pools for tokens in members]
        return cls(tuple(entries[:MAX_ENTRIES]))


def _slope(entries: tuple[tuple[int, float], ...]) -> float:
    """Seconds per token of the straight line through ``entries``, at least 0."""
    if len(entries) < 2:
        return 0.0
    mean_x = math.fsum(tokens for tokens, _ in entries) / len(entries)
    mean_y = math.fsum(seconds for _, seconds in entries) / len(entries)
    above = math.fsum((x - mean_x) * (y - mean_y) for x, y in entries)
    return max(0.0, above / math.fsum((x - mean_x) ** 2 for x, _ in entries))
