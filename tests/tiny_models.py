"""Tiny random decoders of several families, made in milliseconds, and their plain forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from broker.sampling import Sampling
from cloud_verifier.engine.target import Work
from cloud_verifier.engine.torch_target import TorchTarget

ROWS = 104  # of the embedding; the vocabulary is smaller, as padded embeddings are
VOCAB = 97
WINDOW = 8
CONTEXT = 160

# Large weights and an output layer of its own: else a model says the same token for ever.
_COMMON: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**_COMMON, num_hidden_layers=2, num_key_value_heads=2))


def _gemma3() -> Any:
    config = Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=4,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return Gemma3ForCausalLM(config)


def _gemma2() -> Any:
    config = Gemma2Config(
        **_COMMON,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
    )
    return Gemma2ForCausalLM(config)


def _mistral() -> Any:
    config = MistralConfig(
        **_COMMON, num_hidden_layers=2, num_key_value_heads=4, sliding_window=WINDOW
    )
    return MistralForCausalLM(config)


def _qwen2() -> Any:
    config = Qwen2Config(
        **_COMMON,
        num_hidden_layers=3,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    )
    return Qwen2ForCausalLM(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "gemma3": _gemma3,
    "gemma2": _gemma2,
    "mistral": _mistral,
    "qwen2": _qwen2,
}


@cache
def model_of(family: str) -> Any:
    """The family's model, the same weights each time; never handed to a target itself."""
    torch.manual_seed(20)
    model = FAMILIES[family]().eval()
    # gemma2 knows no other attention than eager; of the others this is the plainest too.
    model.set_attn_implementation("eager")
    return model


def target_of(family: str, *, dtype: torch.dtype = torch.float32, **settings: Any) -> TorchTarget:
    """A target over a copy of the family's model."""
    model = copy.deepcopy(model_of(family)).to(dtype)
    settings = {"vocab_size": VOCAB, "max_slots": 8, **settings}
    return TorchTarget(model, name=family, vocab_hash="0" * 16, eos_ids=(), **settings)


@torch.inference_mode()
def plain_logits(model: Any, sequence: Sequence[int], vocab_size: int = VOCAB) -> torch.Tensor:
    """What transformers computes without a cache: float[len(sequence), vocab_size]."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(sequence)]), use_cache=False).logits
    return logits[0, :, :vocab_size]


def sequence_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(VOCAB, (length,), generator=generator).tolist()
    return tokens


def rows_of(target: TorchTarget, slot: int, keep: int, tokens: list[int]) -> torch.Tensor:
    """Logits after each of ``tokens``: float[len(tokens), vocab]."""
    return target.logits([Work(slot, keep, tuple(tokens), len(tokens), 0, Sampling())])
