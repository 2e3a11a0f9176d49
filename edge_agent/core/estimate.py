"""What drafting and the uplink cost, learnt from what a session does anyway (appendix D.2).

Only one clock is used: a sample is the time from sending a message to hearing its answer, less the
time that the verifier says it held it. It therefore holds the way back too; like all that does not
keep the uplink busy, that counts as propagation once the "pipelined" model is in force.

Which part of alpha keeps the link busy shows in messages that were sent while others were under
way: a busy link makes them wait. Until such messages say otherwise the paper's model ("serial",
all of it) is in force.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from broker.errors import ConfigError
from edge_agent.core.linkfit import (
    FLOOR,
    TERMS,
    Fit,
    Sample,
    Samples,
    Term,
    explore,
    fit_costs,
    refine,
)
from edge_agent.core.pipeline import PIPELINED, SERIAL, LinkCost

#: Messages sent whose answers may still come.
MAX_UPLOADS = 64
#: Seconds; an answer that took longer says nothing about the link.
MAX_DELAY = 60.0
#: Units in one message.
MAX_SIZE = 10**9

#: Samples that may be remembered.
MAX_WINDOW = 4096
#: Samples before the link counts as known.
ENOUGH = 4
#: Samples from one fit to the next, once the link is known.
REFIT_EVERY = 4
#: Samples from one look at the cost model to the next, once there are more than EARLY.
CHOOSE_EVERY = 32
EARLY = 32
#: A message says something about the cost model when it followed another so soon that it would have
#: waited for this share of alpha by the serial model; all that there is to know from the second on.
FOLLOWING, CLOSE = 0.1, 0.9

#: So many samples in a row below, or above, what the fit allows mean another link, ...
SHIFT_BELOW = 4
SHIFT_ABOVE = 8
#: ... those above when so many seconds lie between them.
SHIFT_SPAN = 0.5
#: Least share of the expected delay, and multiple of the scatter, that is out of the ordinary.
SHIFT_SHARE = 0.15
SHIFT_SCALES = 3.0

#: Seconds without a sample after which the link counts as unknown again.
STALE_AFTER = 30.0

#: Sizes of probes, two at a time: the second shows how long the first keeps the link busy.
PROBES = ((1, 8), (4, 1), (8, 2), (2, 4))
#: Seconds from one pair of probes to the next, ...
PROBE_GAP = 0.25
#: ... from the last of PROBES to the first again, at most when nobody answers, ...
PROBE_PERIOD = 60.0
PROBE_PERIOD_MAX = 960.0
#: ... and at least from first to first when the link has become another.
PROBE_SOON = 5.0


def _check_window(window: int) -> None:
    if not 1 <= window <= MAX_WINDOW:
        raise ConfigError(f"window of {window} samples is outside 1 to {MAX_WINDOW}")


class GammaEstimator:
    """Seconds to draft a token: the mean of the middle half of the latest times.

    Not the plain mean: a token that was drafted while something else had the processor would count
    for many. Not the median: a device that changes between two speeds needs what lies between.
    ``prior``: seconds, before any sample; ``window``: samples. Raises ConfigError.
    """

    def __init__(self, prior: float = 0.02, window: int = 64) -> None:
        _check_window(window)
        self.rejected = 0  # impossible times
        self._times: deque[float] = deque(maxlen=window)
        self._gamma: float | None = prior

    def add(self, seconds: float, tokens: int = 1) -> None:
        """Drafting ``tokens`` tokens took ``seconds``; evaluating a prompt does not belong here."""
        if not (tokens >= 1 and 0.0 <= seconds <= MAX_DELAY * tokens):
            self.rejected += 1
            return
        self._times.append(seconds / tokens)
        self._gamma = None

    @property
    def known(self) -> bool:
        return len(self._times) >= ENOUGH

    @property
    def gamma(self) -> float:
        """Seconds per token; before any sample the prior."""
        if self._gamma is None:
            times = sorted(self._times)
            cut = len(times) // 4
            middle = times[cut : len(times) - cut]
            self._gamma = sum(middle) / len(middle)
        return self._gamma


@dataclass(slots=True)
class _Upload:
    """A message sent, and when it arrived by the edge's clock with the answer's way counted in."""

    sent_at: float
    size: int
    probe: bool = False
    answered: bool = False
    arrived_at: float | None = None
    ordinary: bool = False


class LinkEstimator:
    """Alpha, beta and the cost model of one uplink; one thread at a time, ``now`` in seconds.

    ``sent`` for every message on the link (whatever it carries, or the waiting of the next is laid
    to the wrong cause), ``answered`` for those with an answer. Sizes are in the unit that beta is
    to be per: tokens, or bytes. ``prior`` holds until there are samples, its cost model (where it
    has propagation) until they contradict it, its beta (and later the last one measured) whenever
    all messages have the same size: from one size alone beta cannot be told from alpha. ``window``:
    samples, 128 by default. Raises ConfigError.

    While the link is never idle its pace tells occupancy and beta, but nothing tells propagation:
    it may then come out as none, which changes no plan.
    """

    def __init__(self, prior: LinkCost | None = None, window: int = 128) -> None:
        _check_window(window)
        prior = prior or LinkCost(0.02)
        self.rejected = 0  # answers with an impossible time
        self.unmatched = 0  # answers to nothing that is remembered, or a second one
        self.shifts = 0  # times the link was found to be another
        self.probes = 0
        self._samples = Samples(window)
        self._fit = Fit(prior.alpha, prior.beta, 0.0, beta_known=False)
        # Of alpha, what keeps the link busy; None: unknown. And whether it was not chosen yet, or
        # for another link, or from too little. A prior that tells it was measured before.
        self._share: float | None = None
        if prior.propagation > 0.0:
            self._share = prior.occupancy / prior.alpha
        self._undecided = self._share is None
        self._beta_prior = prior.beta
        self._uploads: deque[_Upload] = deque(maxlen=MAX_UPLOADS)
        self._next_ticket = 0
        self._last_at: float | None = None
        self._unfitted = 0
        self._unchosen = 0
        self._outside: deque[tuple[int, float]] = deque(maxlen=SHIFT_ABOVE)  # side, now
        self._pair = 0  # of PROBES, the next to send
        self._pair_left = 0  # probes of it to come
        self._round_at = self._probe_at = -math.inf
        self._probe_period = PROBE_PERIOD
        self._probe_answered = False

    # -- what is known --------------------------------------------------------------------------

    @property
    def alpha(self) -> float:
        """Seconds that a message takes beside its tokens, the answer's way included."""
        return min(self._fit.alpha, MAX_DELAY)

    @property
    def beta(self) -> float:
        """Seconds per unit of size; 0 as long as what was measured does not need more."""
        return min(self._fit.beta, MAX_DELAY)

    @property
    def model(self) -> str:
        """The cost model in force: SERIAL or PIPELINED."""
        return SERIAL if self._share in (None, 1.0) else PIPELINED

    @property
    def cost(self) -> LinkCost:
        """The link by the model in force."""
        occupancy = self.alpha if self._share is None else self._share * self.alpha
        return LinkCost(occupancy, self.alpha - occupancy, self.beta)

    @property
    def known(self) -> bool:
        """Whether alpha is measured."""
        return self._samples.count >= ENOUGH

    @property
    def beta_known(self) -> bool:
        """Whether beta is measured: messages of different sizes were answered."""
        return self._fit.beta_known

    @property
    def model_known(self) -> bool:
        """Whether enough messages followed others closely to know what keeps the link busy."""
        return self._samples.view().informative(self._fit, CLOSE) >= ENOUGH

    def fresh(self, now: float) -> bool:
        """Whether the link was measured lately."""
        return self._last_at is not None and now - self._last_at <= STALE_AFTER

    # -- what happens ---------------------------------------------------------------------------

    def sent(self, now: float, size: int) -> int:
        """A message of ``size`` goes out; the ticket to name it by when its answer comes."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self._uploads.append(_Upload(now, min(max(size, 0), MAX_SIZE)))
        return ticket

    def answered(self, ticket: int, now: float, hold: float = 0.0) -> None:
        """The answer to ``ticket`` came; the verifier had held the message for ``hold`` seconds."""
        index = ticket - (self._next_ticket - len(self._uploads))
        if not 0 <= index < len(self._uploads) or self._uploads[index].answered:
            self.unmatched += 1
            return
        upload = self._uploads[index]
        upload.answered = True
        if upload.probe:
            self._probe_answered = True
            self._probe_period = PROBE_PERIOD
        seconds = now - upload.sent_at - hold
        # Holding times come in tenths of a millisecond: a little below zero is none.
        if not (hold >= 0.0 and -1e-3 <= seconds <= MAX_DELAY):
            self.rejected += 1
            return
        seconds = max(seconds, 0.0)
        upload.arrived_at = upload.sent_at + seconds
        sample, anchor = self._sample(index, seconds, trusting=False)
        side = self._side(sample)
        if anchor is not None and not anchor.ordinary:
            # After a stall messages arrive together, which says nothing about the link's pace; on
            # a link that became slower they do not.
            sample, _ = self._sample(index, seconds, trusting=True)
            later = self._side(sample)
            upload.ordinary = later == 0
            side = side if side == later else 0
        else:
            upload.ordinary = side == 0
        self._note(side, now)
        self._take(sample, now)

    def _sample(
        self, index: int, seconds: float, *, trusting: bool
    ) -> tuple[Sample, _Upload | None]:
        """What was in the way of the message at ``index`` of the uploads, and its anchor.

        The anchor is the latest earlier message of known arrival, ``trusting``: and ordinary delay.
        """
        sent_at = self._uploads[index].sent_at
        terms: list[Term] = []
        total = 0
        for count in range(1, index + 2):
            upload = self._uploads[index + 1 - count]
            arrived_at = upload.arrived_at if upload.ordinary or not trusting else None
            if count > 1 and arrived_at is not None:
                anchor = Term(count - 1, total, sent_at - arrived_at)
                return Sample(seconds, terms, anchor), upload
            total += upload.size
            if count <= TERMS:
                terms.append(Term(count, total, sent_at - upload.sent_at))
        return Sample(seconds, terms, None), None

    def disconnected(self) -> None:
        """The connection is gone: what was under way tells nothing about the next one."""
        self._uploads.clear()

    def _take(self, sample: Sample, now: float) -> None:
        self._samples.append(sample)
        self._last_at = now
        shifted = self._shifted()
        if shifted:
            self.shifts += 1
            self._samples.keep_latest(shifted)
            self._outside.clear()
            self._undecided = True
            self._pair = self._pair_left = 0
            self._probe_at = max(now, self._round_at + PROBE_SOON)
        self._unfitted += 1
        self._unchosen += 1
        if self._samples.count > ENOUGH and self._unfitted < REFIT_EVERY and not shifted:
            return
        self._unfitted = 0
        self._refit()
        early = self._undecided and self._samples.count <= EARLY
        if early or self._unchosen >= CHOOSE_EVERY:
            self._choose()

    def _choose(self) -> None:
        """Look at the cost model again, if the samples have something to say about it."""
        self._unchosen = 0
        if self._undecided and (self._share is not None or self._follows()):
            self._share, self._fit = explore(self._samples, self._fit, self._beta_prior)
            self._undecided = self._samples.count <= EARLY and not self.model_known
        if self._share is not None and self._follows():
            share = refine(self._samples, self._share, self._fit)
            if share != self._share:
                self._share = share
                self._refit()

    def _follows(self) -> bool:
        return self._samples.view().informative(self._fit, FOLLOWING) >= ENOUGH

    def _refit(self) -> None:
        if not self._undecided and self._fit.beta_known:
            self._beta_prior = self._fit.beta
        self._fit = fit_costs(self._samples, self._share, self._fit, self._beta_prior)

    # -- probes ---------------------------------------------------------------------------------

    def probes_needed(self, now: float) -> tuple[int, ...]:
        """Sizes of probes to send now, one right after the other; mostly none.

        There is need while alpha, beta or the model is unknown, or everything is old. Eight probes
        a minute at most, eight in five seconds when the link has become another, and ever fewer
        when none is answered. To be asked only while a generation runs: an idle device need not
        know its link.
        """
        if now < self._probe_at:
            return ()
        if self.known and self.beta_known and self.model_known and self.fresh(now):
            return ()
        return PROBES[self._pair]

    def probe_sent(self, now: float, size: int) -> int:
        """Like ``sent``, for one of ``probes_needed``."""
        if self._pair_left == 0:
            self._pair_left = len(PROBES[self._pair])
            if self._pair == 0:
                self._round_at = now
        self.probes += 1
        self._pair_left -= 1
        if self._pair_left == 0:
            self._pair = (self._pair + 1) % len(PROBES)
            self._probe_at = now + (PROBE_GAP if self._pair else self._period())
        ticket = self.sent(now, size)
        self._uploads[-1].probe = True
        return ticket

    def _period(self) -> float:
        """Seconds from this round of probes to the next: twice as long if none was answered."""
        if not self._probe_answered:
            self._probe_period = min(2.0 * self._probe_period, PROBE_PERIOD_MAX)
        self._probe_answered = False
        return self._probe_period

    # -- another link ---------------------------------------------------------------------------

    def _side(self, sample: Sample) -> int:
        """0 for what the fit leads to expect, 1 for longer, -1 for shorter."""
        unclear = self._share is None and not sample.alone
        if unclear or self._samples.count < 2 * ENOUGH:
            return 0  # nobody knows yet what it should have taken
        expected = sample.expected(1.0 if self._share is None else self._share, self._fit)
        band = max(SHIFT_SCALES * self._fit.scale, SHIFT_SHARE * expected, 2.0 * FLOOR)
        if abs(sample.delay - expected) <= band:
            return 0
        return 1 if sample.delay > expected else -1

    def _note(self, side: int, now: float) -> None:
        if self._outside and self._outside[-1][0] != side:
            self._outside.clear()
        if side != 0:
            self._outside.append((side, now))

    def _shifted(self) -> int:
        """How many of the latest samples belong to another link; 0: none."""
        outside = self._outside
        if outside and outside[-1][0] < 0:
            return SHIFT_BELOW if len(outside) >= SHIFT_BELOW else 0
        enough = len(outside) == SHIFT_ABOVE and outside[-1][1] - outside[0][1] >= SHIFT_SPAN
        return SHIFT_ABOVE if enough else 0
