"""A target on hardware that is slower than this machine's: an emulation, for measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from broker.errors import ConfigError
from cloud_verifier.engine.target import Target, Work
from cloud_verifier.engine.wrapped import WrappedTarget

MAX_FLOOR_S = 60.0


def check_floor(floor_s: float) -> float:
    """``floor_s`` itself, in seconds. Raises ConfigError outside 0 to ``MAX_FLOOR_S``."""
    if not 0.0 <= floor_s <= MAX_FLOOR_S:
        limits = f"outside 0 to {MAX_FLOOR_S * 1000:.0f}"
        raise ConfigError(f"--forward-floor-ms {floor_s * 1000:g} is {limits}: 0 turns it off")
    return floor_s


class SlowTarget(WrappedTarget):
    """``target``, each of whose forwards takes at least ``floor_s`` seconds; else it is the same.

    The rest of a forward that was quicker is waited out passively. Implements ``Target``.
    Raises ConfigError as ``check_floor``.
    """

    def __init__(
        self,
        target: Target,
        floor_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(target)
        self._floor_s = check_floor(floor_s)
        self._clock = clock
        self._sleep = sleep

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        """As ``Target.forward``, and not before the floor has passed."""
        due = self._clock() + self._floor_s
        choices = self._target.forward(batch)
        left = due - self._clock()
        if left > 0.0:
            self._sleep(left)
        return choices
