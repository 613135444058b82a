"""Float8 weights for a frozen target: half the weight traffic and up to twice the matmul rate on recent GPUs.

Weights are scaled by row, activations by token (both to the largest magnitude of e4m3), products are accumulated in
float32 and written in the activations' dtype. N tokens, I in, O out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.errors import UserError

_E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0


class Float8Linear(nn.Module):
    """A frozen linear layer with e4m3 weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight_OI, scale_O1 = quantise_rows(linear.weight.detach())
        self.weight_OI = nn.Buffer(weight_OI)
        self.scale_1O = nn.Buffer(scale_O1.t().contiguous())
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        rows, scale_N1 = quantise_rows(inputs.flatten(0, -2))
        out = torch._scaled_mm(
            rows,
            self.weight_OI.t(),
            scale_a=scale_N1,
            scale_b=self.scale_1O,
            bias=self.bias,
            out_dtype=inputs.dtype,
            use_fast_accum=True,
        )
        return out.view(*inputs.shape[:-1], -1)


def quantise_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 rows and their float32 scales [N, 1]: values = rows · scale, to within 1/16 of each value's size."""
    largest = values.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12)
    scale = largest / _LARGEST
    return (values.float() / scale).to(_E4M3), scale


def use_float8_weights(decoder: nn.Module, device: torch.device) -> None:
    """Replace every linear layer of the decoder's layers. Raises UserError where float8 matmuls do not exist."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            f"target.weights = 'float8' on {device}: float8 matmuls need an NVIDIA GPU of compute capability 8.9 or "
            "later",
            "set target.weights = 'full'",
        )
    for parent in list(decoder.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.in_features % 16 == 0 and child.out_features % 16 == 0:
                parent.set_submodule(name, Float8Linear(child))
