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
from paceline.drafter.float8 import Float8Head

Reweigh = Callable[[Tensor, Tensor], Tensor]
"""(losses [C], given weights [C]) -> weights [C], detached: weights that depend on the model's own confidence."""

_CHUNK_BYTES = {"cuda": 960 << 20, "cpu": 24 << 20}
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
class Rows:
    """What is read of rows, and written for them."""

    labels: Tensor
    weights: Tensor
    """Written only by a sweep that reweighs."""
    losses: Tensor
    correct: Tensor

    def part(self, start: int, stop: int) -> Rows:
        return Rows(*(x[start:stop] for x in (self.labels, self.weights, self.losses, self.correct)))


@dataclass(frozen=True)
class Sweep:
    """What a chunk's pass over its logits needs besides the logits."""

    ends: FrozenEnds
    reweigh: Reweigh | None
    gradient: bool
    float8: Float8Head | None = None


Body = Callable[[Rows, Tensor, Tensor, Sweep], None]
"""(rows, logits [C, V], where d(logits) goes [C, V], sweep): fill losses and correct, bring weights up to date, write
d(loss)/d(logits): over the logits themselves, or in units of `float8.UNIT_GRADIENT` without the weight in float8."""


def frozen_head_loss(
    hidden_NH: Tensor,
    ends: FrozenEnds,
    labels_N: Tensor,
    weights_N: Tensor,
    *,
    chunk: int = 0,
    reweigh: Reweigh | None = None,
    float8: Float8Head | None = None,
) -> HeadResult:
    """Sum over rows of weight · cross-entropy(head(hidden), label), with logits kept for `chunk` rows at a time.

    hidden [N, H] in the head's dtype, labels int64 [N], weights float32 [N]. chunk 0 chooses. With `reweigh`, the
    chunk must be a multiple of the group of rows that it looks at together. `float8` does both products in float8.
    """
    rows = chunk or chunk_rows(len(hidden_NH), ends.head_VH, 1)
    sweep = Sweep(ends, reweigh, torch.is_grad_enabled() and hidden_NH.requires_grad, float8)
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
        wide = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        count, device = len(hidden_NH), hidden_NH.device
        rows = Rows(
            labels_N,
            weights_N.to(wide, copy=sweep.reweigh is not None),
            losses=torch.zeros(count, dtype=wide, device=device),
            correct=torch.zeros(count, dtype=torch.bool, device=device),
        )
        gradient_NH = torch.empty_like(hidden_NH) if sweep.gradient else None
        for start in range(0, count, chunk):
            part = rows.part(start, start + chunk)
            given = None if gradient_NH is None else gradient_NH[start : start + chunk]
            _chunk(hidden_NH[start : start + chunk], part, given, sweep)
        if gradient_NH is not None:
            ctx.save_for_backward(gradient_NH)
        ctx.mark_non_differentiable(rows.correct, rows.losses)
        return (rows.losses * rows.weights).sum(), rows.correct, rows.losses

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None, None]:
        (gradient_NH,) = ctx.saved_tensors
        return gradient_NH * grads[0].to(gradient_NH.dtype), None, None, None, None


def _chunk(hidden_CH: Tensor, rows: Rows, gradient_CH: Tensor | None, sweep: Sweep) -> None:
    body: Body = importlib.import_module("paceline.drafter.kernels").sweep if hidden_CH.is_cuda else plain_sweep
    if sweep.float8 is not None:
        logits_CV = sweep.float8.logits(hidden_CH)
        gradient_CV = torch.empty_like(logits_CV, dtype=sweep.float8.gradient_dtype) if sweep.gradient else logits_CV
        body(rows, logits_CV, gradient_CV, sweep)
        if gradient_CH is not None:
            gradient_CH.copy_(sweep.float8.gradient(gradient_CV, rows.weights))
        return
    logits_CV = _logits(hidden_CH, sweep.ends)
    body(rows, logits_CV, logits_CV, sweep)
    if gradient_CH is not None:
        torch.mm(logits_CV, sweep.ends.head_VH, out=gradient_CH)


def _logits(hidden_CH: Tensor, ends: FrozenEnds) -> Tensor:
    """Without scale and cap, which the sweep applies."""
    return torch.nn.functional.linear(hidden_CH, ends.head_VH, ends.head_bias_V)


def plain_sweep(rows: Rows, logits_CV: Tensor, gradient_CV: Tensor, sweep: Sweep) -> None:
    """The `Body` in torch operations: the CPU's, and the kernel's oracle. Gradients go where the logits are."""
    ends = sweep.ends
    z = logits_CV.to(rows.losses.dtype)  # the same storage in float32 and float64
    rows.correct.copy_(z.argmax(dim=1) == rows.labels)
    if ends.logit_scale != 1.0:
        z.mul_(ends.logit_scale)
    slope = None
    if ends.logit_softcap:
        z.div_(ends.logit_softcap).tanh_()
        slope = 1 - z.square()
        z.mul_(ends.logit_softcap)
    total_C = z.logsumexp(dim=1)
    rows.losses.copy_(total_C - z.gather(1, rows.labels[:, None])[:, 0])
    if sweep.reweigh is not None:
        rows.weights.copy_(sweep.reweigh(rows.losses, rows.weights))
    if not sweep.gradient:
        return
    # weight · softmax in two passes over the chunk; then the label's own -weight.
    z.sub_((total_C - rows.weights.log())[:, None]).exp_()
    z.scatter_add_(1, rows.labels[:, None], -rows.weights[:, None])
    if slope is not None:
        z.mul_(slope)
    if ends.logit_scale != 1.0:
        z.mul_(ends.logit_scale)
    if z.data_ptr() != gradient_CV.data_ptr():
        gradient_CV.copy_(z)
