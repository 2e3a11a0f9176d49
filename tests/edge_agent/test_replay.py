"""A replay keeps to arithmetic that can be done by hand, and to the real verifier's core."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import ConfigError, TransportError
from broker.messages import (
    VERIFY_EAGER,
    VERIFY_TRIGGERED,
    Accepted,
    EdgeMessage,
    VerifierMessage,
)
from cloud_verifier.core.verifier import Forward, VerifierConfig, VerifierCore
from edge_agent.bench.contenders import CONTENDERS
from edge_agent.bench.forward_table import ForwardTable
from edge_agent.bench.link import SCENARIOS, Cut, Link, Scenario, find_scenario
from edge_agent.bench.replay import Overhead, replay, replay_all
from edge_agent.bench.replay_command import main
from edge_agent.bench.replay_result import DOWNLINK, DRAFT, FORWARD, UPLINK, Result
from edge_agent.bench.traces import Trace, write_traces
from edge_agent.bench.virtual_verifier import CONTEXT, VERIFIER_ID
from edge_agent.core.policies import SEND_PLANNED, Policy, find_policy
from edge_agent.core.sending import Estimates
from edge_agent.core.timing import Timing
from edge_agent.core.trigger import Thresholds
from tests.edge_agent.bench_traces import EOS, make_trace, random_trace

FREE = Overhead(0.0, 0.0)
NOTHING = Scenario("nothing")
#: Accepted arrives with the fourth drafted token, so that the first draft has four.
NEAR = Scenario("near", Link(delay_s=0.020))
JUDGED = [name for name, one in CONTENDERS.items() if not one.policy().local]


def policy(name: str) -> Policy:
    return CONTENDERS[name].policy()


def vanilla(n: int) -> Policy:
    return dataclasses.replace(find_policy("vanilla"), thresholds=Thresholds(0.0, 0.0, n))


class RealVerifier:
    """The real core as a ``Judge``, with a target that knows the text."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.core = VerifierCore(
            VerifierConfig(VERIFIER_ID, trace.vocab_size, "replayed", CONTEXT, trace.eos_ids)
        )
        self.forward: Forward | None = None

    def receive(self, message: EdgeMessage, now: float) -> None:
        self.core.receive("replay", "s", message, now)

    def messages_to_send(self, now: float) -> list[VerifierMessage]:
        return [outgoing.message for outgoing in self.core.messages_to_send(now)]

    def begin_forward(self) -> int | None:
        forward = self.core.next_effect()
        if forward is None:
            return None
        self.forward = forward
        [seat] = forward.seats
        return len(seat.plan.tokens)

    def end_forward(self, now: float, seconds: float) -> None:
        assert self.forward is not None
        forward, self.forward = self.forward, None
        [seat] = forward.seats
        plan = seat.plan
        text = (*self.trace.tokens, *(0 for _ in range(plan.choices)))
        choices = text[plan.position : plan.position + plan.choices]
        self.core.forward_done(forward, [choices], now, seconds)


# -- by hand ------------------------------------------------------------------------------------


def test_the_target_alone_takes_its_forwards_and_one_round_trip() -> None:
    trace = make_trace([True] * 10)
    link = Scenario("link", Link(delay_s=0.1))
    result = replay(trace, policy("cloud"), link, overhead=FREE)
    # It begins when it hears of the session, and asks for nothing more.
    assert result.ttft_s == pytest.approx(0.2 + 0.04)
    assert result.seconds == pytest.approx(0.2 + 10 * 0.04)
    assert result.pace_s == pytest.approx(0.04)
    assert (result.forwards, result.drafted, result.tokens) == (10, 0, 10)


def test_the_draft_alone_takes_its_draft_times() -> None:
    trace = make_trace([True, False] * 5, prompt_seconds=0.3)
    result = replay(trace, policy("local"), find_scenario("far"))
    # The first token waits for a prompt of three tokens, the last of which counts as its own.
    assert result.seconds == pytest.approx(10 * 0.010 + 0.3 * 2 / 3)
    assert (result.messages_up, result.bytes_up, result.forwards) == (0, 0, 0)


def test_vanilla_takes_draft_forward_and_round_trip_in_turn() -> None:
    trace = make_trace([True] * 15)
    result = replay(trace, vanilla(4), NEAR, overhead=FREE)
    round_s = 4 * 0.010 + 0.020 + 0.040 + 0.020
    assert result.seconds == pytest.approx(3 * round_s)
    assert (result.forwards, result.drafted, result.accepted, result.judged) == (3, 12, 12, 12)
    assert [commit.tokens for commit in result.commits] == [5, 5, 5]


def test_a_rejection_costs_the_rest_of_the_round() -> None:
    trace = make_trace([True, True, False, True, True, True, True, True, True])
    result = replay(trace, vanilla(4), NEAR, overhead=FREE)
    assert [(commit.start, commit.tokens) for commit in result.commits] == [(0, 3), (3, 5), (8, 1)]
    assert (result.accepted, result.judged) == (2 + 4, 4 + 4)


def test_beside_a_wrong_token_everything_is_wrong() -> None:
    # Drafted at positions 1 to 3 after a wrong first token: right by the record, not by the text.
    trace = make_trace([False] + [True] * 7)
    result = replay(trace, vanilla(4), NEAR, overhead=FREE)
    assert [commit.tokens for commit in result.commits] == [1, 5, 2]


def test_a_branch_gets_the_confidences_of_its_positions() -> None:
    trace = make_trace(
        [True, True, False] + [True] * 7, confidences=(0.9,) * 6 + (0.1,) + (0.9,) * 3
    )
    asking = Policy("asking", Thresholds(0.0, 0.5, 64), proactive=False)
    result = replay(trace, asking, NOTHING, overhead=FREE)
    # The first token is asked about when the session is taken on, and waits for the prompt's
    # forward. Then the wrong one at 2 is drafted, and the first to be unsure is that at 6.
    assert [commit.at for commit in result.commits[:2]] == pytest.approx([0.080, 0.170])
    assert [commit.tokens for commit in result.commits[:2]] == [2, 1]


def test_the_device_floor_and_the_forward_floor_hold() -> None:
    trace = make_trace([True] * 15)
    slow = Scenario("slow", Link(delay_s=0.060), gamma_floor_s=0.030, forward_floor_s=0.1)
    result = replay(trace, vanilla(4), slow, overhead=FREE)
    assert result.seconds == pytest.approx(3 * (4 * 0.030 + 0.060 + 0.1 + 0.060))
    assert result.draft_s == pytest.approx(12 * 0.030)


def test_a_forward_costs_what_its_tokens_cost() -> None:
    trace = make_trace([True] * 10, forward=ForwardTable(((1, 0.010), (5, 0.050))))
    result = replay(trace, vanilla(4), NEAR, overhead=FREE)
    # A prefill of two tokens while the first are drafted; then five tokens at a time.
    assert result.forward_s == pytest.approx(0.020 + 2 * 0.050)


def test_a_verdict_is_heard_between_two_tokens() -> None:
    """One thread drafts: what arrives meanwhile waits for the token to be finished."""
    trace = make_trace([False] * 4)
    asking = Policy("asking", Thresholds(1.0, 0.0, 64), max_ahead=3, min_survival=0.0)
    result = replay(dataclasses.replace(trace, gammas=(0.030,) * 4), asking, NOTHING, overhead=FREE)
    # Asked for with the session and chosen at 40 ms, while a token is drafted from 30 to 60.
    assert result.commits[0].at == pytest.approx(0.060)


def test_padding_is_charged_to_the_link_alone() -> None:
    trace = make_trace([True] * 20)
    link = Scenario("padded", Link(up_bps=20e6, delay_s=0.020), wire="full-probs")
    plain = replay(trace, vanilla(4), link.with_wire("ids"), overhead=FREE)
    padded = replay(trace, vanilla(4), link, overhead=FREE)
    assert padded.bytes_up == plain.bytes_up
    assert padded.drafted == plain.drafted
    assert padded.charged_up == plain.charged_up + plain.drafted * 290_000
    assert padded.seconds == pytest.approx(plain.seconds + plain.drafted * 290_000 * 8 / 20e6)


def test_a_probe_is_charged_as_the_batch_that_it_stands_for() -> None:
    """Else a replay would learn that tokens cost nothing on a padded wire."""
    trace = make_trace([True] * 60)
    link = Scenario("padded", Link(up_bps=20e6, delay_s=0.020), wire="full-probs")
    learnt = replay(trace, Policy("x", verify="triggered"), link, overhead=FREE).estimates.link
    assert learnt.beta == pytest.approx(290_000 * 8 / 20e6, rel=0.05)


def test_overhead_counts_for_each_message() -> None:
    trace = make_trace([True] * 10)
    free = replay(trace, vanilla(4), NOTHING, overhead=FREE)
    costly = replay(trace, vanilla(4), NOTHING, overhead=Overhead(0.003, 0.004))
    # Three rounds; that of the opening is over when the first token is drafted.
    assert costly.seconds == pytest.approx(free.seconds + 3 * 0.007)


def test_the_end_of_the_text_ends_it() -> None:
    trace = make_trace([True] * 6)
    tokens = (*trace.tokens[:5], EOS)
    trace = dataclasses.replace(trace, tokens=tokens, drafted=tokens, max_tokens=50)
    for name in JUDGED:
        result = replay(trace, policy(name), NOTHING)
        assert result.tokens == 6, name


def test_proactive_tokens_are_counted_by_their_fate() -> None:
    ahead = Policy("ahead", Thresholds(0.0, 0.0, 4), max_ahead=64, min_survival=0.0)
    kept = replay(make_trace([True] * 40), ahead, NOTHING, overhead=FREE)
    assert kept.proactive > 10
    assert kept.proactive_kept == kept.proactive
    dropped = replay(make_trace([False] * 40), ahead, NOTHING, overhead=FREE)
    assert dropped.proactive > 10
    assert dropped.proactive_kept == 0
    idle = replay(make_trace([True] * 40), vanilla(4), NOTHING)
    assert (idle.proactive, idle.proactive_kept) == (0, 0)


# -- in general ---------------------------------------------------------------------------------


def check(result: Result, trace: Trace) -> None:
    """What holds for each replay."""
    assert result.tokens == len(trace.tokens)
    end = 0
    last = 0.0
    for commit in result.commits:
        assert commit.start == end
        assert commit.at >= last
        end, last = end + commit.tokens, commit.at
    assert result.accepted <= result.judged
    assert result.proactive_kept <= result.proactive <= result.drafted
    assert result.accepted + result.forwards >= result.tokens


def outcome(*arguments: Any, **settings: Any) -> Result | str:
    """The result, or the error that the session ended with."""
    try:
        return replay(*arguments, **settings)
    except TransportError as error:
        return str(error)


def rough_link(seed: int) -> Link:
    """Slow, jittery and stalling in turn, so that answers come late and are asked for again."""
    return Link(
        up_bps=(None, 1e5, 2e6)[seed % 3],
        delay_s=(0.0, 0.02, 0.3, 1.5)[seed % 4],
        startup_s=(0.0, 0.015)[seed % 2],
        jitter_s=(0.0, 0.05)[seed // 2 % 2],
        stall_probability=(0.0, 0.2)[seed // 3 % 2],
        stall_s=(0.2, 5.0)[seed % 2],
    )


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(JUDGED),
    link=st.integers(0, 23),
    verify=st.sampled_from((VERIFY_TRIGGERED, VERIFY_EAGER)),
    impatient=st.booleans(),
)
def test_the_real_verifier_commits_the_same_at_the_same_times(
    seed: int, name: str, link: int, verify: str, impatient: bool
) -> None:
    trace = random_trace(seed)
    scenario = Scenario("rough", rough_link(link))
    # Time-outs too short for the link: requests are repeated, sessions attached again.
    timing = Timing(0.1, 0.1, 0.05, 1.0, 2, 300.0) if impatient else Timing(offline_after=300.0)
    outcomes = [
        outcome(
            trace,
            policy(name),
            scenario,
            verify=verify,
            timing=timing,
            seed=seed,
            timeline=True,
            verifier=verifier,
        )
        for verifier in (None, RealVerifier(trace))
    ]
    assert outcomes[0] == outcomes[1]
    if not impatient:
        assert isinstance(outcomes[0], Result)
        check(outcomes[0], trace)


def test_the_two_verifiers_are_also_compared_when_sessions_move() -> None:
    """Otherwise the property would say nothing about attaching again."""
    moved = 0
    timing = Timing(0.1, 0.1, 0.05, 1.0, 2, 300.0)
    for seed in range(20):
        trace = random_trace(seed)
        verifier = RealVerifier(trace)
        scenario = Scenario("rough", Link(delay_s=0.02, stall_probability=0.2, stall_s=5.0))
        outcome(trace, policy("pipesd"), scenario, timing=timing, seed=seed, verifier=verifier)
        moved += verifier.core.stats.opens > 1
    assert moved > 5


def test_equal_arguments_give_equal_results() -> None:
    trace = random_trace(5)
    scenario = Scenario("rough", rough_link(7))
    first, second = (replay(trace, policy("pipesd"), scenario, seed=3) for _ in range(2))
    assert first == second
    assert first != replay(trace, policy("pipesd"), scenario, seed=4)


def test_the_timeline_shows_what_the_figures_say() -> None:
    trace = random_trace(11)
    result = replay(trace, policy("pipesd"), find_scenario("4g"), timeline=True)
    kinds = {kind: [s for s in result.timeline if s.kind == kind] for kind in (DRAFT, FORWARD)}
    assert sum(s.end - s.begin for s in kinds[DRAFT]) == pytest.approx(result.draft_s)
    assert sum(s.end - s.begin for s in kinds[FORWARD]) == pytest.approx(result.forward_s)
    for spans in kinds.values():
        # One draft model and one target: each does one thing at a time.
        assert all(a.end <= b.begin for a, b in pairwise(spans))
    up = [s for s in result.timeline if s.kind == UPLINK]
    down = [s for s in result.timeline if s.kind == DOWNLINK]
    assert (len(up), len(down)) == (result.messages_up, result.messages_down)
    assert all(s.end - s.begin >= 0.025 + 0.015 for s in up)
    assert sum(s.accepted for s in down) == result.accepted
    assert sum(s.tokens for s in down) == result.tokens
    assert not replay(trace, policy("pipesd"), find_scenario("4g")).timeline


def test_a_schedule_of_rates_is_met_in_different_phases() -> None:
    trace = make_trace([True] * 40)
    results = replay_all([trace] * 8, vanilla(4), find_scenario("S4").with_wire("full-probs"))
    assert len({round(result.seconds, 6) for result in results}) > 4


def test_a_session_learns_the_link_of_the_scenario() -> None:
    traces = [random_trace(seed) for seed in range(4)]
    result = replay_all(traces, vanilla(4), find_scenario("4g"))[-1]
    # 15 ms of start-up, 25 ms on the way there and back, and what the system itself costs.
    assert result.estimates.link.alpha == pytest.approx(0.0658, rel=0.02)


def test_a_device_keeps_what_it_has_learnt() -> None:
    traces = [random_trace(seed) for seed in range(4)]
    planned = dataclasses.replace(find_policy("pipesd"), sending=SEND_PLANNED)
    scenario = find_scenario("4g")
    results = replay_all(traces, planned, scenario)
    assert results[0].estimates != Estimates()
    alone = replay(traces[-1], planned, scenario, seed=3)
    warm = replay(traces[-1], planned, scenario, seed=3, estimates=results[-2].estimates)
    assert warm == results[-1] != alone


def test_a_link_with_cuts_is_refused() -> None:
    scenario = Scenario("cut", Link(cuts=(Cut(1.0),)))
    with pytest.raises(ConfigError, match="cuts the link"):
        replay(make_trace([True]), policy("pipesd"), scenario)


def test_a_verifier_that_says_nothing_ends_the_replay() -> None:
    class Silent(RealVerifier):
        def messages_to_send(self, now: float) -> list[VerifierMessage]:
            said = super().messages_to_send(now)
            return [m for m in said if isinstance(m, Accepted)]

    trace = make_trace([True] * 5)
    with pytest.raises(TransportError, match=r"attachments brought no token|no verifier answered"):
        replay(trace, policy("pipesd"), NOTHING, verifier=Silent(trace))


def test_it_is_fast() -> None:
    """Two thousand tokens a second by far, or a grid of constants would take all day."""
    traces = [random_trace(seed, 64) for seed in range(20)]
    begin = time.process_time()
    results = [
        result
        for name in ("pipesd", "vanilla", "edgellm")
        for result in replay_all(traces, policy(name), find_scenario("4g"))
    ]
    seconds = time.process_time() - begin
    assert sum(result.tokens for result in results) / seconds > 2_000


# -- the command --------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], argv: Sequence[str]) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_prints_a_table(tmp_path, capsys) -> None:
    path = tmp_path / "t.jsonl"
    write_traces(path, [random_trace(1), random_trace(2)])
    code, out, err = run(capsys, [str(path), "--policies", "pipesd,cloud", "--scenarios", "4g,far"])
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()[2:]]
    assert [line[:2] for line in lines] == [
        ["4g", "pipesd"],
        ["4g", "cloud"],
        ["far", "pipesd"],
        ["far", "cloud"],
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--policies", "fast"], "unknown policy 'fast'"),
        (["--scenarios", "moon"], "unknown scenario 'moon'"),
        (["--scenarios", ","], "empty list"),
        (["--constants", "/nowhere/c.json"], "cannot read --constants"),
        (["--verify", "never"], "invalid choice"),
    ],
)
def test_wrong_flags_are_one_line(tmp_path, capsys, argv, words) -> None:
    path = tmp_path / "t.jsonl"
    write_traces(path, [random_trace(1)])
    code, _, err = run(capsys, [str(path), *argv])
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_missing_trace_file_is_named(capsys) -> None:
    code, _, err = run(capsys, ["/nowhere/t.jsonl"])
    assert code == 2
    assert "/nowhere/t.jsonl cannot be read" in err


def test_every_scenario_can_be_replayed() -> None:
    trace = random_trace(3)
    for scenario in SCENARIOS.values():
        check(replay(trace, policy("pipesd"), scenario), trace)
