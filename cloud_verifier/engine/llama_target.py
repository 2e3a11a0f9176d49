"""The target in llama.cpp, for clouds without a GPU: any GGUF file, many sessions in one pass.

One context of llama.cpp holds all slots. Each slot is a stream of its cache: a session attends to
its own cells only, and its token at position n lies in cell n, whatever the others do. With flash
attention off, and with the least numbers of rows kept below, llama.cpp's kernels on a processor
then sum a row in the same order in any company: on float32 and bfloat16 files not a bit changes
(tests try it), where one cache for all sessions changed the last digits with each neighbour.
``llama_passes`` tells what that costs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.errors import ConfigError, LocalProtocolError, ModelError
from broker.gguf_header import GgufHeader, read_header
from broker.llama_library import complaint, forget_complaints, llama_library
from broker.sampling import Sampler, Sampling
from cloud_verifier.engine.batch import all_or_nothing, check_batch
from cloud_verifier.engine.kv_budget import available_memory
from cloud_verifier.engine.llama_cells import SPARE, slot_cells, slots_for
from cloud_verifier.engine.llama_passes import Window, plan
from cloud_verifier.engine.llama_rows import ROWS, Rows
from cloud_verifier.engine.llama_vocabulary import read_vocabulary
from cloud_verifier.engine.prepare import end_ids
from cloud_verifier.engine.target import Work
from cloud_verifier.engine.trees import branches, choice_positions, lineage, offsets, trunk

DEFAULT_CONTEXT = 2048
"""Tokens per slot unless told otherwise; llama.cpp allocates all slots' cells at once."""

MAX_SLOTS = 256  # sequences that llama.cpp can tell apart

# GGML_TYPE_F32 and GGML_TYPE_F16, and bytes of a number.
_KV_TYPES = {"float32": (0, 4), "bfloat16": (1, 2)}
_FLOAT_FILES = (0, 1, 32)  # general.file_type: all float32, float16, bfloat16
# Weights of blocks that llama.cpp has laid out for itself are multiplied with several rows at a
# time, and what is left over in another way: rows then go through in multiples of this.
_BLOCK_ROWS = 8
_PROBES = (*(1,) * 12, 3, 4, 5)  # tokens of works that are tried alone
_LEAST_CHOICES = 2  # the output layer too sums a lone row in another order
_FILLER = 0
_GREEDY = Sampling()


# Takes the number of a work in its batch, which of its choices, and the logits for it.
_Take = Callable[[int, int, npt.NDArray[np.float32]], None]


@dataclass(slots=True)
class _Leg:
    """Tokens of one branch to run from sequence position ``first`` on; ``asked``: which choice of
    the work each of them is followed by, -1: none."""

    first: int
    tokens: list[int]
    asked: list[int]


@dataclass(slots=True)
class _Course:
    """Work ``number`` of a batch on its way through the passes. ``done``: tokens of the first of
    ``legs`` that have run."""

    work: Work
    number: int
    legs: list[_Leg]
    done: int = 0


@dataclass(frozen=True, slots=True)
class _Tree:
    """What a slot's last work drafted. ``cached``: the branch that is in the cache."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    cached: tuple[int, ...]


class LlamaTarget:
    """``Target`` over a GGUF file, computed as precisely as its weights are stored.

    ``dtype``: of the K/V cells, float32 or (bfloat16) 16 bits. ``context``: tokens per slot, at
    most what the model was trained for; None: ``DEFAULT_CONTEXT`` of them. The cells of all slots,
    ``max_slots`` times ``context`` and ``SPARE`` more (rounded up to 256), are allocated here, and
    fewer slots where those take more than ``kv_budget`` bytes; nothing is shared between slots.
    ``threads``: of a forward; None: all cores.

    Raises ModelError for a file that is missing, damaged, not supported or without memory to cut
    back (recurrent state); ConfigError for values out of range, a budget too small
    for one slot, or a missing llama-cpp-python.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "float32",
        context: int | None = None,
        max_slots: int = 16,
        threads: int | None = None,
        kv_budget: int | None = None,
    ) -> None:
        if dtype not in _KV_TYPES:
            raise ConfigError(f"dtype {dtype} is unknown: choose one of {', '.join(_KV_TYPES)}")
        if not 1 <= max_slots <= MAX_SLOTS:
            raise ConfigError(f"llama.cpp serves 1 to {MAX_SLOTS} slots, not {max_slots}")
        if threads is not None and threads < 1:
            raise ConfigError(f"threads {threads} computes nothing: at least 1")
        if context is not None and context < 2:
            raise ConfigError(f"a context of {context} tokens holds no text: at least 2")
        path = Path(path)
        header = read_header(path)  # llama.cpp's own answer to a broken file can be an abort
        self.name = path.stem
        self._context: Any = None
        self._lib = lib = llama_library()
        self._multiple = _BLOCK_ROWS
        forget_complaints()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model: Any = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise ModelError(
                f"llama.cpp cannot load {path}{complaint()}; "
                "give another model, or a newer llama-cpp-python"
            )
        try:
            kv_type, item = _KV_TYPES[dtype]
            trained = int(lib.llama_model_n_ctx_train(self._model)) or DEFAULT_CONTEXT
            self.context = min(context or DEFAULT_CONTEXT, trained)
            self.max_slots = slots_for(
                kv_budget,
                header,
                item=item,
                context=self.context,
                max_slots=max_slots,
                available=available_memory(),
            )
            self._describe(header)
            self._open_context(kv_type, threads or os.cpu_count() or 1)
            self._try_out()
            self._multiple = self._find_multiple(header)
        except BaseException:
            self.close()
            raise

    def _describe(self, header: GgufHeader) -> None:
        vocabulary = read_vocabulary(self._lib, self._model)
        # llama.cpp divides its cells among the sequences itself: a slot is one block.
        self.block_tokens, self.total_blocks = self.context, self.max_slots
        self.vocab_size = vocabulary.vocab_size
        self.vocab_hash = vocabulary.vocab_hash
        self.eos_ids = frozenset(end_ids(header))
        self._sampler = Sampler(self.vocab_size)
        self._width = vocabulary.rows
        self._lengths = [0] * self.max_slots  # valid tokens, those of a tree left out
        self._ends = [0] * self.max_slots  # cells in use
        self._trees: dict[int, _Tree] = {}

    def _open_context(self, kv_type: int, threads: int) -> None:
        lib = self._lib
        params = lib.llama_context_default_params()
        params.n_ctx = self.max_slots * slot_cells(self.context)
        params.n_seq_max = self.max_slots
        params.n_batch = params.n_ubatch = ROWS
        # llama.cpp makes room for a row of each sequence and ends the process where it may not.
        params.n_outputs_max = params.n_outputs_max_per_seq = max(ROWS, self.max_slots)
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = kv_type
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.kv_unified = False
        # With the small sliding-window cache, tokens that left the window are gone for good, and
        # a rollback that needs them again would be impossible.
        params.swa_full = True
        params.no_perf = True
        forget_complaints()
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise ModelError(
                f"no memory for {self.max_slots} slots of {self.context} tokens{complaint()}; "
                "lower --slots or --context"
            )
        self._memory = lib.llama_get_memory(self._context)
        self._rows = Rows(lib)

    def _try_out(self) -> None:
        """Page the weights in before anybody waits for them, and try what verifying needs."""
        lib = self._lib
        if lib.llama_model_has_encoder(self._model):
            raise ModelError(f"{self.name} has an encoder; give a plain text-generating model")
        if not self._memory:
            raise ModelError(f"{self.name} has no memory of past tokens; give a generating model")
        rows = self._rows
        rows.clear()
        for position in range(4):
            rows.add(0, position, _FILLER, ask=position == 3)
        status = lib.llama_decode(self._context, rows.batch)
        if status != 0 or not lib.llama_get_logits_ith(self._context, 3):
            raise ModelError(
                f"{self.name} does not give logits{complaint()}; give a text-generating model"
            )
        if not lib.llama_memory_seq_rm(self._memory, 0, 2, -1):
            raise ModelError(
                f"{self.name} cannot forget single tokens (recurrent state); "
                "give a plain transformer model"
            )
        lib.llama_memory_clear(self._memory, False)

    def _find_multiple(self, header: GgufHeader) -> int:
        """1 where rows keep their bits whatever their number, else ``_BLOCK_ROWS``.

        Quantised files are tried, since it hangs on the processor too.
        """
        if header.metadata.get("general.file_type") in _FLOAT_FILES:
            return 1
        count = min(2 * sum(_PROBES), self.context)
        tokens = [(13 + 7919 * i) % self.vocab_size for i in range(count)]
        whole = self.logits(Work(0, 0, tuple(tokens), count, 0, _GREEDY))
        self._multiple = 1
        place = count - min(count, sum(_PROBES))
        for probe in _PROBES:
            piece = tuple(tokens[place : place + probe])
            if piece:
                rows = self.logits(Work(0, place, piece, len(piece), 0, _GREEDY))
                if not np.array_equal(rows, whole[place : place + probe]):
                    self._multiple = _BLOCK_ROWS
                    break
            place += probe
        self.free(0)
        return self._multiple

    def free(self, slot: int) -> None:
        """Forget what a slot holds."""
        self._lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
        self._lengths[slot] = self._ends[slot] = 0
        self._trees.pop(slot, None)

    def close(self) -> None:
        """Free cells and weights; nothing may be asked afterwards. Twice is once."""
        context, self._context = self._context, None
        model, self._model = self._model, None
        if context:
            self._lib.llama_free(context)
        if model:
            self._lib.llama_model_free(model)

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        """As ``Target.forward``. Raises LocalProtocolError, before anything changes, for work that
        the slots, the vocabulary or the context do not allow, and after ``close``."""
        if not self._context:
            raise LocalProtocolError("the target is closed")
        trees = {slot: tree.parents for slot, tree in self._trees.items()}
        check_batch(batch, self, lambda work: self._lengths[work.slot], trees)
        positions = [choice_positions(work) for work in batch]
        chosen = [[0] * work.choices for work in batch]

        def choose(number: int, which: int, logits: npt.NDArray[np.float32]) -> None:
            sampling = batch[number].sampling
            position = positions[number][which]
            chosen[number][which] = self._sampler.choose(logits, position, sampling)

        self._work_through(batch, choose)
        return chosen

    def logits(self, work: Work) -> npt.NDArray[np.float32]:
        """The forward of one work without the choice: float32[choices, vocab_size], unchecked."""
        rows = np.empty((work.choices, self.vocab_size), dtype=np.float32)

        def copy(_: int, which: int, logits: npt.NDArray[np.float32]) -> None:
            rows[which] = logits[: self.vocab_size]

        self._work_through([work], copy)
        return rows

    def _work_through(self, batch: Sequence[Work], take: _Take) -> None:
        with all_or_nothing(self.name, batch, lambda work: self.free(work.slot)):
            courses = [self._course(work, number) for number, work in enumerate(batch)]
            running = {course.work.slot: course for course in courses}
            while running:
                remaining = {s: len(c.legs[0].tokens) - c.done for s, c in running.items()}
                window = plan(remaining, multiple=self._multiple, limit=ROWS, spare=SPARE)
                self._run(window, running, take)
                running = {slot: course for slot, course in running.items() if course.legs}
            for work in batch:
                self._note(work)

    def _course(self, work: Work, number: int) -> _Course:
        """Cut the slot back to what stays valid, and lay out what is to run."""
        slot, base = work.slot, self._lengths[work.slot]
        tree = self._trees.get(slot)
        start = work.keep
        again: list[int] = []
        if tree is not None and work.keep > base:
            path = work.path[: work.keep - base]
            common = 0
            while common < min(len(path), len(tree.cached)) and path[common] == tree.cached[common]:
                common += 1
            # The cache holds one branch of the tree; of another one the tokens run once more.
            start = base + common
            again = [tree.tokens[node] for node in path[common:]]
        self._cut(slot, start)
        chain = trunk(work)
        silent = len(work.tokens) - work.choices
        asked = [max(-1, index - silent) for index in range(len(work.tokens))]
        first = _Leg(start, again + list(work.tokens[:chain]), [-1] * len(again) + asked[:chain])
        legs = [first]
        places = offsets(work)
        for run in branches(work.parents or ()):
            tokens = [work.tokens[chain + node] for node in run]
            wanted = [asked[chain + node] for node in run]
            begin = work.keep + places[chain + run[0]]
            if begin == legs[-1].first + len(legs[-1].tokens):
                legs[-1].tokens += tokens
                legs[-1].asked += wanted
            else:
                legs.append(_Leg(begin, tokens, wanted))
        return _Course(work, number, legs)

    def _note(self, work: Work) -> None:
        """Remember what the slot of a finished work holds."""
        slot = work.slot
        self._lengths[slot] = work.keep + trunk(work)
        self._trees.pop(slot, None)
        if work.parents:
            last = branches(work.parents)[-1][-1]
            drafted = work.tokens[trunk(work) :]
            cached = tuple(lineage(work.parents, last))
            self._trees[slot] = _Tree(work.parents, drafted, cached)

    def _run(self, window: Window, running: dict[int, _Course], take: _Take) -> None:
        """One pass over the weights; hands the logits that are asked for to ``take``."""
        rows = self._rows
        rows.clear()
        taken: list[tuple[_Course, int]] = []
        choices: list[tuple[int, _Course, int]] = []  # row, whose, which
        for slot in range(window.first, window.last + 1):
            course = running.get(slot)
            count = 0
            if course is not None:
                leg = course.legs[0]
                count = min(len(leg.tokens) - course.done, window.rows)
                for index in range(course.done, course.done + count):
                    asked = leg.asked[index]
                    if asked >= 0:
                        choices.append((rows.count, course, asked))
                    rows.add(slot, leg.first + index, leg.tokens[index], ask=asked >= 0)
                self._ends[slot] = leg.first + course.done + count
                taken.append((course, count))
            for index in range(window.rows - count):
                rows.add(slot, self._ends[slot] + index, _FILLER, ask=False)
        if choices:
            wanted = max(len(choices), _LEAST_CHOICES)
            rows.ask_more(wanted - len(choices) + -wanted % self._multiple)
        forget_complaints()
        status = self._decode(rows.batch)
        if status != 0:
            raise ModelError(
                f"llama.cpp failed in a forward of {rows.count} rows (status {status})"
                f"{complaint()}; its sessions start again"
            )
        for slot in range(window.first, window.last + 1):
            self._lib.llama_memory_seq_rm(self._memory, slot, self._ends[slot], -1)
        for row, course, which in choices:
            take(course.number, which, self._logits(row))
        for course, count in taken:
            course.done += count
            if course.done == len(course.legs[0].tokens):
                course.legs.pop(0)
                course.done = 0
                if course.legs:
                    self._cut(course.work.slot, course.legs[0].first)

    def _cut(self, slot: int, end: int) -> None:
        if not self._lib.llama_memory_seq_rm(self._memory, slot, end if end else -1, -1):
            raise ModelError("llama.cpp cannot roll back; give a plain transformer model")
        self._ends[slot] = end

    def _decode(self, batch: Any) -> int:
        return int(self._lib.llama_decode(self._context, batch))

    def _logits(self, row: int) -> npt.NDArray[np.float32]:
        """float32[entries of the vocabulary], a view that the next pass overwrites."""
        pointer = self._lib.llama_get_logits_ith(self._context, row)
        if not pointer:
            raise ModelError(f"llama.cpp gave no logits for row {row}{complaint()}")
        return np.ctypeslib.as_array(pointer, (self._width,))
