# pyright: reportMissingImports=false, reportIndexIssue=false
"""The optimiser's pass over one parameter, in Triton: imported on CUDA only. Its oracle is `optimizer._plain_adamw`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from paceline.training.optimizer import AdamW

_ELEMENTS = 1024


def adamw(
    parameter: Tensor, gradient: Tensor, states: list[Tensor], facts: tuple[Tensor, Tensor, Tensor], numbers: AdamW
) -> None:
    """See `optimizer._plain_adamw`."""
    master, moment1, moment2 = states
    scale, good, applied = facts
    size = parameter.numel()
    _adamw_kernel[(triton.cdiv(size, _ELEMENTS),)](
        parameter,
        gradient.contiguous(),
        master,
        moment1,
        moment2,
        scale,
        good,
        applied,
        size,
        numbers.rate,
        numbers.decay,
        numbers.beta1,
        numbers.beta2,
        numbers.epsilon,
        COPY=parameter.data_ptr() != master.data_ptr(),
        ELEMENTS=_ELEMENTS,
    )


@triton.jit
def _adamw_kernel(  # noqa: PLR0913, PLR0917
    parameter,
    gradient,
    master,
    moment1,
    moment2,
    scale,
    good,
    applied,
    size,
    rate,
    decay,
    beta1,
    beta2,
    epsilon,
    COPY: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    if tl.load(good):
        at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
        inside = at < size
        steps = tl.load(applied)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
        m = tl.load(moment1 + at, mask=inside, other=0.0)
        v = tl.load(moment2 + at, mask=inside, other=0.0)
        w = tl.load(master + at, mask=inside, other=0.0)
        m += (1.0 - beta1) * (g - m)
        v = beta2 * v + (1.0 - beta2) * g * g
        correction1 = 1.0 - tl.exp(steps * tl.log(beta1))
        correction2 = 1.0 - tl.exp(steps * tl.log(beta2))
        w *= 1.0 - rate * decay
        w -= rate / correction1 * m / (tl.sqrt(v) / tl.sqrt(correction2) + epsilon)
        tl.store(moment1 + at, m, mask=inside)
        tl.store(moment2 + at, v, mask=inside)
        tl.store(master + at, w, mask=inside)
        if COPY:
            tl.store(parameter + at, w.to(parameter.dtype.element_ty), mask=inside)
