"""A policy on a recorded text, without models and without waiting: everything by a virtual clock.

    python -m edge_agent.bench.replay TRACES [--policies ...] [--scenarios ...] [--constants FILE]

The real session core runs, its messages have their real sizes, and the link is the one that the
relay emulates. Drafting takes the recorded times, a forward what its tokens took when measured.
Beside a wrong drafted token the text goes on differently, which nobody recorded: what is drafted
there is wrong too, and gets the confidences of the same positions.

The driver is like ``edge_agent.runtime``: one thread that drafts, so what arrives while a token is
drafted is heard after it.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from broker.codec import encode
from broker.errors import ConfigError, LocalProtocolError
from broker.messages import (
    DraftBatch,
    EdgeMessage,
    Resync,
    Verdict,
    VerifierMessage,
)
from broker.topics import down_topic
from edge_agent.bench.link import Scenario
from edge_agent.bench.link_model import LinkModel
from edge_agent.bench.recorded_draft import RecordedDraft
from edge_agent.bench.replay_result import (
    DOWNLINK,
    DRAFT,
    FORWARD,
    UPLINK,
    Committed,
    Result,
    Span,
)
from edge_agent.bench.traces import Trace
from edge_agent.bench.virtual_verifier import Judge, VirtualVerifier
from edge_agent.core.config import DEFAULT_VERIFY, LOCAL_FORBID, LOCAL_ONLY, SessionConfig
from edge_agent.core.effects import Commit, DraftNext
from edge_agent.core.policies import Policy
from edge_agent.core.sending import Estimates
from edge_agent.core.session import EdgeSession
from edge_agent.core.timing import Timing
from edge_agent.core.uplink import Outgoing
from edge_agent.wire import publication

#: Events per token after which a replay counts as endless.
MAX_EVENTS_PER_TOKEN = 2_000
#: Where a token takes a tenth of a second to upload. A time-out would send, and charge, all of it
#: again, which the system that is emulated would not do over a connection that loses nothing.
PATIENT = Timing(first_timeout=60.0, min_timeout=60.0, max_timeout=60.0, offline_after=600.0)
_DEVICE, _SESSION = "replay", "0" * 16
#: Bytes of an MQTT 5 PUBLISH beside topic and payload: fixed header, topic length, no properties.
_FRAMING = 5
_PACKET_ID = 2  # at QoS 1


@dataclass(frozen=True, slots=True)
class Overhead:
    """What the system itself costs, in seconds: ``up_s`` and ``down_s`` for each message.

    Codec, broker and scheduling; by measurement over loopback (python -m benchmarks.loopback).
    """

    up_s: float = 0.0004
    down_s: float = 0.0004


def replay(
    trace: Trace,
    policy: Policy,
    scenario: Scenario,
    *,
    verify: str = DEFAULT_VERIFY,
    timing: Timing | None = None,
    overhead: Overhead | None = None,
    seed: int = 0,
    phase_s: float = 0.0,
    estimates: Estimates | None = None,
    timeline: bool = False,
    verifier: Judge | None = None,
) -> Result:
    """Run ``policy`` on ``trace`` over the scenario's link, from the request to the last token.

    ``verify``: as in SessionConfig, where the policy does not say. ``timing``: None for the
    usual one, on a padded wire PATIENT. ``seed``: of the link's jitter and stalls. ``phase_s``: how
    long the link's schedule has been running. ``estimates``: what an earlier session on the device
    left. ``timeline``: keep the spans. ``verifier``: another one than ``VirtualVerifier``.

    Raises ConfigError for a link with cuts, and whatever ends the session with an error.
    """
    if scenario.link.cuts:
        raise ConfigError(f"scenario {scenario.name} cuts the link: a replay has no broker to lose")
    run = _Replay(
        trace,
        policy,
        scenario,
        verify=verify,
        timing=timing or (PATIENT if scenario.pad_bytes_per_token else Timing()),
        overhead=overhead or Overhead(),
        estimates=estimates,
    )
    run.link = LinkModel(scenario.link, seed=seed, start=-phase_s)
    run.verifier = verifier or VirtualVerifier(trace)
    run.spans = [] if timeline else None
    run.run()
    return run.result()


def replay_all(
    traces: Sequence[Trace], policy: Policy, scenario: Scenario, *, verify: str = DEFAULT_VERIFY
) -> list[Result]:
    """Replay ``traces`` one after the other on one device, which keeps what it has learnt.

    A link that changes over time is met all over its schedule.
    """
    period = scenario.link.rates_repeat_s
    results: list[Result] = []
    for index, trace in enumerate(traces):
        results.append(
            replay(
                trace,
                policy,
                scenario,
                verify=verify,
                seed=index,
                phase_s=period * index / len(traces),
                estimates=results[-1].estimates if results else None,
            )
        )
    return results


def _tokens_on_the_wire(message: EdgeMessage) -> int:
    """What a padded wire is charged for, as the relay counts it: drafts and probes."""
    if isinstance(message, Resync):
        return len(message.padding)
    return len(message.tokens) if isinstance(message, DraftBatch) else 0


class _Replay:
    link: LinkModel
    verifier: Judge
    spans: list[Span] | None

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        scenario: Scenario,
        *,
        verify: str,
        timing: Timing,
        overhead: Overhead,
        estimates: Estimates | None,
    ) -> None:
        self.trace, self.policy, self.scenario = trace, policy, scenario
        self.overhead = overhead
        config = SessionConfig(
            prompt=trace.prompt,
            sampling=trace.sampling,
            max_tokens=trace.max_tokens,
            vocab_hash="replayed",
            vocab_size=trace.vocab_size,
            eos_ids=trace.eos_ids,
            context=len(trace.prompt) + trace.max_tokens + policy.max_ahead + 1,
            max_ahead=policy.max_ahead,
            min_survival=policy.min_survival,
            verify=verify,
            local=LOCAL_ONLY if policy.local else LOCAL_FORBID,
            ask_first=True,  # as a generation does
        )
        self.session = EdgeSession(
            config, timing=timing, now=0.0, policy=policy, estimates=estimates
        )
        self.draft = RecordedDraft(trace, scenario.gamma_floor_s)
        self.now = 0.0
        self.up: deque[tuple[float, EdgeMessage]] = deque()
        self.down: deque[tuple[float, VerifierMessage]] = deque()
        # What arrived while a token was being drafted.
        self.inbox: deque[tuple[float, VerifierMessage]] = deque()
        self.drafting: tuple[float, DraftNext, tuple[int, float, float]] | None = None
        self.forward: tuple[float, float] | None = None  # until, seconds
        self.ahead: deque[bool] = deque()  # per unverified token: drafted while a verdict is due
        self.commits: list[Committed] = []
        self.counts = dict.fromkeys(
            ("bytes_up", "bytes_down", "messages_up", "messages_down", "charged_up"), 0
        )
        self.proactive = self.proactive_kept = 0
        self.draft_s = self.forward_s = 0.0
        self._down_topic = len(down_topic(_DEVICE, _SESSION))

    def run(self) -> None:
        """Until the session ends."""
        session = self.session
        session.set_connected(True, 0.0)
        self._edge()
        limit = MAX_EVENTS_PER_TOKEN * (self.trace.max_tokens + 10)
        for _ in range(limit):
            if session.finish is not None:
                return
            self._next_event()
        raise LocalProtocolError(
            f"the replay of {self.trace.name} under {self.policy.name} has no end"
        )

    def _next_event(self) -> None:
        draft_at = self.drafting[0] if self.drafting else math.inf
        forward_at = self.forward[0] if self.forward else math.inf
        up_at = self.up[0][0] if self.up else math.inf
        down_at = self.down[0][0] if self.down else math.inf
        # The one thread of the edge looks at its timer only between two tokens.
        timer = None if self.drafting else self.session.get_timer()
        timer_at = math.inf if timer is None else max(timer, self.now)
        now = min(draft_at, forward_at, up_at, down_at, timer_at)
        if now == math.inf:
            raise LocalProtocolError("everything waits and no timer is armed")
        self.now = now
        if down_at == now:
            self.inbox.append(self.down.popleft())
            if self.drafting is None:
                self._edge()
        elif up_at == now:
            self.verifier.receive(self.up.popleft()[1], now)
            self._verifier()
        elif forward_at == now and self.forward is not None:
            seconds, self.forward = self.forward[1], None
            self.verifier.end_forward(now, seconds)
            self._verifier()
        elif draft_at == now:
            self._drafted()
            self._edge()
        else:
            self._edge()

    # -- the edge -------------------------------------------------------------------------------

    def _edge(self) -> None:
        """One round of the driver's loop: hear, mind the timer, send, begin the next effect."""
        session, now = self.session, self.now
        while self.inbox:
            self._hear(*self.inbox.popleft())
        session.handle_timer(now)
        while True:
            for outgoing in session.messages_to_send(now):
                self._send_up(outgoing)
            effect = session.next_effect()
            if isinstance(effect, Commit):
                self.commits.append(Committed(now, effect.start, len(effect.tokens)))
            elif isinstance(effect, DraftNext):
                answer = self.draft.feed(effect)
                seconds = answer[2]
                self.draft_s += seconds
                self.drafting = (now + seconds, effect, answer)
                if self.spans is not None:
                    self.spans.append(Span(DRAFT, now, now + seconds, 1))
                return
            elif effect is not None:
                if effect.error is not None:
                    raise effect.error
                return
            else:
                return

    def _drafted(self) -> None:
        assert self.drafting is not None
        (_, effect, (token, confidence, seconds)), self.drafting = self.drafting, None
        before = self.session.stats.drafted
        awaited = self.session.expecting
        self.session.drafted(effect, token, confidence, self.now, seconds)
        if self.session.stats.drafted > before and not self.policy.local:
            self.ahead.append(awaited)
            self.proactive += awaited

    def _hear(self, heard_at: float, message: VerifierMessage) -> None:
        session = self.session
        lost, committed = session.stats.rolled_back, len(session.committed)
        session.receive(message, self.now, heard_at)
        if len(session.committed) == committed:
            return
        lost = session.stats.rolled_back - lost
        kept = len(self.ahead) - lost
        self.proactive_kept += sum(flag for flag, _ in zip(self.ahead, range(kept), strict=False))
        left = 0 if lost else max(0, kept - (len(session.committed) - committed))
        # Those that are left outlived the verdict for which they had been ahead.
        self.ahead = deque([False] * left)

    def _send_up(self, outgoing: Outgoing) -> None:
        message = outgoing.message
        topic, payload, qos = publication(_DEVICE, _SESSION, outgoing)
        tokens = _tokens_on_the_wire(message)
        charged = len(topic) + len(payload) + _FRAMING + (_PACKET_ID if qos else 0)
        charged += tokens * self.scenario.pad_bytes_per_token
        passage = self.link.up.send(self.now, charged)
        arrived = passage.arrived + self.overhead.up_s
        self.up.append((arrived, message))
        self.counts["bytes_up"] += len(payload)
        self.counts["messages_up"] += 1
        self.counts["charged_up"] += charged
        if self.spans is not None:
            verify = isinstance(message, DraftBatch) and message.verify
            self.spans.append(Span(UPLINK, self.now, arrived, tokens, 0, verify))

    # -- the verifier ---------------------------------------------------------------------------

    def _verifier(self) -> None:
        """Publish what there is to say, then begin the next forward."""
        for message in self.verifier.messages_to_send(self.now):
            size = len(encode(message))
            passage = self.link.down.send(self.now, self._down_topic + size + _FRAMING)
            arrived = passage.arrived + self.overhead.down_s
            self.down.append((arrived, message))
            self.counts["bytes_down"] += size
            self.counts["messages_down"] += 1
            if self.spans is not None:
                tokens = message.tokens if isinstance(message, Verdict) else ()
                accepted = message.accepted if isinstance(message, Verdict) else 0
                self.spans.append(Span(DOWNLINK, self.now, arrived, len(tokens), accepted))
        tokens_in = self.verifier.begin_forward()
        if tokens_in is not None:
            seconds = self.trace.forward.seconds(tokens_in)
            seconds = max(seconds, self.scenario.forward_floor_s)
            self.forward = (self.now + seconds, seconds)
            self.forward_s += seconds
            if self.spans is not None:
                self.spans.append(Span(FORWARD, self.now, self.now + seconds, tokens_in))

    # -- the end --------------------------------------------------------------------------------

    def result(self) -> Result:
        """The figures."""
        stats, commits = self.session.stats, self.commits
        tokens = sum(commit.tokens for commit in commits)
        return Result(
            trace=self.trace.name,
            policy=self.policy.name,
            scenario=self.scenario.label,
            tokens=tokens,
            tpt_s=commits[-1].at / tokens,
            ttft_s=commits[0].at,
            drafted=stats.drafted,
            accepted=stats.accepted,
            judged=stats.judged,
            forwards=stats.forwards,
            proactive=self.proactive,
            proactive_kept=self.proactive_kept,
            draft_s=self.draft_s,
            forward_s=self.forward_s,
            uplink_s=self.link.up.busy_s,
            timeouts=stats.timeouts,
            estimates=self.session.sending.estimates,
            commits=tuple(commits),
            timeline=() if self.spans is None else tuple(self.spans),
            **self.counts,
        )


if __name__ == "__main__":
    from edge_agent.bench.replay_command import main

    sys.exit(main())
