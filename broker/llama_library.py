"""llama-cpp-python's C interface, for drafts and targets alike: the only module that imports it.

What both sides do with it beside running a model is here too: its complaints in our messages, text
to ids and back with a GGUF file's tokenizer, and other precisions of a model file.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from broker.errors import ConfigError, ModelError

MAX_TEXT_BYTES = 1 << 20
"""Longest prompt text; beyond any context, and the tokenizer is quadratic on some input."""

_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_PIECE_BYTES = 128
_QUANTISE_THREADS = 2

_log = logging.getLogger(__name__)
_loading = threading.Lock()
_errors: deque[str] = deque(maxlen=4)  # llama.cpp's last complaints, for our own messages


def llama_library() -> Any:
    """The interface, quiet and initialised once; from any thread.

    Raises ConfigError when llama-cpp-python is not installed or does not load.
    """
    with _loading:
        return _load()


@lru_cache(maxsize=1)
def _load() -> Any:
    try:
        with _patient_openmp():
            import llama_cpp.llama_cpp as lib
    except ImportError:
        raise ConfigError(
            "llama-cpp-python is not installed: pip install 'pipesd[edge]' on a device, "
            "pip install 'pipesd[cloud-llama]' for a verifier"
        ) from None
    except (OSError, RuntimeError) as error:  # a shared library that does not load
        raise ConfigError(
            f"llama-cpp-python does not load ({_one_line(str(error))}); install it again"
        ) from error
    lib.llama_log_set(_callback(lib), None)
    lib.llama_backend_init()
    return lib


@contextmanager
def _patient_openmp() -> Iterator[None]:
    """While the OpenMP runtime is loaded: let its idle threads sleep instead of spinning.

    The runtime reads this once. Spinning is a little faster on a device with nothing else to do,
    and several times slower where other processes want the cores: drafting with two threads beside
    busy ones took 24 to 36 ms a token so, and 47 to 213 ms by default.
    """
    name = "OMP_WAIT_POLICY"
    chosen = name in os.environ or "GOMP_SPINCOUNT" in os.environ
    if not chosen:
        os.environ[name] = "passive"
    try:
        yield
    finally:
        if not chosen:
            del os.environ[name]


@lru_cache(maxsize=1)
def _callback(lib: Any) -> Any:
    # Cached: llama.cpp keeps the pointer for the rest of the process.
    def on_line(level: int, text: bytes, _: object) -> None:
        line = _one_line(text.decode("utf-8", "replace"))
        if level == _ERROR and line:
            _errors.append(line)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("llama.cpp: %s", line)

    return lib.llama_log_callback(on_line)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def forget_complaints() -> None:
    _errors.clear()


def complaint() -> str:
    """What llama.cpp first complained of since ``forget_complaints``, in parentheses, or ""."""
    return f" ({_errors[0]})" if _errors else ""


# -- a file's tokenizer -------------------------------------------------------------------------


def tokenize(lib: Any, vocab: int, text: str) -> list[int]:
    """The ids of ``text``; special tokens written out in it become those tokens.

    Raises ConfigError for text that is too long or no valid Unicode.
    """
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
    tokens = (lib.llama_token * room)()
    count = lib.llama_tokenize(vocab, data, len(data), tokens, room, False, True)
    ids: list[int] = tokens[: max(count, 0)]
    return ids


def piece(lib: Any, vocab: int, token: int, *, special: bool) -> bytes:
    """The bytes of one token; of a control token only when ``special``."""
    size = _PIECE_BYTES
    while True:
        buffer = ctypes.create_string_buffer(size)
        found = lib.llama_token_to_piece(vocab, token, buffer, size, 0, special)
        if found >= 0:
            return buffer.raw[:found]
        size = -found


# -- model files --------------------------------------------------------------------------------


def convert(source: str, goal: str, ftype: int) -> None:
    """Write the GGUF file ``source`` as ``goal``, its weights as llama.cpp's ``ftype``.

    For a child process: llama.cpp aborts on some of what it does not like. Raises ModelError.
    """
    lib = llama_library()
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype = ftype
    parameters.allow_requantize = True
    parameters.nthread = min(_QUANTISE_THREADS, os.cpu_count() or 1)
    status = lib.llama_model_quantize(
        os.fsencode(source), os.fsencode(goal), ctypes.byref(parameters)
    )
    if status != 0:
        raise ModelError(f"llama.cpp refused to convert it (status {status})")
