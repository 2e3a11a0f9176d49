"""What a generation tells whoever measures it. Costs nothing where nobody listens.

An observer is called by the thread that iterates over the generation, so it must be quick. It
hears a name, begin and end in the clock's seconds, and details:

``draft``     a token was drafted: position, token, confidence, awaiting (a verdict was to come)
``sent``      a message was published: kind, tokens, verify, bytes (of payload)
``verdict``   one was taken in: start, tokens, accepted, judged, hold_ms, forward_ms, and what it
              did here: committed, lost (tokens)
``rollback``  a verdict dropped ``lost`` drafted tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from broker.messages import DraftBatch, EdgeMessage, Verdict
from edge_agent.core.session import EdgeSession

Observer = Callable[[str, float, float, Mapping[str, Any]], None]


def tell_sent(
    observer: Observer, message: EdgeMessage, size: int, begin: float, end: float
) -> None:
    """``message``, ``size`` bytes of payload, was handed to the transport."""
    batch = message if isinstance(message, DraftBatch) else None
    details = {
        "kind": type(message).__name__,
        "tokens": 0 if batch is None else len(batch.tokens),
        "verify": batch is not None and batch.verify,
        "bytes": size,
    }
    observer("sent", begin, end, details)


def receive(
    observer: Observer, core: EdgeSession, verdict: Verdict, now: float, heard_at: float
) -> None:
    """Give ``verdict`` to the core and tell what it did."""
    committed, lost = len(core.committed), core.stats.rolled_back
    core.receive(verdict, now, heard_at)
    lost = core.stats.rolled_back - lost
    details = {
        "start": verdict.start,
        "tokens": len(verdict.tokens),
        "accepted": verdict.accepted,
        "judged": verdict.judged,
        "hold_ms": verdict.hold_ms,
        "forward_ms": verdict.forward_ms,
        "committed": len(core.committed) - committed,
        "lost": lost,
    }
    observer("verdict", now, now, details)
    if lost:
        observer("rollback", now, now, {"lost": lost})
