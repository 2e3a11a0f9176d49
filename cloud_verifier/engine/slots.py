"""Which K/V storage each slot holds, and how much memory that is.

Storage grows by doubling, so a session pays for at most twice the tokens it has (one block at
least), and a slot given to a shorter session shrinks. There is no policy here: which slot belongs
to whom and who is evicted is decided in ``cloud_verifier.core``. Nor is there any tensor: what is
stored, and how it is moved, the caller says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from broker.errors import LocalProtocolError

BLOCK = 64  # tokens; capacities are multiples of it

Storage = TypeVar("Storage")


class SlotTable(Generic[Storage]):
    """The storages of ``max_slots`` slots, each with room for up to ``context`` tokens.

    ``make(capacity)`` gives storage for that many tokens; ``move(old, new, tokens)`` copies the
    first ``tokens`` of them. ``bytes_per_token``: memory of one token over all layers. Together the
    slots never hold more than ``bytes_limit`` bytes, and one slot twice its share while it grows.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        context: int,
        bytes_per_token: int,
        make: Callable[[int], Storage],
        move: Callable[[Storage, Storage, int], None],
    ) -> None:
        self.max_slots = max_slots
        self.context = context
        self.bytes_per_token = bytes_per_token
        self._make = make
        self._move = move
        self._storages: list[Storage | None] = [None] * max_slots
        self._capacities = [0] * max_slots
        self._lengths = [0] * max_slots

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all storages together."""
        return sum(self._capacities) * self.bytes_per_token

    @property
    def bytes_limit(self) -> int:
        """Bytes that all slots hold when each has a full context."""
        return self.max_slots * _whole_blocks(self.context) * self.bytes_per_token

    def length(self, slot: int) -> int:
        """How many tokens of ``slot`` are valid."""
        return self._lengths[slot]

    def capacity(self, slot: int) -> int:
        """How many tokens ``slot`` has room for at present."""
        return self._capacities[slot]

    def storage(self, slot: int) -> Storage:
        """What ``slot`` holds its tokens in. Raises LocalProtocolError when it holds none."""
        storage = self._storages[slot]
        if storage is None:
            raise LocalProtocolError(f"slot {slot} holds nothing: start at 0")
        return storage

    def reserve(self, slot: int, keep: int, end: int) -> Storage:
        """The storage of ``slot``, cut to ``keep`` valid tokens and with room for ``end``.

        Raises LocalProtocolError, before anything changes, when more is to be kept than there is or
        ``end`` lies beyond the context; and whatever ``make`` raises when memory is short, the slot
        then keeping what it had.
        """
        if not 0 <= keep <= self._lengths[slot]:
            raise LocalProtocolError(
                f"slot {slot} holds {self._lengths[slot]} tokens, {keep} cannot be kept: start at 0"
            )
        if not keep <= end <= self.context:
            raise LocalProtocolError(
                f"slot {slot} would hold {end} tokens of {self.context}: clip to the context"
            )
        storage = self._storages[slot]
        capacity = self._capacity_for(end)
        have = self._capacities[slot]
        # Between one and four times what is needed nothing is moved: a session that lives with
        # rejections around a power of two must not copy its whole cache at each of them.
        if storage is None or have < capacity or have >= 4 * capacity:
            if keep == 0:
                storage = self._storages[slot] = None  # before the new one asks for memory
                self._capacities[slot] = self._lengths[slot] = 0
            fresh = self._make(capacity)
            if storage is not None:
                self._move(storage, fresh, keep)
            storage = self._storages[slot] = fresh
            self._capacities[slot] = capacity
        self._lengths[slot] = keep
        return storage

    def commit(self, slot: int, length: int) -> None:
        """Say that ``slot`` now holds ``length`` valid tokens."""
        self._lengths[slot] = length

    def free(self, slot: int) -> None:
        """Give the memory of ``slot`` back; it holds nothing afterwards."""
        self._storages[slot] = None
        self._capacities[slot] = self._lengths[slot] = 0

    def free_all(self) -> None:
        for slot in range(self.max_slots):
            self.free(slot)

    def _capacity_for(self, tokens: int) -> int:
        capacity = BLOCK
        while capacity < tokens:
            capacity *= 2
        return min(capacity, _whole_blocks(self.context))


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK
