"""A split run writes what the target alone would, token for token, whatever drafts for it.

In float32 to the letter. In bfloat16 a first difference is legitimate where the two best choices
tie within the rounding of a logit; ``NEAR`` says how near.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from broker.messages import VERIFY_EAGER
from broker.noise import exponentials, hash_ids, noise_key
from broker.sampling import Sampler, Sampling
from cloud_verifier.engine.target import Work
from cloud_verifier.engine.torch_text import TargetText
from edge_agent.core.config import VERIFY_AHEAD, VERIFY_AUTO
from edge_agent.core.policies import POLICIES, find_policy
from edge_agent.core.trigger import Thresholds
from edge_agent.scripted_draft import Oracle, always_right, always_wrong, sometimes_right
from edge_agent.text import Detokenizer
from tests.brokers import wait_until
from tests.commands import FIELDS, Command, run_command
from tests.lab import Case, Lab, Outcome, differences, open_lab
from tests.prompts import GREEDY, PROMPTS, Prompt, long_texts, sampled

pytestmark = [pytest.mark.models, pytest.mark.slow]

TOKENS = 24
LONG_TOKENS = 12
WINDOW = 512  # of gemma3's sliding layers
QUANTS = ["q2_k", "q3_k_m"]
Ids: TypeAlias = "dict[str, tuple[int, ...]]"
#: Units in the last place of the best logit that two bfloat16 logits may differ by and still tie.
NEAR = 2.0


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """SmolLM2 in float32."""
    with open_lab(tmp_path_factory.mktemp("lab"), "smollm2") as made:
        yield made


@pytest.fixture(scope="module")
def ids(lab: Lab) -> Ids:
    """The token ids of each prompt, as an edge sends them."""
    with lab.draft("q3_k_m") as draft:
        return {
            prompt.name: tuple(
                draft.text.encode_chat([{"role": "user", "content": prompt.text}])
                if prompt.chat
                else draft.text.encode_prompt(prompt.text)
            )
            for prompt in PROMPTS
        }


def cases(ids: Ids, mode: str, prompts: list[Prompt] = PROMPTS) -> list[Case]:
    """One per prompt; each sampled one with its own seed."""
    return [
        Case(
            f"{prompt.name} ({mode})",
            ids[prompt.name],
            GREEDY if mode == "greedy" else sampled(1000 + number),
            TOKENS,
        )
        for number, prompt in enumerate(prompts)
    ]


def acceptance(outcomes: list[Outcome]) -> float:
    return sum(o.stats.accepted for o in outcomes) / sum(o.stats.judged for o in outcomes)


def test_there_are_enough_prompts_of_each_kind(ids: Ids) -> None:
    assert len(PROMPTS) == len(ids) == 20
    assert sum(prompt.chat for prompt in PROMPTS) >= 8
    assert sum(not prompt.chat for prompt in PROMPTS) >= 8
    assert max(map(len, ids.values())) > 256


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("quant", QUANTS)
def test_real_drafts(lab: Lab, ids: Ids, quant: str, mode: str) -> None:
    with lab.draft(quant) as draft:
        outcomes = lab.split(draft, cases(ids, mode))
    assert differences(outcomes) == []
    assert all(outcome.verified for outcome in outcomes)
    # That the text is right says nothing about the draft; that it helped does.
    assert acceptance(outcomes) > 0.25
    tokens = sum(len(outcome.alone.tokens) for outcome in outcomes)
    assert sum(outcome.stats.forwards for outcome in outcomes) < 0.8 * tokens


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["wrong", "right", "random"])
def test_scripted_drafts(lab: Lab, ids: Ids, kind: str, mode: str) -> None:
    wanted = cases(ids, mode)
    for case in wanted:
        lab.alone(case)
    chooser, vocabulary = lab.oracle(), lab.target.vocab_size
    oracle: Oracle = {
        "wrong": always_wrong(chooser, vocabulary),
        "right": always_right(chooser),
        "random": sometimes_right(chooser, vocabulary, 0.6, seed=9),
    }[kind]
    outcomes = lab.split(lab.scripted(oracle), wanted, at_once=8)
    assert differences(outcomes) == []
    for outcome in outcomes:
        stats, count = outcome.stats, len(outcome.alone.tokens)
        if kind == "wrong":
            assert stats.accepted == 0
            assert stats.forwards == count
        elif kind == "right":
            assert stats.accepted == stats.judged
            assert stats.rolled_back == 0
            assert stats.forwards <= max(3, count / 3)


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_alone_on_the_replica(lab: Lab, ids: Ids, mode: str) -> None:
    """Nobody shares the forwards, and the verifier may judge what was not asked for."""
    wanted = cases(ids, mode)
    with lab.draft("q3_k_m") as draft:
        outcomes = lab.split(draft, wanted[:3], at_once=1)
        outcomes += lab.split(draft, wanted[3:6], at_once=1, verify=VERIFY_EAGER)
        outcomes += lab.split(draft, wanted[6:9], at_once=1, verify=VERIFY_AHEAD)
        outcomes += lab.split(draft, wanted[9:12], at_once=3, verify=VERIFY_AUTO)
        seldom = Thresholds(0.0, 0.0, 40)
        outcomes += lab.split(draft, wanted[12:14], at_once=1, thresholds=seldom, max_ahead=40)
    assert differences(outcomes) == []


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "local"])
def test_policies_decide_about_time_only(lab: Lab, ids: Ids, name: str) -> None:
    wanted = [*cases(ids, "greedy")[11:14], *cases(ids, "sampled")[11:13]]
    with lab.draft("q3_k_m") as draft:
        outcomes = lab.split(draft, wanted, policy=find_policy(name))
    assert differences(outcomes) == []
    assert all(outcome.verified for outcome in outcomes)
    assert (sum(outcome.stats.drafted for outcome in outcomes) == 0) == (name == "cloud")


def test_both_sides_read_and_write_the_same_text(lab: Lab, ids: Ids) -> None:
    """Ids from the edge's tokenizer and text from its detokenizer, against transformers'."""
    words = TargetText(lab.source)
    with lab.draft("q3_k_m") as draft:
        for prompt in PROMPTS:
            if prompt.chat:
                expected = words.encode_chat([{"role": "user", "content": prompt.text}])
            else:
                expected = words.encode_prompt(prompt.text)
            assert ids[prompt.name] == tuple(expected), prompt.name
        for case in (*cases(ids, "greedy"), *cases(ids, "sampled")):
            tokens = lab.alone(case).tokens
            detokenizer = Detokenizer()
            text = "".join(detokenizer.feed(draft.text.piece(token)) for token in tokens)
            assert text == words.decode(tokens).removesuffix("\N{REPLACEMENT CHARACTER}"), case


# ---- a sliding window -----------------------------------------------------------------------


def test_prompts_longer_than_the_sliding_window(tmp_path: Path) -> None:
    """gemma3: half of the text is out of sight of most layers, and drafts are taken back there."""
    with open_lab(tmp_path, "gemma3") as lab:
        with lab.draft("q3_k_m") as draft:
            prompts = [tuple(draft.text.encode_prompt(text)) for text in long_texts()]
            assert len(prompts) == 5
            assert all(WINDOW + 8 < len(prompt) < 640 for prompt in prompts)
            greedy = [Case(f"long {n}", p, GREEDY, LONG_TOKENS) for n, p in enumerate(prompts)]
            drawn = [
                Case(f"long {n} (sampled)", p, sampled(50 + n), LONG_TOKENS)
                for n, p in enumerate(prompts)
            ]
            outcomes = lab.split(draft, greedy, at_once=2)
            outcomes += lab.split(draft, drawn[:2], at_once=2)
        with lab.draft("q2_k") as draft:
            outcomes += lab.split(draft, [greedy[0], drawn[1]], at_once=2)
        wrong = lab.scripted(always_wrong(lab.oracle(), lab.target.vocab_size))
        outcomes += lab.split(wrong, greedy[:2], at_once=2)
        assert differences(outcomes) == []


# ---- lower precision ------------------------------------------------------------------------


def unit_in_the_last_place(value: float) -> float:
    """The distance of neighbouring bfloat16 numbers at ``value``: 8 bits of precision."""
    return float(2.0 ** (math.floor(math.log2(abs(value))) - 7))


def gap(logits: np.ndarray, position: int, sampling: Sampling, tokens: tuple[int, int]) -> float:
    """By how much, in units of a logit, the worse of two tokens falls short of winning."""
    scores = logits.astype(np.float64)
    if not sampling.greedy:
        allowed = Sampler(len(logits)).survivors(logits, sampling)
        hashes = hash_ids(
            np.arange(len(logits), dtype=np.uint32), noise_key(sampling.seed, position)
        )
        scores = scores - sampling.temperature * np.log(exponentials(hashes).astype(np.float64))
        # A token that the filters just leave out, or in, is as far away as the last one left in.
        edge = float(logits[allowed].min())
        short = max(max(0.0, edge - float(logits[token])) for token in tokens)
        barred = np.ones(len(logits), dtype=bool)
        barred[[*allowed, *tokens]] = False
        scores[barred] = -np.inf
        return max(short, float(scores.max() - min(scores[token] for token in tokens)))
    return float(scores.max() - min(scores[token] for token in tokens))


def test_bfloat16_differs_at_near_ties_alone(tmp_path: Path, ids: Ids) -> None:
    some = [prompt for prompt in PROMPTS if len(ids[prompt.name]) < 80][:8]
    with open_lab(tmp_path, "smollm2", "bfloat16") as lab, lab.draft("q2_k") as draft:
        outcomes = lab.split(draft, [*cases(ids, "greedy", some), *cases(ids, "sampled", some)])
        gaps = []
        for outcome in outcomes:
            at = outcome.first_difference
            if outcome.equal:
                continue
            alone, split = outcome.alone.tokens, outcome.split.tokens
            assert at < min(len(alone), len(split)), "one is the beginning of the other"
            sequence = (*outcome.case.prompt, *alone[:at])
            with lab.target.lock:
                sampling, blocks = outcome.case.sampling, lab.kept_back
                work = Work(7, 0, sequence, 1, at, sampling, blocks=blocks)
                logits = lab.target.logits([work])[0].float().numpy()
            found = gap(logits, at, sampling, (alone[at], split[at]))
            units = found / unit_in_the_last_place(float(logits.max()))
            gaps.append(units)
            assert units <= NEAR, f"{outcome.case.name} at {at}: {units:.1f} units are no tie"
    print(f"{len(gaps)} of {len(outcomes)} differ, by {max(gaps, default=0.0):.2f} units at most")
    assert len(gaps) <= len(outcomes) / 2


def test_the_measure_of_near_ties() -> None:
    """What the test above relies on where all runs happen to be equal."""
    assert unit_in_the_last_place(17.0) == 0.125
    assert unit_in_the_last_place(-9.0) == 0.0625
    logits = np.array([1.0, 9.0, 8.875, 3.0], dtype=np.float32)
    assert gap(logits, 0, GREEDY, (1, 2)) == 0.125
    assert gap(logits, 0, GREEDY, (1, 3)) == 6.0
    for position in range(50):
        settings = Sampling(temperature=0.8, top_p=0.95, seed=position)
        winner = Sampler(4).choose(logits, position, settings)
        assert gap(logits, position, settings, (winner, winner)) == 0.0
        assert gap(logits, position, settings, (winner, 0)) > 1.0


# ---- the real commands ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "flags"),
    [
        ("Why is the sky blue?", []),
        ("Name three rivers. 🦙", ["--temperature", "0.8", "--top-p", "0.95", "--seed", "11"]),
        ("The first three primes are", ["--raw"]),
    ],
)
def test_the_commands_agree(verifier: str, prompt: str, flags: list[str]) -> None:
    """``edge-agent generate`` against ``cloud-verifier serve`` is ``cloud-verifier generate``."""
    what = ["--pair", "smollm2", "--threads", "1", "--prompt", prompt, "--max-tokens", "20"]
    split = run_command(
        "edge-agent", "generate", "--broker", verifier, "--timeout", "60", *what, *flags, "--json"
    )
    alone = run_command("cloud-verifier", "generate", *what, *flags, "--json", timeout=120)
    assert (split.code, split.err) == (0, "")
    assert (alone.code, alone.err) == (0, "")
    ours, target = json.loads(split.out), json.loads(alone.out)
    assert list(ours) == list(target) == FIELDS
    assert len(split.out.splitlines()) == 1
    for field in ("text", "token_ids", "finish_reason", "tokens"):
        assert ours[field] == target[field]
    assert ours["tokens"] == len(ours["token_ids"])
    assert (ours["mode"], ours["verified"]) == ("cloud", True)
    assert ours["ttft_ms"] > 0
    assert 0 < ours["accepted"] <= ours["drafted"]
    assert 0 < ours["forwards"] <= ours["tokens"]
    assert 0 < ours["uplink_messages"] <= ours["uplink_bytes"]
    assert ours["downlink_bytes"] > 0
    assert (target["mode"], target["forwards"]) == ("target", target["tokens"])


@pytest.fixture(scope="module")
def verifier(url: str) -> Iterator[str]:
    """The broker's address, with ``cloud-verifier serve`` as a process behind it."""
    flags = ["--broker", url, "--pair", "smollm2", "--threads", "1", "--id", "served"]
    with Command("cloud-verifier", "serve", *flags) as command:
        command.until(lambda: "verifier served serves" in command.out, 120)
        yield url
        command.signal(15)
        assert command.wait().code == 0
    assert wait_until(lambda: command.process.returncode == 0)
