"""Joules: integrated, counted or estimated, never invented."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.sensors.energy import (
    MAX_GAP_S,
    MAX_PART_WATTS,
    Counted,
    Integrated,
    find_estimate,
    find_nvml,
    find_pmic,
    find_rapl,
)
from tests.broker.sensors import boards


def test_power_is_integrated_over_the_time_between() -> None:
    watts = iter([10.0, 20.0, 20.0])
    source = Integrated("x", lambda: next(watts))
    assert [source.joules(now) for now in (100.0, 102.0, 103.0)] == [0.0, 30.0, 50.0]


@pytest.mark.parametrize("gap", [MAX_GAP_S + 1.0, 600.0, -5.0])
def test_a_sampler_that_slept_invents_nothing(gap: float) -> None:
    source = Integrated("x", lambda: 10.0)
    source.joules(0.0)
    assert source.joules(gap) == 0.0
    assert source.gaps == 1
    assert source.joules(gap + 1.0) == pytest.approx(10.0)


def counters(*values: float, wrap: float = 1000.0) -> Callable[[], dict[str, tuple[float, float]]]:
    left = iter(values)
    return lambda: {"package": (next(left), wrap)}


def test_a_counter_wraps() -> None:
    source = Counted("x", counters(950.0, 990.0, 10.0))
    assert [source.joules(now) for now in (0.0, 1.0, 2.0)] == [0.0, 40.0, 60.0]


def test_a_counter_without_an_end_that_begins_anew_adds_nothing() -> None:
    source = Counted("x", counters(950.0, 10.0, 15.0, wrap=0.0))
    assert [source.joules(now) for now in (0.0, 1.0, 2.0)] == [0.0, 0.0, 5.0]
    assert source.gaps == 1


def test_a_reset_is_no_wrap() -> None:
    """A package's counter ends at some 262 kJ: that much in two seconds is none."""
    source = Counted("x", counters(100.0, 1.0, 2.0, wrap=262_143.0))
    assert [source.joules(now) for now in (0.0, 2.0, 4.0)] == [0.0, 0.0, 1.0]


def test_a_counter_that_comes_later_counts_from_then() -> None:
    found = iter([{"a": (5.0, 0.0)}, {"a": (6.0, 0.0), "b": (700.0, 0.0)}, {"b": (703.0, 0.0)}])
    source = Counted("x", lambda: next(found))
    assert [source.joules(now) for now in (0.0, 1.0, 2.0)] == [0.0, 1.0, 4.0]


@given(
    steps=st.lists(
        st.tuples(st.floats(-100.0, 1000.0), st.floats(0.0, 1e6), st.floats(0.0, 1e5)), max_size=30
    )
)
def test_energy_only_grows_and_never_beyond_what_can_be(steps) -> None:
    state: dict[str, tuple[float, float]] = {}
    counted = Counted("x", lambda: {"a": state["now"]})
    now, last, limit = 0.0, 0.0, 0.0
    for seconds, value, wrap in steps:
        state["now"] = (value, wrap)
        limit += MAX_PART_WATTS * max(seconds, 0.0)
        now += seconds
        try:
            joules = counted.joules(now)
        except ValueError:  # it stands still
            continue
        assert last <= joules <= limit * (1 + 1e-9) + 1e-6
        last = joules


def test_rapl_counts_packages_and_memory_once(tmp_path: Path) -> None:
    source = find_rapl(boards.xeon(tmp_path, energy=1_000_000, dram=500_000))
    assert source is not None
    assert source.name == "rapl"
    assert source.joules(0.0) == 0.0
    boards.xeon(tmp_path, energy=51_000_000, dram=3_500_000)
    assert source.joules(1.0) == pytest.approx(53.0)


def test_rapl_of_a_virtual_machine_counts_nothing(tmp_path: Path) -> None:
    """Never a zero that nobody measured."""
    assert find_rapl(boards.xeon(tmp_path, energy=0, dram=0)) is None
    source = find_rapl(boards.xeon(tmp_path, energy=5_000_000))
    assert source is not None
    source.joules(0.0)
    assert source.joules(0.5) == 0.0
    with pytest.raises(ValueError, match="stand still"):
        source.joules(2.0)
    boards.xeon(tmp_path, energy=6_000_000)
    assert source.joules(3.0) == pytest.approx(1.0)


def test_rapl_over_the_end_of_the_counter(tmp_path: Path) -> None:
    wrap = 262_143_328_850
    source = find_rapl(boards.xeon(tmp_path, energy=wrap - 1_000_000))
    assert source is not None
    source.joules(0.0)
    boards.xeon(tmp_path, energy=2_000_000)
    assert source.joules(1.0) == pytest.approx(3.0)


def test_rapl_for_root_only_is_absent_and_said(tmp_path: Path, monkeypatch) -> None:
    boards.xeon(tmp_path)
    opened = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    said: list[str] = []
    assert find_rapl(tmp_path, said.append) is None
    assert len(said) == 1
    assert "root" in said[0]
    assert "--watts" in said[0]


def test_no_rapl(tmp_path: Path) -> None:
    assert find_rapl(tmp_path) is None
    folder = "sys/class/powercap/intel-rapl:0"
    assert find_rapl(boards.lay(tmp_path, {f"{folder}/name": "package-0\n"})) is None


def test_pmic_is_integrated() -> None:
    source = find_pmic(boards.Vcgencmd())
    assert source is not None
    source.joules(0.0)
    assert source.joules(2.0) == pytest.approx(2.0 * boards.PMIC_WATTS)


def test_an_estimate_needs_stated_watts(tmp_path: Path) -> None:
    boards.process(tmp_path, ticks=3 * boards.TICKS)
    assert find_estimate(None, tmp_path) is None
    assert find_estimate(0.0, tmp_path) is None
    assert find_estimate(float("nan"), tmp_path) is None
    source = find_estimate(4.0, tmp_path)
    assert source is not None
    assert source.name == "estimate"
    assert source.joules(0.0) == pytest.approx(12.0)


class NvmlError(Exception):
    """As pynvml raises."""


class Nvml(SimpleNamespace):
    """What is asked of pynvml; ``energies`` in mJ by index, None: not supported."""

    NVMLError = NvmlError

    def __init__(self, *energies: int | None) -> None:
        super().__init__()
        self.energies = list(energies)
        self.driver = True

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NvmlError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.energies)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.energies):
            raise NvmlError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        found = self.energies[handle]
        if found is None:
            raise NvmlError("Not Supported")
        return found


@pytest.mark.parametrize(
    ("visible", "joules"), [(None, 7.0), ("1", 5.0), ("GPU-0", 2.0), ("0,1", 7.0), ("0,-1,1", 2.0)]
)
def test_nvml_counts_the_gpus_that_are_visible(monkeypatch, visible, joules) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml(1_000_000, 9_000_000)
    source = find_nvml(lambda: nvml)
    assert source is not None
    assert source.joules(0.0) == 0.0
    nvml.energies = [1_002_000, 9_005_000]
    assert source.joules(1.0) == pytest.approx(joules)


def test_no_nvml(monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def missing() -> Any:
        raise ImportError

    assert find_nvml(missing) is None
    assert find_nvml(lambda: Nvml()) is None
    assert find_nvml(lambda: Nvml(None)) is None  # older than Volta
    asleep = Nvml(5)
    asleep.driver = False
    assert find_nvml(lambda: asleep) is None


def test_a_gpu_that_falls_off_the_bus_is_a_failure_not_a_zero(monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = Nvml(5_000)
    source = find_nvml(lambda: nvml)
    assert source is not None
    source.joules(0.0)
    nvml.energies = [None]
    with pytest.raises(ValueError, match="Not Supported"):
        source.joules(1.0)
