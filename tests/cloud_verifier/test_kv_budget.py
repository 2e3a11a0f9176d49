"""Sizes as people write them, memory as machines state it, and the blocks that follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.errors import ConfigError
from cloud_verifier.engine.kv_budget import available_memory, blocks_for, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("512M", 512 * 2**20),
        ("2g", 2 * 2**30),
        ("1.5GiB", 3 * 2**29),
        (" 64KB ", 65536),
        ("1T", 2**40),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.0001", "-1G", "2 X", "G", "1e9", "inf", "9" * 40])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="like 512M or 2G"):
        parse_size(text)


@pytest.mark.parametrize("count", [1, 1024, 5_000_000, 2**30, 123_456_789_012])
def test_a_size_that_is_shown_suffices(count: int) -> None:
    assert parse_size(format_size(count)) >= count


def machine(path: Path, **files: str) -> int | None:
    for name, content in files.items():
        (path / name.replace("_", ".", 1)).write_text(content)
    return available_memory(path / "meminfo", path)


def test_the_container_s_limit_counts_where_it_is_tighter(tmp_path: Path) -> None:
    assert machine(tmp_path) is None
    assert machine(tmp_path, meminfo="MemTotal: 9 kB\nMemAvailable:    800 kB\n") == 800 * 1024
    assert machine(tmp_path, memory_max="max\n", memory_current="5\n") == 800 * 1024
    stat = "anon 7\ninactive_file 1000\n"
    assert machine(tmp_path, memory_max="500000", memory_stat=stat) == 500_000 - 5 + 1000


def blocks(budget: int | None, available: int | None = None) -> int:
    """Of 100 bytes, ten for a context, four slots."""
    return blocks_for(budget, block_bytes=100, context_blocks=10, max_slots=4, available=available)


def test_a_budget_is_filled_with_whole_blocks_and_no_more_than_can_be_used() -> None:
    assert blocks(1999) == 19
    assert blocks(10**9) == 40
    with pytest.raises(ConfigError, match=r"--kv-budget 1K holds no session .* give 1K at least"):
        blocks(999)


def test_without_a_budget_a_quarter_of_what_is_available_is_taken_at_most() -> None:
    assert blocks(None) == 40
    assert blocks(None, 10**6) == 40
    assert blocks(None, 10_000) == 25
    assert blocks(None, 100) == 10, "one context in any case"


def test_a_budget_beyond_what_is_available_is_refused() -> None:
    assert blocks(4000, 4000) == 40
    assert blocks(10**9, 4000) == 40, "no more than the slots can use is taken"
    with pytest.raises(ConfigError, match=r"--kv-budget 4K takes 4K where 4K are available"):
        blocks(4000, 3999)
