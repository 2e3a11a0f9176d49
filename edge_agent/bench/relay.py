"""A TCP relay that makes the connection between an agent and its broker feel like a link.

Both directions run through one ``LinkModel``; what it says about a packet decides when the packet
is handed on. Time is kept virtually: a timer that fires late delays its own packet alone. All
connections through one relay share the link, as those of one device do.

What is not there: TCP's handshake takes no time (a connection costs one round trip less than over
the real link), headers below MQTT weigh nothing, and a TLS connection cannot be looked into: each
run of its bytes counts as one message, and none is charged for padding.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable

from broker.clock import Clock, MonotonicClock
from broker.errors import LocalProtocolError, TransportError
from edge_agent.bench.crossing import Crossing
from edge_agent.bench.fine_loop import fine_loop
from edge_agent.bench.link import Link
from edge_agent.bench.link_model import LinkModel, Passage
from edge_agent.bench.relay_stats import Books, RelayStats

log = logging.getLogger(__name__)

#: Connections at a time.
MAX_CONNECTIONS = 64
#: Seconds that connecting to the broker may take.
CONNECT_TIMEOUT = 5.0


class EmulatedLink:
    """Listens on a free port of this machine and relays to ``target_host:target_port``.

    ``clock``: the one whose seconds ``passages_up`` reports; the process's monotonic clock unless
    given. ``seed``: of jitter and stalls. ``pad_bytes_per_token``: charge the uplink that much for
    each token of a DraftBatch (see ``link.WIRES``). ``offset_s``: begin that far into the link's
    schedule of rates and cuts, whose time runs from here on.

    Use it as a context manager, or ``start`` and ``close`` it. Everything may be called from any
    thread.
    """

    def __init__(
        self,
        target_host: str,
        target_port: int,
        link: Link,
        *,
        clock: Clock | None = None,
        seed: int = 0,
        pad_bytes_per_token: int = 0,
        offset_s: float = 0.0,
    ) -> None:
        self.port = 0
        self.clock: Clock = clock or MonotonicClock()
        self._target = (target_host, target_port)
        self._model = LinkModel(link, seed=seed, start=self.clock.now() - offset_s)
        self._books = Books()
        self._pad = pad_bytes_per_token
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="emulated-link", daemon=True)
        self._ready = threading.Event()
        self._failure: OSError | None = None
        self._crossings: set[Crossing] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where the agent connects to."""
        return f"mqtt://127.0.0.1:{self.port}"

    def start(self) -> EmulatedLink:
        """Listen. Raises TransportError when no port can be had, LocalProtocolError when reused."""
        if self._thread.ident is not None:
            raise LocalProtocolError("an emulated link starts once: make another")
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise TransportError(f"cannot listen on 127.0.0.1 ({self._failure}): free some ports")
        return self

    def close(self) -> None:
        """End every connection and the relay's thread; idempotent."""
        self._call(lambda loop: loop.stop())
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def __enter__(self) -> EmulatedLink:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self, for_s: float = 0.0) -> None:
        """End every connection now, and turn new ones away for ``for_s`` seconds."""
        self._call(lambda _: self._cut(for_s))

    def become(self, link: Link, seed: int = 0) -> None:
        """The device is in another network: its connections end, and what follows meets ``link``.

        A schedule of cuts that ``link`` may have is left out.
        """
        self._call(lambda _: self._become(link, seed))

    def passages_up(self) -> list[Passage]:
        """The uplink messages that arrived, oldest first; a bounded log."""
        return self._books.copy_of(self._books.up)

    def passages_down(self) -> list[Passage]:
        """The downlink messages that arrived, oldest first; a bounded log."""
        return self._books.copy_of(self._books.down)

    def stats(self) -> RelayStats:
        """The counters now."""
        return self._books.summary(self._model)

    def _call(self, what: Callable[[asyncio.AbstractEventLoop], object]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(what, loop)
            except RuntimeError:
                log.debug("the emulated link had just ended")

    # -- the relay's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            loop = self._loop = fine_loop()
            loop.set_exception_handler(self._on_error)
            listening = loop.create_server(self._accept, "127.0.0.1", 0, family=socket.AF_INET)
            server = loop.run_until_complete(listening)
        except OSError as error:
            self._failure = error
            if self._loop is not None:
                self._loop.close()
            self._ready.set()
            return
        self.port = server.sockets[0].getsockname()[1]
        loop.call_soon(self._schedule_cut, self.clock.now())
        self._ready.set()
        try:
            loop.run_forever()
        finally:
            server.close()
            loop.run_until_complete(self._wind_down())
            loop.close()

    async def _wind_down(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for crossing in list(self._crossings):
            crossing.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the sockets that were aborted close in the loop's next round
        await asyncio.get_running_loop().shutdown_default_executor()

    def _on_error(self, _: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self._books.errors += 1
        log.warning("emulated link: %s: %r", context.get("message"), context.get("exception"))

    def _schedule_cut(self, after: float) -> None:
        found = self._model.next_cut(after)
        if found is not None:
            when, cut = found
            loop = asyncio.get_running_loop()
            loop.call_later(when - self.clock.now(), self._scheduled_cut, when, cut.for_s)

    def _scheduled_cut(self, when: float, for_s: float) -> None:
        self._cut(for_s)
        # Not after the clock's time: a timer that fires a little early would find this cut again.
        self._schedule_cut(when)

    def _cut(self, for_s: float) -> None:
        self._books.cuts += 1
        self._model.cut(self.clock.now(), for_s)
        for crossing in list(self._crossings):
            crossing.abort()

    def _become(self, link: Link, seed: int) -> None:
        self._cut(0.0)
        self._model = LinkModel(link, seed=seed, start=self.clock.now())

    def _accept(self) -> asyncio.Protocol:
        crossing = Crossing(
            self._model,
            self.clock,
            self._books,
            pad_bytes_per_token=self._pad,
            on_near=self._admit,
            on_end=self._crossings.discard,
        )
        return crossing.near

    def _admit(self, crossing: Crossing) -> None:
        """The agent is there: look for the broker."""
        if self._model.is_cut(self.clock.now()) or len(self._crossings) >= MAX_CONNECTIONS:
            self._books.refused += 1
            crossing.abort()
            return
        self._crossings.add(crossing)
        task = asyncio.get_running_loop().create_task(self._reach(crossing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reach(self, crossing: Crossing) -> None:
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(lambda: crossing.far, *self._target)
        try:
            await asyncio.wait_for(connecting, CONNECT_TIMEOUT)
        except (OSError, asyncio.TimeoutError) as error:
            self._books.refused += 1
            log.debug("no broker at %s: %s", self._target, error)
            crossing.abort()
            return
        if not crossing.aborted:
            self._books.connections += 1
            crossing.begin()
