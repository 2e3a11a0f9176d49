"""Whether another client uses our client id, seen from the traces that it leaves.

Two clients with one id throw each other out for ever (MQTT 5, 3.1.4). The standard lets the broker
say so to the loser; Mosquitto 2.0 and rumqttd just close the connection. So birth and will carry
the mark of the connection that they belong to, and a mark that cannot be there without a rival is
evidence too. Marks can be ordered: of two rivals the one that started later gives up first.
"""

from __future__ import annotations

from collections import deque

#: As many pieces of evidence within so many seconds make a rival certain. An older client holds
#: out for twice as many, so that one of the two remains.
STRONG, WINDOW = 3, 60.0
#: The same for evidence that may also come of our own half-open connection, after a change of
#: network; who is older it does not tell.
WEAK = 5


class RivalWatch:
    """Counts evidence, at most one piece per connection. Times in seconds of any one clock."""

    def __init__(self, instance: str) -> None:
        """``instance``: a word without dots, this client's alone, that sorts by its start."""
        self._instance = instance
        self._link = 0
        self._up = False
        self._up_before = False
        self._noted = False
        self._older = False
        self._strong: deque[float] = deque(maxlen=2 * STRONG)
        self._weak: deque[float] = deque(maxlen=WEAK)

    def new_link(self, taken_over: bool) -> str:
        """A connection begins; its mark. ``taken_over``: the last one was, and that was counted."""
        self._link += 1
        self._up_before |= self._up
        self._up = False
        self._noted = taken_over
        return f"{self._instance}.{self._link}"

    def link_up(self) -> None:
        """The connection is up."""
        self._up = True

    def taken_over(self, now: float) -> bool:
        """The broker said that another client took the connection. True: a rival is certain."""
        self._strong.append(now)
        return _enough(self._strong, 2 * STRONG if self._older else STRONG, now)

    def heard(self, mark: str | None, is_will: bool, now: float) -> bool:
        """A message with this mark is on our status topic. True: a rival is certain."""
        if mark is None:
            return False
        instance, _, link = mark.partition(".")
        if instance != self._instance:
            # On the first connection it is an earlier process's. Later we spoke last here.
            if not self._up_before:
                return False
            self._older = self._instance < instance
            if self._noted:
                return False
            self._noted = True
            return self.taken_over(now)
        if is_will and link == str(self._link) and not self._noted:
            # We live, and yet our will was spoken: rumqttd does that when it throws one out.
            self._noted = True
            self._weak.append(now)
            return _enough(self._weak, WEAK, now)
        return False


def _enough(evidence: deque[float], wanted: int, now: float) -> bool:
    return len(evidence) >= wanted and now - evidence[-wanted] <= WINDOW
