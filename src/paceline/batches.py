"""Every tensor that crosses a room, with named axes.

S context tokens of a batch, A anchors, B block size, V vocabulary, H hidden size, F = K·H width of a token's feature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchShape:
    """The one shape that all batches of a run have."""

    tokens: int
    anchors: int
    block_size: int
    gamma: float


@dataclass(frozen=True)
class TokenBatch:
    """One fixed-shape batch: whole documents packed in a row, with anchors drawn and labels weighed.

    Padding tokens carry document -1, position 0 and id 0. A padding block has anchor = start = 0 and weights of zero.
    """

    index: int
    ids_S: Tensor
    """int64 [S]"""
    positions_S: Tensor
    """int64 [S], restarting at 0 with each document."""
    documents_S: Tensor
    """int32 [S], 0, 1, 2, … within this row; -1 is padding."""
    supervised_S: Tensor
    """bool [S]"""
    anchors_A: Tensor
    """int64 [A], places in the row, ascending; padding blocks last."""
    starts_A: Tensor
    """int64 [A], place in the row of the first token of the anchor's document: the block sees [start, anchor)."""
    labels_AB: Tensor
    """int64 [A, B]; slot 0 is the anchor's own token, slot j the token at anchor + j (0 where there is none)."""
    weights_AB: Tensor
    """float32 [A, B], exp(-(j-1)/gamma) for slots that count, else 0; slot 0 is always 0."""
    documents: tuple[int, ...] = ()
    """Corpus numbers of the packed documents, in row order (empty for synthetic batches); held-out document n is
    -1 - n, so that no cache takes one for a training document."""
    bounds: tuple[int, ...] = ()
    """Row places where the documents start, and the end of the last: len(documents) + 1 numbers."""

    def map(self, change: Callable[[Tensor], Tensor]) -> TokenBatch:
        """The same batch with every tensor changed."""
        changed: dict[str, Any] = {
            item.name: change(value)
            for item in dataclasses.fields(self)
            if isinstance(value := self.__dict__[item.name], Tensor)
        }
        return dataclasses.replace(self, **changed)

    def to(self, device: torch.device) -> TokenBatch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class EvaluationBatch:
    """Held-out answers with EVERY answer position an anchor, for the exact acceptance length.

    `answer_A` numbers the answer that an anchor belongs to within the whole held-out set (-1 for padding blocks), so
    that a walk can be put together again from several batches that share documents.
    """

    tokens: TokenBatch
    answer_A: Tensor
    """int64 [A]"""
    kinds: tuple[str, ...] = ()
    """Kind of prompt of each answer number (same length as the number of answers; empty where data has no kinds)."""


@dataclass(frozen=True)
class FeatureBatch:
    """A token batch with the target's captured states."""

    tokens: TokenBatch
    features_SF: Tensor
    """[S, F] in the run's compute dtype; rows of padding tokens are finite and unused."""


@dataclass(frozen=True)
class FrozenEnds:
    """The target's token embedding and head: frozen, shared, and no part of a drafter's checkpoint."""

    embedding_VH: Tensor
    head_VH: Tensor
    """The same storage as `embedding_VH` when the target ties them."""
    head_bias_V: Tensor | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings as the target's first layer receives them, [..., H]."""
        vectors = torch.nn.functional.embedding(ids, self.embedding_VH)
        return vectors if self.embedding_scale == 1.0 else vectors * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Full logits [..., V] of final-normed states: for decoding and oracles, never for the training loss."""
        logits = torch.nn.functional.linear(hidden, self.head_VH, self.head_bias_V)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits
