"""A target around another one: what wraps one changes its forwards and is the same in all else."""

from __future__ import annotations

from collections.abc import Sequence

from cloud_verifier.engine.target import Target, Work


class WrappedTarget:
    """``target`` as it is. Implements ``Target``."""

    def __init__(self, target: Target) -> None:
        self.name = target.name
        self.vocab_size = target.vocab_size
        self.context = target.context
        self.vocab_hash = target.vocab_hash
        self.eos_ids = target.eos_ids
        self.max_slots = target.max_slots
        self.block_tokens = target.block_tokens
        self.total_blocks = target.total_blocks
        self._target = target

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        """As ``Target.forward``."""
        return self._target.forward(batch)

    def close(self) -> None:
        """Close the target."""
        self._target.close()
