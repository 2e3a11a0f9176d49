"""How much memory llama.cpp's cells take, from what a GGUF file says of its model."""

from __future__ import annotations

from typing import Any

from broker.errors import ConfigError
from broker.gguf_header import GgufHeader
from cloud_verifier.engine.kv_budget import format_size

SPARE = 32  # cells behind each slot's context, for rows that only fill a pass up
_STEP = 256  # llama.cpp rounds the cells of a sequence up to whole ones of these


def slot_cells(context: int) -> int:
    """Cells of one slot for ``context`` tokens."""
    return -(-(context + SPARE) // _STEP) * _STEP


def cell_bytes(header: GgufHeader, item: int) -> int | None:
    """Bytes of one cell over all layers, numbers of ``item`` bytes; None where it is not told."""

    def told(name: str, default: Any = None) -> Any:
        return header.metadata.get(f"{header.architecture}.{name}", default)

    layers, heads = told("block_count"), told("attention.head_count")
    kv_heads = told("attention.head_count_kv", heads)
    try:
        # Where layers differ, heads are told for each of them; the first may have none.
        most = max(heads) if isinstance(heads, tuple) else heads
        total = sum(kv_heads) if isinstance(kv_heads, tuple) else layers * kv_heads
        width = told("embedding_length") // most
        key, value = (told(f"attention.{each}_length", width) for each in ("key", "value"))
        count = int(total * (key + value) * item)
    except (TypeError, ValueError, ZeroDivisionError):
        return None
    return count if count > 0 else None


def slots_for(
    budget: int | None,
    header: GgufHeader,
    *,
    item: int,
    context: int,
    max_slots: int,
    available: int | None,
) -> int:
    """Slots whose cells fit in ``budget`` bytes, at most ``max_slots``; None: all of them.

    Raises ConfigError where not one fits, where they take more than the ``available`` bytes (the
    system would end the process), or the file does not tell what a budget needs to know.
    """
    cell = cell_bytes(header, item)
    if budget is None:
        if cell is not None:
            _check(max_slots * cell * slot_cells(context), available, "--slots or --context")
        return max_slots
    if cell is None:
        raise ConfigError(
            "the model does not tell what its K/V take: leave out --kv-budget, give --slots"
        )
    each = cell * slot_cells(context)
    if budget < each:
        raise ConfigError(
            f"--kv-budget {format_size(budget)} holds no session of the whole context: give "
            f"{format_size(each)} at least, or a smaller --context"
        )
    slots = min(max_slots, budget // each)
    _check(slots * each, available, "--kv-budget")
    return slots


def _check(taken: int, available: int | None, lower: str) -> None:
    if available is not None and taken > available:
        raise ConfigError(
            f"K/V take {format_size(taken)} where {format_size(available)} are available: "
            f"lower {lower}"
        )
