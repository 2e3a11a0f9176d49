"""CPU time, memory and model, and the helpers that read files and run commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from broker.sensors import files
from broker.sensors.machine import (
    MAX_MODEL,
    machine_cpu_seconds,
    machine_memory,
    machine_model,
    process_cpu_seconds,
    resident_memory_bytes,
)
from tests.broker.sensors import boards


def test_process_and_machine(tmp_path: Path) -> None:
    boards.process(tmp_path, ticks=150, pages=1000, busy=900)
    assert process_cpu_seconds(tmp_path) == 150 / boards.TICKS
    assert machine_cpu_seconds(tmp_path) == 900 / boards.TICKS
    assert resident_memory_bytes(tmp_path) == 1000 * boards.PAGE
    assert machine_memory(tmp_path) == (8_000_000 * 1024, 6_000_000 * 1024)


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert process_cpu_seconds(tmp_path) is None
    assert machine_cpu_seconds(tmp_path) is None
    assert resident_memory_bytes(tmp_path) is None
    assert machine_memory(tmp_path) == (None, None)
    assert machine_model(tmp_path) is None


@pytest.mark.parametrize(
    ("path", "text", "read"),
    [
        ("proc/self/stat", "42 (x) S 1", process_cpu_seconds),
        ("proc/self/stat", "", process_cpu_seconds),
        ("proc/stat", "", machine_cpu_seconds),
        ("proc/stat", "cpu 1 2", machine_cpu_seconds),
        ("proc/self/statm", "9", resident_memory_bytes),
        ("proc/meminfo", "MemTotal: lots kB", machine_memory),
        ("proc/meminfo", "MemTotal: 1 MB", machine_memory),
    ],
)
def test_files_that_say_nothing_sensible(tmp_path: Path, path, text, read) -> None:
    with pytest.raises((ValueError, IndexError)):
        read(boards.lay(tmp_path, {path: text}))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc of Linux")
def test_this_very_machine() -> None:
    assert 0.0 < (process_cpu_seconds() or 0.0) < (machine_cpu_seconds() or 0.0)
    total, available = machine_memory()
    assert 0.0 < (resident_memory_bytes() or 0.0) < (total or 0.0)
    assert 0.0 < (available or 0.0) <= (total or 0.0)
    assert machine_model()


@pytest.mark.parametrize(
    ("lay", "name"),
    [
        (boards.raspberry_pi_5, "Raspberry Pi 5 Model B Rev 1.0"),
        (boards.orin_nano, "NVIDIA Jetson Orin Nano Developer Kit"),
        (boards.xeon, "Dell Inc. PowerEdge R750"),
    ],
)
def test_machines_name_themselves(tmp_path: Path, lay, name) -> None:
    assert machine_model(lay(tmp_path)) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor : 0\nmodel name : AMD EPYC 9354\nprocessor : 1\n", "AMD EPYC 9354"),
        ("processor : 0\n\nModel : Raspberry Pi 4 Model B\n", "Raspberry Pi 4 Model B"),
        ("model name\t: a\x07b" + "c" * 500 + "\n", "a b" + "c" * (MAX_MODEL - 3)),
        ("bogomips : 1\n", None),
    ],
)
def test_else_the_processor_does(tmp_path: Path, text, name) -> None:
    boards.lay(
        tmp_path, {"proc/cpuinfo": text, "sys/class/dmi/id/product_name": "To be filled by O.E.M."}
    )
    assert machine_model(tmp_path) == name


def test_a_long_file_is_read_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"x" * (files.MAX_BYTES + 100))
    assert len(files.read_text(path) or "") == files.MAX_BYTES


def test_commands(monkeypatch) -> None:
    assert files.run_command(("no-such-program-here",)) is None
    assert files.run_command((sys.executable, "-c", "print('said')")) == "said\n"
    with pytest.raises(ValueError, match="ended with 3"):
        files.run_command((sys.executable, "-c", "raise SystemExit(3)"))
    monkeypatch.setattr(files, "COMMAND_TIMEOUT", 0.1)
    with pytest.raises(ValueError, match=r"longer than 0\.1 s"):
        files.run_command((sys.executable, "-c", "import time; time.sleep(30)"))
