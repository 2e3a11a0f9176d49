"""The vocabulary of a GGUF file: text to token ids and back, with llama.cpp's tokenizer.

Made by ``llama_draft``, which hands in llama-cpp-python's C interface.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import repeat
from typing import Any

from broker.chat import ChatTemplate, with_one_bos
from broker.errors import ConfigError, LocalProtocolError
from broker.llama_library import piece, tokenize
from broker.vocabulary import vocab_hash

_METADATA_BYTES = 128
_USER_DEFINED = 1 << 4  # LLAMA_TOKEN_ATTR_USER_DEFINED
_SENTENCEPIECE = 1  # LLAMA_VOCAB_TYPE_SPM


class LlamaText:
    """Implements ``TextModel``; may be used from any thread.

    ``rows``: entries of the vocabulary, padding included, which is also the length of the logits.
    ``vocab_size``: those that may be proposed. ``eos_ids``: tokens that end the text.
    ``adds_space_prefix``: the first word of a text carries a space that is not its own
    (SentencePiece); see ``Detokenizer``.
    """

    def __init__(self, lib: Any, model: int) -> None:
        self._lib = lib
        vocab = lib.llama_model_get_vocab(model)
        self._vocab: int | None = vocab
        self.rows = int(lib.llama_vocab_n_tokens(vocab))
        texts = [
            text.decode("utf-8", "replace")
            for text in map(lib.llama_vocab_get_text, repeat(vocab), range(self.rows))
        ]
        self.vocab_size = _count_tokens(texts)
        self.vocab_hash = vocab_hash(texts)
        self._bos = _token(lib.llama_vocab_bos(vocab))
        self._add_bos = bool(lib.llama_vocab_get_add_bos(vocab))
        eos = _token(lib.llama_vocab_eos(vocab))
        eot = _token(lib.llama_vocab_eot(vocab))
        ends = {token for token in (eos, eot) if token is not None}
        suspected = [
            token
            for token, ends_text in enumerate(
                map(lib.llama_vocab_is_eog, repeat(vocab), range(self.rows))
            )
            if ends_text and token not in ends
        ]
        # llama.cpp takes any token whose text looks like an end for one. Where the file says that
        # it is ordinary text (gemma: the HTML tag </s>), the file is right.
        self._ordinary = frozenset(
            token for token in suspected if lib.llama_vocab_get_attr(vocab, token) & _USER_DEFINED
        )
        self.eos_ids = frozenset(ends | set(suspected)) - self._ordinary
        self.adds_space_prefix = (
            lib.llama_vocab_type(vocab) == _SENTENCEPIECE
            and _metadata(lib, model, b"tokenizer.ggml.add_space_prefix") != b"false"
        )
        named = {
            "bos_token": self._bos,
            "eos_token": eos,
            "pad_token": _token(lib.llama_vocab_pad(vocab)),
        }
        special = {name: texts[token] for name, token in named.items() if token is not None}
        template = lib.llama_model_chat_template(model, None)
        self._template = (
            ChatTemplate(template.decode("utf-8", "replace"), special) if template else None
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_prompt(self, text: str) -> list[int]:
        """See ``TextModel``. Raises ConfigError for text that is too long or no valid Unicode.

        Special tokens written out in ``text`` become those tokens, as in transformers.
        """
        return with_one_bos(tokenize(self._lib, self._opened(), text), self._bos, self._add_bos)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """See ``TextModel``. Raises ConfigError, also as ``encode_prompt`` does."""
        if self._template is None:
            raise ConfigError("the model has no chat template; give plain text with --raw")
        return self.encode_prompt(self._template.render(messages))

    def piece(self, token: int) -> bytes:
        """See ``TextModel``. Raises LocalProtocolError for an id outside the vocabulary."""
        if not 0 <= token < self.rows:
            raise LocalProtocolError(f"token {token} is outside the vocabulary of {self.rows}")
        return piece(self._lib, self._opened(), token, special=token in self._ordinary)

    def close(self) -> None:
        """The model is going away: no more calls into llama.cpp. Idempotent."""
        self._vocab = None

    def _opened(self) -> int:
        if self._vocab is None:
            raise LocalProtocolError("the draft model is closed")
        return self._vocab


def _metadata(lib: Any, model: int, key: bytes) -> bytes | None:
    # A short value of the GGUF's metadata, None where it is absent.
    buffer = ctypes.create_string_buffer(_METADATA_BYTES)
    length = lib.llama_model_meta_val_str(model, key, buffer, len(buffer))
    return buffer.value if length >= 0 else None


def _token(value: int) -> int | None:
    # LLAMA_TOKEN_NULL is -1.
    return None if value < 0 else value


def _count_tokens(texts: Sequence[str]) -> int:
    # Converters fill an embedding with more rows than the tokenizer has tokens like this; such an
    # id means nothing to the target.
    count = len(texts)
    while count and texts[count - 1] in ("", f"[PAD{count - 1}]"):
        count -= 1
    return count
