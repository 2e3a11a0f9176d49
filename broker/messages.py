"""The messages of a session, as frozen values that are checked when they are made.

Positions are absolute and count generated tokens from 0. Every message is idempotent: a duplicate,
a late or a reordered one changes nothing that it should not. docs/protocol.md tells the story.

A message that cannot be legal raises LocalProtocolError when it is made; the codec turns that into
RemoteProtocolError for what came in from outside.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from broker.errors import LocalProtocolError
from broker.sampling import Sampling

MAX_TOKEN = 2**31 - 1
MAX_POSITION = 2**31 - 1
#: Tokens in one draft batch or verdict.
MAX_BATCH = 1024
#: Prompt plus committed tokens in one SessionOpen.
MAX_PROMPT = 131_072
MAX_DETAIL = 300

#: When the verifier may run a forward: only at a trigger (the paper), also whenever it would idle,
#: or all the time, the target writing alone.
VERIFY_TRIGGERED = "triggered"
VERIFY_EAGER = "eager"
VERIFY_STREAM = "stream"
VERIFY_MODES = (VERIFY_TRIGGERED, VERIFY_EAGER, VERIFY_STREAM)

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISHES = (FINISH_STOP, FINISH_LENGTH)

REFUSED_VOCABULARY = "vocabulary"
REFUSED_BUSY = "busy"
REFUSED_PROMPT = "prompt_too_long"
REFUSED_TOKEN = "token_out_of_range"  # noqa: S105
REFUSALS = (REFUSED_VOCABULARY, REFUSED_BUSY, REFUSED_PROMPT, REFUSED_TOKEN)

CLOSED_DONE = "done"  # the edge said Close, or has every token
CLOSED_UNKNOWN = "unknown"  # this verifier holds no such session: open again
CLOSED_MOVED = "moved"  # the verifier goes away: open again
CLOSED_ERROR = "error"  # the target failed on this session: open again
CLOSED_TOKEN = "token_out_of_range"  # noqa: S105 (a drafted id that the target does not have)
CLOSED_REASONS = (CLOSED_DONE, CLOSED_UNKNOWN, CLOSED_MOVED, CLOSED_ERROR, CLOSED_TOKEN)


def check_count(name: str, value: int, top: int = MAX_POSITION) -> None:
    """Raises LocalProtocolError unless ``value`` is an integer from 0 to ``top``."""
    if type(value) is not int or not 0 <= value <= top:
        raise LocalProtocolError(f"{name} {value!r} is no integer from 0 to {top}")


def check_text(name: str, value: str, top: int) -> None:
    """Raises LocalProtocolError unless ``value`` is a text of at most ``top`` characters."""
    if type(value) is not str or len(value) > top:
        raise LocalProtocolError(f"{name} is no text of at most {top} characters")


def tokens_of(tokens: Iterable[int], limit: int = MAX_BATCH) -> tuple[int, ...]:
    """``tokens`` as plain Python ints (numpy integers included), each from 0 to ``MAX_TOKEN``.

    Raises LocalProtocolError for anything else and for more than ``limit`` of them.
    """
    try:
        plain = tuple(map(operator.index, tokens))
    except TypeError:
        raise LocalProtocolError("token ids are integers") from None
    if len(plain) > limit:
        raise LocalProtocolError(f"{len(plain)} tokens where at most {limit} are allowed")
    if plain and (min(plain) < 0 or max(plain) > MAX_TOKEN):
        raise LocalProtocolError("a token id is negative or above 2^31-1")
    return plain


@dataclass(frozen=True, slots=True)
class SessionOpen:
    """Edge to any verifier: take this session on, from prompt and what is committed so far.

    ``attach`` counts the edge's attachments of this session from 1. ``vocab_hash`` is that of the
    draft's tokenizer (broker.vocabulary). ``verify``: one of VERIFY_MODES, a wish. ``ask``: the
    token after all that is wanted too, as by an empty DraftBatch with ``verify``.
    """

    attach: int
    prompt: tuple[int, ...]
    committed: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    vocab_hash: str
    verify: str = VERIFY_TRIGGERED
    ask: bool = False

    def __post_init__(self) -> None:
        check_count("attach", self.attach)
        object.__setattr__(self, "prompt", tokens_of(self.prompt, MAX_PROMPT))
        object.__setattr__(self, "committed", tokens_of(self.committed, MAX_PROMPT))
        if not self.prompt:
            raise LocalProtocolError("a session needs at least one prompt token")
        if not isinstance(self.sampling, Sampling):
            raise LocalProtocolError("sampling is no Sampling")
        check_count("max_tokens", self.max_tokens)
        if self.max_tokens < 1:
            raise LocalProtocolError("max_tokens is at least 1")
        check_text("vocab_hash", self.vocab_hash, 64)
        if self.verify not in VERIFY_MODES:
            raise LocalProtocolError(f"verify {self.verify!r} is none of {VERIFY_MODES}")
        if type(self.ask) is not bool:
            raise LocalProtocolError("ask is true or false")


@dataclass(frozen=True, slots=True)
class Accepted:
    """Verifier to edge: the session is mine; send to ``up/<verifier>``.

    ``context``: tokens that prompt and text may have together. ``limit``: the position at which the
    text ends for length (``max_tokens`` or a full context, whichever comes first).
    """

    attach: int
    verifier: str
    context: int
    limit: int

    def __post_init__(self) -> None:
        check_count("attach", self.attach)
        check_text("verifier", self.verifier, 64)
        check_count("context", self.context)
        check_count("limit", self.limit)


@dataclass(frozen=True, slots=True)
class Refused:
    """Verifier to edge: not taken. ``retry_after`` seconds; 0: trying again cannot help."""

    attach: int
    reason: str
    detail: str = ""
    retry_after: float = 0.0

    def __post_init__(self) -> None:
        check_count("attach", self.attach)
        check_text("reason", self.reason, 64)
        check_text("detail", self.detail, MAX_DETAIL)
        if not 0.0 <= self.retry_after <= 86_400.0:
            raise LocalProtocolError(f"retry_after {self.retry_after!r} is outside 0 to a day")


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Edge to its verifier: drafted tokens at positions ``base``, ``base+1``, ...

    ``epoch`` is the edge's count of rollbacks. ``verify`` is the NAV trigger: judge everything up
    to the end of this batch. An empty batch with ``verify`` asks for one token of the target.
    ``go_on``, with ``verify``: when that is judged the target may write on by itself while it
    would idle. ``parents``: None for a chain; else per token the index in this batch of its parent
    (-1: the token before ``base``), parents before children.
    """

    attach: int
    epoch: int
    base: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    verify: bool = False
    go_on: bool = False

    def __post_init__(self) -> None:
        check_count("attach", self.attach)
        check_count("epoch", self.epoch)
        check_count("base", self.base)
        object.__setattr__(self, "tokens", tokens_of(self.tokens))
        if self.parents is not None:
            try:
                parents = tuple(map(operator.index, self.parents))
            except TypeError:
                raise LocalProtocolError("parents are integers") from None
            if len(parents) != len(self.tokens) or any(
                not -1 <= parent < index for index, parent in enumerate(parents)
            ):
                raise LocalProtocolError("parents do not make a tree: each lies before its child")
            object.__setattr__(self, "parents", parents)
        if type(self.verify) is not bool:
            raise LocalProtocolError("verify is true or false")
        if type(self.go_on) is not bool or (self.go_on and not self.verify):
            raise LocalProtocolError("go_on is true or false, and true only with verify")
        if not self.tokens and not self.verify:
            raise LocalProtocolError("a batch without tokens asks for nothing")

    def trunk(self) -> tuple[int, ...]:
        """The chain in it: a chain's tokens, or a tree's path along first children."""
        if self.parents is None:
            return self.tokens
        path: list[int] = []
        last = -1
        for index, parent in enumerate(self.parents):
            if parent == last:
                path.append(self.tokens[index])
                last = index
        return tuple(path)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verifier to edge: the committed tokens from position ``start`` on.

    ``accepted`` of ``judged`` draft tokens were right; ``tokens`` holds those and, unless the text
    ended, one token of the target (recovered after a rejection, bonus after a full acceptance).
    ``finish``: one of FINISHES when the last of ``tokens`` ends the text. ``hold_ms``: from the
    arrival of the batch that ended at ``start + judged`` to the sending of this, so that an edge
    can measure its link without two clocks; 0: no batch ended there. ``forward_ms``: the model's
    share. Both in milliseconds, carried in tenths.
    """

    attach: int
    epoch: int
    start: int
    tokens: tuple[int, ...]
    accepted: int
    judged: int
    finish: str | None = None
    hold_ms: float = 0.0
    forward_ms: float = 0.0

    def __post_init__(self) -> None:
        check_count("attach", self.attach)
        check_count("epoch", self.epoch)
        check_count("start", self.start)
        object.__setattr__(self, "tokens", tokens_of(self.tokens, MAX_BATCH + 1))
        check_count("accepted", self.accepted)
        check_count("judged", self.judged)
        if not self.tokens:
            raise LocalProtocolError("a verdict commits at least one token")
        if not self.accepted <= min(self.judged, len(self.tokens)):
            raise LocalProtocolError("more accepted than judged or committed")
        if self.finish is not None and self.finish not in FINISHES:
            raise LocalProtocolError(f"finish {self.finish!r} is none of {FINISHES}")
        if not (0.0 <= self.hold_ms <= 1e8 and 0.0 <= self.forward_ms <= 1e8):
            raise LocalProtocolError("hold_ms or forward_ms is outside 0 to a day")


@dataclass(frozen=True, slots=True)
class Resync:
    """Either way: I have everything of this epoch up to position ``have``; repeat from there.

    From the edge: the verdicts from ``have`` on. From the verifier: the draft from ``have`` on.

    ``probe``: from the edge, above 0: answer with that number at once, whatever there is to repeat;
    it measures the link. ``padding``: tokens that make a probe as large as a batch of so many.
    """

    attach: int
    epoch: int
    have: int
    probe: int = 0
    padding: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_count("attach", self.attach)
        check_count("epoch", self.epoch)
        check_count("have", self.have)
        check_count("probe", self.probe)
        object.__setattr__(self, "padding", tokens_of(self.padding))


@dataclass(frozen=True, slots=True)
class Close:
    """Edge to verifier: forget this session."""

    attach: int

    def __post_init__(self) -> None:
        check_count("attach", self.attach)


@dataclass(frozen=True, slots=True)
class Closed:
    """Verifier to edge: the session is not (or no longer) here; ``reason`` tells what to do."""

    attach: int
    reason: str

    def __post_init__(self) -> None:
        check_count("attach", self.attach)
        check_text("reason", self.reason, 64)


@dataclass(frozen=True, slots=True)
class VerifierStatus:
    """Retained on ``_verifiers/<verifier>/status``; the will is one with ``online`` false."""

    online: bool
    version: str = ""
    model: str = ""
    vocab_hash: str = ""
    context: int = 0
    sessions: int = 0
    max_sessions: int = 0

    def __post_init__(self) -> None:
        if type(self.online) is not bool:
            raise LocalProtocolError("online is true or false")
        check_text("version", self.version, 64)
        check_text("model", self.model, 200)
        check_text("vocab_hash", self.vocab_hash, 64)
        check_count("context", self.context)
        check_count("sessions", self.sessions)
        check_count("max_sessions", self.max_sessions)


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """Retained on ``<device>/status``; the will is one with ``online`` false."""

    online: bool
    version: str = ""
    draft: str = ""

    def __post_init__(self) -> None:
        if type(self.online) is not bool:
            raise LocalProtocolError("online is true or false")
        check_text("version", self.version, 64)
        check_text("draft", self.draft, 200)


EdgeMessage = SessionOpen | DraftBatch | Resync | Close
VerifierMessage = Accepted | Refused | Verdict | Resync | Closed
SessionMessage = EdgeMessage | VerifierMessage | VerifierStatus | DeviceStatus
