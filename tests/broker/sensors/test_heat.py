"""Temperature and throttling of the boards that devices are."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.sensors.heat import ThrottleReader, temperature_celsius
from tests.broker.sensors import boards


@pytest.mark.parametrize(
    ("lay", "celsius"),
    [
        (boards.orin_nano, 50.25),
        (boards.jetson_nano, 38.5),
        (boards.raspberry_pi_5, 61.7),
        (boards.xeon, 55.0),
    ],
)
def test_the_processors_zone_is_found_by_its_type(tmp_path: Path, lay, celsius) -> None:
    assert temperature_celsius(lay(tmp_path)) == pytest.approx(celsius)


def test_the_hottest_of_several_clusters(tmp_path: Path) -> None:
    boards.zones(tmp_path, [("cpu-0-0-thermal", "40000"), ("cpu-1-0-thermal", "47000")])
    assert temperature_celsius(tmp_path) == 47.0


def test_a_soc_without_a_zone_of_its_cpu(tmp_path: Path) -> None:
    boards.zones(tmp_path, [("gpu-thermal", "70000"), ("soc-thermal", "44000")])
    assert temperature_celsius(tmp_path) == 44.0


def test_amd_has_a_chip_and_no_zone(tmp_path: Path) -> None:
    boards.zones(tmp_path, [("acpitz", "20000")])
    folder = "sys/class/hwmon/hwmon2"
    boards.lay(tmp_path, {f"{folder}/name": "k10temp\n", f"{folder}/temp1_input": "48125\n"})
    assert temperature_celsius(tmp_path) == 48.125


def test_the_boards_zone_is_the_last_resort(tmp_path: Path) -> None:
    assert temperature_celsius(boards.zones(tmp_path, [("acpitz", "20000")])) == 20.0


def test_no_sensor_is_no_temperature(tmp_path: Path) -> None:
    assert temperature_celsius(tmp_path) is None
    assert temperature_celsius(boards.zones(tmp_path, [("battery", "20000")])) is None


def test_one_broken_cluster_leaves_the_other(tmp_path: Path) -> None:
    boards.zones(tmp_path, [("cpu0", "-274000"), ("cpu1", "47000")])
    assert temperature_celsius(tmp_path) == 47.0


@pytest.mark.parametrize("value", ["-274000", "999000", "warm", ""])
def test_a_broken_sensor_raises(tmp_path: Path, value: str) -> None:
    boards.zones(tmp_path, [("cpu-thermal", value)])
    with pytest.raises(ValueError, match="temp"):
        temperature_celsius(tmp_path)


@pytest.mark.parametrize(
    ("word", "throttled", "undervoltage"),
    [
        ("0", False, False),
        ("50000", False, False),  # it was, since the start; it is not now
        ("50005", True, True),
        ("1", False, True),
        ("80008", True, False),
    ],
)
def test_raspberry_pi_says_what_holds_now(tmp_path, word, throttled, undervoltage) -> None:
    boards.raspberry_pi_5(tmp_path)
    (path,) = tmp_path.glob("sys/devices/platform/*/*/get_throttled")
    path.write_text(f"{word}\n")
    reader = ThrottleReader(tmp_path, boards.no_command)
    assert reader.read() == (throttled, undervoltage)
    path.unlink()
    assert ThrottleReader(tmp_path, boards.Vcgencmd(throttled=f"throttled=0x{word}\n")).read() == (
        throttled,
        undervoltage,
    )


def test_vcgencmd_that_says_something_else(tmp_path: Path) -> None:
    reader = ThrottleReader(tmp_path, boards.Vcgencmd(throttled="VCHI initialization failed"))
    with pytest.raises(ValueError, match="VCHI"):
        reader.read()


def test_intel_counters_are_compared_with_the_last_look(tmp_path: Path) -> None:
    reader = ThrottleReader(boards.xeon(tmp_path), boards.no_command)
    assert reader.read().throttled is None
    assert reader.read().throttled is False
    (tmp_path / "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count").write_text("9")
    assert reader.read().throttled is True
    assert reader.read().throttled is False


def test_jetson_throttles_by_cooling_devices_and_not_by_its_fan(tmp_path: Path) -> None:
    reader = ThrottleReader(boards.orin_nano(tmp_path), boards.no_command)
    assert reader.read() == (False, None)
    (tmp_path / "sys/class/thermal/cooling_device1/cur_state").write_text("1\n")
    assert reader.read() == (True, None)


def test_who_does_not_say_is_not_unthrottled(tmp_path: Path) -> None:
    assert ThrottleReader(tmp_path, boards.no_command).read() == (None, None)
    fan = {
        "sys/class/thermal/cooling_device0/type": "pwm-fan",
        "sys/class/thermal/cooling_device0/cur_state": "3",
    }
    assert ThrottleReader(boards.lay(tmp_path, fan), boards.no_command).read() == (None, None)
