"""When to ask for a verification: PipeSD's two confidence thresholds (paper 3.3).

The sequence rule multiplies the draft's confidences since the last trigger and fires when the
product falls to ``r1``; the token rule fires when one token's confidence falls to ``r2``. The
product never exceeds its last factor, so with ``r1 >= r2`` the token rule never decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.errors import ConfigError

#: Fixed defaults until they are tuned per device; chosen by measurement, docs/design-notes.md.
DEFAULT_R1 = 0.35
DEFAULT_R2 = 0.40


@dataclass(frozen=True, slots=True)
class Thresholds:
    """``r1`` (sequence) and ``r2`` (token), each from 0 to 1; 0 turns a rule off.

    ``window``: tokens after which a trigger comes in any case. Raises ConfigError.
    """

    r1: float = DEFAULT_R1
    r2: float = DEFAULT_R2
    window: int = 16

    def __post_init__(self) -> None:
        for name, value in (("r1", self.r1), ("r2", self.r2)):
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"threshold {name} {value} is outside [0, 1]: 0 turns it off")
        if not 1 <= self.window <= 512:
            raise ConfigError(f"draft window {self.window} is outside 1 to 512")


class Trigger:
    """The running state of the two rules. ``thresholds`` may be replaced at any time."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self._product = 1.0
        self._length = 0

    def reset(self) -> None:
        """Begin anew: after a trigger or a rollback."""
        self._product = 1.0
        self._length = 0

    def observe(self, confidence: float) -> str | None:
        """Take one drafted token's confidence; the rule that fires (and resets), or None.

        The answer is ``sequence``, ``token`` or ``window``.
        """
        limits = self.thresholds
        self._product *= confidence
        self._length += 1
        fired: str | None = None
        if limits.r2 > 0.0 and confidence <= limits.r2:
            fired = "token"
        elif limits.r1 > 0.0 and self._product <= limits.r1:
            fired = "sequence"
        elif self._length >= limits.window:
            fired = "window"
        if fired is not None:
            self.reset()
        return fired
