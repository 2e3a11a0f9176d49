"""A verifier's core driven by hand: tests are its driver, its target and its edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from broker.messages import (
    VERIFY_TRIGGERED,
    Accepted,
    Close,
    DraftBatch,
    Resync,
    SessionOpen,
    VerifierMessage,
)
from broker.sampling import Sampling
from cloud_verifier.core.scheduler import Limits
from cloud_verifier.core.session import VerifierSession
from cloud_verifier.core.verifier import Forward, SessionKey, VerifierConfig, VerifierCore

EOS = 0
VOCAB = 100
PROMPT = (91, 92, 93)
Kind = TypeVar("Kind")


def next_token(sequence: Sequence[int]) -> int:
    """A target that never ends: depends on the whole sequence, so that a wrong cache shows."""
    return 1 + (sum(sequence) * 7 + len(sequence) * 13) % (VOCAB - 1)


def continuation(prompt: Sequence[int], number: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(number):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


class Hand:
    """``now`` is turned by the test. Sessions are named by their device; the session id is s."""

    def __init__(self, limits: Limits | None = None, **changes: object) -> None:
        self.now = 0.0
        settings: dict[str, object] = {
            "verifier": "v1",
            "vocab_size": VOCAB,
            "vocab_hash": "v",
            "context": 300,
            "eos_ids": frozenset({EOS}),
            "slots": 4,
            "limits": limits or Limits(),
            **changes,
        }
        self.core = VerifierCore(VerifierConfig(**settings))  # type: ignore[arg-type]
        self.blocks: list[list[int]] = [[] for _ in range(self.core.blocks.total)]
        self.down: list[tuple[str, VerifierMessage]] = []

    def held(self, device: str) -> VerifierSession:
        return self.core.sessions[SessionKey(device, "s")]

    # -- edges ----------------------------------------------------------------------------------

    def receive(self, device: str, message: SessionOpen | DraftBatch | Resync | Close) -> None:
        self.core.receive(device, "s", message, self.now)

    def open(
        self,
        device: str = "a",
        *,
        attach: int = 1,
        prompt: tuple[int, ...] = PROMPT,
        committed: Sequence[int] = (),
        max_tokens: int = 50,
        vocab_hash: str = "v",
        verify: str = VERIFY_TRIGGERED,
    ) -> None:
        opened = SessionOpen(
            attach, prompt, tuple(committed), Sampling(), max_tokens, vocab_hash, verify
        )
        self.receive(device, opened)

    def open_as(self, device: str, session: str, attach: int = 1) -> None:
        """One of several sessions of a device."""
        opened = SessionOpen(attach, PROMPT, (), Sampling(), 50, "v")
        self.core.receive(device, session, opened, self.now)

    def ask(
        self, device: str = "a", *tokens: int, base: int | None = None, attach: int = 1,
        epoch: int = 1, verify: bool = True,
    ) -> None:  # fmt: skip
        """Drafts with a request for a verdict, by default after what is committed."""
        if base is None:
            base = len(self.held(device).committed)
        self.receive(device, DraftBatch(attach, epoch, base, tokens, None, verify))

    def told(self) -> list[tuple[str, VerifierMessage]]:
        """What goes to the devices now."""
        return [(device, message) for device, _, message in self.core.messages_to_send(self.now)]

    def told_of(self, kind: type[Kind]) -> list[tuple[str, Kind]]:
        return [(device, message) for device, message in self.told() if isinstance(message, kind)]

    # -- the driver -----------------------------------------------------------------------------

    def forward(self) -> Forward:
        forward = self.core.next_effect()
        assert forward is not None, "nothing to do"
        assert self.core.next_effect() is None, "one forward at a time"
        return forward

    def seated(self, forward: Forward) -> list[str]:
        names = {session: key.device for key, session in self.core.sessions.items()}
        return [names[seat.session] for seat in forward.seats]

    def finish(self, forward: Forward, choose: Callable[[Sequence[int]], int] = next_token) -> None:
        """Run a forward as an engine does, and hand the answer in."""
        answers = []
        for seat in forward.seats:
            plan, size = seat.plan, self.core.blocks.block_tokens
            held = [token for block in seat.blocks for token in self.blocks[block]][: plan.keep]
            assert len(held) == plan.keep, "the core believes in a cache that is not there"
            text = [*seat.session.prompt, *seat.session.committed]
            assert held == text[: plan.keep], "the blocks hold another text"
            answer = []
            for index, token in enumerate(plan.tokens):
                held.append(token)
                if index >= len(plan.tokens) - plan.choices:
                    answer.append(choose(held))
            for place in range(plan.keep // size, -(-len(held) // size)):
                written = seat.blocks[place]
                users = sum(written in other.blocks for other in forward.seats)
                assert users == 1, "a block that is written to is another's too"
                self.blocks[written] = held[place * size : (place + 1) * size]
            answers.append(answer)
        self.now += 0.05
        self.core.forward_done(forward, answers, self.now, 0.05)

    def run(self, most: int = 100) -> int:
        """Forwards until there is nothing to do; how many."""
        for count in range(most):
            forward = self.core.next_effect()
            if forward is None:
                return count
            self.finish(forward)
        raise AssertionError(f"no rest after {most} forwards")


def attached(*devices: str, **changes: object) -> Hand:
    """A verifier that has taken these devices' sessions; nothing run yet."""
    hand = Hand(**changes)  # type: ignore[arg-type]
    for device in devices:
        hand.open(device)
        hand.now += 0.001
    assert all(isinstance(message, Accepted) for _, message in hand.told())
    return hand
