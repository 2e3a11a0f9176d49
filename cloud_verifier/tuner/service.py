"""The tuner as it runs: one loop that reads, decides, and carries out.

One thread does everything but MQTT. A cycle renews the leases, reads the source once for all
devices, gives both to the core, and carries out what that wants done, as far as the time of a cycle
goes; the rest comes first in the next. Nothing is published in a cycle without renewed leases.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from broker.clock import Clock, MonotonicClock
from broker.errors import TransportError
from cloud_verifier.tuner.configs import Configs
from cloud_verifier.tuner.core.fleet import TunerCore
from cloud_verifier.tuner.core.messages import (
    TRIAL,
    Ask,
    Choice,
    Effect,
    Fail,
    Publish,
    Save,
    Tell,
)
from cloud_verifier.tuner.core.studies import Studies
from cloud_verifier.tuner.database import BrokenStudyError, StudyError
from cloud_verifier.tuner.registry import Registry
from cloud_verifier.tuner.sources import Source, SourceError

log = logging.getLogger(__name__)

#: Share of the interval for which effects are carried out in one cycle.
_BUSY_SHARE = 0.8
#: Leases asked for in one cycle.
_MAX_ACQUIRED = 200
#: Seconds after a connection for what the broker retains to arrive.
SETTLE_S = 1.0


class Tuner:
    """See the module. ``stats``: counts by cause, beside those of ``core.stats``."""

    def __init__(
        self,
        core: TunerCore,
        source: Source,
        studies: Studies,
        registry: Registry,
        configs: Configs,
        *,
        interval: float = 5.0,
        lease_s: float = 30.0,
        clock: Clock | None = None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.core = core
        self.source = source
        self.studies = studies
        self.registry = registry
        self.configs = configs
        self.stats: Counter[str] = Counter()
        self.lock = threading.Lock()  # held while the core changes
        self._interval = interval
        self._lease_s = lease_s
        self._clock = clock or MonotonicClock()
        self._say = say
        self._renewed = float("-inf")
        self._quiet: set[str] = set()  # what was said already and still lasts

    # -- the loop ---------------------------------------------------------------------------------

    def run(self, over: threading.Event) -> None:
        """Cycle after cycle until ``over``; then the leases are given back."""
        try:
            over.wait(SETTLE_S)
            while not over.is_set():
                began = time.monotonic()
                self.cycle()
                over.wait(max(0.05, self._interval - (time.monotonic() - began)))
        finally:
            try:
                self.registry.release()
            except StudyError as error:
                log.warning("leases are left to run out: %s", error)

    def cycle(self) -> None:
        """One reading and what follows from it. Raises nothing that another cycle may mend."""
        renewed = self._sync()
        try:
            readings = self.source.read()
        except SourceError as error:
            self.stats[f"source_{error.cause}"] += 1
            self._complain("source", f"nothing is known of the devices: {error}")
        else:
            self._quiet.discard("source")
            self.stats["readings"] += len(readings)
            with self.lock:
                self.core.receive(readings, self._clock.now())
        if renewed:
            self._acquire()
            self._carry_out()

    def _sync(self) -> bool:
        """Renew the leases and hear what the operator wants; False: the storage does not answer."""
        try:
            rows = self.registry.sync(self._clock.now())
        except StudyError as error:
            self._storage_failed(error)
            return False
        self._quiet.discard("storage")
        self._renewed = self._clock.now()
        with self.lock:
            unsaved = self.core.unsaved
            for name in list(self.core.devices):
                row = rows.get(name)
                if row is None or row.owner != self.registry.owner:
                    self.core.lost(name)
                elif name not in unsaved:
                    self.core.update(name, row.record)
        return True

    def _acquire(self) -> None:
        wanted = self.core.strangers[:_MAX_ACQUIRED]
        if not wanted:
            return
        refused = self.registry.refused
        try:
            records = self.registry.acquire(wanted, self._clock.now())
            self.stats["table_full"] += self.registry.refused - refused
            for name, record in records.items():
                try:
                    left = self.studies.fail_running(name, record.campaign, "tuner_gone")
                except BrokenStudyError as error:
                    self._study_broken(error)
                    continue
                if left:
                    self.stats["trials_left_behind"] += left
                    self._say(f"{name}: {left} trial of a tuner that is gone failed")
        except StudyError as error:
            # The leases stand; they are granted when the next sync shows them as this tuner's.
            self._storage_failed(error)
            return
        with self.lock:
            for name, record in records.items():
                self.core.granted(name, record)

    def _carry_out(self) -> None:
        until = self._clock.now() + _BUSY_SHARE * self._interval
        # An answer makes further effects, but none of its own kind: this ends.
        while (effect := self._next(until)) is not None:
            try:
                self._do(effect)
            except BrokenStudyError as error:
                # What was to be told to it is lost; the others are asked all the same.
                self._study_broken(error)
                with self.lock:
                    self.core.study_failed(effect.device)
            except StudyError as error:
                self._storage_failed(error)
                with self.lock:
                    if not isinstance(effect, Ask):
                        self.core.put_back(effect)
                        return
                    self.core.study_failed(effect.device)

    def _next(self, until: float) -> Effect | None:
        now = self._clock.now()
        with self.lock:
            if now > until:
                self.stats["put_off"] += self.core.pending > 0
                return None
            # Half a lease: another tuner cannot have taken over by then.
            if now - self._renewed > 0.5 * self._lease_s:
                self.stats["late"] += 1
                return None
            return self.core.next_effect()

    # -- one effect -------------------------------------------------------------------------------

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, Ask):
            answer = self.studies.ask(effect.device, effect.campaign, effect.device_class)
            if isinstance(answer, Choice):
                self._say(
                    f"{effect.device}: settled on {answer.pair} after {answer.trials} trials"
                    + (f", {1e3 * answer.tpt:.1f} ms a token" if answer.tpt else "")
                )
            else:
                best = "" if answer.best is None else f", best {1e3 * answer.best.tpt:.1f} ms"
                self._say(
                    f"{effect.device}: trial {answer.index}/{answer.budget} {answer.pair}{best}"
                )
            with self.lock:
                self.core.proposed(effect.device, answer, effect.campaign)
        elif isinstance(effect, Publish):
            self._publish(effect)
        elif isinstance(effect, Tell):
            self.studies.tell(
                effect.device,
                effect.campaign,
                effect.number,
                effect.tpt,
                effect.tokens,
                early=effect.early,
            )
            dropped = ", dropped early" if effect.early else ""
            self._say(
                f"{effect.device}: {1e3 * effect.tpt:.1f} ms a token "
                f"over {effect.tokens:.0f}{dropped}"
            )
        elif isinstance(effect, Fail):
            self.studies.fail(effect.device, effect.campaign, effect.number, effect.cause)
            self._say(f"{effect.device}: trial failed ({effect.cause})")
        else:
            self._save(effect)

    def _publish(self, effect: Publish) -> None:
        try:
            version = self.configs.publish(effect.device, effect.pair, anew=effect.why == TRIAL)
        except TransportError as error:
            self.stats["publish_failed"] += 1
            self._complain("publish", f"no config goes out: {error}")
            with self.lock:
                self.core.not_published(effect.device, effect.why)
            return
        self._quiet.discard("publish")
        with self.lock:
            self.core.published(effect.device, effect.why, version)

    def _save(self, effect: Save) -> None:
        if not self.registry.save(effect.device, effect.device_class, effect.record):
            self.stats["overtaken"] += 1  # by the operator: the next sync tells the core
        elif effect.why != "settled":
            self._say(f"{effect.device}: {effect.why} moved, so it is tuned again")

    # -- trouble ----------------------------------------------------------------------------------

    def _study_broken(self, error: BrokenStudyError) -> None:
        # Said each time: the device's pause grows with each failure.
        self.stats["broken_studies"] += 1
        log.warning("%s", error)

    def _storage_failed(self, error: StudyError) -> None:
        self.stats["storage_errors"] += 1
        self._complain("storage", f"the storage does not answer: {error}")

    def _complain(self, what: str, line: str) -> None:
        """Once, until it is over."""
        if what not in self._quiet:
            self._quiet.add(what)
            log.warning("%s", line)
