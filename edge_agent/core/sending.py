"""When drafted tokens that nobody asked for go out, and what that is decided from.

Three ways: at once, never before the trigger, or planned: where the paper's dynamic programming
ends a message (3.2), with alpha, beta, gamma and the window learnt on the way (appendix D.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_agent.core.estimate import GammaEstimator, LinkEstimator
from edge_agent.core.pipeline import LinkCost, Planner, WindowLength
from edge_agent.core.policies import SEND_AT_ONCE, SEND_HELD

#: Seconds that a plan may be slower for having fewer messages: what a noisy beta is worth.
SLACK = 5e-4
#: Tokens fed to the draft model for one proposal, above which its time says nothing about gamma.
MAX_FEED = 2


@dataclass(frozen=True, slots=True)
class Estimates:
    """What one session leaves to the next on the same device. Times in seconds."""

    link: LinkCost = LinkCost(0.02)  # noqa: RUF009 (frozen)
    gamma: float = 0.02
    window: int = 20


class Sending:
    """The plan in force and the measurements behind it; one session, one thread.

    ``sending``: one of the policies' SEND_*. Sizes are tokens, so beta is per token.
    """

    def __init__(self, sending: str, start: Estimates | None = None) -> None:
        start = start or Estimates()
        self.link = LinkEstimator(start.link)
        self.gamma = GammaEstimator(start.gamma)
        self.window = WindowLength(start.window)
        self._sending = sending
        self._planner = Planner(start.window, start.link, start.gamma, SLACK)
        self._count = 0  # tokens of the window so far
        self._length = 0  # tokens of the draft sequence so far
        self._ticket: int | None = None  # of the request that a verdict will answer

    @property
    def replans(self) -> int:
        return self._planner.replans

    @property
    def estimates(self) -> Estimates:
        """What is known now."""
        return Estimates(self.link.cost, self.gamma.gamma, self.window.value)

    def drafted(self, feed: int, seconds: float | None) -> None:
        """One more token of the draft, after evaluating ``feed`` tokens in ``seconds``."""
        if seconds is not None and feed <= MAX_FEED:
            self.gamma.add(seconds)
        self._count += 1
        self._length += 1

    def due(self) -> bool:
        """Whether what is drafted and unasked shall go out now."""
        if self._sending == SEND_AT_ONCE:
            return True
        if self._sending == SEND_HELD or self._count == 0:
            return False
        return self._planner.plan.ends_message(self._count)

    def asked(self) -> None:
        """A trigger sends everything and interrupts the window (paper, rule 1)."""
        self.window.add(self._length)
        self._count = self._length = 0

    def rolled_back(self) -> None:
        """The draft begins anew."""
        self._count = self._length = 0

    def sent(self, now: float, tokens: int, *, request: bool) -> None:
        """A message of ``tokens`` went out; ``request``: the next verdict answers it."""
        ticket = self.link.sent(now, tokens)
        if request:
            self._ticket = ticket

    def answered(self, now: float, hold: float) -> None:
        """The verdict that answers the latest request alone came; ``hold`` in seconds."""
        if self._ticket is not None:
            self.link.answered(self._ticket, now, hold)
            self._ticket = None
        self._replan()

    def disconnected(self) -> None:
        self.link.disconnected()
        self._ticket = None

    def _replan(self) -> None:
        known = self.estimates
        if self._planner.update(known.window, known.link, known.gamma):
            self._count = 0
