"""llama.cpp's batch over arrays of its own."""

from __future__ import annotations

import ctypes
from typing import Any

ROWS = 128
"""Rows of one pass at most; more do not get faster on a processor."""


class Rows:
    """Up to ``ROWS`` rows of one sequence each, in ``batch`` as llama_decode takes them."""

    def __init__(self, lib: Any) -> None:
        self.count = 0
        self._tokens = (ctypes.c_int32 * ROWS)()
        self._positions = (ctypes.c_int32 * ROWS)()
        self._slots = (ctypes.c_int32 * ROWS)()
        self._asked = (ctypes.c_int8 * ROWS)()
        self._ones = (ctypes.c_int32 * ROWS)(*[1] * ROWS)
        each = ctypes.POINTER(ctypes.c_int32)
        self._lists = (each * ROWS)()
        for row in range(ROWS):
            item = ctypes.c_int32.from_buffer(self._slots, 4 * row)
            self._lists[row] = ctypes.pointer(item)
        self.batch = lib.llama_batch(
            n_tokens=0,
            token=self._tokens,
            embd=None,
            pos=self._positions,
            n_seq_id=self._ones,
            seq_id=self._lists,
            logits=self._asked,
        )

    def clear(self) -> None:
        self.count = self.batch.n_tokens = 0

    def add(self, slot: int, position: int, token: int, *, ask: bool) -> None:
        row = self.count
        self._slots[row] = slot
        self._positions[row] = position
        self._tokens[row] = token
        self._asked[row] = ask
        self.count = self.batch.n_tokens = row + 1

    def ask_more(self, count: int) -> None:
        """Ask for the logits of ``count`` more rows, whichever; there are enough."""
        for row in range(self.count):
            if count <= 0:
                return
            if not self._asked[row]:
                self._asked[row] = 1
                count -= 1
