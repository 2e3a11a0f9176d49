"""The target in PyTorch: any decoder that transformers loads, as a packed ragged batch over slots.

Tokens of all sessions of a forward stand in one row, with explicit positions; nothing is padded to
the longest. Rejected tokens are forgotten by ``Work.keep``. See ``torch_attention`` for how each
session sees only its own past, and ``torch_linear`` for why a session's result does not hang on its
company, not even by a rounding, on processors where that holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from broker.errors import ConfigError, ModelError
from broker.sampling import Sampling
from broker.vocabulary import vocab_hash
from cloud_verifier.engine import torch_attention, torch_linear, torch_probe
from cloud_verifier.engine.batch import all_or_nothing, check_batch
from cloud_verifier.engine.kv_budget import available_memory, blocks_for
from cloud_verifier.engine.prepare import resolve_target, tokenizer_tokens
from cloud_verifier.engine.slots import BLOCK, Blocks
from cloud_verifier.engine.target import Work
from cloud_verifier.engine.torch_attention import KeyValues, Masks, Segment, Step
from cloud_verifier.engine.torch_reading import end_ids, name_of, read_model
from cloud_verifier.engine.torch_sampling import choose_many
from cloud_verifier.engine.trees import choice_positions, offsets, trunk

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Self

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Rotary embeddings that change all frequencies once any token lies beyond this position: a short
# session's text would then hang on whether a long one is in the same forward.
_SHIFTING_ROPES = ("dynamic", "longrope")

_GREEDY = Sampling()

_CHECK_TOKENS = 12
# The check at loading: root mean square difference of a middling row, in standard deviations of its
# logits. With so few and so odd tokens, bfloat16 models differ by 0.06 to 0.13 from themselves.
_TOLERANCE = {torch.float32: 0.01}
_COARSE = 0.4


class TorchTarget:
    """``Target`` over a transformers model, which it takes over: its linear layers may be replaced.

    ``vocab_size``: entries of the tokenizer; rows of the embedding past it never win. ``context``:
    tokens a slot can hold. ``kv_budget``: bytes for the K/V of all slots, allocated here; None:
    what they take with full contexts, at most a quarter of the available memory and at least
    one context. Raises ConfigError for a budget in which no context fits, ModelError for a model
    that the packed batch does not give back as transformers computes it, which is tried on a few
    tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        vocab_size: int,
        vocab_hash: str,
        eos_ids: Iterable[int],
        context: int | None = None,
        max_slots: int = 16,
        kv_budget: int | None = None,
        pack: bool = True,
    ) -> None:
        if max_slots < 1:
            raise ConfigError(f"max slots {max_slots} leaves room for no session: at least 1")
        self.name = name
        self.vocab_size = vocab_size
        self.vocab_hash = vocab_hash
        self.eos_ids = frozenset(eos_ids)
        self.max_slots = max_slots
        self.context = _context_of(model, context)
        self._model: Any = model
        self._model.train(False).requires_grad_(False)
        self._device, self._dtype = model.device, model.dtype
        with torch.inference_mode():
            self.layers = torch_probe.find_layers(model)
            self._masks = Masks(self._dtype, self._device)
            # Parents of the tree that a slot's last work fed, where it fed one, and where it lies.
            self._trees: dict[int, tuple[tuple[int, ...], Segment]] = {}
            self._allocate(kv_budget)
            tokens, expected = self._reference()
            if pack and torch_linear.can_pack(self._device, self._dtype):
                self._pack()
            torch_attention.register()
            self._model.set_attn_implementation(torch_attention.NAME)
            self._compare(tokens, expected)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        context: int | None = None,
        max_slots: int = 16,
        threads: int | None = None,
        reading: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Self:
        """Load a model directory, a hub id or a GGUF file (converted once and cached).

        ``threads``: of torch, in this whole process; None leaves its own choice. ``reading``: more
        for transformers to read the model with; ``others``: for the constructor. Raises ConfigError
        for settings out of range, ModelError for what is missing, damaged or not supported.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype} is unknown: choose one of {', '.join(DTYPES)}")
        if threads is not None:
            if threads < 1:
                raise ConfigError(f"threads {threads} computes nothing: at least 1")
            torch.set_num_threads(threads)
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError) as exc:  # also for a GPU that is not there
            cause = " ".join(str(exc).split())[:120]
            raise ConfigError(f"device {device} is not here ({cause}): give cpu") from None
        directory = resolve_target(path)
        model, tokenizer = read_model(directory, path, DTYPES[dtype], device, reading or {})
        tokens = tokenizer_tokens(tokenizer, model.get_output_embeddings().weight.shape[0])
        return cls(
            model,
            name=name_of(path),
            vocab_size=len(tokens),
            vocab_hash=vocab_hash(tokens),
            eos_ids=end_ids(model, tokenizer, tokens),
            context=context,
            max_slots=max_slots,
            **others,
        )

    def _allocate(self, budget: int | None) -> None:
        width = sum(layer.width for layer in self.layers)
        self.bytes_per_token = width * self._dtype.itemsize
        """Bytes of K/V for one token of one session."""
        self.block_tokens = BLOCK
        fitting = blocks_for(
            budget,
            block_bytes=BLOCK * self.bytes_per_token,
            context_blocks=-(-self.context // BLOCK),
            max_slots=self.max_slots,
            available=_available(self._device),
        )
        self.total_blocks = self._agree(fitting)
        self._blocks = Blocks(
            max_slots=self.max_slots,
            context=self.context,
            block_tokens=BLOCK,
            total=self.total_blocks,
        )
        try:
            self._memory = KeyValues(
                self.layers, BLOCK * self.total_blocks, self._dtype, self._device
            )
        except (MemoryError, RuntimeError) as exc:
            cause = " ".join(str(exc).split())[:120]
            raise ConfigError(
                f"no memory for {self.bytes_allocated} bytes of K/V ({cause}): lower --kv-budget"
            ) from None

    def _agree(self, blocks: int) -> int:
        """How many blocks there are, where ``blocks`` fit here; for targets of several parts."""
        return blocks

    @property
    def bytes_allocated(self) -> int:
        """Bytes of K/V memory; the same from start to end."""
        return self.total_blocks * BLOCK * self.bytes_per_token

    def free(self, slot: int) -> None:
        """Forget what lies in the slot's own blocks, while it has some."""
        if not self._blocks.handed_out:
            self._blocks.commit(self._blocks.own(slot), 0, 0)
        self._trees.pop(slot, None)

    def close(self) -> None:
        """Drop model and memory; nothing may be asked afterwards. Twice is once."""
        self._blocks.clear()
        self._trees.clear()
        self._memory.layers.clear()
        self._model = None

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        """As ``Target.forward``. Raises LocalProtocolError, before anything changes, for work that
        the slots, the vocabulary or the context do not allow."""
        trees = {slot: parents for slot, (parents, _) in self._trees.items()}
        check_batch(batch, self, self._blocks.length, trees)
        self._blocks.check(batch)
        if not batch:
            return []
        with all_or_nothing(self.name, batch, self._spoil):
            return _choices(self.logits(batch), batch)

    @torch.inference_mode()
    def logits(self, batch: Sequence[Work]) -> Tensor:
        """The forward without the choice: float[choices of all works, vocab_size], unchecked."""
        ids: list[int] = []
        positions: list[int] = []
        asked: list[int] = []
        segments: list[Segment] = []
        for work in batch:
            start, count = len(ids), len(work.tokens)
            table = self._blocks.table(work)
            segment = Segment(table, start, count, work.keep, work.parents or ())
            self._settle(work, segment)
            segments.append(segment)
            ids += work.tokens
            positions += (work.keep + offset for offset in offsets(work))
            asked += range(start + count - work.choices, start + count)
        step = Step(segments, self._memory, self._masks, self.layers)
        filler = max(step.rows_needed(), torch_linear.MIN_ROWS) - len(ids)
        rows = self._run(ids + [0] * filler, positions + [0] * filler, asked, step)
        for work, segment in zip(batch, segments, strict=True):
            self._blocks.commit(segment.table, work.keep, work.keep + trunk(work))
            if work.parents:
                self._trees[work.slot] = work.parents, segment
        return rows

    def _spoil(self, work: Work) -> None:
        """Forget what a work that failed may have half written."""
        if work.blocks:  # others may share those before
            self._blocks.commit(work.blocks, work.keep, work.keep)
            self._trees.pop(work.slot, None)
        else:
            self.free(work.slot)

    def _settle(self, work: Work, segment: Segment) -> None:
        """Make the accepted path of the slot's last tree a part of its chain, and forget the rest.

        What is stored was computed at its final position already; only its place changes.
        """
        _, tree = self._trees.pop(work.slot, ((), segment))
        length = self._blocks.length(work)
        path = work.path[: max(0, work.keep - length)]
        if path:
            sources = [tree.place(length + node) for node in path]
            goals = [segment.place(length + node) for node in range(len(path))]
            self._memory.move(sources, goals)
            self._blocks.commit(segment.table, length, length + len(path))

    def _run(self, ids: list[int], positions: list[int], asked: list[int], step: Step) -> Tensor:
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([ids], device=self._device),
            "position_ids": torch.tensor([positions], device=self._device),
            "use_cache": False,
            "pipesd_step": step,
        }
        if not asked:
            self._model.base_model(**inputs)
            return torch.empty(0, self.vocab_size)
        keep = asked + asked[-1:] * (torch_linear.MIN_ROWS - len(asked))
        kept = torch.tensor(keep, device=self._device)
        logits: Tensor = self._model(**inputs, logits_to_keep=kept).logits
        return logits[0, : len(asked), : self.vocab_size]

    def _pack(self) -> None:
        output = self._model.get_output_embeddings()
        if type(output) is nn.Linear:
            packed = torch_linear.PackedLinear(output, rows=self.vocab_size)
            for name, module in list(self._model.named_modules()):
                if module is output:
                    self._model.set_submodule(name, packed)
        torch_linear.pack_linears(self._model)

    def _reference(self) -> tuple[list[int], Tensor]:
        """A few tokens, and transformers' own logits after the second half of them."""
        count = min(_CHECK_TOKENS, self.context)
        tokens = [(13 + 7919 * i) % self.vocab_size for i in range(count)]
        self._model.set_attn_implementation("eager")
        ids = torch.tensor([tokens], device=self._device)
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        if logits.shape[-1] < self.vocab_size:
            raise ModelError(
                f"{self.name} has {logits.shape[-1]} outputs for {self.vocab_size} tokens: "
                "its tokenizer belongs to another model"
            )
        return tokens, logits[count // 2 :, : self.vocab_size].float()

    def _compare(self, tokens: list[int], expected: Tensor) -> None:
        """The same logits in two forwards, with a few rejected tokens between."""
        half = len(tokens) // 2
        wrong = tokens[half:][::-1][: self.context - half]
        for keep, fed in ((0, tokens[:half] + wrong), (half, tokens[half:])):
            if fed:
                work = Work(0, keep, tuple(fed), len(tokens) - half, 0, _GREEDY)
                found = self.logits([work])
        self.free(0)
        error = (found.float() - expected).square().mean(dim=1).sqrt()
        difference = float((error / expected.std(dim=1).clamp_min(1e-9)).median())
        if not difference <= _TOLERANCE.get(self._dtype, _COARSE):
            raise ModelError(
                f"{self.name} is not computed as transformers does (logits differ by "
                f"{difference:.3g} deviations): give another target model"
            )


def _choices(logits: Tensor, batch: Sequence[Work]) -> list[list[int]]:
    """The tokens chosen for each work from its rows of ``logits``."""
    if not len(logits):
        return [[] for _ in batch]
    asked: list[tuple[int, int, Sampling]] = []
    for work in batch:
        if work.parents:  # each of its rows has a position of its own
            asked += ((1, position, work.sampling) for position in choice_positions(work))
        else:
            asked.append((work.choices, work.position, work.sampling))
    tokens = iter(token for row in choose_many(logits, asked) for token in row)
    return [[next(tokens) for _ in range(work.choices)] for work in batch]


def _available(device: torch.device) -> int | None:
    """Bytes that K/V could take on ``device``."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory() if device.type == "cpu" else None


def _context_of(model: PreTrainedModel, wanted: int | None) -> int:
    config: Any = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None), wanted]
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in ropes.values() if all(isinstance(r, dict) for r in ropes.values()) else [ropes]:
        if rope.get("rope_type") in _SHIFTING_ROPES:
            limits.append(rope.get("original_max_position_embeddings"))
    known = [int(limit) for limit in limits if limit is not None]
    if not known:
        raise ConfigError("the model names no context length: give one with --context")
    if min(known) < 2:
        raise ConfigError(f"a context of {min(known)} tokens holds no text: at least 2")
    return min(known)
