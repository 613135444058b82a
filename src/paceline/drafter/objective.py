"""One batch in, sums out: the drafter, its target's frozen ends, the mask and the loss, put together.

Letters: S context tokens, A anchors, B block size, J = B - 1 predicted slots, Q = A·B, N = A·J, F = K·H, H hidden,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from paceline.batches import BatchShape, FeatureBatch, FrozenEnds, TokenBatch
from paceline.config import TrainingConfig
from paceline.drafter import weighting
from paceline.drafter.blocks import TILE, BlockMaskWriter, GroupedAttend, dense_attend, dense_mask, flex_attend
from paceline.drafter.float8 import Float8Head
from paceline.drafter.loss import HeadResult, argmax_matches, chunk_rows, frozen_head_loss
from paceline.drafter.model import Attend, Drafter

_ROWS = 16
"""A float8 product's inner side is a multiple of this; the rows are the inner side of the weights' gradients."""


@dataclass(frozen=True)
class Sums:
    """What a batch adds to a global batch: nothing is divided yet."""

    loss: Tensor
    """Scalar: sum over slots of weight · cross-entropy; call `backward` on it."""
    weight: Tensor
    """Scalar float32: what the whole global batch's loss and gradient are divided by, once summed."""
    correct_B: Tensor
    """float32 [B]: per slot, how many labels were the draft's argmax."""
    count_B: Tensor
    """float32 [B]: per slot, how many labels there were."""


class Objective:
    """The training step's mathematics, for batches of one shape.

    `vocabulary_ids` (int64 [V'], ascending) restricts the loss to a part of the vocabulary: an exact softmax over it,
    for small machines, where the frozen head is most of the work. Labels outside it count for nothing. `accepts` always
    uses the whole head.
    """

    def __init__(
        self,
        drafter: Drafter,
        ends: FrozenEnds,
        shape: BatchShape,
        config: TrainingConfig,
        attention: Literal["flex", "dense"],
        *,
        vocabulary_ids: Tensor | None = None,
        flex_options: dict[str, Any] | None = None,
    ) -> None:
        self.drafter = drafter
        self.ends = ends
        self.shape = shape
        self.config = config
        device = ends.embedding_VH.device
        self._loss_ends, self._renumber_V = _restrict(ends, vocabulary_ids)
        self._mask_id = torch.tensor([drafter.shape.mask_token_id], device=device)
        self._offsets_B = torch.arange(shape.block_size, device=device)
        self._flex_options = flex_options
        self._float8_head = Float8Head(self._loss_ends) if config.matmul == "float8" else None
        self._padding = _padding(shape) if attention == "flex" else (0, 0)
        self._writer = self._make_writer(device) if attention == "flex" else None
        self._compiled = False
        drafter.recompute(config.recompute)
        drafter.float8(config.matmul == "float8")

    def compile(self, **options: Any) -> None:
        """Compile the drafter's parts; layers share their graphs."""
        self.drafter.compile_parts(**options)
        self._compiled = True

    def sums(self, batch: FeatureBatch) -> Sums:
        """Loss and counts of one batch; gradients flow to the drafter's parameters."""
        labels_AB, weights_AB = self._targets(batch.tokens)
        result, rows_N = self._loss(self.hidden(batch), labels_AB[:, 1:], weights_AB[:, 1:])
        counted_AJ = weights_AB[:, 1:] > 0
        correct_AJ = _all_rows(result.correct_N, rows_N, counted_AJ.numel()).view_as(counted_AJ) & counted_AJ
        dynamic = self.config.weighting == "dpace"
        return Sums(
            loss=result.loss,
            weight=weighting.blocks_with_labels(weights_AB) if dynamic else weights_AB.sum(),
            correct_B=functional.pad(correct_AJ.sum(dim=0, dtype=torch.float32), (1, 0)),
            count_B=functional.pad(counted_AJ.sum(dim=0, dtype=torch.float32), (1, 0)),
        )

    @torch.no_grad()
    def accepts(self, batch: FeatureBatch, *, prefix_only: bool = False) -> Tensor:
        """bool [A, B]: the slot has a label and the draft's argmax over the whole vocabulary is that label.

        With `prefix_only` a slot after a block's first miss is False without being looked at: all that an acceptance
        length needs, for a fraction of the head's work. It asks the host how many blocks are left, so it is for CPU.
        """
        hidden_AJH = self.looked_at(batch)
        labels_AJ, counted_AJ = batch.tokens.labels_AB[:, 1:], batch.tokens.weights_AB[:, 1:] > 0
        if prefix_only:
            return functional.pad(self._prefixes(hidden_AJH, labels_AJ, counted_AJ), (1, 0))
        rows_N = _host_rows(counted_AJ)
        hidden_NH, labels_N = _flat(hidden_AJH, rows_N), _flat(labels_AJ, rows_N)
        chunk = chunk_rows(len(hidden_NH), self.ends.head_VH, 1)
        matches_N = argmax_matches(hidden_NH, self.ends, labels_N, chunk)
        matches_AJ = _all_rows(matches_N, rows_N, counted_AJ.numel()).view_as(counted_AJ)
        return functional.pad(matches_AJ & counted_AJ, (1, 0))

    def looked_at(self, batch: FeatureBatch) -> Tensor:
        """`hidden` without gradients. Compiled, it runs training's own graphs, or others would be compiled for it."""
        with torch.set_grad_enabled(self._compiled):
            return self.hidden(batch).detach().to(self.ends.head_VH.dtype)

    def hidden(self, batch: FeatureBatch) -> Tensor:
        """The drafter's final-normed states of every predicted slot, [A, J, H]."""
        tokens = batch.tokens
        pad_tokens, pad_anchors = self._padding
        anchors_A = functional.pad(tokens.anchors_A, (0, pad_anchors))
        positions_S = functional.pad(tokens.positions_S, (0, pad_tokens))
        features_SF = functional.pad(batch.features_SF, (0, 0, 0, pad_tokens)).to(self.drafter.dtype)
        positions_Q = (positions_S[anchors_A][:, None] + self._offsets_B).flatten()
        masks = self._mask_id.expand(_ROWS - len(anchors_A) % _ROWS)
        embedded_UH = self.ends.embed(torch.cat((tokens.ids_S[anchors_A], masks))).to(self.drafter.dtype)
        context = self.drafter.context_kv(features_SF[None], positions_S[None])
        attend, size = self.attend(tokens), self.shape.block_size
        return self.drafter.slots(embedded_UH[None], positions_Q[None], context, attend, size)[0, : self.shape.anchors]

    def lengths(self) -> tuple[int, int]:
        """Block tokens Q and context tokens S that `attend` is for, padding included."""
        pad_tokens, pad_anchors = self._padding
        return (self.shape.anchors + pad_anchors) * self.shape.block_size, self.shape.tokens + pad_tokens

    def attend(self, tokens: TokenBatch) -> Attend:
        """The attention of a batch, under its mask."""
        pad = (0, self._padding[1])
        return self._attend(functional.pad(tokens.starts_A, pad), functional.pad(tokens.anchors_A, pad))

    def _attend(self, starts_A: Tensor, anchors_A: Tensor) -> Attend:
        if self._writer is not None:
            return flex_attend(self._writer.write(starts_A, anchors_A), self._flex_options)
        # Documents taken apart have other shapes in each batch, which compiled code would be compiled anew for.
        if starts_A.is_cuda or self._compiled:
            return dense_attend(dense_mask(starts_A, anchors_A, self.shape.tokens, self.shape.block_size))
        return GroupedAttend(starts_A, anchors_A, self.shape.tokens, self.shape.block_size)

    def _targets(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Labels and weights [A, B], in the numbering of the loss's vocabulary."""
        if self._renumber_V is None:
            return tokens.labels_AB, tokens.weights_AB
        labels_AB = self._renumber_V[tokens.labels_AB]
        return labels_AB.clamp(min=0), tokens.weights_AB * (labels_AB >= 0)

    def _loss(self, hidden_AJH: Tensor, labels_AJ: Tensor, weights_AJ: Tensor) -> tuple[HeadResult, Tensor | None]:
        """On CPU rows without weight are left out; on CUDA shapes are fixed."""
        dynamic = self.config.weighting == "dpace"
        slots = self.shape.block_size - 1
        rows_N = None if dynamic else _host_rows(weights_AJ)
        # A drafter may compute in another dtype than its target, whose head this is.
        hidden_NH = _flat(hidden_AJH, rows_N).to(self._loss_ends.head_VH.dtype)
        chunk = self.config.head_chunk or chunk_rows(len(hidden_NH), self._loss_ends.head_VH, slots if dynamic else 1)
        result = frozen_head_loss(
            hidden_NH,
            self._loss_ends,
            _flat(labels_AJ, rows_N),
            _flat(weights_AJ, rows_N),
            chunk=-(-chunk // slots) * slots if dynamic else chunk,
            reweigh=weighting.dpace(slots) if dynamic else None,
            float8=self._float8_head,
        )
        return result, rows_N

    def _prefixes(self, hidden_AJH: Tensor, labels_AJ: Tensor, counted_AJ: Tensor) -> Tensor:
        accepted_AJ = torch.zeros_like(counted_AJ)
        alive = counted_AJ[:, 0].nonzero()[:, 0]
        for slot in range(self.shape.block_size - 1):
            hit = argmax_matches(hidden_AJH[alive, slot], self.ends, labels_AJ[alive, slot])
            alive = alive[hit & counted_AJ[alive, slot]]
            accepted_AJ[alive, slot] = True
        return accepted_AJ

    def _make_writer(self, device: torch.device) -> BlockMaskWriter:
        pad_tokens, pad_anchors = self._padding
        shape = self.shape
        return BlockMaskWriter(shape.tokens + pad_tokens, shape.anchors + pad_anchors, shape.block_size, device)


def _padding(shape: BatchShape) -> tuple[int, int]:
    """Tokens and anchors to add so that context and block tokens are whole tiles, and the slots whole float8 rows."""
    anchors = -(-shape.anchors // _ROWS) * _ROWS
    while anchors * shape.block_size % TILE:
        anchors += _ROWS
    return -shape.tokens % TILE, anchors - shape.anchors


def _restrict(ends: FrozenEnds, vocabulary_ids: Tensor | None) -> tuple[FrozenEnds, Tensor | None]:
    """Ends whose head has the given rows, and a table from full ids to theirs (-1 where absent)."""
    if vocabulary_ids is None:
        return ends, None
    table_V = torch.full((len(ends.head_VH),), -1, dtype=torch.int64, device=ends.head_VH.device)
    table_V[vocabulary_ids] = torch.arange(len(vocabulary_ids), device=table_V.device)
    bias = None if ends.head_bias_V is None else ends.head_bias_V[vocabulary_ids]
    return dataclasses.replace(ends, head_VH=ends.head_VH[vocabulary_ids].contiguous(), head_bias_V=bias), table_V


def _host_rows(counted_AJ: Tensor) -> Tensor | None:
    """Indices of the rows that count, where asking for them costs no device synchronisation."""
    return None if counted_AJ.is_cuda else (counted_AJ.reshape(-1) > 0).nonzero()[:, 0]


def _flat(x_AJ: Tensor, rows_N: Tensor | None) -> Tensor:
    """[A, J, …] as [N, …], or the given rows of it."""
    flat = x_AJ.flatten(0, 1)
    return flat if rows_N is None else flat[rows_N]


def _all_rows(values_n: Tensor, rows_n: Tensor | None, size: int) -> Tensor:
    """Back to all N rows; those left out are False."""
    return values_n if rows_n is None else torch.zeros(size, dtype=torch.bool).scatter_(0, rows_n, values_n)
