"""llama-cpp-python's C interface for targets: the only module here that imports it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from functools import lru_cache
from typing import Any

from broker.errors import ConfigError

_ERROR = 4  # GGML_LOG_LEVEL_ERROR

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
        import llama_cpp.llama_cpp as lib
    except ImportError:
        raise ConfigError(
            "llama-cpp-python is not installed: pip install 'pipesd[cloud-llama]'"
        ) from None
    except (OSError, RuntimeError) as error:  # a shared library that does not load
        raise ConfigError(
            f"llama-cpp-python does not load ({one_line(str(error))}); install it again"
        ) from error
    lib.llama_log_set(_callback(lib), None)
    lib.llama_backend_init()
    return lib


@lru_cache(maxsize=1)
def _callback(lib: Any) -> Any:
    # Cached: llama.cpp keeps the pointer for the rest of the process.
    def on_line(level: int, text: bytes, _: object) -> None:
        line = one_line(text.decode("utf-8", "replace"))
        if level == _ERROR and line:
            _errors.append(line)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("llama.cpp: %s", line)

    return lib.llama_log_callback(on_line)


def one_line(text: str) -> str:
    return " ".join(text.split())


def forget_complaints() -> None:
    _errors.clear()


def complaint() -> str:
    """What llama.cpp first complained of since ``forget_complaints``, in parentheses, or ""."""
    return f" ({_errors[0]})" if _errors else ""
