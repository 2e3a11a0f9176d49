"""The torch engine beyond the contract: what it refuses, loads and holds, and how exact it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import ConfigError, ModelError
from broker.sampling import Sampling
from cloud_verifier.engine import torch_attention, torch_linear
from cloud_verifier.engine.slots import BLOCK
from cloud_verifier.engine.target import Work
from cloud_verifier.engine.torch_target import TorchTarget
from tests.tiny_models import (
    CONTEXT,
    FAMILIES,
    ROWS,
    VOCAB,
    WINDOW,
    model_of,
    plain_logits,
    rows_of,
    sequence_of,
)
from tests.tiny_models import target_of as tiny_target

GREEDY = Sampling()


# Exactness


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
def test_logits_equal_plain_ones(family: str, pack: bool) -> None:
    target = tiny_target(family, pack=pack)
    text = sequence_of(150, 1)
    expected = plain_logits(model_of(family), text)
    rows_of(target, 0, 0, text[:70])
    found = rows_of(target, 0, 60, text[60:])
    assert torch.allclose(found, expected[60:], atol=2e-4, rtol=1e-4)


def test_float32_is_near_and_bfloat16_nearer_than_its_own_rounding() -> None:
    text = sequence_of(100, 2)
    expected = plain_logits(model_of("llama"), text)
    plain = plain_logits(copy.deepcopy(model_of("llama")).to(torch.bfloat16), text).float()
    found = rows_of(tiny_target("llama", dtype=torch.bfloat16), 0, 0, text).float()
    assert (found - expected).abs().mean() < 2 * (plain - expected).abs().mean()


def kernels_sum_rows_alike(dtype: torch.dtype) -> bool:
    """Whether this processor's kernels give a row the same bits whatever rows are beside it."""
    if not torch_linear.can_pack(torch.device("cpu"), dtype):
        return False
    torch.manual_seed(3)
    linear = torch_linear.PackedLinear(torch.nn.Linear(96, 200, dtype=dtype))
    rows = torch.randn(64, 96, dtype=dtype)
    keys = torch.randn(1, 2, 128, 32, dtype=dtype)
    queries = torch.randn(1, 2, 64, 32, dtype=dtype)
    mask = torch.zeros(64, 128, dtype=dtype)

    def attend(count: int) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            queries[:, :, :count], keys, keys, attn_mask=mask[:count]
        )

    return all(
        torch.equal(linear(rows[:count]), linear(rows)[:count])
        and torch.equal(attend(count), attend(64)[:, :, :count])
        for count in (4, 5, 12, 17, 36)
    )


CUTS = st.lists(st.integers(1, 70), min_size=1, max_size=8)


@settings(max_examples=15, deadline=None)
@given(cuts=CUTS, others=st.lists(st.integers(1, 80), max_size=5), before=st.booleans())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_not_a_bit_changes_with_the_cuts_or_the_company(
    family: str, dtype: torch.dtype, cuts: list[int], others: list[int], before: bool
) -> None:
    with torch.inference_mode():
        alike = kernels_sum_rows_alike(dtype)
    if not alike:
        pytest.skip("this processor's kernels sum rows in an order that depends on their number")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        target = _cached_target(family, dtype)
        text = sequence_of(CONTEXT, 4)
        whole = rows_of(target, 0, 0, text)
        start = 0
        for cut in cuts:
            piece = tuple(text[start : start + cut])
            if not piece:
                break
            mine = Work(0, start, piece, len(piece), 0, GREEDY)
            company = [
                Work(slot, 0, tuple(sequence_of(length, slot)), 1, 0, GREEDY)
                for slot, length in enumerate(others, 1)
            ]
            batch = [*company, mine] if before else [mine, *company]
            first = len(company) if before else 0
            found = target.logits(batch)[first : first + len(piece)]
            assert torch.equal(found, whole[start : start + len(piece)])
            start += cut
    finally:
        torch.set_num_threads(threads)


_TARGETS: dict[tuple[str, torch.dtype], TorchTarget] = {}


def _cached_target(family: str, dtype: torch.dtype) -> TorchTarget:
    if (family, dtype) not in _TARGETS:
        _TARGETS[family, dtype] = tiny_target(family, dtype=dtype)
    return _TARGETS[family, dtype]


def test_a_long_context_needs_no_more_masks_than_its_blocks() -> None:
    # Blocks of 64 keys, tables that grow: every length around their ends.
    target = tiny_target("mistral")
    text = sequence_of(CONTEXT, 5)
    expected = plain_logits(model_of("mistral"), text)
    rows_of(target, 0, 0, text)
    for keep in (1, 7, 8, 9, 62, 63, 64, 65, 127, 128, 129, CONTEXT - 2):
        tokens = text[keep : keep + 2]
        rows_of(target, 0, 0, text)
        found = rows_of(target, 0, keep, tokens)
        assert torch.allclose(found, expected[keep : keep + 2], atol=2e-4, rtol=1e-4), keep


# Layers


def windows_of(target: TorchTarget) -> list[int | None]:
    return [layer.window for layer in target.layers]


def test_windows_are_found_as_transformers_applies_them() -> None:
    assert windows_of(tiny_target("llama")) == [None, None]
    assert windows_of(tiny_target("gemma3")) == [WINDOW, None, WINDOW, None]
    assert windows_of(tiny_target("mistral")) == [WINDOW, WINDOW]
    assert windows_of(tiny_target("qwen2")) == [None, WINDOW, WINDOW]


def test_memory_is_what_the_budget_says() -> None:
    target = tiny_target("llama")
    # 2 layers of keys and values, 2 heads of 16 float32 numbers.
    assert target.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert target.bytes_allocated == 8 * 192 * target.bytes_per_token
    block = BLOCK * target.bytes_per_token
    small = tiny_target("llama", kv_budget=4 * block + 17)
    assert (small.total_blocks, small.block_tokens) == (4, BLOCK)
    rows_of(small, 0, 0, sequence_of(CONTEXT, 7))
    assert small.bytes_allocated == 4 * block
    with pytest.raises(ConfigError, match="holds no session"):
        tiny_target("llama", kv_budget=3 * block - 1)


def config_of(kind: str, **settings: Any) -> Any:
    common = {
        "vocab_size": ROWS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return getattr(transformers, kind)(**{**common, **settings})


def take(config: Any, **values: Any) -> TorchTarget:
    torch.manual_seed(8)
    model = transformers.AutoModelForCausalLM.from_config(config)
    values = {"name": "odd", "vocab_size": VOCAB, "vocab_hash": "0" * 16, "eos_ids": (), **values}
    return TorchTarget(model, **values)


UNSUPPORTED = {
    # Sinks in the softmax, both directions, chunks, a state beside attention, no attention at all.
    "gpt-oss": lambda: config_of(
        "GptOssConfig", num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=64
    ),
    "gemma3 both ways": lambda: config_of(
        "Gemma3TextConfig", use_bidirectional_attention=True, max_position_embeddings=64
    ),
    "llama4 chunks": lambda: config_of(
        "Llama4TextConfig",
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=8,
        max_position_embeddings=64,
    ),
    "falcon-h1": lambda: config_of(
        "FalconH1Config",
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        max_position_embeddings=64,
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=ROWS, hidden_size=32, num_hidden_layers=2, state_size=4
    ),
}


@pytest.mark.parametrize("config", UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_what_cannot_be_held_exactly_is_refused(config: Any) -> None:
    with pytest.raises(ModelError) as caught:
        take(config(), context=64)
    assert "another target model" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_wrong_computation_is_noticed_at_loading(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_target("llama", dtype=dtype)
    attend = torch_attention._attend

    def without_mask(*tensors: torch.Tensor, **settings: float | None) -> torch.Tensor:
        return attend(*tensors[:3], torch.zeros_like(tensors[3]), **settings)

    monkeypatch.setattr(torch_attention, "_attend", without_mask)
    with pytest.raises(ModelError, match="not computed as transformers"):
        tiny_target("llama", dtype=dtype)


def test_a_mixture_of_experts_is_taken() -> None:
    config = config_of(
        "MixtralConfig", num_local_experts=4, max_position_embeddings=64, initializer_range=0.2
    )
    torch.manual_seed(8)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    text = sequence_of(30, 9)
    expected = plain_logits(model, text)
    target = take(config)
    assert torch.allclose(rows_of(target, 0, 0, text), expected, atol=2e-4, rtol=1e-4)


def test_the_context_is_the_least_of_all_limits() -> None:
    assert tiny_target("llama", context=100).context == 100
    assert tiny_target("llama", context=10**6).context == CONTEXT
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    }
    # Beyond 48 tokens of anybody, this model computes everybody's otherwise.
    long = config_of(
        "Phi3Config",
        max_position_embeddings=256,
        original_max_position_embeddings=48,
        rope_parameters=rope,
    )
    assert take(long).context == 48


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="slots"):
        tiny_target("llama", max_slots=0)
    with pytest.raises(ConfigError, match="context"):
        tiny_target("llama", context=1)
    with pytest.raises(ConfigError, match="dtype"):
        TorchTarget.load("anything", dtype="int3")
    with pytest.raises(ConfigError, match="threads"):
        TorchTarget.load("anything", threads=0)
    with pytest.raises(ModelError, match="another model"):
        tiny_target("llama", vocab_size=ROWS + 1)


def test_nan_in_the_weights_is_an_error_not_a_token() -> None:
    target = tiny_target("llama")
    with torch.inference_mode():
        target._model.model.norm.weight[0] = torch.nan
    with pytest.raises(ModelError, match="NaN"):
        target.forward([Work(0, 0, (1, 2), 1, 0, GREEDY)])
