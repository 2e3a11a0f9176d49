"""A trial under way on a device: a config offered, taken, and measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cloud_verifier.tuner.core.messages import Proposal, TunerSettings
from cloud_verifier.tuner.core.readings import Meter, Reading

#: Spread of a round's time per token beside its mean, and how sure the guard wants to be.
_ROUND_SPREAD, _SURE = 0.6, 1.64
#: A trial on a device that never ends a generation is judged after so many times the tokens.
_ENDLESS = 4
#: So far may the thresholds that a device reports be from those that it was told.
_OBEYS = 0.002


@dataclass(slots=True)
class Trial:
    """``version``: of the config, None: not published yet; ``tries``: times that it was offered.

    ``meter``: since the acknowledgement, which came at ``since``. ``disobeyed``: readings that
    acknowledge it with other thresholds.
    """

    proposal: Proposal
    campaign: int
    offered_at: float
    version: int | None = None
    tries: int = 1
    meter: Meter | None = None
    since: float = 0.0
    disobeyed: int = 0

    def obeyed_by(self, reading: Reading) -> bool:
        """Whether the device works with the pair, as far as it says."""
        pair = self.proposal.pair
        told = ((reading.r1, pair.r1), (reading.r2, pair.r2))
        return all(value is None or abs(value - wanted) <= _OBEYS for value, wanted in told)

    def measured(self, settings: TunerSettings, now: float) -> bool:
        """Whether it was measured for long enough to be told."""
        meter = self.meter
        wanted = settings.min_tokens * self.proposal.weight
        if meter is None or meter.tokens < wanted:
            return False
        whole = meter.generations >= settings.min_generations
        whole = whole or meter.tokens >= _ENDLESS * wanted
        return whole and now - self.since >= settings.min_seconds

    def surely_bad(self, settings: TunerSettings, best: float) -> bool:
        """Whether it is too slow beside ``best`` seconds per token, chance allowed for."""
        meter = self.meter
        if meter is None or meter.tpt is None or meter.tokens < settings.guard_tokens:
            return False
        doubt = _SURE * _ROUND_SPREAD / math.sqrt(max(meter.rounds, 1.0))
        return meter.tpt * (1.0 - doubt) > settings.guard_factor * best
