"""Text to ids and back with a GGUF file's own tokenizer, for the target alone.

In a split run the edge does this with the draft's vocabulary, which is the same one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker.chat import ChatTemplate, with_one_bos
from broker.errors import ConfigError, ModelError
from broker.gguf_header import read_header
from broker.llama_library import (
    complaint,
    forget_complaints,
    llama_library,
    piece,
    tokenize,
)
from cloud_verifier.engine.llama_vocabulary import read_vocabulary

_SENTENCEPIECE = "llama"  # tokenizer.ggml.model


class LlamaText:
    """The tokenizer in the GGUF file ``path``, loaded without its weights. Raises ModelError."""

    def __init__(self, path: str | Path) -> None:
        metadata = read_header(Path(path)).metadata
        self._lib = lib = llama_library()
        params = lib.llama_model_default_params()
        params.vocab_only = True
        forget_complaints()
        model = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise ModelError(f"no usable tokenizer in {path}{complaint()}: check --target")
        self._model: Any = model  # for the life of the process; a vocabulary is small
        self._vocab: Any = lib.llama_model_get_vocab(model)
        vocabulary = read_vocabulary(lib, model)
        self._ordinary = vocabulary.ordinary
        bos = int(lib.llama_vocab_bos(self._vocab))
        self._bos = bos if bos >= 0 else None
        self._add_bos = bool(lib.llama_vocab_get_add_bos(self._vocab))
        self._strips_space = metadata.get("tokenizer.ggml.model") == _SENTENCEPIECE and bool(
            metadata.get("tokenizer.ggml.add_space_prefix", True)
        )
        template = metadata.get("tokenizer.chat_template")
        named = {
            "bos_token": bos,
            "eos_token": int(lib.llama_vocab_eos(self._vocab)),
            "pad_token": int(lib.llama_vocab_pad(self._vocab)),
        }
        special = {
            name: vocabulary.texts[token]
            for name, token in named.items()
            if 0 <= token < vocabulary.vocab_size
        }
        self._template = ChatTemplate(template, special) if isinstance(template, str) else None

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_prompt(self, text: str) -> list[int]:
        """Plain text to continue, with the model's BOS where it has one. Raises ConfigError."""
        return with_one_bos(tokenize(self._lib, self._vocab, text), self._bos, self._add_bos)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Messages by the chat template, ready for the answer. Raises ConfigError."""
        if self._template is None:
            raise ConfigError("the model has no chat template: use --prompt with --raw")
        return self.encode_prompt(self._template.render(messages))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` without control tokens."""
        lib, vocab, ordinary = self._lib, self._vocab, self._ordinary
        data = b"".join(piece(lib, vocab, token, special=token in ordinary) for token in tokens)
        if self._strips_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")
