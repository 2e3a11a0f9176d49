"""What the live view makes of readings, right ones and wrong ones."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import RemoteProtocolError
from broker.telemetry import Histogram
from cloud_verifier.exporter.report import fleet_head, fleet_report
from cloud_verifier.top.view import MAX_TEXT, SORTS, Readings, Row, printable, sorted_rows
from tests.cloud_verifier.exporter.fleet import Fleet, full
from tests.cloud_verifier.top.readings import counters, device, reading, replica


def test_one_reading_shows_ratios_since_the_start() -> None:
    of = counters(200, tpt=0.05, acceptance=0.8)
    of |= {"alpha_seconds": 0.02, "gamma_seconds": 0.008, "temperature_celsius": 51.5}
    view = Readings().view(reading(a=device(**of, energy_joules_total=50.0)))
    (row,) = view.rows
    assert row == Row(
        "a", True, 1.0, pytest.approx(0.05), None, pytest.approx(0.8), None, 0.25, 0.5, 0.9, 3,
        "pipesd", 0.02, 0.008, 51.5, "Pi 5",
    )  # fmt: skip
    assert (view.connected, view.time) == (True, 1_000.0)
    assert view.totals.tpt == pytest.approx(0.05)
    assert view.totals.tokens_per_second == 0.0


def test_rates_are_between_two_messages_of_a_device() -> None:
    readings = Readings()
    readings.view(reading(1_000.0, a=device(7, 1.0, **counters(1_000, tpt=0.2))))
    moved = counters(1_000, tpt=0.2)
    for name, more in counters(50, tpt=0.04, acceptance=0.5).items():
        moved[name] += more
    (row,) = readings.view(reading(1_006.0, a=device(8, 2.0, **moved))).rows
    assert row.tpt == pytest.approx(0.04)
    assert row.acceptance == pytest.approx(0.5)
    assert row.tokens_per_second == pytest.approx(50 / 5.0)  # it was 999, and is 1004
    # The same message once more changes nothing but its age.
    (again,) = readings.view(reading(1_008.0, a=device(8, 4.0, **moved))).rows
    assert (again.tpt, again.tokens_per_second, again.seen) == (row.tpt, row.tokens_per_second, 4.0)
    # A device that rests: no tokens, and what it was capable of in all.
    (rests,) = readings.view(reading(1_011.0, a=device(9, 2.0, **moved))).rows
    assert rests.tokens_per_second == 0.0
    assert rests.tpt == pytest.approx((200.0 + 2.0) / 1_050)


def test_a_restart_counts_from_nothing() -> None:
    readings = Readings()
    readings.view(reading(1_000.0, a=device(90, 0.0, **counters(9_000))))
    (row,) = readings.view(reading(1_010.0, a=device(1, 0.0, "new", **counters(20, tpt=0.5)))).rows
    assert row.tpt == pytest.approx(0.5)
    assert row.tokens_per_second == pytest.approx(2.0)
    assert readings.view(reading(1_011.0)).rows == []
    assert readings._last == {}


def test_ttft_comes_from_the_histogram() -> None:
    readings = Readings()
    shown = []
    for sequence, (counts, total) in enumerate(
        [([2, 0, 0], 0.4), ([2, 2, 0], 2.4), ([2, 2, 0], 2.4)]
    ):
        one = device(sequence, 0.0) | {"ttft_seconds": {"counts": counts, "total": total}}
        shown.append(readings.view(reading(1_000.0 + sequence, a=one)).rows[0].ttft)
    assert shown == pytest.approx([0.2, 1.0, 0.6])


def test_totals_of_devices_and_replicas() -> None:
    readings = Readings()
    verifiers = {"v2": replica(False), "v1": replica(True, 5, 8), "v3": replica(True, 2, 8)}
    for turn in (1, 2):
        view = readings.view(
            reading(
                1_000.0 + 10 * turn,
                verifiers,
                a=device(turn, 0.0, **counters(100 * turn, 0.1, 0.5)),
                b=device(turn, 0.0, online=False, **counters(300 * turn, 0.3, 0.9)),
                c={"online": True},
            )
        )
    totals = view.totals
    assert (totals.devices, totals.online, totals.telemetry) == (3, 2, 2)
    assert totals.tokens_per_second == pytest.approx(40.0)
    assert totals.tpt == pytest.approx((10.0 + 90.0) / 400)
    assert totals.acceptance == pytest.approx((50 + 270) / 400)
    assert (totals.verifiers_online, totals.sessions, totals.max_sessions) == (2, 7, 16)
    assert [row.verifier for row in view.verifiers] == ["v1", "v2", "v3"]


def test_order() -> None:
    rows = [
        Row("d", seen=5.0, tpt=0.1, acceptance=0.9),
        Row("c", seen=9.0, tpt=0.3, acceptance=0.5),
        Row("b"),
        Row("a", seen=1.0, tpt=0.3, acceptance=0.7),
    ]
    order = {sort: "".join(row.device for row in sorted_rows(rows, sort)) for sort in SORTS}
    assert order == {"tpt": "acdb", "acceptance": "cadb", "seen": "cdab", "device": "abcd"}


def test_the_exporter_s_own_report_is_understood() -> None:
    fleet = Fleet()
    fleet.tell("pi-1", full(ttft=Histogram((0, 2, *[0] * 20), 3.0)))
    fleet.status("pi-2", True)
    fleet.verifier("v", True, 2)
    head = fleet_head(fleet.table.statuses(fleet.now), wall=fleet.wall, ttl=60.0, connected=True)
    view = Readings().view(fleet_report(head, fleet.table.entries(fleet.now)))
    one, two = sorted(view.rows, key=lambda row: row.device)
    assert (one.ttft, one.seen, one.policy) == (1.5, 0.0, "pipesd")
    unknown = {name for name, value in vars(one).items() if value is None}
    assert unknown == {"online", "tokens_per_second"}
    assert two == Row("pi-2", True)
    shown = json.loads(json.dumps(view.as_json(), allow_nan=False))
    assert shown["devices"][0]["tpt_seconds"] == pytest.approx(3 / 7)
    assert shown["verifiers"] == [
        {"verifier": "v", "online": True, "model": "m", "sessions": 2, "max_sessions": 8}
    ]


@pytest.mark.parametrize(
    "wrong", [None, [], "x", 7, {}, {"format": 1}, {"devices": {}}, {"format": 2, "devices": {}}]
)
def test_what_is_no_report_is_refused(wrong: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        Readings().view(wrong)


def test_wrong_values_are_unknown_ones() -> None:
    one = device(
        age="old", online="yes", committed_tokens_total=math.nan, generation_seconds_total=True,
        r1_ratio="0.5", r2_ratio=math.inf, config_version=10**400, gamma_seconds=[],
    )  # fmt: skip
    one |= {
        "boot": None,
        "sequence": {},
        "policy": 7,
        "ttft_seconds": {"counts": ["x"], "total": 1},
    }
    (row,) = Readings().view(reading(a=one, b=3, c=None)).rows
    assert row == Row("a", policy="7", machine="Pi 5")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.sampled_from((0.0, 5e-324, 1e-300, 1e30, 1.7e308, 10**400))
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
names = st.sampled_from(sorted({*device(), *counters(1)}))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.text(max_size=3),
            st.dictionaries(names, values, max_size=6)
            | st.builds(lambda of: {**device(), "figures": of}, st.dictionaries(names, values)),
            max_size=3,
        ),
        max_size=3,
    ),
    values,
    st.sampled_from(SORTS),
)
def test_no_report_breaks_it(fleets: list[Any], other: Any, sort: str) -> None:
    readings = Readings()
    for fleet in fleets:
        whole = {**reading(), "devices": fleet, "verifiers": other, "time": other}
        view = readings.view(whole, sort)
        json.dumps(view.as_json(), allow_nan=False)
        assert len(view.rows) <= len(fleet)


@given(st.text())
def test_text_is_printable_and_short(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) <= MAX_TEXT
    if text.isprintable() and len(text) <= MAX_TEXT:
        assert shown == text
