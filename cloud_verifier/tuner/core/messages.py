"""What passes between the tuner's core and the service around it."""

from __future__ import annotations

from dataclasses import dataclass

from broker.errors import ConfigError
from cloud_verifier.tuner.core.space import Pair


@dataclass(frozen=True, slots=True)
class TunerSettings:
    """How devices are tuned. Times in seconds of the core's own clock.

    ``min_tokens``, ``min_seconds``, ``min_generations``: what a trial is measured over at least.
    ``guard_tokens``, ``guard_factor``: from when on a trial is dropped that is surely so many
    times slower than the best. ``ack_s``, ``ack_tries``: how long and how often a config is offered
    to a device that does not take it. ``measure_s``: how long a trial may last. ``ttl_s``: silence
    after which a device counts as away, and ``forget_s`` as gone for good. ``drift``,
    ``drift_hold_s``: see Drift. ``cooldown_s`` to ``max_cooldown_s``: between two searches on one
    device. ``retry_s`` to ``max_retry_s``: pause after a failed trial, doubled each time.
    ``parallel``: devices searched at a time; what they find helps those that come after.
    ``max_devices``: known at a time. Raises ConfigError.
    """

    min_tokens: int = 50
    min_seconds: float = 5.0
    min_generations: int = 1
    guard_tokens: int = 20
    guard_factor: float = 1.5
    ack_s: float = 60.0
    ack_tries: int = 3
    measure_s: float = 600.0
    ttl_s: float = 60.0
    forget_s: float = 3600.0
    drift: float = 0.2
    drift_hold_s: float = 60.0
    cooldown_s: float = 300.0
    max_cooldown_s: float = 3600.0
    retry_s: float = 30.0
    max_retry_s: float = 3600.0
    parallel: int = 16
    max_devices: int = 10_000

    def __post_init__(self) -> None:
        if not 1 <= self.min_tokens <= 1_000_000:
            raise ConfigError(f"{self.min_tokens} tokens a trial: give 1 to 1000000")
        if not (0 <= self.min_generations <= 1_000_000 and self.guard_tokens >= 1):
            raise ConfigError("generations of a trial and tokens of the guard: 0 and 1 at least")
        if not self.guard_factor > 1.0:
            raise ConfigError(f"the guard's factor {self.guard_factor:g} is not above 1")
        if not 0.0 < self.drift < 10.0:
            raise ConfigError(f"--drift {self.drift:g} is not between 0 and 10: 0.2 is usual")
        if min(self.parallel, self.max_devices, self.ack_tries) < 1:
            raise ConfigError("searches at a time, devices and tries: at least 1")
        for name in (
            "min_seconds",
            "ack_s",
            "measure_s",
            "ttl_s",
            "forget_s",
            "drift_hold_s",
            "cooldown_s",
            "max_cooldown_s",
            "retry_s",
            "max_retry_s",
        ):
            # NaN fails the comparison.
            if not 0.0 <= getattr(self, name) <= 1e9:
                raise ConfigError(f"{name} {getattr(self, name)!r}: seconds from 0 to 1e9")


@dataclass(frozen=True, slots=True)
class Choice:
    """The best pair of a search. ``tpt``: seconds per token seen; ``trials``: that were told."""

    pair: Pair
    tpt: float
    trials: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """A trial to make: ``pair``, the study's ``number`` of it, the ``index``-th of ``budget``.

    ``best``: so far, None at first. ``weight``: times the usual tokens to measure it over.
    """

    number: int
    pair: Pair
    index: int
    budget: int
    best: Choice | None = None
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept about a device beside its study. ``campaign``: its current search.

    ``settled``: how that ended, None: it goes on. ``pin``: what the operator demands.
    """

    campaign: int = 1
    settled: Choice | None = None
    pin: Pair | None = None


# -- what the core wants done, answered through its methods ----------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """The next trial: ``proposed`` or ``study_failed``. ``device_class``: empty: unknown."""

    device: str
    campaign: int
    device_class: str


@dataclass(frozen=True, slots=True)
class Publish:
    """A config with ``pair``: ``published`` or ``not_published``. ``why``: trial, best, pin, back.

    Only a trial needs a new version where the retained config says the same already.
    """

    device: str
    pair: Pair
    why: str


@dataclass(frozen=True, slots=True)
class Tell:
    """A trial ended: ``tpt`` seconds per token over ``tokens``. ``early``: the guard dropped it."""

    device: str
    campaign: int
    number: int
    tpt: float
    tokens: float
    early: bool


@dataclass(frozen=True, slots=True)
class Fail:
    """A trial came to nothing; ``cause`` is a short label."""

    device: str
    campaign: int
    number: int
    cause: str


@dataclass(frozen=True, slots=True)
class Save:
    """Keep ``record``; its pin is the operator's. ``why``: settled, or what drifted."""

    device: str
    device_class: str
    record: Record
    why: str


Effect = Ask | Publish | Tell | Fail | Save

TRIAL, BEST, PIN, BACK = "trial", "best", "pin", "back"
