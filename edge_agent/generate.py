"""From committed tokens to text, and the figures of one generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Protocol

from broker.messages import FINISH_STOP
from edge_agent.core.effects import SOURCE_TARGET, Commit, EdgeStats
from edge_agent.core.sending import Learnt, Sending
from edge_agent.generation import Traffic
from edge_agent.text import Detokenizer, StopMatcher


class Pieces(Protocol):
    """What is needed of a TextModel here."""

    def piece(self, token: int) -> bytes: ...


class Running(Protocol):
    """What is needed of a Generation here."""

    finish: str | None

    def __iter__(self) -> Generator[Commit, None, None]: ...
    def cancel(self, reason: str = ...) -> None: ...
    @property
    def stats(self) -> EdgeStats: ...
    @property
    def traffic(self) -> Traffic: ...
    @property
    def sending(self) -> Sending: ...
    @property
    def verified(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown now; ``source``: of the token that completed it (SOURCE_*)."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one generation, as ``--json`` prints them (DESIGN.md, Commands).

    ``ttft_ms``: from the request to the first committed token. ``tpt_ms``: from the request to the
    last one, per token (the paper's TPT). ``forwards``: verdicts, each one forward of the target.
    ``uplink_bytes`` and ``downlink_bytes``: MQTT payloads. ``mode``: cloud, local, or mixed.
    ``link``: what was learnt of the link and of both models; not part of ``--json``.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    tokens: int
    ttft_ms: float
    tpt_ms: float
    drafted: int
    accepted: int
    forwards: int
    uplink_bytes: int
    downlink_bytes: int
    uplink_messages: int
    mode: str
    verified: bool
    link: Learnt

    def as_dict(self) -> dict[str, object]:
        values = asdict(self)
        del values["link"]
        return values


class TextStream:
    """Iterate over it for text; ``summary()`` afterwards.

    ``stops``: text is cut exactly before the first of them, and the generation ended.
    """

    def __init__(
        self,
        generation: Running,
        pieces: Pieces,
        *,
        stops: Sequence[str] = (),
        strip_leading_space: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generation = generation
        self._pieces = pieces
        self._detokenizer = Detokenizer(strip_leading_space=strip_leading_space)
        self._stops = StopMatcher(stops)
        self._clock = clock
        self._begin = clock()
        self._first: float | None = None
        self._last = self._begin
        self._tokens: list[int] = []
        self._text: list[str] = []

    def __iter__(self) -> Generator[Piece, None, None]:
        source = SOURCE_TARGET
        # Closed here and not by the garbage collector: it is this that tells the verifier, and an
        # exception in the consumer keeps the frames alive until it is too late for that.
        with closing(iter(self._generation)) as commits:
            for commit in commits:
                self._last = self._clock()
                if self._first is None:
                    self._first = self._last
                for token, source in zip(commit.tokens, commit.sources, strict=True):
                    self._tokens.append(token)
                    piece = self._stops.feed(self._detokenizer.feed(self._pieces.piece(token)))
                    if piece:
                        self._text.append(piece)
                        yield Piece(piece, source)
                    if self._stops.stop is not None:
                        break
                if self._stops.stop is not None:
                    self._generation.cancel(FINISH_STOP)
                    break
        rest = "" if self._stops.stop is not None else self._stops.finish()
        if rest:
            self._text.append(rest)
            yield Piece(rest, source)

    def summary(self) -> Summary:
        """The figures so far."""
        generation = self._generation
        stats, traffic = generation.stats, generation.traffic
        count = len(self._tokens)
        stopped = self._stops.stop is not None
        first = self._last if self._first is None else self._first
        verified = generation.verified
        mode = "cloud" if verified else "mixed" if stats.forwards else "local"
        return Summary(
            text="".join(self._text),
            token_ids=list(self._tokens),
            finish_reason=FINISH_STOP if stopped else generation.finish or "cancelled",
            tokens=count,
            ttft_ms=round((first - self._begin) * 1000.0, 2),
            tpt_ms=round((self._last - self._begin) * 1000.0 / max(count, 1), 2),
            drafted=stats.drafted,
            accepted=stats.accepted,
            forwards=stats.forwards,
            uplink_bytes=traffic.uplink_bytes,
            downlink_bytes=traffic.downlink_bytes,
            uplink_messages=traffic.uplink_messages,
            mode=mode,
            verified=verified,
            link=generation.sending.learnt,
        )
