"""What the devices of a fleet have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edge_agent.bench.traces import Trace
from edge_agent.core.config import DEFAULT_VERIFY
from edge_agent.core.policies import Policy


@dataclass(frozen=True, slots=True)
class Habits:
    """What all devices of a fleet do. Times in seconds.

    ``texts``: one is drawn for each generation. ``think_s``: mean pause between two generations.
    ``generations``: of each device, None: until ``until`` on the clock, when none begins any more.
    ``patience_s``: silence or refusals after which a generation has failed. ``hang_up``: share of
    generations that nobody wants any more at some moment of their first ``hang_up_s``.
    ``telemetry_s``: from one message with a device's figures to the next, 0: none; with them the
    device also follows the config that is published for it.
    """

    texts: Sequence[Trace]
    policy: Policy
    vocab_hash: str
    verify: str = DEFAULT_VERIFY
    think_s: float = 0.0
    generations: int | None = None
    until: float = math.inf
    patience_s: float = 300.0
    hang_up: float = 0.0
    hang_up_s: float = 0.0
    seed: int = 0
    telemetry_s: float = 0.0
