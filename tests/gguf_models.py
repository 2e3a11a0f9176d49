"""The tiny random decoders of ``tiny_models`` as GGUF files: the same weights in llama.cpp."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.tiny_models import _COMMON, CONTEXT, ROWS, VOCAB, WINDOW, model_of

#: llama.cpp's families, by the transformers model that has their weights.
FAMILIES = ("llama", "gemma3")


@cache
def reference(family: str) -> Any:
    """The transformers model with the weights of the file; eager attention, float32."""
    if family != "gemma3":
        return model_of(family)
    # llama.cpp's gemma3 gives the first five layers a window, and scales by the head's size.
    config = Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 3,
    )
    torch.manual_seed(21)
    model = Gemma3ForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    return model


@cache
def gguf_of(family: str) -> Path:
    """The file; written once per process, with ``ROWS`` rows for a vocabulary of ``VOCAB``."""
    path = Path(tempfile.mkdtemp(prefix="pipesd-gguf-")) / f"{family}.gguf"
    write(path, family)
    return path


def write(path: Path, family: str) -> None:
    model = reference(family)
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, family)
    writer.add_name(family)
    writer.add_file_type(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(ROWS)
    if family == "gemma3":
        writer.add_sliding_window(WINDOW)
        writer.add_rope_freq_base(1_000_000.0)
    else:
        writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"<{n}>" if n < VOCAB else f"[PAD{n}]" for n in range(ROWS)])
    writer.add_token_types([1 if n < VOCAB else 5 for n in range(ROWS)])
    writer.add_token_merges(["< 1"])
    for name, weight in tensors(model, family):
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def tensors(model: Any, family: str) -> list[tuple[str, np.ndarray]]:
    found = []
    for full, tensor in model.state_dict().items():
        weight = tensor.numpy().astype(np.float32)
        name = full.removesuffix(".weight")
        if family == "gemma3" and "norm" in name:
            weight = weight + 1.0  # transformers adds it when it computes
        if name.startswith("model.layers."):
            _, _, layer, part = name.split(".", 3)
            if part == "post_attention_layernorm":
                kind = "post_attention_norm" if family == "gemma3" else "ffn_norm"
            else:
                kind = _LAYER[part]
            if family == "llama" and kind in ("attn_q", "attn_k"):
                weight = interleaved(weight, 16)
            found.append((f"blk.{layer}.{kind}", weight))
        else:
            found.append((_WHOLE[name], weight))
    return found


def interleaved(weight: np.ndarray, head: int) -> np.ndarray:
    """Rows as llama.cpp's rotation of llama pairs them: neighbours, not halves of a head."""
    rows, columns = weight.shape
    return np.ascontiguousarray(
        weight.reshape(rows // head, 2, head // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )
