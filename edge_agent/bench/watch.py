"""What one measured generation did besides its text: proactive tokens, forwards, a timeline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_agent.bench.link_model import Passage
from edge_agent.core.sending import Sending

#: Events kept for the timeline of one generation.
MAX_EVENTS = 4_000
#: Forward times kept of one generation.
MAX_SAMPLES = 2_000

DRAFT = "draft"
UPLINK = "uplink"  # the message occupies the link
UP_AIR = "up"  # it is under way
HOLD = "hold"  # it waits at the verifier
FORWARD = "forward"
DOWN = "down"
VERDICT = "verdict"
ROLLBACK = "rollback"
LANES = (DRAFT, UPLINK, UP_AIR, HOLD, FORWARD, DOWN, VERDICT, ROLLBACK)


@dataclass(frozen=True, slots=True)
class Span:
    """Something on the timeline of a generation: ``lane`` (of LANES), seconds since its begin.

    ``count``: tokens drafted, sent, committed or lost; messages for the links.
    """

    lane: str
    begin: float
    end: float
    count: int = 1


#: What of ``Sending`` is planning and estimating.
_PLANNING = (
    "drafted",
    "due",
    "asked",
    "rolled_back",
    "sent",
    "judged",
    "probes",
    "probe_sent",
    "probe_answered",
)


class PlanningTime:
    """Adds up the ``seconds`` that one session's ``sending`` takes, from now on."""

    def __init__(self, sending: Sending, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        for name in _PLANNING:
            setattr(sending, name, self._timed(getattr(sending, name), clock))

    def _timed(self, call: Callable[..., Any], clock: Callable[[], float]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += clock() - begin

        return timed


class Watch:
    """An observer (``edge_agent.observer``) of one generation.

    ``proactive``: tokens drafted while a verdict was awaited; of those whose verdict has come,
    ``kept`` stayed in the draft or were committed, ``dropped`` were rolled back. ``forwards``:
    pairs (judged tokens, milliseconds).
    """

    def __init__(self) -> None:
        self.proactive = 0
        self.kept = 0
        self.dropped = 0
        self.draft_bytes = 0
        self.draft_messages = 0
        self.sent_tokens = 0
        self.forwards: list[tuple[int, float]] = []
        self._gammas: list[float] = []
        self._pending: list[int] = []
        self._end = 0  # position behind the last drafted token
        self._events: list[tuple[str, float, float, Mapping[str, Any]]] = []

    def __call__(self, name: str, begin: float, end: float, details: Mapping[str, Any]) -> None:
        """See ``edge_agent.observer``."""
        if len(self._events) < MAX_EVENTS:
            self._events.append((name, begin, end, details))
        if name == "draft":
            self._end = details["position"] + 1
            if len(self._gammas) <= MAX_SAMPLES:
                self._gammas.append(end - begin)
            if details["awaiting"]:
                self.proactive += 1
                self._pending.append(details["position"])
        elif name == "sent":
            if details["kind"] == "DraftBatch":
                self.draft_messages += 1
                self.draft_bytes += details["bytes"]
                self.sent_tokens += details["tokens"]
        elif name == "verdict" and details["committed"]:
            self._on_verdict(details)

    @property
    def gamma_s(self) -> float:
        """Median seconds of drafting a token; without the first, which evaluates the prompt."""
        return statistics.median(self._gammas[1:]) if len(self._gammas) > 1 else 0.0

    def _on_verdict(self, details: Mapping[str, Any]) -> None:
        if len(self.forwards) < MAX_SAMPLES:
            self.forwards.append((details["judged"], details["forward_ms"]))
        # What was rolled back is the end of the draft; before it all was right.
        right = self._end - details["lost"]
        kept = sum(position < right for position in self._pending)
        self.kept += kept
        self.dropped += len(self._pending) - kept
        self._pending.clear()

    def timeline(self, origin: float, up: Sequence[Passage], down: Sequence[Passage]) -> list[Span]:
        """All spans in order of their begin; ``origin``: what they count from.

        ``up`` and ``down``: the link's log on the same clock. When a forward ran follows from when
        its verdict entered the link, and from what the verdict says of it.
        """
        spans: list[Span] = []
        for passage in up:
            if passage.sent >= origin:
                spans.append(Span(UPLINK, passage.start, passage.departed))
                spans.append(Span(UP_AIR, passage.departed, passage.arrived))
        arrivals = [passage for passage in down if passage.sent >= origin]
        used = 0
        for name, begin, end, details in self._events:
            if name == "draft":
                spans.append(Span(DRAFT, begin, end))
            elif name == "rollback":
                spans.append(Span(ROLLBACK, begin, end, details["lost"]))
            elif name == "verdict" and details["committed"]:
                spans.append(Span(VERDICT, begin, end, details["committed"]))
                while used < len(arrivals) - 1 and arrivals[used + 1].arrived <= begin:
                    used += 1
                if used < len(arrivals) and arrivals[used].arrived <= begin + 0.001:
                    spans += _verification(arrivals[used], details)
                    used += 1
        moved = [Span(s.lane, s.begin - origin, s.end - origin, s.count) for s in spans]
        return sorted(moved, key=lambda span: span.begin)


def _verification(passage: Passage, details: Mapping[str, Any]) -> list[Span]:
    forward = passage.sent - details["forward_ms"] / 1000.0
    hold = passage.sent - max(details["hold_ms"], details["forward_ms"]) / 1000.0
    return [
        Span(HOLD, hold, forward),
        Span(FORWARD, forward, passage.sent, details["judged"]),
        Span(DOWN, passage.sent, passage.arrived),
    ]
