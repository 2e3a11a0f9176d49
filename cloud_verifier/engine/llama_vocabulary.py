"""What a GGUF file says of its tokens: how many, their hash, and which of them are text."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import Any

from broker.vocabulary import vocab_hash

_USER_DEFINED = 1 << 4  # LLAMA_TOKEN_ATTR_USER_DEFINED


@dataclass(frozen=True, slots=True)
class LlamaVocabulary:
    """``rows``: entries, padding included, which is also the length of the logits. ``texts``: of
    the ``vocab_size`` entries that mean something. ``ordinary``: tokens of ordinary text that
    llama.cpp takes for the end of one."""

    rows: int
    texts: tuple[str, ...]
    vocab_hash: str
    ordinary: frozenset[int]

    @property
    def vocab_size(self) -> int:
        return len(self.texts)


def read_vocabulary(lib: Any, model: Any) -> LlamaVocabulary:
    """The vocabulary of a loaded model. Raises ModelError for a model without tokens."""
    vocab = lib.llama_model_get_vocab(model)
    rows = int(lib.llama_vocab_n_tokens(vocab))
    texts = [
        text.decode("utf-8", "replace")
        for text in map(lib.llama_vocab_get_text, repeat(vocab), range(rows))
    ]
    hashed = vocab_hash(texts)
    # Converters fill an embedding that has more rows than the tokenizer has tokens like this.
    while texts and texts[-1] in ("", f"[PAD{len(texts) - 1}]"):
        texts.pop()
    # llama.cpp takes any token whose text looks like an end for one. Where the file says that it
    # is ordinary text (gemma: the HTML tag </s>), the file is right.
    ordinary = frozenset(
        token
        for token in range(len(texts))
        if lib.llama_vocab_is_eog(vocab, token)
        and lib.llama_vocab_get_attr(vocab, token) & _USER_DEFINED
    )
    return LlamaVocabulary(
        rows=rows,
        texts=tuple(texts),
        vocab_hash=hashed,
        ordinary=ordinary,
    )
