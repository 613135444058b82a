"""What a target must offer, whatever runs it.

S context tokens of a batch, K captured layers, H hidden size, F = K·H, V vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from paceline.batches import FrozenEnds, TokenBatch
from paceline.shapes import TargetShape


class Target(ABC):
    """A frozen model that turns packed token batches into context features."""

    def __init__(
        self, shape: TargetShape, layer_ids: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> None:
        """`layer_ids` are 0-based and ascend; the feature of id l is the raw output of decoder layer l."""
        self.shape = shape
        self.layer_ids = layer_ids
        self.device: torch.device = device
        self.dtype = dtype

    @property
    @abstractmethod
    def ends(self) -> FrozenEnds:
        """The embedding and the head, shared with the model's own storage where it holds them whole."""

    @abstractmethod
    def features(self, batch: TokenBatch, out: Tensor | None = None) -> Tensor:
        """Captured states [S, F] of a packed batch; documents do not see each other.

        With `out`, the states are written there, and `out` is returned. Rows of padding tokens are finite.
        """

    @abstractmethod
    def next_tokens(self, batch: TokenBatch) -> Tensor:
        """The whole model's greedy choice after each position, int64 [S]; only before `close_upper_layers`."""

    @abstractmethod
    def self_check(self, batch: TokenBatch) -> None:
        """Raise UserError unless packing, capture and ends are right on this batch."""

    @abstractmethod
    def close_upper_layers(self) -> None:
        """Let go of everything after the last captured layer."""

    def silence(self) -> contextlib.AbstractContextManager[object]:
        """Within it, one rank of a sharded target runs without the others: what it computes then is of no use."""
        return contextlib.nullcontext()

    def fingerprint(self) -> str:
        """Identity of the weights and the captured layers: what kept features belong to."""
        digest = hashlib.sha256(repr((replace(self.shape, name=""), self.layer_ids, self.dtype)).encode())
        digest.update(checksum([self.ends.embedding_VH, self.ends.head_VH]))
        return digest.hexdigest()

    @property
    def width(self) -> int:
        """F, the width of one token's feature."""
        return len(self.layer_ids) * self.shape.hidden_size


def checksum(tensors: Iterable[Tensor]) -> bytes:
    """Short digest of the bits of tensors, taken where they lie: two sums over all elements, exact in int64."""
    sums = []
    for tensor in tensors:
        bits = tensor.detach().flatten().view(_BITS[tensor.element_size()])
        for part in bits.split(1 << 24):
            whole = part.long()
            places = torch.arange(1, len(part) + 1, device=part.device)
            sums.append(torch.stack([whole.sum(), (whole * places).sum()]))
    return torch.stack(sums).cpu().numpy().tobytes() if sums else b""


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
