"""One plain forward of transformers with its own cache and attention, to compare an engine with."""

from __future__ import annotations

import inspect
import random
import time
from typing import Any

#: Tokens before those that are timed, and the most of those.
PAST, MOST = 100, 512


class PlainModel:
    """``pair``'s target as transformers runs it. Raises ModelError when it cannot be prepared."""

    def __init__(self, pair: str, dtype: str) -> None:
        import transformers

        from cloud_verifier.engine.prepare import resolve_target
        from cloud_verifier.engine.torch_target import DTYPES

        library: Any = transformers
        directory = resolve_target(None, pair)
        self._model = library.AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype])
        self._model.eval()
        known = inspect.signature(type(self._model).forward).parameters
        self._name = "cache" if "cache" in known else "past_key_values"
        self._cache = library.DynamicCache(config=self._model.config)
        draw = random.Random(1)  # noqa: S311 (any text will do)
        top = self._model.config.vocab_size
        self._text = [draw.randrange(top) for _ in range(PAST + MOST)]
        self._run(0, PAST)

    def seconds(self, tokens: int) -> float:
        """Of a forward over so many tokens of one sequence, with the best token after each."""
        if (extra := self._cache.get_seq_length() - PAST) > 0:
            self._cache.crop(-extra)
        begin = time.perf_counter()
        self._run(PAST, min(tokens, MOST))
        return time.perf_counter() - begin

    def _run(self, start: int, tokens: int) -> None:
        import torch

        ids = torch.tensor([self._text[start : start + tokens]])
        with torch.inference_mode():
            found = self._model(input_ids=ids, use_cache=True, **{self._name: self._cache})
            found.logits[0].argmax(-1).tolist()
