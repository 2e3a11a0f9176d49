"""When drafted tokens that nobody asked for go out, and what that is decided from.

Three ways: at once, never before the trigger, or planned: where the paper's dynamic programming
ends a message (3.2), with alpha, beta, gamma and the window learnt on the way (appendix D.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_agent.core.estimate import GammaEstimator, LinkEstimator
from edge_agent.core.pipeline import LinkCost, Planner, WindowLength
from edge_agent.core.policies import SEND_AT_ONCE, SEND_HELD, SEND_PLANNED

#: Seconds that a plan may be slower for having fewer messages: what a noisy beta is worth.
SLACK = 5e-4
#: Tokens fed to the draft model for one proposal, above which its time says nothing about gamma.
MAX_FEED = 2
#: Tokens that the edge drafts after a verdict before it asks again, roughly: the time until then,
#: beside that of the way, for which the target would idle.
TOKENS_TO_ASK = 2
#: Forwards that the estimate of their duration is taken from.
FORWARDS = 16
#: Probes that all sessions together may send before the link is measured, or is another one.
MAX_PROBES = 16
#: Batches whose verdict may still come; as many are remembered of probes.
MAX_TICKETS = 64


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a session knows of its link and its models at the end, for reports. Times in seconds.

    ``model``: the cost model in force, "serial" (the paper's) or "pipelined"; ``known``: whether
    the link was measured at all. ``messages``: of which the plan makes a window of ``window``
    tokens. ``replans``, ``probes``, ``shifts`` (to another link): counts.
    """

    model: str
    known: bool
    alpha: float
    occupancy: float
    beta: float
    gamma: float
    forward: float
    window: int
    messages: int
    replans: int
    probes: int
    shifts: int


@dataclass(frozen=True, slots=True)
class Estimates:
    """What one session leaves to the next on the same device. Times in seconds.

    ``known``: the link's costs were measured; ``measured``: the model that they go by too, so that
    the next session need not send probes unless the link turns out to be another. ``forward``:
    seconds of one forward of the target, 0: unknown. ``probes``: sent so far by all sessions.
    """

    link: LinkCost = LinkCost(0.02)  # noqa: RUF009 (frozen)
    gamma: float = 0.02
    window: int = 20
    known: bool = False
    measured: bool = False
    forward: float = 0.0
    probes: int = 0


class Sending:
    """The plan in force and the measurements behind it; one session, one thread.

    ``sending``: one of the policies' SEND_*. Sizes are tokens, so beta is per token. A batch is
    named by its epoch and the position at which it ends, as its verdict names it.
    """

    def __init__(self, sending: str, start: Estimates | None = None) -> None:
        start = start or Estimates()
        self.link = LinkEstimator(start.link)
        self.gamma = GammaEstimator(start.gamma)
        self.window = WindowLength(start.window)
        self.forward = GammaEstimator(start.forward, FORWARDS)
        self._sending = sending
        self._known_before = start.known or start.measured
        self._measured = start.measured
        self._probes_before = start.probes
        self._planner = Planner(start.window, start.link, start.gamma, SLACK)
        self._count = 0  # tokens of the window so far
        self._length = 0  # tokens of the draft sequence so far
        self._busy_until = 0.0  # when the link is done with all that was sent, by the estimates
        # Tickets of the estimator; None: two batches had that name, so no verdict tells which.
        self._batches: dict[tuple[int, int], int | None] = {}
        self._probes: dict[int, int] = {}

    @property
    def replans(self) -> int:
        return self._planner.replans

    @property
    def learnt(self) -> Learnt:
        """For reports."""
        cost = self.link.cost
        return Learnt(
            self.link.model,
            self._known,
            cost.alpha,
            cost.occupancy,
            cost.beta,
            self.gamma.gamma,
            self.forward.gamma,
            self.window.value,
            len(self._planner.plan.ends),
            self.replans,
            self.link.probes,
            self.link.shifts,
        )

    @property
    def estimates(self) -> Estimates:
        """What is known now."""
        return Estimates(
            self.link.cost,
            self.gamma.gamma,
            self.window.value,
            self._known,
            self._measured_enough(),
            self.forward.gamma,
            self._probes_before + self.link.probes,
        )

    @property
    def target_idles(self) -> bool:
        """Whether the target, after a verdict, has time for a forward before it is asked again.

        A forward that nobody asked for delays one that is: it pays only where the way to the edge
        and back, and some drafting, take longer than it. False as long as that is not known.
        """
        forward = self.forward.gamma
        if forward <= 0.0 or not self._known:
            return False
        return self.link.alpha + TOKENS_TO_ASK * self.gamma.gamma > forward

    def backlogged(self, now: float) -> bool:
        """Whether the link needs longer for what was sent than the target for a forward.

        More would stand in a queue until the target has written past it.
        """
        forward = self.forward.gamma
        return forward > 0.0 and self._busy_until - now > forward

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
        plan = self._planner.plan
        # A plan of one message says that nothing is gained by parting what is drafted. To send at
        # the end of an average window would part it after all, whenever a draft is longer.
        return len(plan.ends) > 1 and plan.ends_message(self._count)

    def asked(self) -> None:
        """A trigger sends everything and interrupts the window (paper, rule 1)."""
        self.window.add(self._length)
        self._count = self._length = 0

    def rolled_back(self) -> None:
        """The draft begins anew."""
        self._count = self._length = 0

    # -- the link -------------------------------------------------------------------------------

    def sent(self, now: float, tokens: int, name: tuple[int, int] | None = None) -> None:
        """A message of ``tokens`` went out; ``name``: of a batch, by which its verdict calls it."""
        ticket = self.link.sent(now, tokens)
        self._occupy(now, tokens)
        if name is not None:
            self._batches[name] = None if name in self._batches else ticket
            if len(self._batches) > MAX_TICKETS:
                del self._batches[next(iter(self._batches))]

    def judged(self, name: tuple[int, int], now: float, hold: float, forward: float) -> None:
        """A verdict on the batch ``name`` and all before it arrived at ``now``.

        ``hold``: seconds from the batch's arrival at the verifier to the verdict's departure; 0 and
        less: unknown. ``forward``: seconds of the target's forward for it; 0: unknown.
        """
        if forward > 0.0:
            self.forward.add(forward)
        ticket = self._batches.pop(name, None)
        if ticket is not None and hold > 0.0:
            self.link.answered(ticket, now, hold)
            self._replan()

    def _occupy(self, now: float, tokens: int) -> None:
        cost = self.link.cost
        begin = max(now, self._busy_until)
        self._busy_until = begin + cost.occupancy + cost.beta * tokens

    def doubtful(self) -> None:
        """Something was lost or late: no answer to what is under way is a measurement."""
        self._batches = dict.fromkeys(self._batches)
        self._probes.clear()

    def disconnected(self) -> None:
        """The connection is gone, and what was under way with it."""
        self.link.disconnected()
        self._busy_until = 0.0
        self._batches.clear()
        self._probes.clear()

    def probes(self, now: float) -> tuple[int, ...]:
        """Sizes in tokens of the probes that are to go out now, one right after the other."""
        if self._sending != SEND_PLANNED or len(self._probes) >= MAX_TICKETS:
            return ()
        # Sessions may be too short for a round of them, and a link may be slow to carry them.
        enough = self._measured or self._probes_before + self.link.probes >= MAX_PROBES
        if enough and not self.link.shifts:
            return ()
        return self.link.probes_needed(now)

    def probe_sent(self, now: float, size: int) -> int:
        """One of them goes out; its number, above 0."""
        ticket = self.link.probe_sent(now, size)
        self._occupy(now, size)
        number = self.link.probes
        self._probes[number] = ticket
        return number

    def probe_answered(self, number: int, now: float) -> None:
        """The answer to a probe arrived at ``now``; a verifier gives it at once."""
        ticket = self._probes.pop(number, None)
        if ticket is not None:
            self.link.answered(ticket, now)
            self._replan()

    @property
    def _known(self) -> bool:
        return self.link.known or (self._known_before and not self.link.shifts)

    def _measured_enough(self) -> bool:
        link = self.link
        if link.shifts:
            return link.known and link.model_known
        return self._measured or (link.known and link.model_known)

    def _replan(self) -> None:
        if self._planner.update(self.window.value, self.link.cost, self.gamma.gamma):
            self._count = 0
