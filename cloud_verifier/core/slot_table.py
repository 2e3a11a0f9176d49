"""Which session holds which K/V slot of the engine, and who must give one up.

Pure bookkeeping. How much memory a slot's session holds is in ``block_table``; the memory itself is
the engine's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


class SlotTable(Generic[Owner]):
    """``size`` slots, least recently used first. ``evictions`` counts slots taken from owners."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, -1, -1))
        self._owners: OrderedDict[Owner, int] = OrderedDict()
        self.size = size
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._owners)

    def get(self, owner: Owner) -> int | None:
        """The slot of ``owner``, which becomes the most recently used; None if it has none."""
        slot = self._owners.get(owner)
        if slot is not None:
            self._owners.move_to_end(owner)
        return slot

    def owner_of(self, slot: int) -> Owner | None:
        """Who holds ``slot`` now; None: nobody."""
        return next((owner for owner, held in self._owners.items() if held == slot), None)

    def acquire(
        self, owner: Owner, may_evict: Callable[[Owner], bool] | None
    ) -> tuple[int, Owner | None] | None:
        """A slot for ``owner``, and whose it was if one had to give it up.

        None when every slot belongs to an owner for whom ``may_evict`` is false; nobody is asked
        without ``may_evict``.
        """
        slot = self.get(owner)
        if slot is not None:
            return slot, None
        loser: Owner | None = None
        if self._free:
            slot = self._free.pop()
        else:
            loser = None if may_evict is None else self.evict(may_evict)
            if loser is None:
                return None
            slot = self._free.pop()
        self._owners[owner] = slot
        return slot, loser

    def evict(self, may_evict: Callable[[Owner], bool]) -> Owner | None:
        """Free the slot of the least recently used owner that allows it; whose that was."""
        loser = next((other for other in self._owners if may_evict(other)), None)
        if loser is not None:
            self._free.append(self._owners.pop(loser))
            self.evictions += 1
        return loser

    def release(self, owner: Owner) -> None:
        slot = self._owners.pop(owner, None)
        if slot is not None:
            self._free.append(slot)

    def hand_over(self, old: Owner, new: Owner) -> None:
        """``new`` takes the slot of ``old``, contents and all."""
        slot = self._owners.pop(old, None)
        if slot is not None:
            self._owners[new] = slot
