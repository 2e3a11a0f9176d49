"""Drafting with llama.cpp, through the low-level calls of llama-cpp-python.

Each sequence has a llama.cpp context of its own over the shared weights, so sequences never wait
for each other. Only the last token of an ``eval`` gets logits; they are read where llama.cpp wrote
them, without a copy. ``rollback`` drops cache cells (``llama_memory_seq_rm``).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from broker.errors import ConfigError, LocalProtocolError, ModelError
from broker.gguf_header import read_header
from broker.llama_library import complaint, forget_complaints, llama_library
from broker.noise import exponentials, hash_ids, noise_key
from broker.sampling import Sampler, Sampling
from edge_agent.cpus import default_threads
from edge_agent.draft import Proposal
from edge_agent.llama_text import LlamaText

DEFAULT_CONTEXT = 4096
"""Tokens of a sequence unless told otherwise; the cache is allocated whole when one is opened."""

_BATCH = 512  # tokens per llama_decode call; more do not get faster on a CPU


class LlamaDraftModel:
    """A GGUF model for drafting. Implements ``DraftModel``; ``text`` is its ``TextModel``.

    ``context``: tokens per sequence, at most what the model was trained for; None:
    ``DEFAULT_CONTEXT`` of them. ``threads``: of one evaluation; None: see ``cpus``.
    ``max_sequences``: open at once, each with its own cache.

    ``open``, ``close`` and ``text`` may be used from any thread, a sequence from one at a time.
    Raises ModelError when the file is missing, truncated, no GGUF, not usable by llama.cpp, or a
    kind of model that cannot roll back (recurrent state); ConfigError for values out of range.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        context: int | None = None,
        threads: int | None = None,
        max_sequences: int = 4,
    ) -> None:
        for name, value in (("context", context), ("threads", threads), ("", max_sequences)):
            if value is not None and value < 1:
                raise ConfigError(f"draft {name or 'sequences'} {value}: give at least 1")
        path = Path(path)
        read_header(path)  # llama.cpp's own answer to a broken file can be an abort
        self.name = path.stem
        self._lib = lib = llama_library()
        self._threads = threads or default_threads()
        self._max_sequences = max_sequences
        self._lock = threading.Lock()
        self._drafts: set[LlamaDraft] = set()
        self._opening = 0
        self._spare: int | None = None
        forget_complaints()
        self._model = lib.llama_model_load_from_file(
            os.fsencode(path), lib.llama_model_default_params()
        )
        if not self._model:
            raise ModelError(
                f"llama.cpp cannot load {path}{complaint()}; "
                "give another model, or a newer llama-cpp-python"
            )
        try:
            self._describe(context)
            self._spare = self._new_context()
            self._warm_up(self._spare)
        except BaseException:
            self.close()
            raise

    def _describe(self, context: int | None) -> None:
        lib = self._lib
        trained = int(lib.llama_model_n_ctx_train(self._model)) or DEFAULT_CONTEXT
        self.context = min(context or DEFAULT_CONTEXT, trained)
        self.text = LlamaText(lib, self._model)
        self.vocab_size = self.text.vocab_size
        self.vocab_hash = self.text.vocab_hash
        self.eos_ids = self.text.eos_ids

    def _new_context(self) -> int:
        lib = self._lib
        params = lib.llama_context_default_params()
        params.n_ctx = self.context
        params.n_batch = params.n_ubatch = min(_BATCH, self.context)
        params.n_seq_max = params.n_outputs_max = 1
        params.n_threads = params.n_threads_batch = self._threads
        params.no_perf = True
        # With the small sliding-window cache, tokens that left the window are gone for good, and a
        # rollback that needs them again would be impossible.
        params.swa_full = True
        forget_complaints()
        pointer = lib.llama_init_from_model(self._model, params)
        if not pointer:
            raise ModelError(
                f"no memory for a draft context of {self.context} tokens{complaint()}; "
                "lower the draft's context or close a session"
            )
        return int(pointer)

    def _warm_up(self, pointer: int) -> None:
        """Page the weights in before anybody waits for them, and try what drafting needs."""
        lib = self._lib
        memory = lib.llama_get_memory(pointer)
        tokens = (lib.llama_token * 2)()
        forget_complaints()
        status = lib.llama_decode(pointer, lib.llama_batch_get_one(tokens, 2))
        if status != 0 or not lib.llama_get_logits_ith(pointer, -1):
            raise ModelError(
                f"{self.name} does not give logits{complaint()}; "
                "give a text-generating model as the draft"
            )
        if not memory or not lib.llama_memory_seq_rm(memory, 0, 1, -1):
            raise ModelError(
                f"{self.name} cannot roll back (recurrent state); give a plain transformer model"
            )
        lib.llama_memory_clear(memory, False)

    def open(self) -> LlamaDraft:
        """A new empty sequence. Raises ModelError when ``max_sequences`` are open or memory lacks.

        Raises LocalProtocolError after ``close``.
        """
        with self._lock:
            if not self._model:
                raise LocalProtocolError("the draft model is closed")
            if len(self._drafts) + self._opening >= self._max_sequences:
                raise ModelError(
                    f"{self._max_sequences} draft sequences are open already; "
                    "wait for one to end or raise the limit"
                )
            pointer, self._spare = self._spare, None
            self._opening += 1
        draft: LlamaDraft | None = None
        try:
            draft = LlamaDraft(self, self._new_context() if pointer is None else pointer)
        finally:
            with self._lock:
                self._opening -= 1
                if draft is not None:
                    self._drafts.add(draft)
        return draft

    def close(self) -> None:
        """Close all sequences and free the weights; idempotent. Not while a call is running."""
        with self._lock:
            drafts, self._drafts = self._drafts, set()
            spare, self._spare = self._spare, None
            model, self._model = self._model, None
        for draft in drafts:
            draft.close()
        if spare is not None:
            self._lib.llama_free(spare)
        if model:
            if hasattr(self, "text"):
                self.text.close()
            self._lib.llama_model_free(model)

    def _release(self, draft: LlamaDraft, pointer: int) -> None:
        # One context is kept for the next session: allocating the cache costs tens of milliseconds
        # of its time to first token.
        with self._lock:
            self._drafts.discard(draft)
            keep = bool(self._model) and self._spare is None
            if keep:
                self._lib.llama_memory_clear(self._lib.llama_get_memory(pointer), False)
                self._spare = pointer
        if not keep:
            self._lib.llama_free(pointer)


class LlamaDraft:
    """One sequence; see ``Draft``. Made by ``LlamaDraftModel.open``.

    When llama.cpp fails in ``eval``, the cache is as before but ``propose`` needs another ``eval``.
    """

    def __init__(self, model: LlamaDraftModel, pointer: int) -> None:
        lib = model._lib
        self._model = model
        self._context: int | None = pointer
        self._memory = lib.llama_get_memory(pointer)
        self._limit = model.context
        self._rows = model.text.rows
        self._length = 0
        self._tokens = (lib.llama_token * _BATCH)()
        self._batch = lib.llama_batch_get_one(self._tokens, 1)
        self._decode = lib.llama_decode
        # As a plain address: a pointer object per token would only be taken apart again.
        self._find_logits = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)(
            ctypes.cast(lib.llama_get_logits_ith, ctypes.c_void_p).value or 0
        )
        self._sampler = Sampler(model.vocab_size)
        # A view of llama.cpp's own buffer, float32[rows], valid until the next decode.
        self._logits: npt.NDArray[np.float32] | None = None
        self._address = 0
        self._ready = False

    @property
    def length(self) -> int:
        return self._length

    def eval(self, tokens: Sequence[int]) -> None:
        """See ``Draft.eval``. Raises LocalProtocolError for no tokens or ids out of range."""
        context = self._opened()
        count = len(tokens)
        if count == 0:
            raise LocalProtocolError("nothing to evaluate")
        if min(tokens) < 0 or max(tokens) >= self._rows:
            raise LocalProtocolError(f"token ids outside 0 to {self._rows - 1}")
        if self._length + count > self._limit:
            raise ModelError(
                f"the draft's context of {self._limit} tokens cannot take {count} more after "
                f"{self._length}; raise the draft's context or shorten the prompt"
            )
        self._ready = False
        try:
            for start in range(0, count, _BATCH):
                chunk = tokens[start : start + _BATCH]
                self._tokens[: len(chunk)] = chunk
                self._batch.n_tokens = len(chunk)
                status = self._decode(context, self._batch)
                if status != 0:
                    raise ModelError(
                        f"llama.cpp failed to evaluate {count} tokens (status {status}); "
                        "the model may not fit this device"
                    )
            self._map_logits(context)
        except BaseException:
            self._model._lib.llama_memory_seq_rm(self._memory, 0, self._length, -1)
            raise
        self._length += count
        self._ready = True

    def _map_logits(self, context: int) -> None:
        address = self._find_logits(context, -1)
        if not address:
            raise ModelError("llama.cpp gave no logits; give a text-generating model as the draft")
        if address != self._address:
            row = (ctypes.c_float * self._rows).from_address(address)
            self._logits = np.ctypeslib.as_array(row)
            self._logits.setflags(write=False)
            self._address = address

    def rollback(self, length: int) -> None:
        """See ``Draft.rollback``."""
        self._opened()
        if not 0 <= length <= self._length:
            raise LocalProtocolError(f"rollback to {length} of {self._length} tokens")
        self._ready = False
        if not self._model._lib.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise ModelError("llama.cpp cannot roll back; give a plain transformer model")
        self._length = length

    def propose(self, position: int, sampling: Sampling) -> Proposal:
        """See ``Draft.propose``."""
        if not self._ready or self._logits is None:
            raise LocalProtocolError("no logits: evaluate a token first")
        return Proposal(*self._sampler.choose_with_confidence(self._logits, position, sampling))

    def ranked(self, position: int, sampling: Sampling, count: int) -> list[int]:
        """The ``count`` best choices, ``propose``'s own first; fewer where filters leave fewer.

        Looks at the whole vocabulary: for recording, not for drafting. Raises as ``propose``.
        """
        if not self._ready or self._logits is None:
            raise LocalProtocolError("no logits: evaluate a token first")
        if sampling.greedy:
            row = self._logits[: self._sampler.vocab_size]
            return [int(token) for token in np.argsort(-row, kind="stable")[:count]]
        ids = self._sampler.survivors(self._logits, sampling)
        noise = exponentials(hash_ids(ids.astype(np.uint32), noise_key(sampling.seed, position)))
        # Least exponential / probability first, in logarithms: nothing overflows there.
        logits = self._logits[ids].astype(np.float64)
        scores = np.log(noise) - logits / sampling.temperature
        return [int(token) for token in ids[np.argsort(scores, kind="stable")[:count]]]

    def close(self) -> None:
        context, self._context = self._context, None
        self._ready = False
        self._logits = None
        if context is not None:
            self._model._release(self, context)

    def _opened(self) -> int:
        if self._context is None:
            raise LocalProtocolError("the draft sequence is closed")
        return self._context
