"""Restarts of devices and of the exporter, lost, late and repeated messages: no jump that was not.

A world of one device, drawn at random and scraped every few seconds: its agent is started again and
again, its messages are lost, doubled and up to DELAY_S late, the exporter is started again and
again too. What is shown must always be the newest of what came, and ``increase`` of it, reckoned as
Prometheus does, never more than the device really counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.codec import encode
from broker.topics import telemetry_topic
from cloud_verifier.exporter.device import QUIET_S
from cloud_verifier.exporter.table import TTL_S, FleetTable
from tests.cloud_verifier.exporter.fleet import COMMITTED, WALL, telemetry

#: A message is no later than this. A broker ends an agent's old connection when the new one comes,
#: so what lags behind is a moment's worth; agents live longer and exporters take longer to start.
DELAY_S = 8.0
TOPIC = telemetry_topic("d")
KEY = f'{COMMITTED}{{device="d"}}'


@dataclass(frozen=True)
class Sent:
    """One message: ``rank`` says which is newer, ``count`` is the counter, ``sent`` when."""

    rank: tuple[int, int]
    count: float
    sent: float
    uptime: float

    @property
    def payload(self) -> bytes:
        boot, sequence = self.rank
        message = telemetry(
            f"boot-{boot}", sequence, committed_tokens_total=self.count, uptime_seconds=self.uptime
        )
        return encode(message)


def increase(shown: list[float | None]) -> float:
    """Of a counter over all its samples; what is absent makes a gap that is bridged."""
    values = [value for value in shown if value is not None]
    return sum(b - a if b >= a else b for a, b in pairwise(values))


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[Sent], float]:
    """What the device sent over several boots, and what it counted in all."""
    messages, total, now = [], 0.0, 0.0
    for boot in range(draw(st.integers(1, 4))):
        start = now
        count = 0.0
        for sequence in range(1, draw(st.integers(2, 8)) + 1):
            now += draw(st.sampled_from((5.0, 5.0, 5.5, 20.0, TTL_S + 1.0)))
            count += draw(st.integers(0, 40))
            messages.append(Sent((boot, sequence), count, now, now - start))
        total += count
        now += draw(st.sampled_from((0.5, 2.0, 15.0, QUIET_S + 1.0, 2 * TTL_S)))
    return messages, total


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[tuple[float, Sent]], list[float], float]:
    """Arrivals in their order, moments at which the exporter ends and begins again in turn, and
    what the device counted."""
    messages, total = draw(lives())
    arrivals = []
    for message in messages:
        for _ in range(draw(st.sampled_from((0, 1, 1, 1, 1, 2)))):
            arrivals.append((message.sent + draw(st.floats(0.0, DELAY_S)), message))
    arrivals.sort(key=lambda pair: pair[0])
    moments, now = [], 0.0
    for _ in range(draw(st.integers(0, 3))):
        now += draw(st.floats(1.0, messages[-1].sent))
        moments.append(now)
        now += draw(st.floats(DELAY_S, 60.0))
        moments.append(now)
    return arrivals, moments, total


def shown_by(table: FleetTable, now: float) -> float | None:
    for line in table.snapshot(now).text().splitlines():
        if line.startswith(KEY):
            return float(line.removeprefix(KEY))
    return None


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_what_is_shown_never_grows_by_more_than_was_counted(
    world: tuple[list[tuple[float, Sent]], list[float], float],
) -> None:
    arrivals, moments, total = world
    end = arrivals[-1][0] + 10.0 if arrivals else 10.0
    shown: list[float | None] = []
    starts, ends = [0.0, *moments[1::2]], [*moments[::2], end]
    for start, over in zip(starts, ends, strict=True):
        # Another process, which knows nothing, and whose clock begins anew.
        table = FleetTable()
        heard = [(when, message) for when, message in arrivals if start <= when < over]
        newest: tuple[float, Sent] | None = None
        scrape = start
        while (scrape := scrape + 4.0) < min(over, end):
            while heard and heard[0][0] <= scrape:
                when, message = heard.pop(0)
                table.receive(TOPIC, message.payload, False, when - start, WALL)
                if newest is None or message.rank > newest[1].rank:
                    newest = (when, message)
            value = shown_by(table, scrape - start)
            if newest is None or scrape - newest[0] > TTL_S + 0.001:
                assert value is None
            elif scrape - newest[0] < TTL_S - 0.001:
                assert value == newest[1].count
            shown.append(value)
        assert table.dropped.keys() <= {"old_boot", "old_sequence"}
    assert increase(shown) <= total


def test_a_lost_message_is_made_up_for_by_the_next() -> None:
    table = FleetTable()
    shown: list[float | None] = []
    for sequence in range(1, 11):
        if sequence not in (4, 5, 8):
            payload = Sent((0, sequence), 10.0 * sequence, 0.0, 5.0 * sequence).payload
            table.receive(TOPIC, payload, False, 5.0 * sequence, WALL)
        shown.append(shown_by(table, 5.0 * sequence))
    assert increase(shown) == 90.0


@pytest.mark.parametrize("restart", [False, True])
def test_two_boots_one_after_the_other(restart: bool) -> None:
    """All that both counted since the first scrape, once."""
    table = FleetTable()
    shown: list[float | None] = []
    for turn, (boot, count) in enumerate([(0, 10), (0, 50), (0, 80), (1, 5), (1, 60), (1, 100)]):
        if restart and turn in (1, 4):
            table = FleetTable()
        now = 5.0 * turn
        payload = Sent((boot, turn), count, now, now - 14.0 * boot).payload
        table.receive(TOPIC, payload, False, now, WALL)
        shown.append(shown_by(table, now))
    assert increase(shown) == 70.0 + 100.0
