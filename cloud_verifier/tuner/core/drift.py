"""Whether what was tuned for has changed: a figure that moved and stayed moved."""

from __future__ import annotations

#: Readings that a baseline is the mean of. One alone would be as noisy as what is held against it.
BASELINE_READINGS = 5
#: Readings that must have moved, however far apart they are.
_MOVED_READINGS = 3
#: Share of the threshold within which a figure counts as back.
_BACK = 0.5


class Drift:
    """Watches figures of one device. ``threshold``: relative; ``hold_s``: for how long.

    A figure that has moved by more than the threshold, up or down, and did not come back to half of
    it for ``hold_s`` seconds has drifted.
    """

    def __init__(self, threshold: float, hold_s: float) -> None:
        self._threshold = threshold
        self._hold_s = hold_s
        self._sums: dict[str, tuple[float, int]] = {}
        self._moved: dict[str, tuple[float, bool, int]] = {}  # since when, up?, readings

    def baseline(self, name: str) -> float | None:
        """What ``name`` is held against; None while it is being taken."""
        total, count = self._sums.get(name, (0.0, 0))
        return total / count if count >= BASELINE_READINGS else None

    def observe(self, name: str, value: float, now: float, *, least: float = 0.0) -> bool:
        """Take one reading; whether the figure ``name`` has drifted.

        ``least``: a move by less than this, in the figure's own unit, is none, however large it is
        beside the baseline.
        """
        base = self.baseline(name)
        if base is None:
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)
            return False
        limit = max(self._threshold * base, least)
        away, up = abs(value - base), value > base
        known = self._moved.get(name)
        if known is None or known[1] != up:
            if away > limit:
                self._moved[name] = (now, up, 1)
            else:
                self._moved.pop(name, None)
            return False
        if away <= _BACK * limit:
            del self._moved[name]
            return False
        since, _, count = known
        self._moved[name] = (since, up, count + 1)
        return count + 1 >= _MOVED_READINGS and now - since >= self._hold_s
