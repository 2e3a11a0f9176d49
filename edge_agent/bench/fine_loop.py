"""An event loop whose timers are exact to some 0.1 ms, without waiting busily."""

from __future__ import annotations

import asyncio
import select
import selectors
import sys

#: select(2) takes no descriptor from this one on.
_FD_SETSIZE = 1024

if sys.platform == "linux":

    class _FineSelector(selectors.EpollSelector):
        """epoll waits in whole milliseconds, select in microseconds: select waits for epoll."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0 and self.fileno() < _FD_SETSIZE:
                ready, _, _ = select.select([self.fileno()], [], [], timeout)
                if not ready:
                    return []
                timeout = 0
            return super().select(timeout)

else:
    # kqueue is as fine as select by itself.
    _FineSelector = selectors.DefaultSelector


def fine_loop() -> asyncio.AbstractEventLoop:
    """A new event loop; the caller closes it."""
    return asyncio.SelectorEventLoop(_FineSelector())
