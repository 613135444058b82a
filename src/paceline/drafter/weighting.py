"""Slot weights that follow the model's own confidence: D-PACE (arXiv 2605.18810).

The chance that a block is accepted up to slot m is about the product of the drafter's confidences q_i in the tokens of
slots 1..m, so the expected accepted length is the sum of these products over m; the weight of slot j's log-probability
in its gradient is the part of the sum that contains q_j:

    q_i = exp(-CE_i),  q~_i = (1 - alpha) q_i + alpha  (eq. 7)
    w_j = sum over m >= j of prod over i <= m of q~_i  (eq. 8)

detached, times the plain cross-entropy (eq. 9). Slots beyond a block's last label take no part: neither a weight of
their own nor a term of the sum. The paper's loss is a mean over blocks, so the denominator is the number of blocks that
have a label.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.drafter.loss import Reweigh

ALPHA = 0.5
"""The paper's smoothing: stable from 0.3 to 0.7, it says."""


def dpace(slots: int, alpha: float = ALPHA) -> Reweigh:
    """Weights for rows that are whole blocks of `slots` = B - 1 predicted slots, in order."""

    def reweigh(losses_C: Tensor, given_C: Tensor) -> Tensor:
        counts_AJ = (given_C > 0).unflatten(0, (-1, slots))
        confidence_AJ = (1 - alpha) * torch.exp(-losses_C.unflatten(0, (-1, slots))) + alpha
        # Labels of a block are a prefix of its slots, so products up to the last label never meet a slot without one.
        reach_AJ = confidence_AJ.cumprod(dim=1) * counts_AJ
        return (reach_AJ.flip(1).cumsum(dim=1).flip(1) * counts_AJ).flatten()

    return reweigh


def blocks_with_labels(weights_AB: Tensor) -> Tensor:
    """Scalar float32: D-PACE's denominator."""
    return (weights_AB > 0).any(dim=1).sum().float()
