"""What an emulated link and device are like, and the scenarios that have a name.

Everything here is settings, checked when made. ``edge_agent.bench.link_model`` says when a byte
leaves and arrives over such a link, ``edge_agent.bench.relay`` makes real connections feel it.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from broker.errors import ConfigError

WIRE_IDS = "ids"
WIRE_FULL_PROBS = "full-probs"
#: "ids": what this system sends. "full-probs": the uplink is charged as if each drafted token
#: carried the draft's whole distribution, as the paper's authors send it; nothing is really padded.
WIRES = (WIRE_IDS, WIRE_FULL_PROBS)
#: Bytes per drafted token that the authors upload (about 0.29 MB).
FULL_PROBS_BYTES = 290_000

#: Seconds that any single setting may be: an hour of delay is a slip of the pen.
MAX_SECONDS = 3_600.0
#: Bits per second; below the first a full packet takes minutes, the second is no radio.
MIN_RATE, MAX_RATE = 1e3, 1e12
#: Changes of rate, and cuts, in one link.
MAX_CHANGES = 10_000


def _check_number(what: str, value: object, low: float, high: float) -> None:
    # NaN fails every comparison, so the range also keeps it out.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{what} {value!r} is no number from {low:g} to {high:g}: mend it")


def _check_rate(what: str, value: object) -> None:
    if value is not None:
        _check_number(f"{what} (bits per second)", value, MIN_RATE, MAX_RATE)


def _check_ascending(what: str, items: object, kind: type) -> None:
    if not isinstance(items, tuple) or not all(isinstance(item, kind) for item in items):
        raise ConfigError(f"{what}: a tuple of {kind.__name__} is wanted")
    if len(items) > MAX_CHANGES:
        raise ConfigError(f"{what}: {len(items)} of them, above {MAX_CHANGES}: give fewer")
    last = -math.inf
    for item in items:
        if not item.at_s > last:
            raise ConfigError(f"{what}: {item.at_s} s does not come after {last} s: sort by time")
        last = item.at_s


def _settings(kind: type, data: object, what: str) -> dict[str, Any]:
    """``data`` as keyword arguments of the dataclass ``kind``."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{what}: {str(data)[:60]!r} is no table of settings")
    fields = dataclasses.fields(kind)
    names = [one.name for one in fields]
    for name in data:
        if name not in names:
            raise ConfigError(f"{what}: unknown setting {name!r}: there are {', '.join(names)}")
    for one in fields:
        needed = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if needed and one.name not in data:
            raise ConfigError(f"{what}: the setting {one.name} is missing: give it")
    return dict(data)


@dataclass(frozen=True, slots=True)
class RateChange:
    """From ``at_s`` seconds on both directions have these rates in bits per second; None: no limit.

    Raises ConfigError.
    """

    at_s: float
    up_bps: float | None
    down_bps: float | None

    def __post_init__(self) -> None:
        _check_number("at_s of a rate change", self.at_s, 0.0, 1e6)
        _check_rate("up_bps of a rate change", self.up_bps)
        _check_rate("down_bps of a rate change", self.down_bps)


@dataclass(frozen=True, slots=True)
class Cut:
    """At ``at_s`` seconds every connection ends; for ``for_s`` seconds none comes about.

    Raises ConfigError.
    """

    at_s: float
    for_s: float = 0.0

    def __post_init__(self) -> None:
        _check_number("at_s of a cut", self.at_s, 0.0, 1e6)
        _check_number("for_s of a cut", self.for_s, 0.0, MAX_SECONDS)


@dataclass(frozen=True, slots=True)
class Link:
    """One device's link to its broker. Times in seconds, rates in bits per second.

    ``up_bps``, ``down_bps``: None for no limit. ``delay_s``: propagation, one way, either way.
    ``startup_s``: what each message costs the uplink before its first bit; it occupies the uplink
    as a radio's grant does, so the next message waits for it. ``jitter_s``: each message is under
    way for up to this much longer (uniformly), never so that it would overtake another.
    ``stall_probability``, ``stall_s``: a message is late by that much with that probability, and
    everything behind it waits, which is how TCP shows the loss of a packet.

    ``rates``: changes with ascending times, counted from the link's start; ``rates_repeat_s``:
    the whole schedule begins again after so long, 0: the last rates stay. ``cuts``: ascending.

    Raises ConfigError.
    """

    up_bps: float | None = None
    down_bps: float | None = None
    delay_s: float = 0.0
    startup_s: float = 0.0
    jitter_s: float = 0.0
    stall_probability: float = 0.0
    stall_s: float = 0.0
    rates: tuple[RateChange, ...] = ()
    rates_repeat_s: float = 0.0
    cuts: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        _check_rate("up_bps", self.up_bps)
        _check_rate("down_bps", self.down_bps)
        for name in ("delay_s", "startup_s", "jitter_s", "stall_s"):
            _check_number(name, getattr(self, name), 0.0, MAX_SECONDS)
        _check_number("stall_probability", self.stall_probability, 0.0, 1.0)
        _check_number("rates_repeat_s", self.rates_repeat_s, 0.0, 1e6)
        _check_ascending("rates", self.rates, RateChange)
        _check_ascending("cuts", self.cuts, Cut)
        if self.rates and self.rates[0].at_s == 0.0:
            raise ConfigError("rates: the first change is at 0 s: give it as up_bps and down_bps")
        if self.rates_repeat_s and not self.rates:
            raise ConfigError("rates_repeat_s without rates: there is nothing to repeat")
        if self.rates_repeat_s and self.rates_repeat_s <= self.rates[-1].at_s:
            raise ConfigError(
                f"rates_repeat_s {self.rates_repeat_s} is not after the last change at "
                f"{self.rates[-1].at_s} s: repeat later"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> Link:
        """The inverse of ``to_dict``; what is left out has its default. Raises ConfigError."""
        values = _settings(cls, data, "link")
        for name, kind in (("rates", RateChange), ("cuts", Cut)):
            if name in values:
                if not isinstance(values[name], list | tuple):
                    raise ConfigError(f"link: {name} is no list: give a list, [] for none")
                values[name] = tuple(kind(**_settings(kind, item, name)) for item in values[name])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A link and a pair of devices to measure on.

    ``gamma_floor_s``: least seconds that drafting one token takes, to stand for a slower device.
    ``forward_floor_s``: least seconds of a forward of the target. ``wire``: one of WIRES.
    ``note``: where the figures come from, for reports.

    Raises ConfigError.
    """

    name: str
    link: Link = field(default_factory=Link)
    gamma_floor_s: float = 0.0
    forward_floor_s: float = 0.0
    wire: str = WIRE_IDS
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 1 <= len(self.name) <= 64:
            raise ConfigError(f"scenario name {self.name!r}: use 1 to 64 characters")
        if not isinstance(self.link, Link):
            raise ConfigError(f"scenario {self.name}: the link is no Link")
        if not isinstance(self.note, str):
            raise ConfigError(f"scenario {self.name}: the note is no text")
        _check_number("gamma_floor_s", self.gamma_floor_s, 0.0, MAX_SECONDS)
        _check_number("forward_floor_s", self.forward_floor_s, 0.0, MAX_SECONDS)
        if self.wire not in WIRES:
            raise ConfigError(f"wire {self.wire!r} is none of {', '.join(WIRES)}")

    @property
    def pad_bytes_per_token(self) -> int:
        """Bytes that the uplink is charged for each drafted token on top of what is sent."""
        return FULL_PROBS_BYTES if self.wire == WIRE_FULL_PROBS else 0

    @property
    def label(self) -> str:
        """The name for tables, which tells when the wire is not this system's own."""
        return self.name if self.wire == WIRE_IDS else f"{self.name} [{self.wire}]"

    def with_wire(self, wire: str) -> Scenario:
        """The same on another wire. Raises ConfigError."""
        return dataclasses.replace(self, wire=wire)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> Scenario:
        """The inverse of ``to_dict``. Raises ConfigError."""
        values = _settings(cls, data, "scenario")
        if "name" not in values:
            raise ConfigError("scenario: the name is missing: give one")
        if "link" in values:
            values["link"] = Link.from_dict(values["link"])
        return cls(**values)


def varying_rates(
    up_mbps: tuple[float, float],
    down_mbps: tuple[float, float],
    *,
    every_s: float,
    steps: int,
    seed: int,
) -> Link:
    """A link whose rates are drawn anew every ``every_s`` seconds, uniformly in Mbps.

    After ``steps`` draws the schedule begins again. The same seed gives the same link.
    """
    draw = random.Random(seed)  # noqa: S311  (a simulation, repeatable on purpose)
    drawn = [
        (round(draw.uniform(*up_mbps), 1) * 1e6, round(draw.uniform(*down_mbps), 1) * 1e6)
        for _ in range(steps)
    ]
    (up, down), rest = drawn[0], drawn[1:]
    rates = tuple(RateChange(every_s * (i + 1), *pair) for i, pair in enumerate(rest))
    return Link(up, down, rates=rates, rates_repeat_s=every_s * steps if rates else 0.0)


def _named() -> dict[str, Scenario]:
    mbps = 1e6
    # The paper reports no round-trip time. 10 ms one way and 2 ms per message: a wireless network
    # with a good uplink and a data centre of the same region.
    delay, startup = 0.010, 0.002
    s1 = Link(20 * mbps, 200 * mbps, delay_s=delay, startup_s=startup)
    s4 = dataclasses.replace(
        varying_rates((10, 80), (150, 280), every_s=20.0, steps=45, seed=4),
        delay_s=delay,
        startup_s=startup,
    )
    chosen = "delay and start-up chosen (20 ms round trip, 2 ms): the paper gives none"
    four_g = Link(20 * mbps, 50 * mbps, delay_s=0.025, startup_s=0.015)
    rates = "rates chosen: they hardly matter to token ids"
    all_scenarios = (
        # 25 to 36 ms per drafted token were the authors' on their laptop.
        Scenario("S1", s1, 0.030, note=f"the paper's laptop, 20/200 Mbps; {chosen}; draft 30 ms"),
        # The laptop boosts to 5.1 GHz; its 30 ms, scaled by the clocks. For S3 this also puts
        # drafting near the upload of one distribution (116 ms), where overlapping the two gains
        # most, and the paper's gain is the largest there.
        Scenario(
            "S2", s1, 0.061, note=f"2.5 GHz phone: S1's link; draft 30 ms x 5.1/2.5 GHz; {chosen}"
        ),
        Scenario(
            "S3", s1, 0.128, note=f"1.2 GHz board: S1's link; draft 30 ms x 5.1/1.2 GHz; {chosen}"
        ),
        Scenario(
            "S4",
            s4,
            0.030,
            note=f"S1's laptop, 10-80/150-280 Mbps drawn every 20 s for 15 minutes; {chosen}",
        ),
        Scenario(
            "wifi",
            Link(100 * mbps, 300 * mbps, delay_s=0.005, startup_s=0.002),
            note=f"5 ms one way, 2 ms start-up; {rates}",
        ),
        Scenario("4g", four_g, note=f"25 ms one way, 15 ms start-up; {rates}"),
        Scenario(
            "far",
            Link(20 * mbps, 50 * mbps, delay_s=0.080, startup_s=0.015),
            note=f"80 ms one way, 15 ms start-up; {rates}",
        ),
        Scenario("slow-edge", four_g, 0.030, note="4g with at least 30 ms per drafted token"),
        Scenario("loopback", note="no emulation"),
    )
    return {scenario.name: scenario for scenario in all_scenarios}


#: What ``--scenario`` names.
SCENARIOS: Mapping[str, Scenario] = _named()


def find_scenario(name: str) -> Scenario:
    """The scenario of that name. Raises ConfigError that lists the names."""
    found = SCENARIOS.get(name)
    if found is None:
        raise ConfigError(f"unknown scenario {name!r}: choose among {', '.join(SCENARIOS)}")
    return found
