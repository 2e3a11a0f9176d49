"""The whole verifier over every target: a session's text is the same alone and in any company.

Sessions of unequal length with chains, trees, wrong and right drafts, pieces of prefill, evictions
(more sessions than slots) and second openings share the forwards; what each of them commits is
what a plain forward over its own sequence chooses, token by token.
"""

from __future__ import annotations

import random

import pytest

from broker.messages import Accepted, DraftBatch, SessionOpen
from broker.sampling import Sampling
from cloud_verifier.core.scheduler import Limits
from cloud_verifier.core.verifier import SessionKey, VerifierCore
from cloud_verifier.runtime import config_for, works_of
from tests.contract.test_target import GREEDY, PLAIN, SAMPLED, SUBJECTS, sequence_of
from tests.tiny_models import VOCAB

#: Prompt length, tokens to write and sampling.
MIX: tuple[tuple[int, int, Sampling], ...] = (
    (3, 16, GREEDY),
    (40, 12, SAMPLED),
    (21, 10, PLAIN),
    (7, 14, SAMPLED),
    (33, 8, GREEDY),
)


def tree_around(
    right: list[int], draw: random.Random
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """A draft of up to five tokens that follows the text ``right`` more or less, maybe a tree."""
    chain = [
        token if draw.random() < 0.7 else draw.randrange(VOCAB)
        for token in right[: draw.randrange(6)]
    ]
    if draw.random() < 0.4:
        return tuple(chain), None
    tokens, parents = list(chain), list(range(-1, len(chain) - 1))
    for depth in range(min(len(right), len(chain) + 1)):
        if draw.random() < 0.5:
            parent = depth - 1
            for token in right[depth : depth + 2]:
                tokens.append(token if draw.random() < 0.7 else draw.randrange(VOCAB))
                parents.append(parent)
                parent = len(tokens) - 1
    return tuple(tokens), tuple(parents)


@pytest.mark.parametrize("name", SUBJECTS)
def test_each_session_writes_its_own_text(name: str) -> None:
    subject = SUBJECTS[name]
    target = subject.make()  # of its own, since the core hands out its blocks
    draw = random.Random(7)
    core = VerifierCore(
        config_for(target, "v", slots=2, limits=Limits(forward_tokens=40, prefill_tokens=16))
    )
    prompts = [sequence_of(size, 50 + size) for size, _, _ in MIX]
    texts = [
        subject.text(prompt, count, how)
        for prompt, (_, count, how) in zip(prompts, MIX, strict=True)
    ]
    attach = [0] * len(MIX)
    epochs = [0] * len(MIX)

    def open_again(index: int, committed: list[int]) -> None:
        attach[index] += 1
        _, count, how = MIX[index]
        opened = SessionOpen(
            attach[index], tuple(prompts[index]), tuple(committed), how, count, target.vocab_hash
        )
        core.receive(f"d{index}", "s", opened, now)

    def draft(index: int) -> None:
        held = core.sessions[SessionKey(f"d{index}", "s")]
        epochs[index] += 1
        tokens, parents = tree_around(texts[index][len(held.committed) :], draw)
        batch = DraftBatch(
            attach[index], epochs[index], len(held.committed), tokens, parents, verify=True
        )
        core.receive(f"d{index}", "s", batch, now)

    now = 0.0
    for index in range(len(MIX)):
        open_again(index, [])
    assert all(isinstance(sent.message, Accepted) for sent in core.messages_to_send(now))
    for _ in range(200):
        for index in range(len(MIX)):
            held = core.sessions[SessionKey(f"d{index}", "s")]
            if held.finish is None and not held.triggered and draw.random() < 0.7:
                if draw.random() < 0.1:
                    open_again(index, held.committed[: draw.randrange(len(held.committed) + 1)])
                draft(index)
        forward = core.next_effect()
        if forward is not None:
            now += 0.01
            core.forward_done(forward, target.forward(works_of(forward)), now, 0.01)
        for index, text in enumerate(texts):
            held = core.sessions[SessionKey(f"d{index}", "s")]
            assert held.committed == text[: len(held.committed)], f"session {index}"
        core.messages_to_send(now)
        if all(held.finish is not None for held in core.sessions.values()):
            break
    else:
        pytest.fail("not all sessions came to their end")
    target.close()
    stats = core.stats
    assert stats.batch_sessions > stats.forwards, "no forward had company"
    assert stats.judged > stats.accepted > 0
