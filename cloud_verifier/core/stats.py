"""Counts of a verifier as a plain dataclass; exporters stand apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class VerifierStats:
    """Since the start, but for ``blocks_in_use``, which is now.

    ``rejected``: input dropped, by cause (a fixed set of causes). ``refused``: openings that were
    refused, by reason; ``refusals`` is their sum.
    """

    opens: int = 0
    refusals: int = 0
    device_refusals: int = 0  # of them those of devices that have too many sessions
    forwards: int = 0
    forward_failures: int = 0
    forward_seconds: float = 0.0
    batch_sessions: int = 0  # sum over forwards
    batch_tokens: int = 0  # sum over forwards
    prefilled_tokens: int = 0  # prompt and committed tokens run, the one before a choice left out
    shared_tokens: int = 0  # taken over from what another session had computed
    shared_blocks: int = 0  # of K/V memory, which hold those
    evictions: int = 0  # sessions that gave their slot and blocks to another
    blocks_in_use: int = 0  # blocks of K/V memory in tables of sessions
    drafts: int = 0
    judged: int = 0
    accepted: int = 0
    committed: int = 0
    verdicts: int = 0
    repeats: int = 0
    resyncs: int = 0
    gaps: int = 0
    stale_drafts: int = 0
    dead_epochs: int = 0
    late_triggers: int = 0
    lost_branches: int = 0  # of trees: repeated, behind what is committed, or too many tokens
    stale_attach: int = 0
    unknown_sessions: int = 0
    expired: int = 0
    closed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
