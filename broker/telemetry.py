"""What a device tells about itself, and what it is told: ``telemetry`` and ``config``.

Telemetry goes out every few seconds at QoS 0, never retained; the next one makes up for a lost one,
since counters are absolute. ``config`` is retained, so a device hears it when it comes back; an
empty payload takes it away again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from broker.errors import LocalProtocolError
from broker.figures import BUCKETS
from broker.messages import check_count, check_text

#: Figures in one message; the table has fewer.
MAX_FIGURES = 256
#: The form of DeviceConfig that this version knows.
CONFIG_SCHEMA = 1


def _number(name: str, value: object) -> float:
    if type(value) not in (int, float):
        raise LocalProtocolError(f"{name} {value!r} is no number")
    return float(value)  # type: ignore[arg-type]  # (one of the two)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts since the agent's start. ``counts``: per bucket of BUCKETS and one for what is above,
    not cumulative; none at all: nothing was measured. ``total``: sum of what was measured, seconds.
    """

    counts: tuple[int, ...] = ()
    total: float = 0.0

    def __post_init__(self) -> None:
        try:
            counts = tuple(map(operator.index, self.counts))
        except TypeError:
            raise LocalProtocolError("counts of a histogram are integers") from None
        if len(counts) not in (0, len(BUCKETS) + 1) or (counts and min(counts) < 0):
            raise LocalProtocolError(f"a histogram has {len(BUCKETS) + 1} counts of 0 or more")
        if sum(counts) > 2**53:
            raise LocalProtocolError("a histogram that counts beyond 2^53")
        object.__setattr__(self, "counts", counts)
        total = _number("the sum of a histogram", self.total)
        if not 0.0 <= total < math.inf:
            raise LocalProtocolError(f"the sum {total!r} of a histogram is no number above 0")
        object.__setattr__(self, "total", total)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A device's figures. The values of ``figures`` are as they came: see ``broker.figures``.

    ``boot``: chosen anew at each start of the agent, so that counters that begin anew are told from
    late messages. ``sequence`` counts its messages from 1. ``clock``: the device's wall clock in
    Unix seconds, for the check of that clock alone; 0: unknown. ``figures``: by number; one that
    could not be measured is absent, never 0. ``energy_source``: see broker.sensors; empty: none.
    """

    boot: str
    sequence: int
    clock: float = 0.0
    figures: Mapping[int, float] = field(default_factory=dict, hash=False)
    ttft: Histogram = field(default_factory=Histogram)
    tpt: Histogram = field(default_factory=Histogram)
    version: str = ""
    draft: str = ""
    policy: str = ""
    machine: str = ""
    energy_source: str = ""

    def __post_init__(self) -> None:
        check_text("boot", self.boot, 64)
        check_count("sequence", self.sequence)
        object.__setattr__(self, "clock", _number("clock", self.clock))
        if len(self.figures) > MAX_FIGURES:
            raise LocalProtocolError(f"{len(self.figures)} figures, {MAX_FIGURES} are allowed")
        plain: dict[int, float] = {}
        for number, value in self.figures.items():
            check_count("the number of a figure", number)
            plain[number] = _number(f"figure {number}", value)
        object.__setattr__(self, "figures", plain)
        for name, top in (
            ("version", 64),
            ("draft", 200),
            ("policy", 64),
            ("machine", 200),
            ("energy_source", 64),
        ):
            check_text(name, getattr(self, name), top)


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """What a device is told to work with; it answers with ``config_version`` in its telemetry.

    ``version``: which config this is, compared for equality alone: what the broker retains last is
    in force. ``r1``, ``r2``: thresholds from 0 (rule off) to 1. ``window``: tokens after which a
    verdict is asked for in any case; 0: the device's own. ``policy``: empty: the device's own.
    ``schema``: a later form than CONFIG_SCHEMA is not applied, since it may mean something else.
    """

    version: int
    r1: float
    r2: float
    window: int = 0
    policy: str = ""
    schema: int = CONFIG_SCHEMA

    def __post_init__(self) -> None:
        check_count("schema", self.schema)
        check_count("version", self.version)
        for name in ("r1", "r2"):
            value = _number(name, getattr(self, name))
            if not 0.0 <= value <= 1.0:
                raise LocalProtocolError(f"{name} {value!r} is outside 0 to 1")
            object.__setattr__(self, name, value)
        check_count("window", self.window)
        if self.window > 512:
            raise LocalProtocolError(f"window {self.window} is above 512")
        check_text("policy", self.policy, 64)
