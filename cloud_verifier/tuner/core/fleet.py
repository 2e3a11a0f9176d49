"""All devices of one tuner: who is known, whose turn it is, what one reading changes.

Time here is the core's own. It goes on only with readings: while the source is away nothing times
out, and a machine that slept, or a clock that jumped, counts as one interval.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from cloud_verifier.tuner.core.device import AWAY, PHASES, SEARCHING, DeviceTuner
from cloud_verifier.tuner.core.messages import (
    Choice,
    Effect,
    Proposal,
    Record,
    Save,
    TunerSettings,
)
from cloud_verifier.tuner.core.readings import Reading


class TunerCore:
    """See the module. ``wanted(device)``: whether this tuner is to mind it.

    ``stats``: counts by cause. A device becomes tuned when its lease is ``granted``.
    """

    def __init__(
        self,
        settings: TunerSettings,
        *,
        wanted: Callable[[str], bool] = lambda _: True,
        longest_step: float = 60.0,
    ) -> None:
        """``longest_step``: seconds that may pass between two readings as far as it is known."""
        self.settings = settings
        self.stats: Counter[str] = Counter()
        self.devices: dict[str, DeviceTuner] = {}
        self.now = 0.0
        self._wanted = wanted
        self._longest_step = longest_step
        self._clock: float | None = None
        self._out: deque[Effect] = deque()
        # Known, but without a lease: the last reading and when it was new.
        self._strangers: dict[str, tuple[Reading, float]] = {}

    def receive(self, readings: Iterable[Reading], clock: float) -> None:
        """A whole reading of the source. ``clock``: seconds of any clock."""
        if self._clock is not None:
            self.now += min(max(0.0, clock - self._clock), self._longest_step)
        self._clock = clock
        now = self.now
        for reading in readings:
            device = self.devices.get(reading.device)
            if device is not None:
                if device.last is None or device.last.seen != reading.seen:
                    device.heard(reading, now)
            elif self._wanted(reading.device):
                self._meet(reading)
        for name, device in list(self.devices.items()):
            device.handle_timer(now)
            if device.phase == AWAY and now - device.seen_at > self.settings.forget_s:
                del self.devices[name]
                self.stats["forgotten"] += 1
        for name, (_, seen_at) in list(self._strangers.items()):
            if now - seen_at > self.settings.ttl_s:
                del self._strangers[name]
        self._fill_places()

    def _meet(self, reading: Reading) -> None:
        known = self._strangers.get(reading.device)
        if known is None and len(self.devices) + len(self._strangers) >= self.settings.max_devices:
            self.stats["too_many_devices"] += 1
            return
        if known is None or known[0].seen != reading.seen:
            self._strangers[reading.device] = (reading, self.now)

    def _fill_places(self) -> None:
        places = self.settings.parallel - self.searching
        if places <= 0:
            return
        ready = [device for device in self.devices.values() if device.ready(self.now)]
        ready.sort(key=lambda device: device.waiting_since)
        for device in ready[:places]:
            device.begin(self.now)

    # -- leases -----------------------------------------------------------------------------------

    @property
    def strangers(self) -> list[str]:
        """Devices that tell something and for which this tuner has no lease."""
        return list(self._strangers)

    def granted(self, name: str, record: Record) -> None:
        """This tuner alone minds the device from now on."""
        known = self._strangers.pop(name, None)
        if known is None or name in self.devices:
            return
        device = DeviceTuner(name, record, self.settings, self._out, self.stats)
        self.devices[name] = device
        device.heard(known[0], self.now)

    def lost(self, name: str) -> None:
        """Another tuner minds the device now."""
        device = self.devices.pop(name, None)
        if device is not None:
            self.stats["leases_lost"] += 1
            device.lost()
            kept = [effect for effect in self._out if effect.device != name]
            self._out.clear()
            self._out.extend(kept)

    def update(self, name: str, record: Record) -> None:
        """What the storage says about the device; the operator may have changed it."""
        device = self.devices.get(name)
        if device is not None and device.record != record:
            device.update(record, self.now)

    # -- effects and answers ----------------------------------------------------------------------

    def next_effect(self) -> Effect | None:
        """The oldest thing to do."""
        return self._out.popleft() if self._out else None

    @property
    def pending(self) -> int:
        """Things to do."""
        return len(self._out)

    @property
    def unsaved(self) -> set[str]:
        """Devices of which something is still to be saved."""
        return {effect.device for effect in self._out if isinstance(effect, Save)}

    def put_back(self, effect: Effect) -> None:
        """There was no time for it: it comes first next time."""
        self._out.appendleft(effect)

    def proposed(self, name: str, answer: Proposal | Choice, campaign: int) -> None:
        """See DeviceTuner."""
        if (device := self.devices.get(name)) is not None:
            device.proposed(answer, campaign, self.now)

    def study_failed(self, name: str) -> None:
        """See DeviceTuner."""
        if (device := self.devices.get(name)) is not None:
            device.study_failed(self.now)

    def published(self, name: str, why: str, version: int) -> None:
        """See DeviceTuner."""
        if (device := self.devices.get(name)) is not None:
            device.published(why, version, self.now)

    def not_published(self, name: str, why: str) -> None:
        """See DeviceTuner."""
        if (device := self.devices.get(name)) is not None:
            device.not_published(why, self.now)

    # -- for who looks on -------------------------------------------------------------------------

    @property
    def searching(self) -> int:
        """Devices that take a place in the search."""
        return sum(device.phase in SEARCHING for device in self.devices.values())

    @property
    def places(self) -> int:
        """Devices that may be searched at a time."""
        return self.settings.parallel

    @property
    def phases(self) -> dict[str, int]:
        """How many devices are in each phase."""
        found = dict.fromkeys(PHASES, 0)
        for device in self.devices.values():
            found[device.phase] += 1
        return found
