"""An edge session driven by hand: tests are its driver, its draft model and its verifier."""

from __future__ import annotations

from collections.abc import Sequence

from broker.messages import (
    VERIFY_TRIGGERED,
    Accepted,
    DraftBatch,
    EdgeMessage,
    Resync,
    SessionOpen,
    Verdict,
    VerifierMessage,
)
from broker.sampling import Sampling
from edge_agent.core.config import SessionConfig
from edge_agent.core.effects import Commit, DraftNext, Finished
from edge_agent.core.policies import SEND_AT_ONCE, Policy
from edge_agent.core.sending import Estimates
from edge_agent.core.session import EdgeSession, State
from edge_agent.core.timing import Timing
from edge_agent.core.trigger import Thresholds
from edge_agent.core.uplink import Outgoing

PROMPT = (11, 12, 13)
EOS = 0
VOCAB = 100
QUIET = Thresholds(r1=0.0, r2=0.0, window=512)
OFTEN = Thresholds(r1=0.0, r2=0.5, window=512)  # a confidence of 0.5 or less asks


def config(**changes: object) -> SessionConfig:
    settings: dict[str, object] = {
        "prompt": PROMPT,
        "sampling": Sampling(),
        "max_tokens": 50,
        "vocab_hash": "v",
        "vocab_size": VOCAB,
        "eos_ids": frozenset({EOS}),
        "context": 1000,
        "min_survival": 0.0,
        "verify": VERIFY_TRIGGERED,
        **changes,
    }
    return SessionConfig(**settings)  # type: ignore[arg-type]


class Hand:
    """``now`` is turned by the test; ``limit`` is what the verifier says at Accepted."""

    def __init__(
        self,
        thresholds: Thresholds = QUIET,
        timing: Timing | None = None,
        limit: int = 50,
        policy: Policy | None = None,
        estimates: Estimates | None = None,
        **changes: object,
    ) -> None:
        self.now = 100.0
        self.limit = limit
        # Each drafted token is to be seen as soon as it may go out.
        policy = policy or Policy("pipesd", thresholds, sending=SEND_AT_ONCE, ask_again=1)
        self.session = EdgeSession(
            config(**changes), None, timing, self.now, policy=policy, estimates=estimates
        )
        self.open_message: SessionOpen | None = None
        self._seen: list[Commit | Finished] = []

    # -- the driver -----------------------------------------------------------------------------

    def outgoing(self) -> list[Outgoing]:
        return self.session.messages_to_send(self.now)

    def sent(self) -> list[EdgeMessage]:
        return [outgoing.message for outgoing in self.outgoing()]

    def batch(self) -> DraftBatch:
        """The one message that is to be sent now, a DraftBatch."""
        (message,) = self.sent()
        assert isinstance(message, DraftBatch)
        return message

    def next_draft(self) -> DraftNext | None:
        """The draft that the session asks for, if it does; what it reports is put aside."""
        while isinstance(effect := self.session.next_effect(), Commit | Finished):
            self._seen.append(effect)
        return effect

    def effects(self) -> list[Commit | Finished]:
        """What the session has reported since the last look."""
        self.next_draft()
        seen, self._seen = self._seen, []
        return seen

    def wanted(self) -> DraftNext:
        effect = self.next_draft()
        assert effect is not None, "nothing to draft"
        return effect

    def idle(self) -> bool:
        """Whether there is nothing for a driver to do."""
        return self.next_draft() is None and not self.sent()

    def draft(self, *tokens: int, confidence: float = 0.9) -> None:
        for token in tokens:
            self.session.drafted(self.wanted(), token, confidence, self.now)

    def fire(self) -> float:
        """Jump to the timer; the seconds that it took."""
        due = self.session.get_timer()
        assert due is not None, "no timer is armed"
        waited = due - self.now
        self.now = due
        self.session.handle_timer(self.now)
        again = self.session.get_timer()
        assert again is None or again > self.now, "the timer stays in the past"
        return waited

    def link(self, up: bool) -> None:
        self.session.set_connected(up, self.now)

    # -- the verifier ---------------------------------------------------------------------------

    def receive(self, message: VerifierMessage) -> None:
        self.session.receive(message, self.now)

    def accept(self, verifier: str = "v1") -> None:
        self.receive(Accepted(self.session.attach, verifier, 1000, self.limit))

    def verdict(
        self, start: int, tokens: Sequence[int], accepted: int = 0, finish: str | None = None
    ) -> None:
        attach = self.session.attach
        judged = max(accepted, len(tokens) - 1)
        self.receive(Verdict(attach, 0, start, tuple(tokens), accepted, judged, finish))

    def resync(self, have: int, epoch: int | None = None) -> None:
        epoch = self.session._window.epoch if epoch is None else epoch
        self.receive(Resync(self.session.attach, epoch, have))


def opened(thresholds: Thresholds = QUIET, **changes: object) -> Hand:
    """A session that verifier v1 has taken; nothing drafted, nothing waits to be sent."""
    hand = Hand(thresholds, **changes)  # type: ignore[arg-type]
    hand.link(True)
    (message,) = hand.sent()
    assert isinstance(message, SessionOpen)
    hand.open_message = message
    hand.accept()
    assert hand.session.state is State.ACTIVE
    assert hand.sent() == []
    return hand
