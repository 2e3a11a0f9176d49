"""Which rows go through llama.cpp together.

Each slot is a stream of llama.cpp's cache, so that a session attends to its own cells only and its
token at position n always lies in cell n. llama.cpp runs streams together when their numbers follow
each other and each has as many tokens as the others. Works are therefore filled up with rows that
are forgotten afterwards, where that costs less than another pass over the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import NamedTuple

PASS_ROWS = 16
"""What reading the weights once more costs, in rows; measured 10 (bf16) to 25 (float32)."""

LEAST = 2
"""Rows of a slot: attention sums those of a lone one in another order."""

_LENGTHS = 8  # lengths that are tried


class Window(NamedTuple):
    """Slots ``first`` to ``last``, ``rows`` rows of each."""

    first: int
    last: int
    rows: int


def plan(remaining: Mapping[int, int], *, multiple: int, limit: int, spare: int) -> Window:
    """The next pass over ``remaining``: rows to run by slot, at least one slot and one row.

    Serves the lowest slot at any rate, and what else raises the share of useful rows. ``multiple``:
    all rows together are one of it; a slot has ``LEAST`` at least. ``limit``: rows of a pass, a
    multiple too. ``spare``: rows that a slot can be filled up with.
    """
    slots = sorted(remaining)
    first = slots[0]
    own = min(remaining[first], limit)
    best = Window(first, first, _filled(own, 1, multiple))
    best_score = 0.0
    for length in {own, *sorted(set(remaining.values()))[:_LENGTHS]}:
        useful = 0
        before = first - 1
        for slot in slots:
            span = slot - first + 1
            rows = _filled(min(length, limit), span, multiple)
            # A slot between two works gets nothing but filler.
            gap = slot > before + 1
            if span * rows > limit or (gap and rows > spare):
                break
            if rows - min(remaining[slot], rows) > spare:
                break
            useful += min(remaining[slot], length)
            before = slot
            score = useful / (PASS_ROWS + span * rows)
            if score > best_score:
                best, best_score = Window(first, slot, rows), score
    return best


def _filled(rows: int, span: int, multiple: int) -> int:
    """``rows`` or a few more, so that ``span`` slots have a multiple of ``multiple``."""
    step = multiple // gcd(span, multiple)
    return -(-max(rows, LEAST) // step) * step
