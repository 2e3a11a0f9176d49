"""The whole verifier over every target, driven at random: no accident changes a token.

Forwards fail before and after the model ran; devices attach again with less than was committed,
close, leave gaps and draft wrong trees while forwards run; slots are few and prompts begin alike.
Whatever is committed or told is what a plain forward over the session's own text chooses.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from broker.errors import ModelError
from broker.messages import (
    VERIFY_EAGER,
    VERIFY_STREAM,
    VERIFY_TRIGGERED,
    Close,
    DraftBatch,
    Resync,
    SessionOpen,
    Verdict,
)
from cloud_verifier.core.scheduler import Limits
from cloud_verifier.core.verifier import Forward, SessionKey, VerifierCore
from cloud_verifier.runtime import config_for, works_of
from tests.contract.test_core_on_targets import tree_around
from tests.contract.test_target import GREEDY, PLAIN, SAMPLED, SUBJECTS, sequence_of

NAMES = ("scripted", "llama", "gemma3", "llama.cpp-llama")
STEPS = 120
DEVICES = 6
#: Where prompts part: in the middle of blocks of 64 tokens and at their ends.
HEADS = (0, 20, 63, 64, 65, 100, 128)


class Stress:
    """One verifier, its target, and devices that each have a prompt of their own."""

    def __init__(self, name: str, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        subject = SUBJECTS[name]
        self.target: Any = subject.make()
        limits = Limits(
            forward_tokens=draw.choice((40, 80)), prefill_tokens=draw.choice((16, 40)),
            unasked_tokens=8, draft_tokens=4, crowd=3,
        )  # fmt: skip
        slots = draw.choice((2, 3, self.target.max_slots))
        self.core = VerifierCore(
            config_for(
                self.target,
                "v",
                slots=slots,
                limits=limits,
                idle_ttl=3.0,
                max_sessions=5,
                busy_retry=0.05,
            )
        )
        self.now = 0.0
        self.epoch = 0
        self.attaches = [0] * DEVICES
        self.told = 0
        head = sequence_of(130, 5)
        self.prompts: list[list[int]] = []
        self.texts: list[list[int]] = []
        for device in range(DEVICES):
            parts = head[: draw.choice(HEADS)], sequence_of(draw.randint(1, 10), 50 + device)
            prompt = [*parts[0], *parts[1]]
            count = min(draw.randint(6, 20), self.target.context - len(prompt) - 1)
            self.prompts.append(prompt)
            self.texts.append(subject.text(prompt, count, self.sampling(device)))

    @staticmethod
    def sampling(device: int) -> Any:
        return (GREEDY, SAMPLED, PLAIN)[device % 3]

    def held(self, device: int) -> Any:
        return self.core.sessions.get(SessionKey(f"d{device}", "s"))

    def open(self, device: int) -> None:
        held, text = self.held(device), self.texts[device]
        known = len(held.committed) if held is not None else len(text) - 1
        committed = text[: min(self.draw.randint(known // 2, known), len(text) - 1)]
        self.attaches[device] += 1
        self.say(
            device,
            SessionOpen(
                self.attaches[device], tuple(self.prompts[device]), tuple(committed),
                self.sampling(device), len(text), self.target.vocab_hash,
                self.draw.choice((VERIFY_TRIGGERED, VERIFY_EAGER, VERIFY_STREAM)),
                ask=self.draw.random() < 0.5,
            ),
        )  # fmt: skip

    def say(self, device: int, message: Any) -> None:
        self.core.receive(f"d{device}", "s", message, self.now)

    def anything(self) -> None:
        draw = self.draw
        self.now += draw.choice((0.0, 0.01, 0.1))
        device = draw.randrange(DEVICES)
        held, what = self.held(device), draw.random()
        if held is None or what < 0.1:
            self.open(device)
        elif what < 0.14:
            self.say(device, Close(held.attach))
        elif what < 0.18:
            have = draw.randint(0, len(held.committed))
            self.say(device, Resync(held.attach, draw.randint(0, self.epoch), have))
        elif what < 0.2:
            self.core.handle_timer(self.now)
        else:
            self.draft(device, held)
        self.hear()

    def draft(self, device: int, held: Any) -> None:
        self.epoch += self.draw.randint(0, 1)
        base = max(0, len(held.committed) - self.draw.choice((0, 0, 0, 1, 3)))
        tokens, parents = tree_around(self.texts[device][base:], self.draw)
        base += self.draw.choice((0, 0, 0, 0, 2)) if tokens else 0
        asks = not tokens or self.draw.random() < 0.7
        goes_on = asks and self.draw.random() < 0.2
        shape = parents if tokens else None
        self.say(device, DraftBatch(held.attach, self.epoch, base, tokens, shape, asks, goes_on))

    def hear(self) -> None:
        for device, _, message in self.core.messages_to_send(self.now):
            if isinstance(message, Verdict):
                text, start = self.texts[int(device[1:])], message.start
                assert list(message.tokens) == text[start : start + len(message.tokens)], device
                self.told += 1

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One forward, which may fail, with messages while it runs."""
        forward = self.core.next_effect()
        if forward is None:
            return
        for _ in range(self.draw.choice((0, 0, 1, 3))):
            self.anything()
        self.now += 0.01
        if self.draw.random() < 0.06:
            self.fail(forward, monkeypatch)
        else:
            choices = self.target.forward(works_of(forward))
            assert self.core.forward_done(forward, choices, self.now, 0.01) == []
        self.hear()

    def fail(self, forward: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
        ran, after = self.target._run, self.draw.random() < 0.5

        def broken(*given: Any) -> Any:
            if after:
                ran(*given)
            raise ModelError("fails in the middle: start again")

        with monkeypatch.context() as patch:
            patch.setattr(self.target, "_run", broken)
            with pytest.raises(ModelError, match="in the middle"):
                self.target.forward(works_of(forward))
        self.core.forward_failed(forward)

    def check(self) -> None:
        core = self.core
        for key, held in core.sessions.items():
            text = self.texts[int(key.device[1:])]
            assert held.committed == text[: len(held.committed)], key.device
        seen = [held.last_seen for held in core.sessions.values()]
        assert seen == sorted(seen), "who is silent for longest comes first"


@pytest.mark.parametrize("name", NAMES)
def test_no_accident_changes_a_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stress = Stress(name, seed=11)
    for _ in range(STEPS):
        for _ in range(stress.draw.choice((0, 1, 2, 4))):
            stress.anything()
        stress.run(monkeypatch)
        stress.check()
    stats = stress.core.stats
    assert stress.told > 20
    assert stats.accepted > 0
    assert stats.forward_failures > 0
    stress.core.drain()
    assert stress.core.blocks.available == stress.core.blocks.total
    assert len(stress.core.slots) == 0
    stress.target.close()
