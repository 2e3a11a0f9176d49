"""What is written is drawn from the target's softmax, whatever the draft proposes.

A hand-made target of four tokens, sampled with the shared noise on both sides, through the whole
protocol over the in-memory broker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chisquare

from broker.memory import Faults
from broker.messages import VERIFY_TRIGGERED, Verdict
from broker.sampling import Sampler, Sampling
from edge_agent.core.trigger import Thresholds
from edge_agent.scripted_draft import Chooser, Oracle
from tests.sim.world import CALM, SimEdge, World

#: Tokens 1 to 4; 0 would end the text.
TARGET = np.array([-np.inf, 1.2, 0.3, -0.4, -1.5], dtype=np.float32)
DRAFTS = {
    "equal": TARGET,
    "good": np.array([-np.inf, 1.0, 0.5, -0.5, -1.2], dtype=np.float32),
    "bad": np.array([-np.inf, -1.5, -0.4, 0.3, 1.2], dtype=np.float32),
    "blind": np.array([-np.inf, 0.0, 0.0, 0.0, 0.0], dtype=np.float32),
}
DRAWS = 4_000
SAMPLING = Sampling(temperature=1.0, seed=20_240_229)
PROMPT = (1, 2)


def softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits[1:].astype(np.float64))
    return weights / weights.sum()


def shared_noise_acceptance(
    target: npt.NDArray[np.float32], draft: npt.NDArray[np.float32]
) -> float:
    """The chance that both sides choose the same token with the same exponentials.

    Token i wins on both sides when its exponential is the least relative to either probability:
    the sum over i of 1 / (sum over j of max(target_j / target_i, draft_j / draft_i)).
    """
    target_probs, draft_probs = softmax(target), softmax(draft)
    return sum(
        1.0 / np.maximum(target_probs / t, draft_probs / d).sum()
        for t, d in zip(target_probs, draft_probs, strict=True)
    )


def target_side() -> Chooser:
    sampler = Sampler(len(TARGET))
    return lambda sequence, position, sampling: sampler.choose(TARGET, position, sampling)


def draft_side(logits: npt.NDArray[np.float32]) -> Oracle:
    sampler = Sampler(len(logits))

    def oracle(sequence: Sequence[int], position: int, sampling: Sampling) -> tuple[int, float]:
        return sampler.choose_with_confidence(logits, position, sampling)

    return oracle


def write(name: str, window: int, faults: Faults = CALM) -> tuple[SimEdge, list[Verdict]]:
    """One long session; its edge and the verdicts that reached it."""
    world = World(5, chooser=target_side(), context=DRAWS + 10)
    world.broker.faults = faults
    world.add_verifier(forward_time=0.001)
    edge = world.add_edge(
        prompt=PROMPT,
        max_tokens=DRAWS,
        draft=draft_side(DRAFTS[name]),
        draft_time=0.001,
        sampling=SAMPLING,
        context=DRAWS + 10,
        thresholds=Thresholds(r1=0.0, r2=0.0, window=window),
        max_ahead=window,
        verify=VERIFY_TRIGGERED,  # so that nearly every token is a judged one
    )
    verdicts: list[Verdict] = []
    receive = edge.session.receive

    def listen(message, now: float) -> None:
        if isinstance(message, Verdict):
            verdicts.append(message)
        receive(message, now)

    edge.session.receive = listen  # type: ignore[method-assign]
    world.run(200_000)
    edge.check()
    return edge, verdicts


def fit(tokens: Sequence[int]) -> float:
    """p-value of the tokens' counts under the target's softmax."""
    counts = Counter(tokens)
    observed = [counts[token] for token in range(1, 5)]
    assert sum(observed) == len(tokens)
    return float(chisquare(observed, softmax(TARGET) * len(tokens)).pvalue)


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[SimEdge, list[Verdict]]]:
    return {name: write(name, window=4) for name in DRAFTS}


@pytest.mark.parametrize("name", DRAFTS)
def test_four_thousand_draws_fit_the_targets_softmax(runs, name) -> None:
    edge, _ = runs[name]
    assert len(edge.text) == DRAWS
    assert fit(edge.text) > 0.001


def test_neighbours_are_independent(runs) -> None:
    """Pairs of tokens too: noise of one position says nothing of the next."""
    text = runs["bad"][0].text
    pairs = Counter(zip(text[::2], text[1::2], strict=True))
    probs = softmax(TARGET)
    expected = np.outer(probs, probs).ravel() * (DRAWS // 2)
    observed = [pairs[(one, two)] for one in range(1, 5) for two in range(1, 5)]
    assert chisquare(observed, expected).pvalue > 0.001


def test_the_test_would_notice_another_distribution(runs) -> None:
    """The draft's own choices, which differ most of the time, do not fit."""
    oracle = draft_side(DRAFTS["bad"])
    own = [oracle((), position, SAMPLING)[0] for position in range(DRAWS)]
    assert fit(own) < 1e-9


def test_the_text_does_not_depend_on_the_draft(runs) -> None:
    texts = {name: edge.text for name, (edge, _) in runs.items()}
    assert texts["good"] == texts["bad"] == texts["equal"] == texts["blind"]


@pytest.mark.parametrize("name", DRAFTS)
def test_acceptance_is_what_shared_noise_promises(runs, name) -> None:
    """Judged tokens up to the first rejection of each verdict are independent trials."""
    _, verdicts = runs[name]
    accepted = sum(verdict.accepted for verdict in verdicts)
    rejected = sum(verdict.accepted < verdict.judged for verdict in verdicts)
    promised = shared_noise_acceptance(TARGET, DRAFTS[name])
    trials = accepted + rejected
    assert trials > 1_000
    deviation = np.sqrt(promised * (1.0 - promised) / trials)
    assert accepted / trials == pytest.approx(promised, abs=max(4.0 * deviation, 1e-9))


def test_acceptance_lies_between_the_bounds_of_any_scheme() -> None:
    """At most 1 - total variation; shared noise reaches (1 - tv) / (1 + tv) at least."""
    for logits in DRAFTS.values():
        distance = 0.5 * float(np.abs(softmax(TARGET) - softmax(logits)).sum())
        promised = shared_noise_acceptance(TARGET, logits)
        assert (1 - distance) / (1 + distance) - 1e-12 <= promised <= 1 - distance + 1e-12


def test_short_sessions_with_many_seeds_fit_too() -> None:
    """Four tokens each: the first positions of a text are as good as any."""
    world = World(6, chooser=target_side(), max_sessions=2_000)
    world.add_verifier(slots=64, forward_time=0.0)
    text: list[int] = []
    for seed in range(1_000):
        edge = world.add_edge(
            f"d{seed}",
            prompt=PROMPT,
            max_tokens=4,
            draft=draft_side(DRAFTS["bad"]),
            draft_time=0.0,
            sampling=Sampling(temperature=1.0, seed=seed),
        )
        world.run(10**9)
        edge.check()
        text += edge.text
        edge.transport.stop()
        world.edges.clear()
    assert len(text) == DRAWS
    assert fit(text) > 0.001


def test_a_lossy_network_draws_the_same_text(runs) -> None:
    edge, _ = write(
        "good", window=4, faults=Faults(drop=0.05, duplicate=0.1, reorder=0.1, delay=(0.001, 0.01))
    )
    assert edge.text == runs["good"][0].text
    assert edge.session.stats.timeouts > 0
