"""What a session sends of its draft, and the one request (NAV trigger) whose verdict is awaited.

Pure, like the session that owns it. It knows the window that the tokens come from, what the link is
known to cost, and how long answers may take; whether a session is attached is not its affair.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from broker.messages import VERIFY_EAGER, EdgeMessage, Resync
from edge_agent.core.attachment import Attachment
from edge_agent.core.config import VERIFY_AHEAD, VERIFY_AUTO
from edge_agent.core.effects import EdgeStats
from edge_agent.core.policies import SEND_PLANNED, Policy
from edge_agent.core.sending import Sending
from edge_agent.core.window import DraftWindow

#: Chance of the whole draft below which nothing is sent unasked while a verdict is awaited. By
#: measurement, docs/design-notes.md.
SEND_SURVIVAL = 0.5


class Outgoing(NamedTuple):
    """A message and the verifier that it is for; None: any (the ``open`` topic)."""

    verifier: str | None
    message: EdgeMessage


class Uplink:
    """See the module. ``verify``: one of VERIFY_CHOICES; ``pad_token``: what fills probes.

    ``asked``: the position up to which a verdict is awaited, None while none is; ``asked_at``:
    since when. ``going_on``: whether the latest request let the target write on by itself.
    """

    def __init__(
        self,
        policy: Policy,
        verify: str,
        *,
        window: DraftWindow,
        sending: Sending,
        attachment: Attachment,
        stats: EdgeStats,
        pad_token: int,
    ) -> None:
        self.asked: int | None = None
        self.asked_at = 0.0
        self.going_on = False
        self._policy = policy
        self._verify = verify
        self._window = window
        self._sending = sending
        self._at = attachment
        self._stats = stats
        self._pad_token = pad_token
        self._undisturbed = False  # the outstanding request was neither repeated nor joined
        self._resync_at: tuple[int, float] = (-1, 0.0)
        self._outbox: deque[Outgoing] = deque()

    def may_ask(self, now: float) -> bool:
        """Whether a rule that fires now may ask: nothing is asked, or enough is drafted since.

        Where a verdict comes in any case nothing joins a queue on the uplink.
        """
        if self.asked is None and not self.going_on:
            return True
        if self._sending.backlogged(now):
            return False
        return self.asked is None or self._window.unsent >= self._policy.ask_again

    def put(self, message: EdgeMessage, verifier: str | None) -> None:
        """``message`` goes out next."""
        self._outbox.append(Outgoing(verifier, message))

    def take(self) -> list[Outgoing]:
        """Everything that is to go out, in order; each exactly once."""
        messages = list(self._outbox)
        self._outbox.clear()
        return messages

    # -- requests -------------------------------------------------------------------------------

    def ask(self, now: float, limit: int) -> None:
        """NAV trigger: everything unsent goes out in one batch (paper, rule 1).

        ``limit``: the position at which the text ends.
        """
        # A target that writes on may be about to say what is asked for: no time of an answer.
        self._undisturbed = self.asked is None and not self.going_on
        if self.asked is None:
            self.asked_at = now
            self._at.expect_answer(now)
        self._sending.asked()
        self._send_request(now, limit)
        for size in self._sending.probes(now):
            self._send_probe(now, size)

    def asked_by_opening(self, now: float) -> None:
        """The verifier was asked for one token by SessionOpen, and has taken the session now."""
        self.asked = self._window.position
        self.asked_at = now
        # It has been at work already: how soon it answers says nothing about the next request.
        self._undisturbed = False
        self._at.expect_answer(now)

    def answered(self, now: float) -> None:
        """The verdict that was awaited has come."""
        if self._undisturbed:
            self._at.response.sample(now - self.asked_at)
        self.drop_request()

    def answered_in_part(self, now: float) -> None:
        """A verdict has come, and another one will."""
        self.asked_at = now
        self._at.expect_answer(now)

    def drop_request(self) -> None:
        """No verdict is awaited any more."""
        self.asked = None
        self._at.deadline = None

    def detached(self) -> None:
        """Whoever was asked has the session no longer; the attachment's timers are not touched."""
        self.asked = None
        self.going_on = False

    def driver_returned(self, now: float) -> None:
        """Nobody listened for a while: how long an answer took by now says nothing."""
        self.asked_at = now
        self._undisturbed = False
        self._sending.doubtful()

    def _send_request(self, now: float, limit: int) -> None:
        # A stream is asked for once, up to the end of the text.
        self.asked = limit if self._policy.stream else self._window.position
        self.going_on = self._verify == VERIFY_AHEAD or (
            self._verify == VERIFY_AUTO and self._sending.target_idles
        )
        self._send_draft(now, verify=True)

    # -- drafts ---------------------------------------------------------------------------------

    def send_unasked(self, now: float) -> None:
        """What is drafted goes out without a request, if it is time for it."""
        if self._window.has_unsent and self._sending.due() and not self._holds_back(now):
            self._send_draft(now, verify=False)

    def _holds_back(self, now: float) -> bool:
        """While a verdict is awaited: paper, rule 2, but only for what will probably be kept.

        Nobody looks at it before the next request, which waits behind what a verdict drops.
        """
        if self._policy.sending != SEND_PLANNED:
            return False
        if self.going_on and self._sending.backlogged(now):
            return True
        if self.asked is None or self._verify == VERIFY_EAGER:
            return False
        return self._window.survival < SEND_SURVIVAL

    def _send_draft(self, now: float, *, verify: bool) -> None:
        batch = self._window.take_batch(
            self._at.attach, verify=verify, go_on=verify and self.going_on
        )
        if batch is not None:
            size = len(batch.tokens)
            self._sending.sent(now, size, (batch.epoch, batch.base + size))
            self.put(batch, self._at.verifier)

    # -- losses ---------------------------------------------------------------------------------

    def repeat(self, now: float, limit: int) -> None:
        """No verdict came: repeat the request, and ask for verdicts that may have been lost.

        The draft goes first, so that the verifier's answer to Resync already counts it.
        """
        self._window.resend_from(0)
        self.repeat_draft(now, limit)
        self.send_resync(now)

    def repeat_draft(self, now: float, limit: int) -> None:
        """The request again, with whatever counts as unsent."""
        self._undisturbed = False
        self._sending.doubtful()
        self._send_request(now, limit)

    def send_resync(self, now: float, *, only_once: bool = False) -> None:
        """Ask for the verdicts after what is committed; ``only_once``: unless just asked for."""
        have = len(self._window.committed)
        if only_once and self._resync_at[0] == have and now < self._resync_at[1]:
            return
        self._resync_at = (have, now + self._at.response.timeout)
        self._undisturbed = False
        self._sending.doubtful()
        self._stats.resyncs += 1
        if self.asked is not None:
            self._at.expect_answer(now)
        self._sending.sent(now, 0)
        self.put(Resync(self._at.attach, self._window.epoch, have), self._at.verifier)

    def _send_probe(self, now: float, size: int) -> None:
        """While the link has nothing else to do: a verdict is being waited for."""
        number = self._sending.probe_sent(now, size)
        padding = (self._pad_token,) * size
        have = len(self._window.committed)
        message = Resync(self._at.attach, self._window.epoch, have, number, padding)
        self.put(message, self._at.verifier)
