"""One relayed connection: two sockets, and a queue each way out of which bytes come when due.

All of it runs on the relay's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

from broker.clock import Clock
from edge_agent.bench.link_model import Lane, LinkModel, Passage
from edge_agent.bench.mqtt_frames import MqttFrames, Piece, draft_tokens
from edge_agent.bench.relay_stats import Books

#: Bytes, and runs of bytes, that may be under way in one direction of one connection before its
#: sender is no longer read from. One read more may come on top.
MAX_QUEUED_BYTES = 1 << 20
MAX_QUEUED_PIECES = 8_192
#: Seconds too early that are as good as on time: another timer would cost more.
_EARLY = 20e-6


class _Item(NamedTuple):
    """Bytes due at ``arrived``. ``passage``: of the message that ends with them; ``end``: FIN."""

    arrived: float
    data: bytes
    passage: Passage | None = None
    end: bool = False


class Flow:
    """One direction of a connection, from ``source`` to ``sink``; ``held`` from the beginning."""

    def __init__(
        self,
        crossing: Crossing,
        lane: Lane,
        passages: deque[Passage],
        pad_bytes_per_token: int,
        ends: tuple[End, End],
    ) -> None:
        self.done = False
        self.ended = False  # the source will send no more
        self._crossing = crossing
        self._lane = lane
        self._passages = passages
        self._pad = pad_bytes_per_token
        self._source, self._sink = ends
        self._clock = crossing.clock
        self._books = crossing.books
        self._frames = MqttFrames()
        self._queue: deque[_Item] = deque()
        self._bytes = 0
        self._held = True
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._begin: Passage | None = None  # of the message whose last piece has not come yet
        self._size = 0

    def take(self, data: bytes) -> None:
        """The source sent ``data``."""
        if self.done:
            return
        now = self._clock.now()
        opaque = self._frames.opaque
        for piece in self._frames.feed(data):
            self._push(piece, now)
        self._books.opaque += self._frames.opaque and not opaque
        self._pump()
        if not self._paused and not self._room(MAX_QUEUED_BYTES, MAX_QUEUED_PIECES):
            self._paused = True
            self._books.held_back += 1
            self._source.pause()

    def end(self) -> None:
        """The source has ended: what it sent still arrives, then the end of it."""
        if self.ended:
            return
        self.ended = True
        now = self._clock.now()
        rest = self._frames.rest()
        if rest:
            self._push(Piece(rest, False, False), now)
        arrived = self._lane.send(now, 0, message=False).arrived
        self._queue.append(_Item(arrived, b"", end=True))
        self._pump()

    def drop(self) -> None:
        """What is under way is lost, and more will not come."""
        self._books.lost += sum(item.passage is not None for item in self._queue)
        self._queue.clear()
        self._bytes = 0
        self.done = self.ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def hold(self) -> None:
        """The sink takes no more for now."""
        self._held = True

    def release(self) -> None:
        """The sink takes bytes."""
        self._held = False
        self._pump()

    def _room(self, size: int, pieces: int) -> bool:
        return self._bytes <= size and len(self._queue) <= pieces

    def _push(self, piece: Piece, now: float) -> None:
        padding = 0
        if self._pad and piece.first and piece.last:
            padding = self._pad * draft_tokens(piece.data)
            self._books.padding += padding
        passage = self._lane.send(now, len(piece.data) + padding, message=piece.first)
        if piece.first:
            self._begin, self._size = passage, 0
        self._size += passage.size
        message = None
        if piece.last and self._begin is not None:
            message = self._begin._replace(
                departed=passage.departed, arrived=passage.arrived, size=self._size
            )
            self._begin = None
        self._queue.append(_Item(passage.arrived, piece.data, message))
        self._bytes += len(piece.data)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    def _pump(self) -> None:
        """Hand on what is due, and come back for the rest."""
        if self._held or self.done:
            return
        now, queue = self._clock.now(), self._queue
        due: list[bytes] = []
        end = False
        while queue and queue[0].arrived <= now + _EARLY:
            item = queue.popleft()
            self._bytes -= len(item.data)
            due.append(item.data)
            end |= item.end
            if item.passage is not None:
                self._books.note(self._passages, item.passage)
                if item.arrived > item.passage.sent:
                    self._books.note_late(max(0.0, now - item.arrived))
        if due:
            self._sink.write(b"".join(due))
        if end:
            self.done = True
            self._sink.write_end()
            self._crossing.check()
        elif queue and self._timer is None:
            wait = queue[0].arrived - now
            self._timer = asyncio.get_running_loop().call_later(wait, self._on_timer)
        if self._paused and self._room(MAX_QUEUED_BYTES // 2, MAX_QUEUED_PIECES // 2):
            self._paused = False
            self._source.resume()


class End(asyncio.Protocol):
    """One of the two sockets. asyncio sets TCP_NODELAY on every TCP socket by itself."""

    def __init__(self, crossing: Crossing) -> None:
        self.lost = False
        self.outward: Flow
        self.inward: Flow
        self._crossing = crossing
        self._transport: asyncio.Transport | None = None

    # -- called by asyncio ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._crossing.connected(self)

    def data_received(self, data: bytes) -> None:
        self.outward.take(data)

    def eof_received(self) -> bool:
        self.outward.end()
        return True  # the other direction goes on: a half-closed connection is still one

    def connection_lost(self, _: Exception | None) -> None:
        self.lost = True
        # What it had sent before still arrives; what was on its way to it does not.
        self.inward.drop()
        self.outward.end()
        self._crossing.check()

    def pause_writing(self) -> None:
        self.inward.hold()

    def resume_writing(self) -> None:
        self.inward.release()

    # -- called by flows and the crossing -------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def write_end(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            # After its own FIN nothing more is read from a peer, so that its reset shows only here.
            with contextlib.suppress(OSError):
                self._transport.write_eof()

    def pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        else:
            self.lost = True  # it never was there


class Crossing:
    """A connection from ``near`` (the agent) to ``far`` (the broker).

    ``on_near(crossing)`` is called when the agent is there; the caller then connects ``far`` and
    calls ``begin``, or ``abort``. ``on_end(crossing)``: both sockets are gone.
    """

    def __init__(
        self,
        model: LinkModel,
        clock: Clock,
        books: Books,
        *,
        pad_bytes_per_token: int,
        on_near: Callable[[Crossing], None],
        on_end: Callable[[Crossing], None],
    ) -> None:
        self.clock = clock
        self.books = books
        self.aborted = False
        self.near, self.far = End(self), End(self)
        up = Flow(self, model.up, books.up, pad_bytes_per_token, (self.near, self.far))
        down = Flow(self, model.down, books.down, 0, (self.far, self.near))
        self.near.outward = self.far.inward = up
        self.far.outward = self.near.inward = down
        self._on_near = on_near
        self._on_end = on_end

    def connected(self, end: End) -> None:
        """One of the ends is there."""
        if self.aborted:
            end.abort()
        elif end is self.near:
            self._on_near(self)

    def begin(self) -> None:
        """Both ends are there: let through what was due meanwhile."""
        self.near.inward.release()
        self.far.inward.release()

    def abort(self) -> None:
        """End it at once on both sides; what is under way is lost."""
        self.aborted = True
        for end in (self.near, self.far):
            end.inward.drop()
            end.abort()
        self.check()

    def check(self) -> None:
        """Clear up when nothing more can come from either side."""
        if self.near.inward.done and self.far.inward.done:
            self.near.close()
            self.far.close()
        if self.near.lost and self.far.lost:
            self._on_end(self)
