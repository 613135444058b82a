"""Linear layers that share an input, done as one product where their weights lie one behind the other in memory.

The parameters stay apart, under their checkpoint names; once the optimiser has laid all of them into one flat buffer,
q, k and v (and gate and up) are neighbours there, and a view over them is the joined weight. So nothing is copied, the
product is wider, and the gradient of the input needs no sum of parts.

Letters: M rows, K inputs, N outputs of all together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.drafter import float8


class Projection(nn.Linear):
    """A linear layer without bias whose products run in the parameters' dtype or in float8."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.float8 = False

    def forward(self, input: Tensor) -> Tensor:
        return _rows(float8.linear, input, self.weight) if self.float8 else functional.linear(input, self.weight)


class _Joined(torch.autograd.Function):
    """x [M, K] times `whole` [N, K] transposed; gradients go to the parameters that `whole` is a view of."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, whole_NK: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x_MK, whole_NK)
        ctx.sizes = [len(weight) for weight in weights]
        return x_MK @ whole_NK.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, whole_NK = ctx.saved_tensors
        return grads[0] @ whole_NK, None, *(grads[0].t() @ x_MK).split(ctx.sizes)


class _JoinedFloat8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, whole_NK: Tensor, *weights: Tensor) -> Tensor:
        y_MN, saved = float8.forward(x_MK, whole_NK)
        ctx.save_for_backward(*saved)
        ctx.dtype = x_MK.dtype
        ctx.sizes = [len(weight) for weight in weights]
        return y_MN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_whole = float8.backward(ctx.saved_tensors, grads[0], ctx.dtype)
        return grad_x, None, *grad_whole.split(ctx.sizes)


def joined(x: Tensor, projections: Sequence[Projection], whole_NK: Tensor | None) -> Sequence[Tensor]:
    """Each projection of x [..., K]; as one product when `whole_NK`, from `neighbours`, is given."""
    if whole_NK is None:
        return [projection(x) for projection in projections]
    body = _JoinedFloat8 if projections[0].float8 else _Joined
    weights = [projection.weight for projection in projections]
    return _rows(body.apply, x, whole_NK, *weights).split([len(weight) for weight in weights], dim=-1)


def _rows(product: Any, x: Tensor, *rest: Tensor) -> Tensor:
    """Apply a product of matrices over any leading axes."""
    return product(x.flatten(0, -2), *rest).unflatten(0, x.shape[:-1])


def neighbours(projections: Sequence[Projection]) -> Tensor | None:
    """One weight over all of them, if theirs follow each other in one buffer without a gap."""
    weights = [projection.weight.detach() for projection in projections]
    place, storage = weights[0].data_ptr(), weights[0].untyped_storage().data_ptr()
    for weight in weights:
        if weight.data_ptr() != place or weight.untyped_storage().data_ptr() != storage:
            return None
        place += weight.nbytes
    rows = sum(len(weight) for weight in weights)
    return weights[0].as_strided((rows, weights[0].shape[1]), weights[0].stride())
