"""What a relay counts and logs."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from edge_agent.bench.link_model import LinkModel, Passage

#: Passages kept per direction.
MAX_LOG = 20_000
#: Timer errors kept.
MAX_LATE = 10_000

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RelayStats:
    """What a relay has done so far.

    ``messages_up``, ``messages_down``: PUBLISH packets taken in (runs of bytes where a stream is
    ``opaque``, that is no MQTT). ``bytes_up``, ``bytes_down``: really taken in, all packets.
    ``padding_bytes``: charged to the uplink on top and never sent. ``busy_up_s``, ``busy_down_s``:
    seconds for which a direction was, or will be, occupied by what it took in. ``stalls``: messages
    late by a loss of their own. ``lost``: messages under way when their connection ended.
    ``connections``: relayed; ``refused``: turned away (link down, too many, no broker).
    ``held_back``: times a sender was not read from because too much was under way.
    ``not_logged``: passages that a full log has dropped. ``errors``: exceptions in the relay
    itself. ``late_median_s``, ``late_p99_s``: how much later than due messages were handed on, of
    the last ``MAX_LATE`` that had to wait; a machine too busy for the emulation shows here.
    """

    messages_up: int
    messages_down: int
    bytes_up: int
    bytes_down: int
    padding_bytes: int
    busy_up_s: float
    busy_down_s: float
    stalls: int
    lost: int
    connections: int
    refused: int
    cuts: int
    opaque: int
    held_back: int
    not_logged: int
    errors: int
    late_median_s: float
    late_p99_s: float


class Books:
    """Counters and logs that all connections of one relay share; its thread writes, all read."""

    def __init__(self) -> None:
        self.padding = 0
        self.lost = 0
        self.connections = 0
        self.refused = 0
        self.cuts = 0
        self.opaque = 0
        self.held_back = 0
        self.not_logged = 0
        self.errors = 0
        self.up: deque[Passage] = deque(maxlen=MAX_LOG)
        self.down: deque[Passage] = deque(maxlen=MAX_LOG)
        self.late: deque[float] = deque(maxlen=MAX_LATE)
        self._lock = threading.Lock()

    def note(self, where: deque[Passage], passage: Passage) -> None:
        """Log a message that arrived."""
        with self._lock:
            self.not_logged += len(where) == MAX_LOG
            where.append(passage)

    def note_late(self, seconds: float) -> None:
        """Log how late a message was handed on."""
        with self._lock:
            self.late.append(seconds)

    def copy_of(self, where: deque[_T]) -> list[_T]:
        """A log as it is now; for other threads."""
        with self._lock:
            return list(where)

    def summary(self, model: LinkModel) -> RelayStats:
        """All of it, with what the model has counted."""
        up, down, late = model.up, model.down, sorted(self.copy_of(self.late))
        return RelayStats(
            messages_up=up.messages,
            messages_down=down.messages,
            bytes_up=up.bytes - self.padding,
            bytes_down=down.bytes,
            padding_bytes=self.padding,
            busy_up_s=up.busy_s,
            busy_down_s=down.busy_s,
            stalls=up.stalls + down.stalls,
            lost=self.lost,
            connections=self.connections,
            refused=self.refused,
            cuts=self.cuts,
            opaque=self.opaque,
            held_back=self.held_back,
            not_logged=self.not_logged,
            errors=self.errors,
            late_median_s=late[len(late) // 2] if late else 0.0,
            late_p99_s=late[len(late) * 99 // 100] if late else 0.0,
        )
