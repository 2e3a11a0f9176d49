"""The event loop with exact timers: never early, and an event loop like any other."""

from __future__ import annotations

import asyncio
import statistics
import time

import pytest

from edge_agent.bench import fine_loop as module
from edge_agent.bench.fine_loop import fine_loop


async def _lateness(seconds: float, times: int) -> list[float]:
    late = []
    for _ in range(times):
        due = time.monotonic() + seconds
        await asyncio.sleep(seconds)
        late.append(time.monotonic() - due)
    return late


async def _echoed(data: bytes) -> bytes:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(len(data)))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    back = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    server.close()
    return back


@pytest.mark.parametrize("limit", [1024, 0])
def test_timers_and_sockets_work(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without select, for a process that has too many descriptors for it."""
    monkeypatch.setattr(module, "_FD_SETSIZE", limit)
    loop = fine_loop()
    try:
        late = loop.run_until_complete(_lateness(0.0033, 30))
        assert min(late) > -1e-6
        assert statistics.median(late) < 0.02
        assert loop.run_until_complete(_echoed(bytes(300_000))) == bytes(300_000)
        assert loop.run_until_complete(asyncio.wait_for(asyncio.sleep(0, "now"), 5)) == "now"
    finally:
        loop.close()
