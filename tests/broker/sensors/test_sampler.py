"""The sampler: everything a machine has, nothing that it has not, and no exception ever."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.clock import VirtualClock
from broker.errors import ConfigError
from broker.figures import BY_NAME
from broker.sensors import BackgroundSampler, Readings, Sampler, check_watts
from broker.sensors.sampler import MAX_FAILURES, RETRY_S
from tests.broker.sensors import boards
from tests.brokers import wait_until


def sampler(root: Path, **options) -> Sampler:
    return Sampler(root, command=options.pop("command", boards.no_command), **options)


def test_a_machine_without_anything_has_no_figures(tmp_path: Path) -> None:
    made = sampler(tmp_path)
    assert made.sample(0.0) == Readings()
    assert not made.failures


def test_case_34_missing_sensors_are_absent_and_the_rest_is_there(tmp_path: Path) -> None:
    """JetPack 6 without its monitors, a Raspberry Pi's container without vcgencmd."""
    made = sampler(boards.process(tmp_path))
    for now in (0.0, 2.0):
        found = made.sample(now)
        assert found.energy_joules is None
        assert found.energy_source is None
        assert found.temperature_celsius is None
        assert found.throttled is None
        assert found.throttled_seconds is None
        assert found.cpu_seconds == 150 / boards.TICKS
        assert found.machine_available_memory_bytes == 6_000_000 * 1024
    assert not made.failures


def test_case_34_a_sensor_that_goes_away_later(tmp_path: Path) -> None:
    made = sampler(boards.orin_nano(tmp_path))
    made.sample(0.0)
    assert made.sample(2.0).energy_joules == pytest.approx(10.0)
    for path in tmp_path.glob("sys/bus/i2c/drivers/ina3221/*/hwmon/*/curr*_input"):
        path.unlink()
    found = made.sample(4.0)
    assert found.energy_joules is None
    assert found.energy_source is None
    assert found.temperature_celsius == 50.25
    assert made.failures == {"energy": 1}


@pytest.mark.parametrize(
    ("lay", "source", "watts"),
    [
        (boards.orin_nano, "ina3221", 5.0),
        (boards.agx_orin, "ina3221", 11.0),
        (boards.jetson_nano, "ina3221", 2.5),
    ],
)
def test_energy_of_a_jetson(tmp_path: Path, lay, source, watts) -> None:
    made = sampler(lay(tmp_path), watts=9.0)
    assert made.sample(100.0).energy_joules == 0.0
    found = made.sample(110.0)
    assert found.energy_joules == pytest.approx(10.0 * watts)
    assert found.energy_source == source


def test_energy_of_a_raspberry_pi_5(tmp_path: Path) -> None:
    made = sampler(boards.raspberry_pi_5(tmp_path), command=boards.Vcgencmd())
    made.sample(0.0)
    found = made.sample(5.0)
    assert found.energy_joules == pytest.approx(5.0 * boards.PMIC_WATTS)
    assert found.energy_source == "pmic"
    assert found.throttled == 0.0
    assert found.undervoltage == 0.0


def test_energy_of_a_server(tmp_path: Path) -> None:
    made = sampler(boards.xeon(tmp_path, energy=1_000_000))
    made.sample(0.0)
    boards.xeon(tmp_path, energy=91_000_000)
    found = made.sample(1.0)
    assert found.energy_joules == pytest.approx(90.0)
    assert found.energy_source == "rapl"


def test_an_estimate_is_called_one(tmp_path: Path) -> None:
    found = sampler(boards.process(tmp_path, ticks=200), watts=3.0).sample(0.0)
    assert found.energy_joules == pytest.approx(3.0 * 200 / boards.TICKS)
    assert found.energy_source == "estimate"


def test_a_sleep_of_ten_minutes_costs_nothing(tmp_path: Path) -> None:
    made = sampler(boards.orin_nano(tmp_path))
    made.sample(0.0)
    made.sample(10.0)
    assert made.sample(610.0).energy_joules == pytest.approx(50.0)


def test_a_reader_that_keeps_failing_is_asked_once_a_minute(tmp_path: Path, caplog) -> None:
    boards.zones(tmp_path, [("cpu-thermal", "warm")])
    made = sampler(tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in range(20):
            assert made.sample(2.0 * step).temperature_celsius is None
    assert made.failures == {"temperature": MAX_FAILURES}
    assert len(caplog.records) == 1
    boards.zones(tmp_path, [("cpu-thermal", "40000")])
    assert made.sample(40.0).temperature_celsius is None
    assert made.sample(4.0 + RETRY_S).temperature_celsius == 40.0
    assert made.sample(6.0 + RETRY_S).temperature_celsius == 40.0


def test_a_clock_that_went_back_silences_nothing_for_long(tmp_path: Path) -> None:
    boards.zones(tmp_path, [("cpu-thermal", "warm")])
    made = sampler(tmp_path)
    for _ in range(MAX_FAILURES):
        made.sample(1e6)
    boards.zones(tmp_path, [("cpu-thermal", "40000")])
    assert made.sample(5.0).temperature_celsius == 40.0


def test_a_sensor_that_fails_at_first_is_waited_for(tmp_path: Path) -> None:
    """Under load at boot a command may run out of time; an estimate must not take over for ever."""
    command = boards.Vcgencmd()
    command.fault = ValueError("vcgencmd took longer than 1 s")
    made = sampler(boards.raspberry_pi_5(tmp_path), watts=3.0, command=command)
    assert made.sample(0.0).energy_source is None
    command.fault = None
    made.sample(2.0)
    assert made.sample(4.0).energy_source == "pmic"


def test_a_sensor_that_never_works_gives_way_to_the_estimate(tmp_path: Path) -> None:
    command = boards.Vcgencmd()
    command.fault = ValueError("VCHI initialization failed")
    made = sampler(boards.process(tmp_path), watts=3.0, command=command)
    sources = [made.sample(2.0 * step).energy_source for step in range(5)]
    assert sources == [None, None, "estimate", "estimate", "estimate"]
    assert made.failures["energy_pmic"] == MAX_FAILURES


def test_a_source_that_comes_later_is_found(tmp_path: Path) -> None:
    made = sampler(boards.process(tmp_path))
    assert made.sample(0.0).energy_source is None
    boards.xeon(tmp_path)
    assert made.sample(10.0).energy_source is None
    assert made.sample(RETRY_S).energy_source == "rapl"


def test_rapl_for_root_only_is_said_once(tmp_path: Path, caplog, monkeypatch) -> None:
    boards.xeon(tmp_path)
    opened = Path.open

    def refuse(path: Path, *args, **kwargs):
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    made = sampler(tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in range(8):
            assert made.sample(RETRY_S * step).energy_joules is None
    assert len(caplog.records) == 1
    assert not made.failures


def test_seconds_throttled(tmp_path: Path) -> None:
    command = boards.Vcgencmd(throttled="throttled=0x50005\n")
    made = sampler(tmp_path, command=command)
    assert made.sample(0.0).throttled_seconds == 0.0
    assert made.sample(2.0).throttled_seconds == 2.0
    assert made.sample(602.0).throttled_seconds == 2.0  # asleep, and nobody knows
    command.throttled = "throttled=0x50000\n"
    assert made.sample(604.0).throttled_seconds == 2.0
    command.throttled = "throttled=0x4\n"
    assert made.sample(606.0).throttled_seconds == 2.0
    assert made.sample(607.0).throttled_seconds == 3.0


JUNK = ("", "0", "-1", "\0\0", "nan", "9" * 40, "cpu a b c d e f g h", "1 (a) S", "x" * 9000)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None
)
@given(
    junk=st.sampled_from(JUNK),
    which=st.integers(0, 4),
    times=st.lists(st.floats(-1e9, 1e9), max_size=4),
)
def test_whatever_the_files_hold_nothing_is_raised(tmp_path: Path, junk, which, times) -> None:
    """Every fifth file of a machine that has everything."""
    root = tmp_path / f"{which}-{JUNK.index(junk)}"
    if not root.exists():
        boards.orin_nano(root)
        boards.xeon(root)
        for path in sorted(path for path in root.rglob("*") if path.is_file())[which::5]:
            path.write_text(junk)
    made = sampler(root, watts=1.0, command=boards.Vcgencmd(junk, junk))
    for now in times:
        found = made.sample(now)
        for field in fields(found):
            value = getattr(found, field.name)
            assert value is None or isinstance(value, str) or value >= -60.0


def test_a_folder_where_a_file_should_be(tmp_path: Path) -> None:
    (tmp_path / "proc/self/stat").mkdir(parents=True)
    made = sampler(tmp_path)
    assert made.sample(0.0).cpu_seconds is None
    assert made.failures == {"cpu": 1}


def test_the_figures_of_devices_have_these_names() -> None:
    """So that telemetry takes them over by name."""
    for field in fields(Readings):
        if field.name in ("energy_source", "undervoltage", "machine_cpu_seconds"):
            continue
        grows = field.name.endswith(("_seconds", "_joules"))
        assert (f"{field.name}_total" if grows else field.name) in BY_NAME


@pytest.mark.parametrize("watts", [0.0, -1.0, 1e6, float("nan"), float("inf")])
def test_watts_that_no_core_draws(watts: float) -> None:
    with pytest.raises(ConfigError, match="--watts"):
        check_watts(watts)


def test_watts_that_are_fine() -> None:
    assert check_watts(None) is None
    assert check_watts(4.5) == 4.5


def test_in_the_background(tmp_path: Path) -> None:
    boards.orin_nano(tmp_path)
    clock = VirtualClock()
    background = BackgroundSampler(sampler(tmp_path), interval=0.005, clock=clock)
    assert background.latest == Readings()
    background.start()
    try:
        assert wait_until(lambda: background.latest.energy_joules == 0.0)
        clock.advance_to(10.0)
        assert wait_until(lambda: (background.latest.energy_joules or 0.0) > 49.0)
    finally:
        background.stop()
        background.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "sensors"]


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc of Linux")
def test_this_very_machine() -> None:
    made = Sampler()
    found = made.sample(0.0)
    assert (found.cpu_seconds or 0.0) > 0.0
    assert (found.resident_memory_bytes or 0.0) > 1e6
