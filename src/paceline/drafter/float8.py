"""Products in float8: e4m3 for values and weights, e5m2 for gradients. Hopper and later.

Layers scale a whole tensor by its own largest entry, taken anew each time, so there is no state to keep or to restore.
The frozen head is quantised once, row by row in each of its two layouts; its gradient's rows are scaled by their label
weights, which bound them. Masters, weight gradients and everything between the products stay as they are.

Letters: M rows, N outputs, K inputs; C rows of a chunk, V vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.batches import FrozenEnds
from paceline.errors import UserError

VALUES = torch.float8_e4m3fn
GRADIENTS = torch.float8_e5m2

UNIT_GRADIENT = 32_768.0
"""What 1 becomes in the head's float8 gradient: a row's label weight is left out of it, and in the row's scale."""


def cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale in float8 and the float32 scale, a scalar: the largest entry becomes the dtype's largest number."""
    return _divided(x, x.abs().amax().float(), dtype)


def cast_rows(x_MK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same with a scale for each row, [M, 1]."""
    return _divided(x_MK, x_MK.abs().amax(dim=1, keepdim=True).float(), dtype)


def _divided(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = torch.finfo(dtype).max
    scale = largest.clamp(min=1e-12) / limit
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


class _Linear(torch.autograd.Function):
    """All three products of a linear layer in float8."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        x8, x_scale = cast(x_MK, VALUES)
        weight8, weight_scale = cast(weight_NK, VALUES)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        ctx.dtype = x_MK.dtype
        return _product(x8, x_scale, weight8, weight_scale, x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        grad8, grad_scale = cast(grads[0], GRADIENTS)
        grad_x = _product(grad8, grad_scale, weight8.t().contiguous(), weight_scale, ctx.dtype)
        grad_weight = _product(grad8.t().contiguous(), grad_scale, x8.t().contiguous(), x_scale, ctx.dtype)
        return grad_x, grad_weight


class Projection(nn.Linear):
    """A linear layer without bias whose products run in the parameters' dtype or in float8."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.float8 = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.float8:
            return functional.linear(input, self.weight)
        product = _Linear.apply(input.flatten(0, -2), self.weight)
        return product.unflatten(0, input.shape[:-1])  # type: ignore[union-attr]


def _product(a8: Tensor, a_scale: Tensor, b8: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a [M, K] times b [N, K] transposed, both laid out by rows."""
    return torch.ops.aten._scaled_mm(a8, b8.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype)


class Float8Head:
    """The frozen head in both layouts that its two products read."""

    gradient_dtype = GRADIENTS

    def __init__(self, ends: FrozenEnds) -> None:
        """Raises UserError where float8 products do not exist, or not for this head."""
        _check(ends)
        self._by_token, token_scale = cast_rows(ends.head_VH, VALUES)
        self._by_channel, channel_scale = cast_rows(ends.head_VH.t().contiguous(), VALUES)
        self._token_scale, self._channel_scale = token_scale.t().contiguous(), channel_scale.t().contiguous()

    def logits(self, hidden_CH: Tensor) -> Tensor:
        hidden8, scale = cast_rows(hidden_CH, VALUES)
        return _product(hidden8, scale, self._by_token, self._token_scale, hidden_CH.dtype)

    def gradient(self, gradient_CV: Tensor, weights_C: Tensor) -> Tensor:
        """d(hidden) from a float8 d(logits) in units of `UNIT_GRADIENT` that lacks the rows' weights."""
        scale = (weights_C.float() / UNIT_GRADIENT)[:, None]
        return _product(gradient_CV, scale, self._by_channel, self._channel_scale, torch.bfloat16)


def _check(ends: FrozenEnds) -> None:
    device = ends.head_VH.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            f"training.matmul = 'float8' on {device}, which has no float8 matrix units",
            "use training.matmul = 'same', or a GPU of compute capability 8.9 or later",
        )
    if ends.head_bias_V is not None or any(size % 16 for size in ends.head_VH.shape):
        raise UserError(
            f"training.matmul = 'float8' with a head of {list(ends.head_VH.shape)}"
            + (" and a bias" if ends.head_bias_V is not None else ""),
            "float8 products need sizes that are multiples of 16 and no bias: use training.matmul = 'same'",
        )
