"""Readings of a fleet for the live view."""

from __future__ import annotations

from typing import Any


def device(
    sequence: int = 1,
    age: Any = 1.0,
    boot: str = "b",
    online: Any = True,
    **of: Any,
) -> dict[str, Any]:
    """``of``: figures by name."""
    figures = {"r1_ratio": 0.5, "r2_ratio": 0.9, "config_version": 3.0, **of}
    return {
        "online": online, "age_seconds": age, "clock_offset_seconds": 0.0, "boot": boot,
        "sequence": sequence, "version": "1", "draft": "d", "policy": "pipesd", "machine": "Pi 5",
        "energy_source": "", "figures": figures,
    }  # fmt: skip


def counters(tokens: float, tpt: float = 0.1, acceptance: float = 0.75) -> dict[str, float]:
    return {
        "committed_tokens_total": tokens,
        "generation_seconds_total": tokens * tpt,
        "judged_tokens_total": tokens,
        "accepted_tokens_total": tokens * acceptance,
    }


def reading(
    time: float = 1_000.0, verifiers: dict[str, Any] | None = None, **devices: Any
) -> dict[str, Any]:
    return {
        "format": 1,
        "time": time,
        "ttl_seconds": 60.0,
        "broker_connected": True,
        "buckets_seconds": [0.1, 1.0],
        "devices": devices,
        "verifiers": verifiers or {},
    }


def replica(online: bool = True, sessions: int = 3, most: int = 8) -> dict[str, Any]:
    return {
        "online": online, "version": "1", "model": "m", "context": 64, "sessions": sessions,
        "max_sessions": most,
    }  # fmt: skip
