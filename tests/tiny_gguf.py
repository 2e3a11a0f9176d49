"""A GGUF file of a few hundred kilobytes with random weights, whole and valid."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, FEED_FORWARD, CONTEXT = 32, 2, 4, 64, 128
END, START, TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_alphabet() -> list[str]:
    """GPT-2's spelling of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable}
    spelling.update({byte: chr(0x100 + n) for n, byte in enumerate(others)})
    return [spelling[byte] for byte in range(256)]


def vocabulary() -> list[str]:
    """Ids 0 to 2 are control tokens, then the bytes, then two merges."""
    return [END, START, TURN, *byte_alphabet(), "Ġa", "Ġ1"]


def write(path: Path, *, architecture: str = "llama", seed: int = 0) -> Path:
    """Write the file to ``path`` and return it."""
    tokens = vocabulary()
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["Ġ a", "Ġ 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    def add(name: str, *shape: int) -> None:
        values = np.ones(shape) if len(shape) == 1 else random.normal(0, 0.3, shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    add("token_embd", len(tokens), HIDDEN)
    add("output_norm", HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for name in ("attn_norm", "ffn_norm"):
            add(f"{block}.{name}", HIDDEN)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{block}.{name}", HIDDEN, HIDDEN)
        for name in ("ffn_gate", "ffn_up"):
            add(f"{block}.{name}", FEED_FORWARD, HIDDEN)
        add(f"{block}.ffn_down", HIDDEN, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
