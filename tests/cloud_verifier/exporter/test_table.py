"""The fleet's table: what is shown of whom, for how long, and what wrong input changes: nothing."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.codec import encode
from broker.exposition import FAMILIES
from broker.figures import BY_NAME, FIGURES, MAX_VALUE
from broker.messages import DeviceStatus
from broker.telemetry import DeviceConfig, Telemetry
from broker.topics import config_topic, down_topic, status_topic, telemetry_topic
from cloud_verifier.exporter.device import INFO_HOLD_S, MAX_BOOTS, QUIET_S
from cloud_verifier.exporter.figures import CAUSES
from cloud_verifier.exporter.table import (
    EXTRAS,
    MAX_PAYLOAD,
    MAX_VERIFIERS,
    TTL_S,
    VERIFIER_TTL_S,
    FleetTable,
)
from tests.cloud_verifier.exporter.fleet import COMMITTED, WALL, Fleet, full, series, telemetry

LAST_SEEN = "pipesd_device_last_seen_timestamp_seconds"
OFFSET = "pipesd_device_clock_offset_seconds"
ONLINE = "pipesd_device_online"


def test_every_figure_of_every_device_is_shown_once() -> None:
    fleet = Fleet()
    fleet.tell("pi-1", full(scale=1.0))
    fleet.tell("pi-2", full(scale=2.0))
    for place, device in enumerate(("pi-1", "pi-2"), 1):
        shown = fleet.of(device)
        for figure in FIGURES:
            assert shown[f"pipesd_device_{figure.name}"] == place * figure.number
        assert shown[LAST_SEEN] == WALL
        assert shown[OFFSET] == 0.0
        assert ONLINE not in shown  # nothing was said
    text = fleet.text()
    for family in (*FAMILIES, *EXTRAS):
        assert text.count(family.header) == (family.name != ONLINE)
    assert not fleet.table.dropped


def test_a_missing_figure_is_a_missing_series() -> None:
    fleet = Fleet()
    fleet.tell("d", telemetry(committed_tokens_total=0.0))
    assert set(fleet.of("d")) == {COMMITTED, LAST_SEEN, OFFSET}
    assert Fleet().text() == ""


# ---- wrong input ------------------------------------------------------------------------------


def junk() -> Iterator[tuple[str, bytes, bool, str]]:
    """Topic, payload, retained or not, and the cause under which it is counted."""
    topic = telemetry_topic("pi-1")
    good = encode(full("b1", 50))
    yield topic, b"", False, "msgpack"
    yield topic, b"\x9f\xfd\x74\xf7\xdd\x74\xff\xfd\xbd", False, "msgpack"
    yield topic, b"junk" * 1_000, False, "msgpack"
    yield topic, good[:-7], False, "msgpack"
    yield topic, b"\0" * (MAX_PAYLOAD + 1), False, "too_large"
    yield topic, msgpack.packb([99, 1]), False, "unknown_kind"
    yield topic, msgpack.packb([18, "b1", -1, 0.0, [], [], [], 0.0, [], 0.0]), False, "fields"
    yield topic, msgpack.packb([18, "b1", 50, 0.0, [1], [], [], 0.0, [], 0.0]), False, "fields"
    yield topic, msgpack.packb([18, "b1", 50, "now", [], [], [], 0.0, [], 0.0]), False, "fields"
    yield topic, msgpack.packb([18, "b1", 50, 0.0, [1], ["9"], [], 0.0, [], 0.0]), False, "fields"
    yield topic, msgpack.packb([18, "b1", 50, 0.0, [], [], [1, 2], 0.0, [], 0.0]), False, "fields"
    yield topic, encode(DeviceStatus(True)), False, "wrong_kind"
    yield topic, good, True, "retained"
    yield topic, encode(full("b1", 7)), False, "old_sequence"
    yield topic, encode(full("b1", 6)), False, "old_sequence"
    yield status_topic("pi-1"), good, False, "wrong_kind"
    yield status_topic("pi-1"), b"online", True, "msgpack"
    yield config_topic("pi-1"), encode(DeviceConfig(1, 0.5, 0.5)), True, "topic"
    yield down_topic("pi-1", "s"), good, False, "topic"
    yield telemetry_topic("_verifiers"), good, False, "topic"
    yield telemetry_topic("no spaces"), good, False, "topic"
    yield telemetry_topic("x" * 65), good, False, "topic"
    yield "pipesd/1/_verifiers/v 1/status", good, False, "topic"
    yield "pipesd/1/_verifiers/v/status", good, False, "wrong_kind"
    yield "pipesd/2/pi-1/telemetry", good, False, "topic"
    yield "", good, False, "topic"


@pytest.mark.parametrize(("topic", "payload", "retain", "cause"), list(junk()))
def test_what_is_wrong_is_counted_by_its_cause_and_changes_nothing(
    topic: str, payload: bytes, retain: bool, cause: str
) -> None:
    fleet = Fleet()
    fleet.tell("pi-1", full("b1", 7))
    fleet.status("pi-1", True)
    before = fleet.text()
    fleet.now += 1.0
    fleet.wall += 1.0
    fleet.table.receive(topic, payload, retain, fleet.now, fleet.wall)
    assert fleet.text() == before
    assert fleet.table.dropped == {cause: 1}
    assert cause in CAUSES


@given(st.text(max_size=40), st.binary(max_size=80), st.booleans())
def test_nothing_that_comes_raises(topic: str, payload: bytes, retain: bool) -> None:
    fleet = Fleet()
    for where in (topic, telemetry_topic("d"), status_topic("d"), "pipesd/1/_verifiers/v/status"):
        fleet.table.receive(where, payload, retain, fleet.now, fleet.wall)
    series(fleet.text())
    assert set(fleet.table.dropped) <= set(CAUSES)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_message_with_broken_bytes_does_no_harm(breaks: list[tuple[int, int]]) -> None:
    fleet = Fleet()
    fleet.tell("other", full())
    before = fleet.of("other")
    payload = bytearray(encode(full("b1", 2)))
    for place, value in breaks:
        payload[place % len(payload)] = value
    fleet.tell("d", bytes(payload))
    assert fleet.of("other") == before
    assert all(math.isfinite(value) for value in fleet.series().values())
    assert set(fleet.table.dropped) <= set(CAUSES)


def test_wrong_figures_are_left_out_one_by_one() -> None:
    fleet = Fleet()
    figures = {
        "committed_tokens_total": 5.0,
        "drafted_tokens_total": math.nan,
        "accepted_tokens_total": -1.0,
        "judged_tokens_total": math.inf,
        "uplink_bytes_total": 2.0 * MAX_VALUE,
        "gamma_seconds": -math.inf,
        "r1_ratio": -0.5,
        "temperature_celsius": -20.0,
    }
    message = telemetry(**figures)
    fleet.tell("d", replace(message, figures={**message.figures, 4_000: 1.0, 39: 2.0}))
    shown = fleet.of("d")
    assert shown == {
        COMMITTED: 5.0,
        "pipesd_device_temperature_celsius": -20.0,
        LAST_SEEN: WALL,
        OFFSET: 0.0,
    }
    assert fleet.table.dropped == {
        "not_finite": 3, "negative": 2, "too_large_figure": 1, "unknown_figure": 2,
    }  # fmt: skip


def test_fields_of_a_later_version_are_no_harm() -> None:
    fleet = Fleet()
    parts = msgpack.unpackb(encode(full()))
    fleet.tell("d", msgpack.packb([*parts, "new", 7]))
    later = Fleet()
    later.tell("d", full())
    assert fleet.text() == later.text()


def test_another_device_s_name_inside_changes_nothing_there() -> None:
    fleet = Fleet()
    fleet.tell("pi-2", full())
    before = fleet.of("pi-2")
    name = 'x"} 1\npipesd_device_online{device="pi-2"} 0\n#'
    fleet.tell("pi-1", full("pi-2", 9, 3.0, machine="pi-2", draft=name, policy=name[:60]))
    assert fleet.of("pi-2") == before
    assert fleet.of("pi-1")[COMMITTED] == 3.0 * BY_NAME["committed_tokens_total"].number
    assert {key for key in fleet.series() if key.startswith("pipesd_device_online")} == set()


@pytest.mark.parametrize(
    ("clock", "offset"),
    [
        (WALL + 3_600.0, 3_600.0),
        (12.0, 12.0 - WALL),
        (-5.0, -5.0 - WALL),
        (0.0, None),
        (math.nan, None),
        (math.inf, None),
        (-1e300, None),
    ],
)
def test_a_wrong_clock_shows_in_its_offset_alone(clock: float, offset: float | None) -> None:
    right, wrong = Fleet(), Fleet()
    for fleet, first in ((right, WALL), (wrong, clock)):
        for sequence in (1, 2, 3):
            fleet.tell("d", replace(full("b1", sequence, sequence), clock=first))
    shown, expected = wrong.series(), right.series()
    key = f'{OFFSET}{{device="d"}}'
    assert shown.pop(key, None) == offset
    expected.pop(key)
    assert shown == expected
    unusable = offset is None and clock != 0.0
    assert wrong.table.dropped == ({"clock": 3} if unusable else {})


# ---- time -------------------------------------------------------------------------------------


def test_series_leave_with_a_silent_device_and_return_with_it() -> None:
    """CASES 36."""
    fleet = Fleet()
    fleet.tell("pi-1", telemetry("b1", 1, committed_tokens_total=100.0))
    fleet.tell("pi-2", telemetry("x", 1, committed_tokens_total=7.0))
    fleet.now += TTL_S - 0.1
    fleet.tell("pi-2", telemetry("x", 2, committed_tokens_total=8.0))
    assert fleet.of("pi-1")[COMMITTED] == 100.0
    fleet.now += 0.1
    assert fleet.of("pi-1") == {}
    assert "pi-1" not in fleet.text()
    assert fleet.of("pi-2")[COMMITTED] == 8.0
    assert fleet.table.expired == 1
    fleet.now += 3_600.0
    assert fleet.text() == ""
    fleet.tell("pi-1", telemetry("b1", 900, committed_tokens_total=130.0))
    assert fleet.of("pi-1")[COMMITTED] == 130.0
    assert not fleet.table.dropped


def test_late_messages_are_known_for_a_while_and_shut_nobody_out_for_good() -> None:
    fleet = Fleet(ttl=0.5 * QUIET_S)
    fleet.tell("d", telemetry("b1", 8, committed_tokens_total=100.0))
    fleet.now += 0.75 * QUIET_S
    assert fleet.text() == ""
    fleet.tell("d", telemetry("b1", 7, committed_tokens_total=90.0))
    assert fleet.text() == ""
    assert fleet.table.dropped == {"old_sequence": 1}
    # Somebody sent a number in its name that it will never reach.
    fleet.tell("d", telemetry("b1", 2**31 - 1, committed_tokens_total=0.0))
    fleet.now += 5.0
    fleet.tell("d", telemetry("b1", 9, committed_tokens_total=110.0))
    assert fleet.of("d")[COMMITTED] == 0.0
    fleet.now += QUIET_S
    fleet.tell("d", telemetry("b1", 15, committed_tokens_total=140.0))
    assert fleet.of("d")[COMMITTED] == 140.0


def test_an_earlier_boot_is_over_unless_the_later_one_falls_silent() -> None:
    fleet = Fleet()
    fleet.tell("d", telemetry("b1", 100, committed_tokens_total=500.0, uptime_seconds=500.0))
    fleet.now += 10.0
    fleet.tell("d", telemetry("b2", 1, committed_tokens_total=3.0, uptime_seconds=1.0))
    fleet.now += 1.0
    fleet.tell("d", telemetry("b1", 101, committed_tokens_total=510.0, uptime_seconds=502.0))
    fleet.tell("d", telemetry("b0", 9, committed_tokens_total=900.0, uptime_seconds=900.0))
    assert fleet.of("d")[COMMITTED] == 3.0
    assert fleet.table.dropped == {"old_boot": 2}
    fleet.now += QUIET_S
    fleet.tell("d", telemetry("b1", 102, committed_tokens_total=520.0, uptime_seconds=531.0))
    assert fleet.of("d")[COMMITTED] == 520.0


def test_boots_without_an_uptime_come_one_after_the_other() -> None:
    fleet = Fleet()
    for boot in range(40):
        fleet.now += 1.0
        fleet.tell("d", telemetry(f"b{boot}", 1, committed_tokens_total=float(boot)))
        assert fleet.of("d")[COMMITTED] == boot
    assert len(fleet.table.devices["d"].earlier) == MAX_BOOTS
    fleet.tell("d", telemetry("b38", 2, committed_tokens_total=99.0))
    assert fleet.of("d")[COMMITTED] == 39.0


def test_a_restarted_exporter_shows_what_the_one_before_did() -> None:
    before, after = Fleet(), Fleet()
    after.now = 3.0  # another process, another monotonic clock
    for sequence in (1, 2):
        before.tell("d", full("b1", sequence, sequence))
    after.tell("d", full("b1", 2, 2.0))
    assert after.text() == before.text()


def test_labels_that_change_all_the_time_make_no_series_each_time() -> None:
    fleet = Fleet()
    seen = set()
    for turn in range(100):
        fleet.tell("d", full("b1", turn, machine=f"machine {turn}"))
        seen |= {key for key in fleet.series() if key.startswith("pipesd_device_info")}
        fleet.now += 1.0
    assert len(seen) == 2
    fleet.now += INFO_HOLD_S
    fleet.tell("d", full("b1", 200, policy="hsl"))
    assert 'policy="hsl"' in fleet.text()
    assert fleet.table.devices["d"].telemetry is not None


# ---- who is online ----------------------------------------------------------------------------


def test_the_retained_status_says_who_is_online() -> None:
    fleet = Fleet()
    fleet.status("pi-1", True, retain=True)
    fleet.status("pi-2", False, retain=True)  # it left, at some time
    fleet.now += 10 * TTL_S
    assert fleet.series() == {'pipesd_device_online{device="pi-1"}': 1.0}
    fleet.status("pi-1", False)
    assert fleet.of("pi-1") == {ONLINE: 0.0}
    fleet.now += TTL_S
    assert fleet.text() == ""
    assert fleet.table.devices == {}


def test_a_device_that_left_is_offline_until_its_telemetry_is_old() -> None:
    fleet = Fleet()
    fleet.status("d", True)
    fleet.tell("d", full())
    fleet.now += 30.0
    fleet.status("d", False)
    fleet.status("d", False, retain=True)
    assert fleet.of("d")[ONLINE] == 0.0
    fleet.now += TTL_S - 30.0
    assert fleet.of("d") == {ONLINE: 0.0}
    fleet.now += 30.0
    assert fleet.text() == ""


def test_a_status_that_is_taken_away_says_nothing() -> None:
    fleet = Fleet()
    fleet.status("d", True)
    fleet.status("e", None)
    fleet.status("d", None)
    assert fleet.text() == ""
    assert not fleet.table.dropped


def test_without_a_broker_nobody_is_known_to_be_online_for_long() -> None:
    fleet = Fleet()
    fleet.status("pi-1", True)
    fleet.status("pi-2", True)
    fleet.tell("pi-1", full())
    fleet.verifier("v", True)
    fleet.table.link_lost(fleet.now)
    fleet.now += TTL_S - 1.0
    assert fleet.of("pi-1")[ONLINE] == 1.0
    fleet.status("pi-2", True, retain=True)  # the broker is back, and tells again
    fleet.now += 1.0
    assert fleet.series() == {'pipesd_device_online{device="pi-2"}': 1.0}


def test_verifiers_by_their_status() -> None:
    fleet = Fleet()
    fleet.verifier("v1", True, 3)
    fleet.verifier("v2", True, 0)
    fleet.verifier("old", False)
    shown = {
        'pipesd_fleet_verifier_online{verifier="v1"}': 1.0,
        'pipesd_fleet_verifier_online{verifier="v2"}': 1.0,
        'pipesd_fleet_verifier_sessions{verifier="v1"}': 3.0,
        'pipesd_fleet_verifier_sessions{verifier="v2"}': 0.0,
        'pipesd_fleet_verifier_max_sessions{verifier="v1"}': 8.0,
        'pipesd_fleet_verifier_max_sessions{verifier="v2"}': 8.0,
    }
    assert fleet.series() == shown
    fleet.verifier("v1", False)
    fleet.verifier("v2", None)
    fleet.now += VERIFIER_TTL_S - 1.0
    fleet.verifier("v1", False)
    assert fleet.series() == {'pipesd_fleet_verifier_online{verifier="v1"}': 0.0}
    fleet.now += 1.0
    assert fleet.text() == ""


# ---- limits -----------------------------------------------------------------------------------


def test_a_device_too_many_is_counted_and_waits_for_a_place() -> None:
    fleet = Fleet(max_devices=2)
    fleet.tell("d1", full())
    fleet.tell("d2", full())
    fleet.tell("d3", full())
    fleet.status("d4", True)
    assert set(fleet.table.devices) == {"d1", "d2"}
    assert fleet.table.dropped == {"too_many_devices": 2}
    fleet.now += 30.0
    fleet.tell("d1", full("b1", 2))
    fleet.now += 30.0
    fleet.tell("d3", full("b1", 2))
    assert set(fleet.table.devices) == {"d1", "d3"}


def test_what_is_remembered_of_devices_that_left_is_bounded() -> None:
    fleet = Fleet(max_devices=10)
    for number in range(200):
        fleet.tell(f"d{number}", full())
        fleet.now += TTL_S
    assert fleet.text() == ""
    assert len(fleet.table._gone) == 10
    assert fleet.table.expired == 200


def test_verifiers_are_bounded() -> None:
    fleet = Fleet()
    for number in range(MAX_VERIFIERS + 5):
        fleet.verifier(f"v{number}", True)
    assert len(fleet.table.verifiers) == MAX_VERIFIERS
    assert fleet.table.dropped == {"too_many_verifiers": 5}


def test_series_grow_with_devices_and_never_with_sessions() -> None:
    """CASES 37."""
    fleet = Fleet()
    for device in range(20):
        fleet.tell(f"d{device}", full("b1", 1, 1.0))
    before = set(fleet.series())
    for turn in range(2, 52):
        for device in range(20):
            fleet.tell(f"d{device}", full("b1", turn, 1_000.0 * turn))
            session = down_topic(f"d{device}", f"s{turn}")
            fleet.table.receive(session, b"\x90", False, fleet.now, fleet.wall)
    assert set(fleet.series()) == before
    assert len(before) % 20 == 0
    fleet.tell("d20", full("b1", 1, 1.0))
    assert len(fleet.series()) == len(before) // 20 * 21


def test_a_flood_beyond_the_limit_does_not_look_through_all_devices_each_time() -> None:
    fleet = Fleet(max_devices=3)
    scans = []

    class Watched(FleetTable):
        def expire(self, now: float) -> None:
            scans.append(now)
            super().expire(now)

    fleet.table = Watched(max_devices=3)
    for number in range(1_000):
        fleet.now += 0.001
        fleet.tell(f"d{number}", Telemetry("b", 1))
    assert len(scans) <= 2


def test_floats_come_out_as_they_went_in() -> None:
    fleet = Fleet()
    value = struct.unpack("<d", struct.pack("<d", 0.1 + 0.2))[0]
    fleet.tell("d", telemetry(generation_seconds_total=value))
    assert fleet.of("d")["pipesd_device_generation_seconds_total"] == value
