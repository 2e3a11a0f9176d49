"""What a verifier's metrics page tells a fleet about its forwards (docs/metrics.md)."""

from __future__ import annotations

import math
import socket
import urllib.error
import urllib.request

_TIMEOUT_S = 3.0
_MAX_BYTES = 4 << 20
_PREFIX = "pipesd_verifier_"
#: By the names that a scripted verifier gives them in its counters.
_COUNTERS = {
    "forwards": "forwards_total",
    "batch_sessions": "batch_sessions_sum",
    "batch_tokens": "batch_tokens_sum",
    "committed": "committed_tokens_total",
}
#: What it holds at the moment, and not since its start.
_HELD = {"sessions_left": "sessions"}


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_counters(url: str) -> dict[str, float] | None:
    """The counters that the page at ``url`` tells; None where there is none, or not of a verifier.

    Only http and https are asked.
    """
    if not url.startswith(("http://", "https://")):
        return None
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 (see above)
            text = answer.read(_MAX_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError, urllib.error.URLError):
        return None
    return parse_counters(text)


def parse_counters(text: str) -> dict[str, float] | None:
    """Of a page in Prometheus' text format."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name.startswith(_PREFIX):
            try:
                values[name.removeprefix(_PREFIX)] = float(value.split()[0])
            except (ValueError, IndexError):
                continue
    wanted = {**_COUNTERS, **_HELD}
    found = {ours: values.get(theirs, math.nan) for ours, theirs in wanted.items()}
    return found if all(map(math.isfinite, found.values())) else None


def counted(
    before: dict[str, float] | None, after: dict[str, float] | None
) -> dict[str, int] | None:
    """What was counted between two looks, and is held at the second one.

    None where a look is missing, or the verifier began anew in between.
    """
    if before is None or after is None:
        return None
    found = {
        name: round(value - (0.0 if name in _HELD else before[name]))
        for name, value in after.items()
    }
    return found if min(found.values()) >= 0 else None
