"""Linear layers whose weights oneDNN has laid out once, for inference on a CPU.

PyTorch hands float32 products to MKL, which on AMD processors is at half the memory bandwidth for
the few rows of a verification, and for bfloat16 lays the weights out anew in every call. Laid out
once they are 1.3 to 4 times as fast (1 to 40 rows), and, what is worth more here, a row's result
has been the same to the last bit whatever rows stand beside it: MKL changes its order of summation
with the number of rows, up to eight of them. ``torch.compile`` uses the same two operators.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

ROWS_HINT = 8  # what oneDNN lays the weights out for: one drafted batch
MIN_ROWS = 4  # fewer are slower, and a single row goes another way, with another rounding


class PackedLinear(nn.Module):
    """``nn.Linear`` over [..., in_features], for inference; ``rows`` limits the outputs."""

    def __init__(self, linear: nn.Linear, rows: int | None = None) -> None:
        super().__init__()
        weight = linear.weight.detach()[:rows]
        self.in_features = linear.in_features
        self.out_features = weight.shape[0]
        # Not a parameter: oneDNN's layout is opaque, nothing may read or move it.
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(
            weight.contiguous(), ROWS_HINT
        )
        self._bias = None if linear.bias is None else linear.bias.detach()[:rows].clone()

    def forward(self, rows: Tensor) -> Tensor:
        return cast(
            Tensor,
            torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], ""),
        )


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch and this processor can do it: tried on a small layer."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    linear = nn.Linear(32, 48, dtype=dtype)
    sample = torch.linspace(-1.0, 1.0, 4 * 32).reshape(1, 4, 32).to(dtype)
    try:
        difference = (PackedLinear(linear)(sample) - linear(sample)).abs().max().item()
    except (AttributeError, RuntimeError):
        return False
    return bool(difference < 0.05)


def pack_linears(model: nn.Module, keep: frozenset[str] = frozenset()) -> int:
    """Replace each plain ``nn.Linear`` of ``model`` but those in ``keep`` (full names).

    Returns how many were replaced. The old weights are dropped one by one, so the memory needed
    beyond the model's own is one layer, and a copy of each weight that is shared, as the output
    layer's with the embedding.
    """
    replaced = 0
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            # Exactly nn.Linear: a subclass may compute something else.
            if type(child) is nn.Linear and f"{path}.{name}".lstrip(".") not in keep:
                setattr(module, name, PackedLinear(child))
                replaced += 1
    return replaced
