"""Cross-entropy through the target's frozen head, in one sweep that never holds the logits of more than a chunk.

The head takes no gradient, so the loss, which slots are right and d(hidden) all come from one look at a chunk's logits:
softmax statistics and loss, d(logits) written over the logits, d(hidden) = d(logits) · W. The backward finds d(hidden)
ready; nothing else is kept.

Letters: N rows (slots of blocks), C rows of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.batches import FrozenEnds

Reweigh = Callable[[Tensor, Tensor], Tensor]
"""(losses [C], given weights [C]) -> weights [C], detached: weights that depend on the model's own confidence."""

_CHUNK_BYTES = {"cuda": 640 << 20, "cpu": 24 << 20}
"""Logits held at once: large enough for matmuls at full speed, small enough not to matter (or to stay in cache)."""


@dataclass(frozen=True)
class HeadResult:
    loss: Tensor
    """Scalar, the weighted sum of the rows' cross-entropies; differentiable with respect to the hidden states."""
    correct_N: Tensor
    """bool [N], the row's argmax over the vocabulary is its label."""
    losses_N: Tensor
    """float32 [N], unweighted, detached."""


@dataclass(frozen=True)
class Sweep:
    """What a chunk's pass over its logits needs besides the logits."""

    ends: FrozenEnds
    reweigh: Reweigh | None
    gradient: bool


def frozen_head_loss(
    hidden_NH: Tensor,
    ends: FrozenEnds,
    labels_N: Tensor,
    weights_N: Tensor,
    *,
    chunk: int = 0,
    reweigh: Reweigh | None = None,
) -> HeadResult:
    """Sum over rows of weight · cross-entropy(head(hidden), label), with logits kept for `chunk` rows at a time.

    hidden [N, H] in the head's dtype, labels int64 [N], weights float32 [N]. chunk 0 chooses. With `reweigh`, the
    chunk must be a multiple of the group of rows that it looks at together.
    """
    rows = chunk or chunk_rows(len(hidden_NH), ends.head_VH, 1)
    sweep = Sweep(ends, reweigh, torch.is_grad_enabled() and hidden_NH.requires_grad)
    loss, correct_N, losses_N = _FrozenHead.apply(hidden_NH, labels_N, weights_N, rows, sweep)  # type: ignore[misc]
    return HeadResult(loss, correct_N, losses_N)


def chunk_rows(rows: int, head_VH: Tensor, group: int) -> int:
    """Rows of a chunk: a multiple of `group`, and on CUDA of 1,024 where those fit, so that matmul tiles fill waves."""
    limit = _CHUNK_BYTES["cuda" if head_VH.is_cuda else "cpu"] // (head_VH.shape[0] * head_VH.element_size())
    unit = 1024 * group if head_VH.is_cuda and limit >= 1024 * group else group
    return max(1, min(rows, max(limit, unit) // unit * unit))


def argmax_matches(hidden_NH: Tensor, ends: FrozenEnds, labels_N: Tensor, chunk: int = 0) -> Tensor:
    """bool [N]: the head's argmax is the label. No gradient; logits of a chunk at a time.

    A logit scale and a soft cap are monotonic (the scale is positive), so the plain logits decide.
    """
    rows = chunk or chunk_rows(len(hidden_NH), ends.head_VH, 1)
    parts = [_logits(part, ends).argmax(dim=1) for part in hidden_NH.detach().split(rows)]
    return torch.cat(parts) == labels_N if parts else labels_N.bool()


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, labels_N: Tensor, weights_N: Tensor, chunk: int, sweep: Sweep
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = hidden_NH.device
        losses_N = torch.zeros(len(hidden_NH), dtype=_wide(hidden_NH), device=device)
        correct_N = torch.zeros(len(hidden_NH), dtype=torch.bool, device=device)
        used_N = weights_N.to(losses_N.dtype)
        if sweep.reweigh is not None:
            used_N = used_N.clone()
        gradient_NH = torch.empty_like(hidden_NH) if sweep.gradient else None
        for start in range(0, len(hidden_NH), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden_NH[part], sweep.ends)
            _sweep(logits, labels_N[part], used_N[part], losses_N[part], correct_N[part], sweep)
            if gradient_NH is not None:
                torch.mm(logits, sweep.ends.head_VH, out=gradient_NH[part])
        if gradient_NH is not None:
            ctx.save_for_backward(gradient_NH)
        ctx.mark_non_differentiable(correct_N, losses_N)
        return (losses_N * used_N).sum(), correct_N, losses_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None, None]:
        (gradient_NH,) = ctx.saved_tensors
        return gradient_NH * grads[0].to(gradient_NH.dtype), None, None, None, None


def _logits(hidden_CH: Tensor, ends: FrozenEnds) -> Tensor:
    """Without scale and cap, which the sweep applies."""
    return torch.nn.functional.linear(hidden_CH, ends.head_VH, ends.head_bias_V)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _sweep(
    logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, losses_C: Tensor, correct_C: Tensor, sweep: Sweep
) -> None:
    """Fill losses and correct, bring weights up to date, and turn the logits into d(loss)/d(logits) in place."""
    body = importlib.import_module("paceline.drafter.kernels").sweep if logits_CV.is_cuda else _plain_sweep
    body(logits_CV, labels_C, weights_C, losses_C, correct_C, sweep)


def _plain_sweep(
    logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor, losses_C: Tensor, correct_C: Tensor, sweep: Sweep
) -> None:
    ends = sweep.ends
    z = logits_CV.to(losses_C.dtype)  # the same storage in float32 and float64
    correct_C.copy_(z.argmax(dim=1) == labels_C)
    if ends.logit_scale != 1.0:
        z.mul_(ends.logit_scale)
    slope = None
    if ends.logit_softcap:
        z.div_(ends.logit_softcap).tanh_()
        slope = 1 - z.square()
        z.mul_(ends.logit_softcap)
    total_C = z.logsumexp(dim=1)
    losses_C.copy_(total_C - z.gather(1, labels_C[:, None])[:, 0])
    if sweep.reweigh is not None:
        weights_C.copy_(sweep.reweigh(losses_C, weights_C))
    if not sweep.gradient:
        return
    # weight · softmax in two passes over the chunk; then the label's own -weight.
    z.sub_((total_C - weights_C.log())[:, None]).exp_()
    z.scatter_add_(1, labels_C[:, None], -weights_C[:, None])
    if slope is not None:
        z.mul_(slope)
    if ends.logit_scale != 1.0:
        z.mul_(ends.logit_scale)
    if z.data_ptr() != logits_CV.data_ptr():
        logits_CV.copy_(z)
