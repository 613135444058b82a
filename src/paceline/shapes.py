"""Sizes of the two models, as facts without weights: what one room must know of a model that another room holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TargetShape:
    """A target model's facts, read from its configuration alone."""

    name: str
    """Folder, file or hub id, for messages and model cards."""
    model_type: str
    hidden_size: int
    layers: int
    vocabulary: int
    """Rows of the embedding, padding included."""
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope: dict[str, Any]
    """`rope_parameters` as transformers 5 spells them: at least rope_theta and rope_type."""
    max_positions: int
    tied: bool
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    """Every id that ends an answer."""
    parameters: int = 0
    """Weights of the model, counted from its configuration; 0 when unknown."""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    """0 means none."""


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes a drafter's tensors and its arithmetic."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_ids: tuple[int, ...]
    """K captured target layers, 0-based; the feature of id l is the raw output of decoder layer l."""
    block_size: int
    mask_token_id: int
    vocabulary: int
    target_layers: int
    rms_eps: float = 1e-6
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0})
    max_positions: int = 40_960
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    @property
    def features(self) -> int:
        """K·H, the width of one token's context feature."""
        return len(self.layer_ids) * self.hidden_size
