"""The draft port: a small model that proposes tokens, one sequence at a time.

Held by ``tests/contract/test_draft.py`` for every implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from broker.sampling import Sampling


class Proposal(NamedTuple):
    """A drafted token and the draft model's plain probability of it (temperature 1, no filters)."""

    token: int
    confidence: float


class Draft(Protocol):
    """One sequence in a draft model's cache. Not thread-safe; used by one driver thread.

    The cache holds the tokens given to ``eval`` since the start, less what ``rollback`` forgot.
    """

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        ...

    def eval(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` (at least one) to the cache.

        Raises ModelError when the context is full or the model fails; the cache is then as before.
        """
        ...

    def rollback(self, length: int) -> None:
        """Keep the first ``length`` tokens (0 <= length <= self.length) and forget the rest.

        ``propose`` is legal again only after the next ``eval``.
        Raises LocalProtocolError for a length outside that range.
        """
        ...

    def propose(self, position: int, sampling: Sampling) -> Proposal:
        """The draft's choice after the last token of the cache; changes nothing.

        ``position`` counts generated tokens from 0 and selects the shared noise.
        Raises LocalProtocolError when there are no logits (nothing evaluated since a rollback).
        """
        ...

    def close(self) -> None:
        """Free the sequence; idempotent."""
        ...


class DraftModel(Protocol):
    """A loaded draft model; ``open`` gives independent sequences (bounded by ``max_sequences``)."""

    name: str
    vocab_size: int
    context: int
    vocab_hash: str
    eos_ids: frozenset[int]

    def open(self) -> Draft:
        """A new empty sequence. Raises ModelError when ``max_sequences`` are open already."""
        ...

    def close(self) -> None: ...


class TextModel(Protocol):
    """What turns text into token ids and back, with the draft model's vocabulary."""

    def encode_prompt(self, text: str) -> list[int]:
        """Plain text to continue; with one BOS where the model's vocabulary asks for it."""
        ...

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Messages by the model's chat template with exactly one BOS at most.

        Raises ConfigError when the model has no chat template or the template rejects them.
        """
        ...

    @property
    def has_chat_template(self) -> bool: ...

    def piece(self, token: int) -> bytes:
        """UTF-8 bytes of one token; control tokens (end of text) give b""."""
        ...
