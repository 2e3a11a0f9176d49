"""Where a session is attached, how long it waits for what, and when the cloud counts as gone."""

from __future__ import annotations

import enum

from broker.errors import PipesdError, TransportError
from broker.errors import Refused as RefusedError
from broker.messages import Refused
from edge_agent.core.timing import ResponseTimer, Timing

#: Times the verifier may say "the target failed on this session" before the edge believes it.
MAX_ERRORS = 3
#: SessionOpen sent at even intervals, before the intervals double: a broker hands each of them to
#: a replica of its choice, and one of several that is away is missed soon by asking again.
EVEN_TRIES = 4
#: Attachments without one committed token before the cloud counts as unreachable.
MAX_FRUITLESS = 8


class Next(enum.Enum):
    """What to do after an attachment was lost."""

    OPEN = "open"
    WAIT = "wait"
    GIVE_UP = "give up"


class Attachment:
    """See the module. ``attach`` counts attachments from 1; ``verifier``: None while there is none.

    ``deadline``: when the answer that is waited for is overdue, None while nothing is.
    ``connected``: whether the link to the broker is up.
    """

    def __init__(self, timing: Timing, now: float) -> None:
        self.attach = 0
        self.verifier: str | None = None
        self.connected = False
        self.left: tuple[str, int] | None = None  # a verifier that may still hold that attach
        self.deadline: float | None = None
        self.response = ResponseTimer(timing)
        self._timing = timing
        self._alive_at = now  # of the last sign of life, or of the wait's beginning
        self._silent = 0  # time-outs since the last sign of life
        self._tries = 0  # SessionOpen of this attach
        self._errors = 0
        self._fruitless = 0  # attachments since the last committed token
        self._refusal: Refused | None = None

    # -- waiting --------------------------------------------------------------------------------

    @property
    def offline_at(self) -> float:
        """When the cloud counts as out of reach if nothing is heard until then."""
        return self._alive_at + self._timing.offline_after

    def begin_wait(self, now: float) -> None:
        """Nothing was waited for until now: silence counts from here."""
        self._alive_at = now

    def expect_answer(self, now: float) -> None:
        self.deadline = now + self.response.timeout

    def sign_of_life(self, now: float) -> None:
        self._alive_at = now
        self._silent = 0

    def progress(self) -> None:
        """Tokens were committed."""
        self._fruitless = 0
        self._errors = 0
        self.response.answered()

    def answer_overdue(self) -> bool:
        """One more time-out: whether there were too many in a row for this attachment."""
        self._silent += 1
        return self._silent > self._timing.silent_timers

    # -- attaching ------------------------------------------------------------------------------

    def open(self, now: float) -> int:
        """Another SessionOpen goes out: its attach, the same one until somebody answers."""
        if self._tries == 0:
            self.attach += 1
        self._tries += 1
        wait = self._timing.open_timeout * 2 ** min(max(0, self._tries - EVEN_TRIES), 5)
        self.deadline = now + min(wait, self._timing.max_timeout)
        return self.attach

    def accepted(self, verifier: str, now: float) -> None:
        self.verifier = verifier
        self.sign_of_life(now)
        self._refusal = None
        self._tries = 0
        self.deadline = None

    def busy(self, refusal: Refused, now: float) -> None:
        """A verifier is full: another attach after the time that it asks for."""
        self._tries = 0
        self._refusal = refusal
        self.deadline = now + refusal.retry_after

    def refused(self) -> None:
        """Asking again cannot help."""
        self._tries = 0
        self.deadline = None

    def detach(self) -> None:
        if self.verifier is not None:
            self.left = self.verifier, self.attach
        self.verifier = None
        self._tries = 0
        self._silent = 0
        self.response = ResponseTimer(self._timing)

    def lost(self, now: float) -> Next:
        """This attachment came to nothing: when to try the next one."""
        self.detach()
        self._fruitless += 1
        if self._fruitless > MAX_FRUITLESS:
            return Next.GIVE_UP
        if self._fruitless <= 2:
            return Next.OPEN
        # Whoever takes the session loses it again: do not keep it busy with that.
        self.deadline = now + self._timing.open_timeout * 2 ** (self._fruitless - 3)
        return Next.WAIT

    def target_failed(self) -> bool:
        """The target failed on this session: whether that was once too often."""
        self._errors += 1
        return self._errors >= MAX_ERRORS

    def why_given_up(self, now: float) -> PipesdError:
        """The error of a session that must not go on alone."""
        if self._refusal is not None:
            return refused_error(self._refusal)
        waited = round(now - self._alive_at, 1)
        if self._fruitless > MAX_FRUITLESS:
            cause = f"{self._fruitless} attachments brought no token: see the verifier's log"
        elif self.connected:
            cause = f"the broker is there but no verifier answered for {waited} s: start one"
        else:
            cause = f"no connection to the broker for {waited} s: start it or check --broker"
        return TransportError(f"{cause}, or allow local mode (--local allow)")


def refused_error(message: Refused) -> RefusedError:
    detail = f": {message.detail}" if message.detail else ""
    text = f"the verifier refused the session ({message.reason}){detail}"
    return RefusedError(text, message.reason, message.retry_after)
