"""The pairs of thresholds that are searched: the paper's open square (0, 1) x (0, 1).

The product of confidences never exceeds its last factor, so with R1 >= R2 the token rule never
decides and R2 says nothing. A search therefore moves R2 and R1's share of it: every pair that acts
differently is reached, R2 > R1 among them, and half of the square is not searched twice. It moves
their roots: a product of confidences falls by factors, so small thresholds differ more than large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from broker.errors import LocalProtocolError

#: Nothing outside is ever published: 0 would turn a rule off, 1 asks after every token.
LEAST, MOST = 0.001, 0.999
#: What a search moves between: roots of R2 and of the share R1 / R2. With an R1 below the least the
#: sequence rule hardly ever fires before the draft window is full.
R2_BOUNDS = (math.sqrt(0.02), math.sqrt(0.98))
SHARE_BOUNDS = (math.sqrt(0.02), 1.0)
LEAST_R1 = 0.02


@dataclass(frozen=True, slots=True)
class Pair:
    """``r1`` (sequence) and ``r2`` (token), both from LEAST to MOST.

    Raises LocalProtocolError outside of it.
    """

    r1: float
    r2: float

    def __post_init__(self) -> None:
        for name, value in (("R1", self.r1), ("R2", self.r2)):
            # NaN fails the comparison.
            if not LEAST <= value <= MOST:
                raise LocalProtocolError(f"{name} {value!r} is outside {LEAST} to {MOST}")

    @property
    def share(self) -> float:
        """R1 as a share of R2, from 0 to 1; at 1 the token rule never decides."""
        return min(1.0, self.r1 / self.r2)

    def __str__(self) -> str:
        return f"R1 {self.r1:.3f} R2 {self.r2:.3f}"


#: What devices work with before they are tuned; docs/design-notes.md.
DEFAULT = Pair(0.35, 0.40)


def clamp(r1: float, r2: float) -> Pair:
    """The nearest pair inside the bounds. Raises LocalProtocolError for NaN."""
    if math.isnan(r1) or math.isnan(r2):
        raise LocalProtocolError(f"thresholds {r1!r}, {r2!r} are no numbers")
    return Pair(min(MOST, max(LEAST, r1)), min(MOST, max(LEAST, r2)))


def from_search(root_r2: float, root_share: float) -> Pair:
    """The pair at a point of the search."""
    r2 = root_r2**2
    return clamp(max(LEAST_R1, root_share**2 * r2), r2)


def to_search(pair: Pair) -> tuple[float, float]:
    """The point of the search, roots of R2 and share, that acts as ``pair`` does or is next."""
    # Beyond R2 only R1 acts, so it takes R2's place.
    r2 = math.sqrt(max(pair.r1, pair.r2))
    share = 1.0 if pair.r1 >= pair.r2 else math.sqrt(pair.share)
    return (
        min(R2_BOUNDS[1], max(R2_BOUNDS[0], r2)),
        min(SHARE_BOUNDS[1], max(SHARE_BOUNDS[0], share)),
    )
