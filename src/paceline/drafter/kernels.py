# pyright: reportMissingImports=false, reportIndexIssue=false
"""The loss's pass over a chunk of logits, in Triton: imported on CUDA only.

Device memory is read and written once (a row's second look at its logits comes from cache). Its oracle in plain torch
is `loss.plain_sweep`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.drafter.float8 import UNIT_GRADIENT

if TYPE_CHECKING:
    from paceline.drafter.loss import Rows, Sweep

_COLUMNS = 2048


def sweep(rows: Rows, logits_CV: Tensor, gradient_CV: Tensor, sweep: Sweep) -> None:
    """See `loss.Body`. Without `reweigh` one launch does all; a row's second look at its logits comes from cache."""
    labels_C, weights_C, losses_C, correct_C = rows.labels, rows.weights, rows.losses, rows.correct
    totals_C = torch.empty_like(losses_C)
    unit = gradient_CV.element_size() == 1

    def launch(statistics: bool, gradient: bool) -> None:
        _sweep_kernel[(len(logits_CV),)](
            logits_CV,
            gradient_CV,
            labels_C,
            weights_C,
            losses_C,
            correct_C,
            totals_C,
            logits_CV.stride(0),
            logits_CV.shape[1],
            float(sweep.ends.logit_scale),
            float(sweep.ends.logit_softcap or 1.0),
            CAPPED=bool(sweep.ends.logit_softcap),
            STATISTICS=statistics,
            GRADIENT=gradient,
            UNIT=UNIT_GRADIENT if unit else 0.0,
            COLUMNS=_COLUMNS,
            num_warps=8,
        )

    if sweep.reweigh is None:
        launch(statistics=True, gradient=sweep.gradient)
        return
    launch(statistics=True, gradient=False)
    weights_C.copy_(sweep.reweigh(losses_C, weights_C))
    if sweep.gradient:
        launch(statistics=False, gradient=True)


_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _bits(logits, at, vocabulary, scale, cap, CAPPED: tl.constexpr):
    """Scaled and capped logits in units of log 2 (exp2 is what the hardware has); -inf beyond the vocabulary."""
    inside = at < vocabulary
    z = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32) * (scale * _LOG2_E)
    if CAPPED:
        top = cap * _LOG2_E
        z = top * (2.0 * tl.sigmoid(2.0 * z / top) - 1.0)
    return tl.where(inside, z, float("-inf"))


@triton.jit
def _beats(z, aimed, at, label):
    """Whether these logits win over the label's; as in argmax, the first of equals wins."""
    return ((z > aimed) | ((z == aimed) & (at < label))).to(tl.int32)


@triton.jit
def _sweep_kernel(  # noqa: PLR0913, PLR0917
    logits,
    gradients,
    labels,
    weights,
    losses,
    correct,
    totals,
    stride,
    vocabulary,
    scale,
    cap,
    CAPPED: tl.constexpr,
    STATISTICS: tl.constexpr,
    GRADIENT: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    gradients += row * stride
    label = tl.load(labels + row).to(tl.int32)
    columns = tl.arange(0, COLUMNS)
    if STATISTICS:
        aimed = tl.max(_bits(logits, label + tl.arange(0, 1), vocabulary, scale, cap, CAPPED), axis=0)
        # Kept per lane and joined once at the end: no reduction across the row inside the loop.
        highest = tl.full((COLUMNS,), -1e30, tl.float32)
        mass = tl.zeros((COLUMNS,), tl.float32)
        beaten = tl.zeros((COLUMNS,), tl.int32)
        for start in range(0, vocabulary, 2 * COLUMNS):
            at = start + columns
            first = _bits(logits, at, vocabulary, scale, cap, CAPPED)
            second = _bits(logits, at + COLUMNS, vocabulary, scale, cap, CAPPED)
            higher = tl.maximum(highest, tl.maximum(first, second))
            mass = mass * tl.exp2(highest - higher) + tl.exp2(first - higher) + tl.exp2(second - higher)
            highest = higher
            beaten |= _beats(first, aimed, at, label) | _beats(second, aimed, at + COLUMNS, label)
        top = tl.max(highest, axis=0)
        total = top + tl.log2(tl.sum(mass * tl.exp2(highest - top), axis=0))
        tl.store(losses + row, (total - aimed) / _LOG2_E)
        tl.store(totals + row, total)
        tl.store(correct + row, tl.max(beaten, axis=0) == 0)
    else:
        total = tl.load(totals + row)
    if GRADIENT:
        factor = UNIT if UNIT > 0 else tl.load(weights + row)
        for start in range(0, vocabulary, COLUMNS):
            at = start + columns
            z = _bits(logits, at, vocabulary, scale, cap, CAPPED)
            d = factor * (tl.exp2(z - total) - (at == label).to(tl.float32))
            if CAPPED:
                share = z / (cap * _LOG2_E)
                d *= 1.0 - share * share
            tl.store(gradients + at, (d * scale).to(gradients.dtype.element_ty), mask=at < vocabulary)
