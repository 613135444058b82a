"""Rotary position embedding of the drafter.

The inverse frequencies are a plain float32 tensor kept beside the network and not a buffer of it: a buffer would be
cast to bfloat16 with the parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.shapes import DrafterShape

STATIC_KINDS = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds whose frequencies do not depend on the length of the row: what a drafter can be trained and served with."""


class Rope:
    """cos and sin tables for positions; R rows, T tokens, D head dimension."""

    def __init__(self, shape: DrafterShape) -> None:
        self._frequencies, self._scaling = inverse_frequencies(shape)
        self._placed: dict[torch.device, Tensor] = {}

    def tables(self, positions_RT: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 cos and sin, each [R, T, D/2]."""
        device = positions_RT.device
        if device not in self._placed:
            self._placed[device] = self._frequencies.to(device)
        angles = positions_RT[..., None].float() * self._placed[device]
        return angles.cos() * self._scaling, angles.sin() * self._scaling


def rotate(x: Tensor, cos_RTd: Tensor, sin_RTd: Tensor) -> Tensor:
    """Rotate [R, heads, T, D] by half-split pairs (as transformers does), in float32, back to x's dtype."""
    cos, sin = cos_RTd[:, None], sin_RTd[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def inverse_frequencies(shape: DrafterShape) -> tuple[Tensor, float]:
    """Frequencies [D/2] in float32 and the factor on cos and sin, by transformers' own formulas."""
    kind = shape.rope.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        return 1.0 / (shape.rope["rope_theta"] ** exponents), 1.0
    if kind not in STATIC_KINDS:
        raise ValueError(f"rope kind {kind!r} depends on the length of the row")
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](_config(shape), torch.device("cpu"))
    return frequencies.float(), float(scaling)


def _config(shape: DrafterShape) -> PretrainedConfig:
    rope: dict[str, Any] = dict(shape.rope)
    config = PretrainedConfig()
    config.update(
        {
            "hidden_size": shape.hidden_size,
            "num_attention_heads": shape.heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.max_positions,
            "rope_parameters": rope,
        }
    )
    return config
