"""Finds out from a model itself what its attention layers look like, and refuses what is not held.

Attention, window and mask are what decides about exactness, and they are configured differently in
every family of models. So nothing is read from the configuration: the model runs once over a few
tokens with functions of ours in the place of its attention and of its mask, which write down what
they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from broker.errors import ModelError
from cloud_verifier.engine.torch_attention import Layer

NAME = "pipesd_probe"
ROWS = 4

_MEND = "give another target model"
# Arguments that change what attention computes, and that the packed one does not know.
_UNKNOWN = ("s_aux", "position_bias", "sinks", "relative_bias")


@dataclass(slots=True)
class _Record:
    layers: dict[int, Layer] = field(default_factory=dict)


def find_layers(model: PreTrainedModel) -> list[Layer]:
    """Run ``model`` over a few tokens and describe its attention layers, first to last.

    Leaves the model set to attention ``NAME``. Raises ModelError for a model whose attention, or
    whose memory of past tokens, is of a kind that the packed batch cannot give back exactly.
    """
    kind = type(model).__name__
    if getattr(model, "_is_stateful", False):
        # What such a layer remembers of rejected tokens cannot be cut off again.
        raise ModelError(f"{kind} remembers past tokens in a state beside attention: {_MEND}")
    AttentionInterface.register(NAME, _probe_attention)
    AttentionMaskInterface.register(NAME, _probe_mask)
    try:
        model.set_attn_implementation(NAME)
    except ValueError as exc:
        raise ModelError(f"{kind} has attention of its own: {_MEND}") from exc
    record = _Record()
    device = model.device
    model(
        input_ids=torch.arange(ROWS, device=device)[None],
        position_ids=torch.arange(ROWS, device=device)[None],
        use_cache=False,
        logits_to_keep=torch.zeros(1, dtype=torch.int64, device=device),
        pipesd_record=record,
    )
    count = model.config.get_text_config().num_hidden_layers
    if sorted(record.layers) != list(range(count)):
        raise ModelError(
            f"{kind} has {count} layers, {len(record.layers)} of them with the usual attention: "
            f"{_MEND}"
        )
    return [record.layers[index] for index in range(count)]


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Stands in for a mask; ``window`` as in Layer."""

    window: int | None


def _probe_mask(
    *,
    mask_function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> _Pattern:
    """In the place of a mask: which of the two patterns that are held here it would be."""

    def sees(query: int, key: int) -> bool:
        none = torch.zeros((), dtype=torch.int64, device=device)
        return bool(mask_function(none, none, none + query, none + key))

    # At positions well behind the window the two patterns differ from all others.
    window = local_size or 0
    far = 4 * window + 67
    right = sees(far, far) and not sees(far, far + 1) and not sees(0, 1)
    if local_size is None:
        right = right and sees(far, 0) and sees(far, far // 2)
    else:
        # Two neighbours: a chunk also ends somewhere, but not one token later for the next query.
        right = right and all(
            sees(query, query - window + 1) and not sees(query, query - window)
            for query in (far, far + 1)
        )
    if not right:
        raise ModelError(f"the model's attention mask is neither causal nor a window: {_MEND}")
    return _Pattern(local_size)


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    *,
    pipesd_record: _Record,
    **settings: Any,
) -> tuple[Tensor, None]:
    unknown = [name for name in _UNKNOWN if settings.get(name) is not None]
    if unknown or not isinstance(attention_mask, _Pattern):
        what = ", ".join(unknown) or "an unusual mask"
        raise ModelError(f"attention with {what} is not supported: {_MEND}")
    index: int = module.layer_idx  # type: ignore[assignment]
    if index in pipesd_record.layers:
        raise ModelError(f"attention layer {index} runs twice in one forward: {_MEND}")
    heads, kv_heads = query.shape[1], key.shape[1]
    pipesd_record.layers[index] = Layer(
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        window=attention_mask.window,
    )
    return query.new_zeros(1, query.shape[2], heads, value.shape[3]), None
