"""What a replay found: figures, when tokens were committed, and the spans of a Gantt picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from edge_agent.core.sending import Estimates

DRAFT, UPLINK, FORWARD, DOWNLINK = "draft", "uplink", "forward", "downlink"


class Span(NamedTuple):
    """Something that took from ``begin`` to ``end``, in seconds since the request.

    ``kind``: a drafted token, a message on its way up or down, or a forward. ``tokens``: drafted,
    carried, in the forward, or committed. ``accepted``: of them drafts that the verdict found
    right. ``verify``: an uplink message that asks for a verdict.
    """

    kind: str
    begin: float
    end: float
    tokens: int
    accepted: int = 0
    verify: bool = False


class Committed(NamedTuple):
    """``tokens`` tokens from position ``start`` on became final at ``at`` seconds."""

    at: float
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one replay, named as those of a real generation (``Summary``); seconds, bytes.

    ``tpt_s``: from the request to the last token, per token. ``judged``: drafted tokens that the
    target looked at. ``proactive``: tokens drafted while a verdict was awaited; ``proactive_kept``
    of them outlived it. ``bytes_up``, ``bytes_down``: payloads. ``charged_up``: bytes on the
    uplink, topics and padding included. ``draft_s``, ``forward_s``, ``uplink_s``: time that the
    draft model, the target and the uplink were busy. ``timeouts``: answers that were overdue.
    ``estimates``: what the session leaves to the next one.
    """

    trace: str
    policy: str
    scenario: str
    tokens: int
    tpt_s: float
    ttft_s: float
    drafted: int
    accepted: int
    judged: int
    forwards: int
    bytes_up: int
    bytes_down: int
    messages_up: int
    messages_down: int
    charged_up: int
    proactive: int
    proactive_kept: int
    draft_s: float
    forward_s: float
    uplink_s: float
    timeouts: int
    estimates: Estimates
    commits: tuple[Committed, ...]
    timeline: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """From the request to the last token."""
        return self.tpt_s * self.tokens

    @property
    def pace_s(self) -> float:
        """Seconds per token after the first commit: without the prompt's evaluation."""
        first = self.commits[0].tokens
        return (self.seconds - self.ttft_s) / max(self.tokens - first, 1)
