"""What a target must offer, whatever runs it.

S context tokens of a batch, K captured layers, H hidden size, F = K·H, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from paceline.batches import FrozenEnds, TokenBatch
from paceline.shapes import TargetShape


class Target(ABC):
    """A frozen model that turns packed token batches into context features."""

    shape: TargetShape
    layer_ids: tuple[int, ...]
    """0-based, ascending; the feature of id l is the raw output of decoder layer l."""
    device: torch.device
    dtype: torch.dtype

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

    @property
    def width(self) -> int:
        """F, the width of one token's feature."""
        return len(self.layer_ids) * self.shape.hidden_size
