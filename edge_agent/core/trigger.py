"""When to ask for a verification: PipeSD's two confidence thresholds (paper 3.3).

The sequence rule multiplies the draft's confidences since the last trigger and fires when the
product falls to ``r1``; the token rule fires when one token's confidence falls to ``r2``. The
product never exceeds its last factor, so with ``r1 >= r2`` the token rule never decides.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from broker.errors import ConfigError

#: Fixed defaults until they are tuned per device; chosen by measurement, docs/design-notes.md.
DEFAULT_R1 = 0.35
DEFAULT_R2 = 0.40
#: Requests whose verdict may still come.
MAX_ASKED = 64


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
        self._fired_at = 1.0  # the product at the latest trigger
        self._held: str | None = None  # the rule that fired while it was not to
        # What was asked for and not judged yet: up to where, and the product at that trigger.
        self._asked: deque[tuple[int, float]] = deque(maxlen=MAX_ASKED)

    def rolled_back(self) -> None:
        """The draft begins anew, and nothing that was asked for will be judged."""
        self.reset()
        self._asked.clear()

    def reset(self) -> None:
        """Begin anew, as after a trigger."""
        self._product = 1.0
        self._length = 0
        self._held = None

    def observe(self, confidence: float, *, hold: bool = False) -> str | None:
        """Take one drafted token's confidence; the rule that fires (and resets), or None.

        The answer is ``sequence``, ``token`` or ``window``. ``hold``: fire only at ``release``.
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
        self._held = self._held or fired
        return None if hold else self.release()

    def release(self) -> str | None:
        """The rule that fired while it was held, or None."""
        fired = self._held
        if fired is not None:
            self._fired_at = self._product
            self.reset()
        return fired

    def asked(self, end: int) -> None:
        """The rule that fired last asked for everything up to position ``end``."""
        self._asked.append((end, self._fired_at))

    def adapt(self, judged: int, accepted: int, end: int) -> None:
        """EdgeLLM's update of R1 after a verdict on ``judged`` drafts of which some were accepted.

        All accepted: R1 is halved, so the next draft may be longer. Otherwise it is divided by
        C^(rejected / judged), C being the product at the trigger that asked for what ended at
        position ``end``. Clamped to 1e-9 and 1.
        """
        product = 1.0
        while self._asked and self._asked[0][0] <= end:
            _, product = self._asked.popleft()
        if judged < 1:
            return
        limits = self.thresholds
        if accepted >= judged:
            r1 = limits.r1 * 0.5
        else:
            r1 = limits.r1 / max(product, 1e-9) ** ((judged - accepted) / judged)
        self.thresholds = replace(limits, r1=min(1.0, max(1e-9, r1)))
