"""How many cores a model may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_agent import cpus


def system(
    root: Path, monkeypatch: pytest.MonkeyPatch, siblings: list[str], quota: str | None = None
) -> Path:
    """A sysfs with one CPU per entry of ``siblings`` (its thread siblings), all usable."""
    for cpu, text in enumerate(siblings):
        folder = root / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    if quota is not None:
        (root / "fs/cgroup").mkdir(parents=True)
        (root / "fs/cgroup/cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda _: set(range(len(siblings))))
    monkeypatch.setattr(cpus.os, "cpu_count", lambda: 64)
    return root


@pytest.mark.parametrize(
    ("siblings", "quota", "cores", "threads"),
    [
        (["0", "1", "2", "3"], None, 4, 3),  # a Raspberry Pi
        (["0-1", "0-1", "2-3", "2-3"], None, 2, 1),  # hyperthreads
        (["0", "1"], "max 100000", 2, 1),
        (["0"], None, 1, 1),
        (["0", "1", "2", "3"], "150000 100000", 2, 1),  # a container with one and a half CPUs
        (["0", "1", "2", "3"], "5000 100000", 1, 1),
        (["0", "1", "2", "3"], "nonsense", 4, 3),
    ],
)
def test_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    siblings: list[str],
    quota: str | None,
    cores: int,
    threads: int,
) -> None:
    root = system(tmp_path, monkeypatch, siblings, quota)
    assert cpus.usable_cores(root) == cores
    assert cpus.default_threads(root) == threads


def test_without_topology_each_cpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda _: {0, 3})
    assert cpus.usable_cores(tmp_path / "nowhere") == 2


def test_without_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpus.os, "sched_getaffinity")
    monkeypatch.setattr(cpus.os, "cpu_count", lambda: 6)
    assert cpus.usable_cores(tmp_path) == 6


def test_here() -> None:
    assert cpus.default_threads() >= 1
