"""One device's way through its trials: what it told last decides what is tried next.

    WAITING -> ASKING -> APPLYING -> MEASURING -> ASKING ... -> SETTLED -> (drift) -> WAITING
                                        \\-> failed -> WAITING

AWAY, UNSUITED and PINNED stand beside: from each of them a device comes back to WAITING, or to
SETTLED where its search had ended. Time is the core's own, which stands still while the source
tells nothing; see ``fleet``.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import replace

from cloud_verifier.tuner.core.drift import Drift
from cloud_verifier.tuner.core.messages import (
    BACK,
    BEST,
    PIN,
    TRIAL,
    Ask,
    Choice,
    Effect,
    Fail,
    Proposal,
    Publish,
    Record,
    Save,
    Tell,
    TunerSettings,
)
from cloud_verifier.tuner.core.readings import Meter, Reading, device_class
from cloud_verifier.tuner.core.space import DEFAULT, Pair
from cloud_verifier.tuner.core.trial import Trial

WAITING, ASKING, APPLYING, MEASURING, SETTLED, PINNED, UNSUITED, AWAY = PHASES = (
    "waiting",
    "asking",
    "applying",
    "measuring",
    "settled",
    "pinned",
    "unsuited",
    "away",
)
#: Those that take one of the places of a search.
SEARCHING = (ASKING, APPLYING, MEASURING)
#: Policies that take thresholds from a config; "": not told. Others have rules of their own.
TUNABLE = ("", "pipesd")

#: A move of the link by less than this share of the TPT changes nothing that is worth a search.
_LINK_SHARE = 0.05
#: A search that gained less than this was not worth its trouble: the next one comes later.
_WORTH = 0.05


class DeviceTuner:
    """See the module. ``out``: where effects go; ``stats``: counts by cause."""

    def __init__(
        self,
        device: str,
        record: Record,
        settings: TunerSettings,
        out: deque[Effect],
        stats: Counter[str],
    ) -> None:
        self.device = device
        self.record = record
        self.phase = AWAY
        self.waiting_since = 0.0
        self.seen_at = -math.inf
        # For who looks on: of the last window, and of the first trial of this search.
        self.tpt: float | None = None
        self.first_tpt: float | None = None
        self._settings = settings
        self._out = out
        self._stats = stats
        self._last: Reading | None = None
        self._active_at = -math.inf
        self._trial: Trial | None = None
        self._best: Choice | None = None
        self._not_before = -math.inf
        self._failures = 0
        self._cooldown = settings.cooldown_s
        self._search_began = self._search_ended = -math.inf
        self._before: float | None = None  # TPT when the search began
        self._version: int | None = None  # of the pair that stands while SETTLED or PINNED
        self._offered_at = -math.inf
        self._window: Meter | None = None
        self._tpt_drift = self._link_drift = self._new_drift()

    @property
    def proposal(self) -> Proposal | None:
        """The trial under way."""
        return None if self._trial is None else self._trial.proposal

    @property
    def best(self) -> Choice | None:
        """The best pair known of the current search."""
        return self.record.settled or self._best

    @property
    def last(self) -> Reading | None:
        """What the device told last."""
        return self._last

    def ready(self, now: float) -> bool:
        """Whether it waits for a place in the search, and could use one: somebody generates."""
        recent = now - self._active_at <= self._settings.ttl_s
        return self.phase == WAITING and recent and now >= self._not_before

    # -- what happens -----------------------------------------------------------------------------

    def heard(self, reading: Reading, now: float) -> None:
        """Take in a reading that is newer than the last."""
        last, self._last = self._last, reading
        self.seen_at = now
        if not reading.online:
            self._leave(AWAY, "gone")
            return
        restarted = last is not None and not Meter(last).advance(reading)
        if last is not None and not restarted and reading.committed > last.committed:
            self._active_at = now
        if reading.policy not in TUNABLE:
            self._leave(UNSUITED, "policy")
            return
        if self.phase in (AWAY, UNSUITED):
            self._return(now)
        if restarted:
            self._stats["restarts"] += 1
            self._window = None
            self._fail("restart", now)
            return
        if self.phase in SEARCHING and self._link_moved(reading, now):
            if now - self._search_began >= self._settings.cooldown_s:
                self._fail("link", now)
                self._search_again("link", now)
            return
        if self.phase == APPLYING:
            self._applying(reading, now)
        elif self.phase == MEASURING:
            self._measuring(reading, now)
        elif self.phase in (SETTLED, PINNED):
            self._standing(reading, now)

    def handle_timer(self, now: float) -> None:
        """Give up what has waited too long."""
        settings, trial = self._settings, self._trial
        if now - self.seen_at > settings.ttl_s and self.phase != AWAY:
            self._leave(AWAY, "gone")
        elif self.phase == APPLYING and trial is not None:
            if now - trial.offered_at <= settings.ack_s or trial.version is None:
                return
            if trial.tries >= settings.ack_tries:
                self._fail("no_ack", now)
                return
            trial.tries += 1
            trial.offered_at, trial.version = now, None
            self._out.append(Publish(self.device, trial.proposal.pair, TRIAL))
        elif (
            self.phase == MEASURING and trial is not None and now - trial.since > settings.measure_s
        ):
            self._fail("idle", now)

    def begin(self, now: float) -> None:
        """It has a place in the search."""
        if self.record.settled is None and self._search_began <= self._search_ended:
            self._search_began = now
            self._link_drift = self._new_drift()
            self._before = self.tpt
        self._ask()

    def proposed(self, answer: Proposal | Choice, campaign: int, now: float) -> None:
        """The study's answer to Ask: what to try, or that the search is over."""
        if self.phase != ASKING or campaign != self.record.campaign:
            # It went away, or was reset, while the study was asked: nobody will measure this trial.
            if isinstance(answer, Proposal):
                self._out.append(Fail(self.device, campaign, answer.number, "superseded"))
            return
        if isinstance(answer, Choice):
            self._settle(answer, now)
            return
        self._best = answer.best
        self._trial = Trial(answer, campaign, now)
        self.phase = APPLYING
        self._out.append(Publish(self.device, answer.pair, TRIAL))

    def study_failed(self, now: float) -> None:
        """The study could not be asked."""
        if self.phase == ASKING:
            self._fail("storage", now)

    def published(self, why: str, version: int, now: float) -> None:
        """A config went out, or stands already, as ``version``."""
        if why == TRIAL and self.phase == APPLYING and self._trial is not None:
            self._trial.version, self._trial.offered_at = version, now
        elif why in (BEST, PIN, BACK):
            self._version, self._offered_at = version, now

    def not_published(self, why: str, now: float) -> None:
        """The broker is away or its queue is full."""
        if why == TRIAL and self.phase == APPLYING:
            self._fail("publish", now)
        elif why in (BEST, PIN):
            self._version, self._offered_at = None, now

    def update(self, record: Record, now: float) -> None:
        """The operator may have pinned, freed or reset the device."""
        known, self.record = self.record, record
        if record.campaign != known.campaign:
            self._best = self._before = None
            self._failures, self._not_before = 0, -math.inf
            self._search_began = self._search_ended = -math.inf
            self._abandon("reset")
            if self.phase == SETTLED or self.phase in SEARCHING:
                self._wait(now)
        if record.pin != known.pin and self.phase not in (AWAY, UNSUITED):
            self._abandon("pinned")
            # What was watched before the pin is too long ago. (After a silence it is not: a device
            # that changed its network comes back from one.)
            self._tpt_drift, self._link_drift = self._new_drift(), self._new_drift()
            self._return(now)

    def lost(self) -> None:
        """Another tuner has the device now; its trial, if any, was failed by that one."""
        self._trial = None

    # -- a trial ----------------------------------------------------------------------------------

    def _ask(self) -> None:
        self.phase = ASKING
        last = self._last
        described = "" if last is None else device_class(last)
        self._out.append(Ask(self.device, self.record.campaign, described))

    def _applying(self, reading: Reading, now: float) -> None:
        trial = self._trial
        if trial is None or trial.version is None or reading.config_version != trial.version:
            return
        if not trial.obeyed_by(reading):
            # The telemetry may have been made between the version and the thresholds.
            trial.disobeyed += 1
            if trial.disobeyed > 1:
                self._stats["disobedient"] += 1
                self._fail("own_thresholds", now)
                self._leave(UNSUITED, "own_thresholds")
            return
        trial.meter, trial.since = Meter(reading), now
        self.phase = MEASURING

    def _measuring(self, reading: Reading, now: float) -> None:
        trial, settings = self._trial, self._settings
        assert trial is not None
        assert trial.meter is not None
        meter = trial.meter
        if reading.config_version != trial.version:
            self._fail("config", now)
            return
        meter.advance(reading)
        tpt = meter.tpt
        if tpt is None:
            return
        self.tpt = tpt
        if trial.measured(settings, now):
            self._tell(tpt, meter.tokens, early=False)
        elif self._best is not None and trial.surely_bad(settings, self._best.tpt):
            self._tell(tpt, meter.tokens, early=True)

    def _tell(self, tpt: float, tokens: float, *, early: bool) -> None:
        trial, self._trial = self._trial, None
        assert trial is not None
        self._failures = 0
        self._stats["early" if early else "complete"] += 1
        number, pair = trial.proposal.number, trial.proposal.pair
        self._out.append(Tell(self.device, trial.campaign, number, tpt, tokens, early))
        if trial.proposal.index == 1:
            self.first_tpt = tpt
        if self._best is None or tpt < self._best.tpt:
            self._best = Choice(pair, tpt, trial.proposal.index)
        self._ask()

    def _abandon(self, cause: str) -> None:
        """The trial under way, if any, comes to nothing."""
        trial, self._trial = self._trial, None
        if trial is not None:
            self._stats[f"failed_{cause}"] += 1
            number = trial.proposal.number
            self._out.append(Fail(self.device, trial.campaign, number, cause))

    def _fail(self, cause: str, now: float) -> None:
        """A search stops here for a while; a device that does not search goes on as it is."""
        if self.phase not in SEARCHING:
            return
        if self._trial is None:
            self._stats[f"failed_{cause}"] += 1
        self._abandon(cause)
        self._wait(now)
        if cause not in ("restart", "link", "config"):
            self._failures += 1
            pause = self._settings.retry_s * 2.0 ** min(self._failures - 1, 20)
            self._not_before = now + min(pause, self._settings.max_retry_s)
            # Until the next trial the device should not have to live with this one's pair.
            self._go_back()

    def _go_back(self) -> None:
        best = self.best
        self._out.append(Publish(self.device, DEFAULT if best is None else best.pair, BACK))

    def _wait(self, now: float) -> None:
        self.phase, self.waiting_since = WAITING, now

    # -- beside the search ------------------------------------------------------------------------

    def _leave(self, phase: str, cause: str) -> None:
        if self.phase == phase:
            return
        if self._trial is not None:
            self._abandon(cause)
            self._go_back()
        self._window = None
        self.phase = phase

    def _return(self, now: float) -> None:
        self._window = None
        if self.record.pin is not None:
            self._stand(self.record.pin, PINNED, PIN)
        elif self.record.settled is not None:
            self._stand(self.record.settled.pair, SETTLED, BEST)
        else:
            self._wait(now)

    def _stand(self, pair: Pair, phase: str, why: str) -> None:
        self.phase = phase
        self._version = None
        self._out.append(Publish(self.device, pair, why))

    def _settle(self, choice: Choice, now: float) -> None:
        self._best = choice
        self.record = replace(self.record, settled=choice)
        self._search_ended = now
        gained = self._before is not None and choice.tpt < (1.0 - _WORTH) * self._before
        settings = self._settings
        if gained or self._before is None:
            self._cooldown = settings.cooldown_s
        else:
            self._cooldown = min(2.0 * self._cooldown, settings.max_cooldown_s)
        self._tpt_drift, self._link_drift = self._new_drift(), self._new_drift()
        self._window = None
        self._save("settled")
        self._stats["searches"] += 1
        self._stand(choice.pair, SETTLED, BEST)

    def _standing(self, reading: Reading, now: float) -> None:
        """A pair is in force for good, or until something drifts."""
        pinned = self.phase == PINNED
        if self._version is None or reading.config_version != self._version:
            self._window = None
            if now - self._offered_at > self._settings.ack_s:
                self._offered_at = now
                self._stats["offered_again"] += 1
                self._return(now)
            return
        if self._window is None:
            self._window = Meter(reading)
            return
        window = self._window
        window.advance(reading)
        # What a pin makes of the figures says nothing about the pair that was found.
        cause = "link" if not pinned and self._link_moved(reading, now) else ""
        tpt = window.tpt
        if tpt is not None and window.tokens >= 2 * self._settings.min_tokens:
            self.tpt = tpt
            self._window = Meter(reading)
            if not pinned and self._tpt_drift.observe("tpt", tpt, now):
                cause = "tpt"
        if cause and now - self._search_ended >= self._cooldown:
            self._search_again(cause, now)

    def _link_moved(self, reading: Reading, now: float) -> bool:
        moved = False
        least = _LINK_SHARE * (self.tpt or 0.0)
        for name in ("alpha", "gamma", "forward"):
            value = getattr(reading, name)
            if value is not None:
                moved |= self._link_drift.observe(name, value, now, least=least)
        return moved

    def _search_again(self, cause: str, now: float) -> None:
        """What was found holds no longer: a new search, in a study of its own."""
        self._stats[f"drift_{cause}"] += 1
        self._search_ended = now
        self.record = replace(self.record, campaign=self.record.campaign + 1, settled=None)
        self._best = None
        self._window = None
        self._not_before = -math.inf
        self._save(cause)
        self._wait(now)

    def _save(self, why: str) -> None:
        last = self._last
        described = "" if last is None else device_class(last)
        self._out.append(Save(self.device, described, self.record, why))

    def _new_drift(self) -> Drift:
        return Drift(self._settings.drift, self._settings.drift_hold_s)
