"""The demo pairs' drafts for tests, loaded once per process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from edge_agent.llama_draft import LlamaDraftModel
from edge_agent.prepare import prepare_draft

CONTEXT = 768


def draft_file(pair: str) -> Path:
    """The GGUF of a pair's draft, prepared on the first call."""
    return prepare_draft(pair)


@lru_cache(maxsize=2)
def draft_model(pair: str) -> LlamaDraftModel:
    """A shared model with ``CONTEXT`` tokens; tests close their sequences, never the model."""
    return LlamaDraftModel(draft_file(pair), context=CONTEXT, threads=1, max_sequences=4)
