"""Watts of boards that measure power."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.sensors.power import Ina3221, Pmic, check_watts_read, pmic_watts
from tests.broker.sensors import boards


def test_jetpack_6_takes_the_rail_that_carries_the_module(tmp_path: Path) -> None:
    board = Ina3221.find(boards.orin_nano(tmp_path))
    assert board is not None
    assert [rail.name for rail in board.rails] == ["VDD_IN"]
    assert board.watts() == pytest.approx(5.0)


def test_without_such_a_rail_each_watt_counts_once(tmp_path: Path) -> None:
    board = Ina3221.find(boards.agx_orin(tmp_path))
    assert board is not None
    assert {rail.name for rail in board.rails} == {"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"}
    assert board.watts() == pytest.approx(4.0 + 2.0 + 5.0)


def test_jetpack_4_shows_iio_devices(tmp_path: Path) -> None:
    board = Ina3221.find(boards.jetson_nano(tmp_path))
    assert board is not None
    assert board.watts() == pytest.approx(2.5)


def test_jetpack_4_without_computed_power(tmp_path: Path) -> None:
    for path in boards.jetson_nano(tmp_path).glob("sys/bus/i2c/drivers/*/*/*/in_power*"):
        path.unlink()
    board = Ina3221.find(tmp_path)
    assert board is not None
    assert board.watts() == pytest.approx(2.5)


def test_a_channel_that_is_switched_off_is_no_rail(tmp_path: Path) -> None:
    boards.ina3221(tmp_path, "1-0040", 3, [("A", 1000, 1000), ("B", 1000, 500)])
    folder = tmp_path / "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"
    (folder / "in2_enable").write_text("0\n")
    board = Ina3221.find(tmp_path)
    assert board is not None
    assert board.watts() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"sys/bus/i2c/drivers/ina3221/bind": ""},
        {"sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/in1_label": "VDD_IN\n"},
    ],
)
def test_no_board(tmp_path: Path, files: dict[str, str]) -> None:
    assert Ina3221.find(boards.lay(tmp_path, files)) is None


def test_a_sum_without_one_of_its_rails_is_no_sum(tmp_path: Path) -> None:
    board = Ina3221.find(boards.agx_orin(tmp_path))
    assert board is not None
    (tmp_path / "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/curr2_input").unlink()
    with pytest.raises(ValueError, match="VDD_CPU_CV"):
        board.watts()


def test_pmic_pairs_rails_by_name() -> None:
    assert pmic_watts(boards.PMIC) == pytest.approx(boards.PMIC_WATTS)
    board = Pmic.find(boards.Vcgencmd())
    assert board is not None
    assert board.watts() == pytest.approx(boards.PMIC_WATTS)


@pytest.mark.parametrize(
    "said",
    [
        "",
        'error=1 error_msg="Command not registered"\n',  # a Raspberry Pi 4
        "     EXT5V_V volt(24)=5.06788000V\n",
        "  VDD_CORE_A current(7)=2.0A\n",
    ],
)
def test_no_current_is_no_power(said: str) -> None:
    assert pmic_watts(said) is None
    assert Pmic.find(boards.Vcgencmd(said)) is None


def test_a_rail_that_reads_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        pmic_watts("  X_A current(7)=2..0A\n  X_V volt(7)=1.0V\n")


@pytest.mark.parametrize("watts", [0.0, -2.0, 1e5, float("nan"), float("inf")])
def test_power_that_no_machine_draws(watts: float) -> None:
    with pytest.raises(ValueError, match="no power"):
        check_watts_read(watts)


def test_power_that_one_does() -> None:
    assert check_watts_read(0.8) == 0.8
