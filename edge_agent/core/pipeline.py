"""Token batches that overlap drafting with uploading (paper 3.2, Algorithm 1), exact in O(n).

Token j of a window is drafted at ``gamma * j``. A message of k tokens keeps the link busy for
``occupancy + beta * k`` and arrives ``propagation`` later; the next may leave as soon as the link
is free. With everything of alpha in ``occupancy`` that is the paper's cost ("serial"); with a part
of it in ``propagation`` a message in flight does not block the next ("pipelined").

The earliest time at which the link is done with the first j tokens is

    done[j] = min over i < j of  max(done[i], gamma * j) + occupancy + beta * (j - i)

and propagation, the same for every plan, only adds to the end. Taking the last token out of a plan
ends it at least ``beta`` earlier, so ``done[i] - beta * i`` never falls as i grows. Among the i
with ``done[i] <= gamma * j`` (the link waits for the draft) the largest is therefore best, among
the others (the draft waits for the link) the smallest. They are neighbours, and only move up with
j: two candidates a token instead of j.

The plan with the fewest messages that ends by a given time is then found from the end, each time
with the longest message that can still begin once its last token is there: what is left behind a
longer message is the start of what is left behind a shorter one, due ``beta`` earlier for each
token that it lacks, hence never harder.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from broker.errors import ConfigError

#: Tokens in one window.
MAX_WINDOW = 512
#: The largest cost, in seconds, that anything here may have.
MAX_SECONDS = 86_400.0
#: Plans whose times differ by less than this share count as equally good.
ROUNDING = 1e-12
#: Halvings of a slack when it is found how little of it is needed.
BISECTIONS = 40
#: A parameter has moved when it differs from the plan's by more than this share (appendix D.2)...
TOLERANCE = 0.2
#: ... and by more than this many seconds (beta: over the whole window).
FLOOR = 1e-4

SERIAL = "serial"
PIPELINED = "pipelined"


def _check_seconds(name: str, value: float) -> None:
    if not 0.0 <= value <= MAX_SECONDS:
        raise ConfigError(f"{name} {value!r} is outside 0 to {MAX_SECONDS:.0f} seconds")


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What an uplink message costs, in seconds.

    ``occupancy``: the link is busy with each message for so long; ``propagation``: from there to
    its arrival; ``beta``: busy for each token of it. Raises ConfigError.
    """

    occupancy: float
    propagation: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds("occupancy", self.occupancy)
        _check_seconds("propagation", self.propagation)
        _check_seconds("beta", self.beta)

    @property
    def alpha(self) -> float:
        """The paper's start-up cost of one message."""
        return self.occupancy + self.propagation


def plan(n: int, link: LinkCost, gamma: float, slack: float = 0.0) -> tuple[int, ...]:
    """Where the messages of a window of ``n`` tokens end: ascending token counts, the last ``n``.

    Of the splits that deliver all of it within ``slack`` seconds of the earliest possible, one with
    the fewest messages, and the earliest of those. ``slack`` is what it may cost to save messages.
    Raises ConfigError for ``n`` outside 1 to MAX_WINDOW or times outside 0 to MAX_SECONDS.
    """
    if not 1 <= n <= MAX_WINDOW:
        raise ConfigError(f"planning window {n} is outside 1 to {MAX_WINDOW}")
    _check_seconds("gamma", gamma)
    _check_seconds("slack", slack)
    due = _earliest(n, link.occupancy, link.beta, gamma)
    ends = _fewest(n, link.occupancy, link.beta, gamma, due)
    if slack > 0.0 and len(ends) > 1:
        late = due + slack
        saving = _fewest(n, link.occupancy, link.beta, gamma, late)
        if len(saving) < len(ends):
            # Fewer do; now as early as with so many.
            for _ in range(BISECTIONS):
                middle = (due + late) / 2.0
                found = _fewest(n, link.occupancy, link.beta, gamma, middle)
                if len(found) > len(saving):
                    due = middle
                else:
                    late, saving = middle, found
            return saving
    return ends


def _fewest(n: int, occupancy: float, beta: float, gamma: float, due: float) -> tuple[int, ...]:
    """The ends of the fewest messages that the link is done with at ``due``, if it can be."""
    due *= 1.0 + ROUNDING
    ends = []
    end = n
    while end > 0:
        ends.append(end)
        room = due - occupancy - gamma * end
        # Not by division alone: beta may be zero, or too small to divide by.
        size = end if beta * end <= room else min(max(int(room / beta), 1), end)
        end -= size
        due -= occupancy + beta * size
    return tuple(reversed(ends))


def _earliest(n: int, occupancy: float, beta: float, gamma: float) -> float:
    """``done[n]`` of the module's text, in seconds."""
    done = [0.0]
    idle = 0  # the last prefix that the link is done with when token j is there
    for j in range(1, n + 1):
        ready = gamma * j
        while idle + 1 < j and done[idle + 1] <= ready:
            idle += 1
        best = ready + occupancy + beta * (j - idle)
        if idle + 1 < j:
            best = min(best, done[idle + 1] + occupancy + beta * (j - idle - 1))
        done.append(best)
    return done[n]


def delivery_time(ends: Sequence[int], link: LinkCost, gamma: float) -> float:
    """Seconds until the last of the messages that end at ``ends`` has arrived (equations 2-6)."""
    free = 0.0
    begin = 0
    for end in ends:
        free = max(free, gamma * end) + link.occupancy + link.beta * (end - begin)
        begin = end
    return free + link.propagation


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a plan follows from: a window of ``n`` tokens, the link, seconds to draft a token."""

    n: int
    link: LinkCost
    gamma: float


def replan_needed(old: PlanInputs, new: PlanInputs) -> bool:
    """Whether a plan made for ``old`` is out of date (appendix D.2).

    That is when the window differs, or occupancy, beta or gamma moved by more than TOLERANCE and
    FLOOR. Propagation has no say in a plan; when part of alpha turns out to be propagation, the
    occupancy moves.
    """
    return (
        new.n != old.n
        or _moved(old.link.occupancy, new.link.occupancy, FLOOR)
        or _moved(old.link.beta, new.link.beta, FLOOR / old.n)
        or _moved(old.gamma, new.gamma, FLOOR)
    )


def _moved(old: float, new: float, floor: float) -> bool:
    return abs(new - old) > max(TOLERANCE * old, floor)


class Plan:
    """The batches of a window, used again and again with its length as the period."""

    __slots__ = ("_ends_here", "ends", "inputs", "time")

    def __init__(self, inputs: PlanInputs, slack: float = 0.0) -> None:
        self.inputs = inputs
        self.ends = plan(inputs.n, inputs.link, inputs.gamma, slack)
        #: Seconds until a whole window has arrived, by the model.
        self.time = delivery_time(self.ends, inputs.link, inputs.gamma)
        ends = frozenset(self.ends)
        self._ends_here = tuple(token in ends for token in range(1, inputs.n + 1))

    def ends_message(self, count: int) -> bool:
        """Whether the ``count``-th token (from 1) since the planning began is a message's last."""
        return self._ends_here[(count - 1) % self.inputs.n]


class Planner:
    """The plan in force. ``replans`` counts how often it was made."""

    def __init__(self, n: int, link: LinkCost, gamma: float, slack: float = 0.0) -> None:
        self.slack = slack
        self.replans = 1
        self._plan = Plan(PlanInputs(n, link, gamma), slack)

    @property
    def plan(self) -> Plan:
        return self._plan

    def update(self, n: int, link: LinkCost, gamma: float) -> bool:
        """Take new estimates; whether they called for a new plan.

        A changed plan begins a window: the caller counts tokens from 1 again.
        """
        inputs = PlanInputs(n, link, gamma)
        if not replan_needed(self._plan.inputs, inputs):
            return False
        self._plan = Plan(inputs, self.slack)
        self.replans += 1
        return True


class WindowLength:
    """The planning window: the mean length of the latest draft sequences, ``first`` before any."""

    def __init__(self, first: int = 20, keep: int = 100, top: int = MAX_WINDOW) -> None:
        if not (1 <= first <= top <= MAX_WINDOW and 1 <= keep <= 10_000):
            raise ConfigError(
                f"planning window from {first} over {keep} sequences up to {top}: they must lie "
                f"within 1 to {MAX_WINDOW}, and 1 to 10000 sequences"
            )
        self._first = first
        self._top = top
        self._lengths: deque[int] = deque(maxlen=keep)
        self._sum = 0

    def add(self, length: int) -> None:
        """A draft sequence of ``length`` tokens was sent for verification; 0: there was none."""
        if length < 1:
            return
        if len(self._lengths) == self._lengths.maxlen:
            self._sum -= self._lengths[0]
        self._lengths.append(length)
        self._sum += length

    @property
    def value(self) -> int:
        """Tokens, 1 to ``top``."""
        if not self._lengths:
            return self._first
        return min(self._top, math.floor(self._sum / len(self._lengths) + 0.5))
