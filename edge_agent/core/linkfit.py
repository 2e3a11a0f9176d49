"""Fitting what a message costs to measured delays: robust, never negative, in closed form.

A message leaves once the link is free of those before it (Lindley's recursion). So the time from
its sending to its arrival is the largest of several terms

    way * propagation + occupancy * count + beta * total - lead

one for each message since the latest one before it whose arrival is known: ``lead`` seconds earlier
that one was sent, and if it began the busy period, it and all after it, ``count`` messages with
``total`` units, kept the link busy until this one had left (``way`` 1). One more term starts from
that known arrival, ``lead`` seconds earlier, which holds the propagation already (``way`` 0).

With ``occupancy = share * alpha``, ``propagation = (1 - share) * alpha`` and the largest term of
each sample given, delays are linear in alpha and beta. The terms follow from the last alpha and
beta, and so does who is too far off to be believed (least trimmed squares by concentration steps).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Messages with a term of their own, the sample's included.
TERMS = 8
#: Seconds; smaller scatter and differences are the resolution of what is measured.
FLOOR = 2e-4
#: Concentration steps in one fit.
ROUNDS = 3
#: Samples on each side of a cut between small and large messages that make beta known.
SIDE = 4
#: Samples farther than this multiple of the scatter from the fit are left out.
CUT = 3.0
#: A first guess whose median error is above this share of the delays is a bad one.
FAR = 0.05
#: Standard errors that beta must be above zero to count at all, and to go on counting.
BETA_RISES, BETA_STAYS = 4.0, 2.0
#: Shares that leave no more than so much more error than the best count as equally good.
EQUAL = 0.05
#: A share in force stays unless another leaves less error by so much, and by so many standard
#: errors of the difference.
STAY, GAIN_ERRORS = 0.1, 2.0
#: From this share on it is in force: the difference is not worth a model.
SERIAL_FROM = 0.9
#: Errors, in seconds, are compared beyond this.
LOSS_FLOOR = 2e-5

_ANCHOR = TERMS  # the column of the known arrival
_WAY = np.array([1.0] * TERMS + [0.0])
#: From the largest: see explore.
_SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625, 0.0)
_FINER = (1 / 32, 1 / 128)
_AROUND = np.array([-3.0, -2.0, -1.0, 1.0, 2.0, 3.0])


class Fit(NamedTuple):
    """Seconds per message and per unit of size; ``scale``: scatter, as a standard deviation."""

    alpha: float
    beta: float
    scale: float
    beta_known: bool


class Term(NamedTuple):
    """See the module, where ``messages`` is ``count``; ``lead`` in seconds."""

    messages: int
    total: int
    lead: float


class Sample(NamedTuple):
    """A delay in seconds, 1 to TERMS terms (its own message's first), and that of the anchor."""

    delay: float
    terms: list[Term]
    anchor: Term | None

    @property
    def alone(self) -> bool:
        """Whether nothing can have been in its way."""
        return len(self.terms) == 1 and self.clear

    @property
    def clear(self) -> bool:
        """Whether the known arrival was over before the next message was sent."""
        return self.anchor is None or self.anchor.lead >= self.terms[-1].lead

    def expected(self, share: float, fit: Fit) -> float:
        """The delay that ``fit`` predicts."""
        occupancy = share * fit.alpha
        own = max(occupancy * t.messages + fit.beta * t.total - t.lead for t in self.terms)
        own += fit.alpha - occupancy
        if self.anchor is None:
            return own
        count, total, lead = self.anchor
        return max(own, occupancy * count + fit.beta * total - lead)


class Samples:
    """The latest ``window`` samples, oldest overwritten first."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._at = 0
        self.count = 0
        self._delay: Floats = np.zeros(window)
        self._counts: Floats = np.zeros((window, TERMS + 1))
        self._totals: Floats = np.zeros((window, TERMS + 1))
        self._leads: Floats = np.zeros((window, TERMS + 1))
        self._alone = np.zeros(window, dtype=np.bool_)
        self._clear = np.zeros(window, dtype=np.bool_)

    def append(self, sample: Sample) -> None:
        row = self._at
        self._delay[row] = sample.delay
        self._counts[row] = self._totals[row] = 0.0
        self._leads[row] = np.inf
        for column, term in enumerate(sample.terms):
            self._put(row, column, term)
        if sample.anchor is not None:
            self._put(row, _ANCHOR, sample.anchor)
        self._alone[row] = sample.alone
        self._clear[row] = sample.clear
        self._at = (row + 1) % self._window
        self.count = min(self.count + 1, self._window)

    def _put(self, row: int, column: int, term: Term) -> None:
        self._counts[row, column], self._totals[row, column], self._leads[row, column] = term

    def keep_latest(self, number: int) -> None:
        """Forget all but the latest ``number``."""
        number = min(number, self.count)
        rows = (self._at - number + np.arange(number)) % self._window
        for values in (self._delay, self._counts, self._totals, self._leads):
            values[:number] = values[rows]
        for flags in (self._alone, self._clear):
            flags[:number] = flags[rows]
        self.count = number
        self._at = number % self._window

    def view(self, *, alone: bool = False) -> Table:
        """All samples, or those that nothing can have been in the way of, if there are any."""
        rows = slice(self.count)
        if alone and self._alone[rows].any():
            chosen = np.flatnonzero(self._alone[rows])
            return Table(
                self._delay[chosen],
                self._counts[chosen],
                self._totals[chosen],
                self._leads[chosen],
                self._clear[chosen],
            )
        return Table(
            self._delay[rows],
            self._counts[rows],
            self._totals[rows],
            self._leads[rows],
            self._clear[rows],
        )


class Table(NamedTuple):
    """n samples. ``delay``: float64[n]; ``clear``: bool[n]; the terms: float64[n, TERMS + 1]."""

    delay: Floats
    counts: Floats
    totals: Floats
    leads: Floats
    clear: npt.NDArray[np.bool_]

    def waits(self, fit: Fit) -> Floats:
        """float64[n]: seconds each would have waited if all of alpha kept the link busy."""
        busy = fit.alpha * self.counts + fit.beta * self.totals - self.leads
        waits: Floats = busy.max(axis=1) - busy[:, 0]
        return waits

    def informative(self, fit: Fit, share: float) -> int:
        """How many of these waits are above ``share`` of alpha, and long enough to be noticed."""
        least = max(share * fit.alpha, 2.0 * fit.scale, FLOOR)
        return int(np.count_nonzero(self.waits(fit) > least))


class Applied(NamedTuple):
    """A fit, the terms that hold by it, intp[n], and how far off it is, float64[n] in seconds."""

    fit: Fit
    active: npt.NDArray[np.intp]
    off: Floats


def fit_costs(samples: Samples, share: float | None, start: Fit, beta_prior: float) -> Fit:
    """Alpha and beta for ``share`` of alpha being occupancy, from a first guess ``start``.

    ``share`` None: it is unknown, so samples that nothing can have been in the way of decide alone,
    where there are any. ``beta_prior`` holds where all sizes are the same.
    """
    table = samples.view(alone=share is None)
    share = 1.0 if share is None else share
    prior = None if _vary(table.totals[:, 0]) else beta_prior
    weights = share * table.counts + (1.0 - share) * _WAY
    rows = np.arange(len(table.delay))
    sizes = table.totals[:, 0]
    free = [
        Fit(max(_median(table.delay - beta * sizes), 0.0), beta, 0.0, beta_known=False)
        for beta in {0.0, beta_prior}
    ]
    best = min((_apply(one, table, weights) for one in (start, *free)), key=_error)
    if _error(best) > FAR * _median(table.delay):
        # Perhaps the link is so busy now that every message waits for all before it.
        last = np.where(np.isinf(table.leads[:, _ANCHOR]), 0, _ANCHOR)
        delays = table.delay + table.leads[rows, last]
        busy = [best]
        if (units := table.totals[rows, last]).all():
            all_beta = start._replace(alpha=0.0, beta=max(_median(delays / units), 0.0))
            busy.append(_apply(all_beta, table, weights))
        if (each := weights[rows, last]).all():
            all_alpha = start._replace(alpha=max(_median(delays / each), 0.0), beta=0.0)
            busy.append(_apply(all_alpha, table, weights))
        best = min(busy, key=_error)
    fit, active, off = best
    for _ in range(ROUNDS):
        scale = max(1.4826 * _median(off), FLOOR)
        kept = rows[off <= CUT * scale]
        terms = active[kept]
        fit = _least_squares(
            weights[kept, terms],
            table.totals[kept, terms],
            table.delay[kept] + table.leads[kept, terms],
            prior,
            before=fit._replace(scale=scale),
            errors=BETA_RISES if start.beta == 0.0 else BETA_STAYS,
        )
        before = kept, terms
        fit, active, off = _apply(fit, table, weights)
        if np.array_equal(kept, before[0]) and np.array_equal(active[kept], terms):
            break
    return fit


def _apply(fit: Fit, table: Table, weights: Floats) -> Applied:
    values = fit.alpha * weights + fit.beta * table.totals - table.leads
    active = values.argmax(axis=1)
    off = np.abs(table.delay - values[np.arange(len(active)), active])
    return Applied(fit, active, off)


def _error(applied: Applied) -> float:
    return _median(applied.off)


def _least_squares(
    weights: Floats,
    units: Floats,
    delays: Floats,
    prior: float | None,
    *,
    before: Fit,
    errors: float,
) -> Fit:
    """``delays = alpha * weights + beta * units``, both at least 0; ``prior``: a beta not to fit.

    A beta of less than ``errors`` standard errors is no more than chance and counts as none.
    """
    ww = float(weights @ weights)
    wu = float(weights @ units)
    uu = float(units @ units)
    wd = float(weights @ delays)
    ud = float(units @ delays)
    determinant = ww * uu - wu * wu
    known = prior is None and determinant > 1e-9 * ww * uu
    alpha, beta = before.alpha, before.beta
    if known:
        beta = (ww * ud - wu * wd) / determinant
        alpha = (uu * wd - wu * ud) / determinant
        left = delays - alpha * weights - beta * units
        spread = max(float(left @ left) / max(len(delays) - 2, 1), (FLOOR / 6.0) ** 2)
        if beta < errors * (spread * ww / determinant) ** 0.5:
            alpha, beta = wd / ww, 0.0
    elif ww > 0.0:
        beta = before.beta if prior is None else prior
        alpha = (wd - beta * wu) / ww
    elif prior is None and uu > 0.0:
        beta, known = max(ud, 0.0) / uu, True  # nothing to tell alpha from
    if alpha < 0.0:
        # On the border of what is possible: everything is in the size.
        alpha, beta = 0.0, (max(ud, 0.0) / uu if uu > 0.0 else beta)
    return Fit(alpha, beta, before.scale, known)


def explore(samples: Samples, start: Fit, beta_prior: float) -> tuple[float, Fit]:
    """The share of alpha that is occupancy, and the costs that go with it, from scratch.

    The largest share of those that explain the samples about as well as the best: that the link is
    free sooner needs evidence.
    """
    table = samples.view()
    cap = max(0.5 * _median(table.delay), FLOOR)
    found = []
    for share in _SHARES:
        fit = fit_costs(samples, share, start, beta_prior)
        off = _apply(fit, table, share * table.counts + (1.0 - share) * _WAY).off
        found.append((share, fit, float(np.minimum(off, cap).mean()) + LOSS_FLOOR))
    least = min(loss for _, _, loss in found)
    return next((share, fit) for share, fit, loss in found if loss <= (1.0 + EQUAL) * least)


def refine(samples: Samples, share: float, fit: Fit) -> float:
    """A better share than that in force, or that.

    Shares are tried on finer and finer grids; beta stays as it is, propagation follows. Another
    must be clearly better; the nearest of those about as good as the best is taken. There must be
    informative samples.
    """
    if fit.alpha <= 0.0:
        return share  # nothing to share
    table = samples.view()
    # What waited for longer than alpha waited for something else as well.
    weights = np.minimum(table.waits(fit), fit.alpha)
    weights /= weights.sum()
    candidates = np.append(share, np.linspace(0.0, 1.0, 9))
    residuals, shares = _residuals(table, candidates * fit.alpha, fit)
    for step in _FINER:
        around = candidates[(residuals @ weights).argmin()] + step * _AROUND
        around = around[(around >= 0.0) & (around <= 1.0)]
        more, more_shares = _residuals(table, around * fit.alpha, fit)
        candidates = np.concatenate((candidates, around))
        residuals = np.concatenate((residuals, more))
        shares = np.concatenate((shares, more_shares))
    losses = residuals @ weights + LOSS_FLOOR
    gains = residuals[0] - residuals[losses.argmin()]
    gain = float(gains @ weights)
    error = float(np.linalg.norm((gains - gain) * weights))
    if gain <= max(STAY * losses.min(), GAIN_ERRORS * error):
        return share
    good = shares[losses <= (1.0 + EQUAL) * losses.min()]
    found = float(good[np.abs(good - share).argmin()])
    return 1.0 if found >= SERIAL_FROM else found


def _residuals(table: Table, occupancies: Floats, fit: Fit) -> tuple[Floats, Floats]:
    """How far off each occupancy leaves each sample, and its share of the alpha that goes with it.

    occupancies: float64[candidates]. Result: seconds, float64[candidates, n]; float64[candidates].
    """
    column = occupancies[:, None]

    def term(index: int) -> Floats:  # [candidates, n]
        rest = fit.beta * table.totals[:, index] - table.leads[:, index]
        busy: Floats = column * table.counts[:, index] + rest
        return busy

    own = term(0)
    for index in range(1, TERMS):
        np.maximum(own, term(index), out=own)
    if np.count_nonzero(table.clear) >= max(SIDE, len(table.clear) / 4):
        rest = (table.delay - own)[:, table.clear]
        middle = rest.shape[1] // 2
        propagation = np.maximum(np.partition(rest, middle, axis=1)[:, middle], 0.0)
    else:
        propagation = np.maximum(fit.alpha - occupancies, 0.0)
    expected = np.maximum(own + propagation[:, None], term(_ANCHOR))
    # A stall says nothing about any of them.
    cap = max(5.0 * fit.scale, 0.25 * fit.alpha, FLOOR)
    residuals = np.minimum(np.abs(table.delay - expected), cap)
    return residuals, occupancies / np.maximum(occupancies + propagation, 1e-9)


def _vary(sizes: Floats) -> bool:
    """Whether sizes part into small and large ones, with enough of each."""
    ordered = np.sort(sizes)
    if len(ordered) < 2 * SIDE:
        return False
    return bool(ordered[SIDE - 1] < ordered[-SIDE])


def _median(values: Floats) -> float:
    """Of at least one value; the upper of the middle two."""
    middle = len(values) // 2
    return float(np.partition(values, middle)[middle])
