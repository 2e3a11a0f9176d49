"""Text to ids and back with a GGUF file's own tokenizer, for the target alone.

In a split run the edge does this with the draft's vocabulary, which is the same one.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from broker.errors import ConfigError, ModelError
from broker.gguf_header import read_header
from cloud_verifier.engine.llama_library import complaint, forget_complaints, llama_library
from cloud_verifier.engine.llama_vocabulary import read_vocabulary

MAX_TEXT_BYTES = 1 << 20
"""Longest prompt text; the tokenizer is quadratic on some input."""

_PIECE_BYTES = 128
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
        self._bos = int(lib.llama_vocab_bos(self._vocab))
        self._add_bos = bool(lib.llama_vocab_get_add_bos(self._vocab))
        self._strips_space = metadata.get("tokenizer.ggml.model") == _SENTENCEPIECE and bool(
            metadata.get("tokenizer.ggml.add_space_prefix", True)
        )
        template = metadata.get("tokenizer.chat_template")
        self._template = template if isinstance(template, str) else None
        named = {
            "bos_token": self._bos,
            "eos_token": int(lib.llama_vocab_eos(self._vocab)),
            "pad_token": int(lib.llama_vocab_pad(self._vocab)),
        }
        self._special = {
            name: vocabulary.texts[token]
            for name, token in named.items()
            if 0 <= token < vocabulary.vocab_size
        }

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_prompt(self, text: str) -> list[int]:
        """Plain text to continue, with the model's BOS where it has one. Raises ConfigError."""
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the prompt is no valid Unicode (at character {error.start}); give UTF-8 text"
            ) from None
        if len(data) > MAX_TEXT_BYTES:
            raise ConfigError(f"a prompt of {len(data)} bytes; give at most {MAX_TEXT_BYTES}")
        # A token takes at least a byte, but for the space that SentencePiece may put in front.
        room = len(data) + 8
        tokens = (self._lib.llama_token * room)()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), tokens, room, False, True)
        ids: list[int] = tokens[: max(count, 0)]
        # Template and tokenizer may both write it, and a model that reads two answers worse.
        first = 0
        while first < len(ids) and ids[first] == self._bos:
            first += 1
        if self._bos >= 0 and (self._add_bos or first):
            return [self._bos, *ids[first:]]
        return ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Messages by the chat template, ready for the answer. Raises ConfigError."""
        if self._template is None:
            raise ConfigError("the model has no chat template: use --prompt with --raw")
        try:
            text = _compile(self._template).render(
                messages=list(messages), tools=None, add_generation_prompt=True, **self._special
            )
        except ImportError:
            raise ConfigError(
                "chat templates need jinja2: pip install 'pipesd[cloud-llama]'"
            ) from None
        except Exception as error:  # noqa: BLE001 (a template is a program that may raise anything)
            cause = " ".join(str(error).split())[:200]
            raise ConfigError(f"the chat template rejects the messages: {cause}") from None
        return self.encode_prompt(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` without control tokens."""
        data = b"".join(self._piece(token) for token in tokens)
        if self._strips_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        size = _PIECE_BYTES
        special = token in self._ordinary
        while True:
            buffer = ctypes.create_string_buffer(size)
            found = self._lib.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if found >= 0:
                return buffer.raw[:found]
            size = -found


@lru_cache(maxsize=4)
def _compile(source: str) -> Any:
    # With what transformers gives a template. It comes with a model file, so it runs in a sandbox.
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **options
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
