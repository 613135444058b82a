"""The draft model: a network that knows no ranks, no loss and no target. `state_dict()` names are the checkpoint's.

arXiv 2602.06036, §4.2: queries come from the block alone; keys and values come from the fused features of the context
and from the block, through the same projections in every layer.

Letters: R rows, S context tokens, Q = A·B block tokens, F = K·H features, H hidden, I intermediate, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from paceline.drafter.float8 import Projection
from paceline.drafter.rope import Rope, rotate
from paceline.shapes import DrafterShape

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [R, heads, Q, D], k [R, kv, S+Q, D], v [R, kv, S+Q, D]) -> [R, heads, Q, D]"""

KeyValue = tuple[Tensor, Tensor]
"""Keys (normed and rotated) and values of one layer, each [R, kv, tokens, D]."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = Projection(shape.hidden_size, shape.heads * shape.head_dim)
        self.k_proj = Projection(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.v_proj = Projection(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.o_proj = Projection(shape.heads * shape.head_dim, shape.hidden_size)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: KeyValue, attend: Attend) -> Tensor:
        q = rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), cos, sin)
        k, v = self.keys_values(x, cos, sin)
        k, v = torch.cat((context[0], k), dim=2), torch.cat((context[1], v), dim=2)
        return self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> KeyValue:
        """Of the fused context as it is, or of block states after the layer's input norm."""
        k = rotate(self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2), cos, sin)
        return k, self._heads(self.v_proj(x)).transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = Projection(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Projection(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Projection(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.mlp = MLP(shape)
        self.recompute = False

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: KeyValue, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, attend)
        if self.recompute and torch.is_grad_enabled():
            return x + checkpoint(self._feed_forward, x, use_reentrant=False, context_fn=_keep_products)  # type: ignore
        return x + self._feed_forward(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.post_attention_layernorm(x))


def _keep_products() -> Any:
    """Recompute everything between matrix products, and none of these."""
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default])


class Drafter(nn.Module):
    """Give it features and block embeddings; it gives final-normed states for the target's head."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.rope = Rope(shape)
        self.fc = Projection(shape.features, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_eps)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def context_kv(self, features_RSF: Tensor, positions_RS: Tensor) -> list[KeyValue]:
        """Every layer's keys and values of the context, each [R, kv, S, D]."""
        cos, sin = self.rope.tables(positions_RS)
        return self.project(features_RSF, cos, sin)

    def blocks(self, block_RQH: Tensor, positions_RQ: Tensor, context: list[KeyValue], attend: Attend) -> Tensor:
        """States after the final norm, [R, Q, H], of blocks given as token embeddings [R, Q, H]."""
        cos, sin = self.rope.tables(positions_RQ)
        hidden = block_RQH
        for layer, key_value in zip(self.layers, context, strict=True):
            hidden = layer(hidden, cos, sin, key_value, attend)
        return self.norm(hidden)

    def project(self, features_RSF: Tensor, cos: Tensor, sin: Tensor) -> list[KeyValue]:
        """The tensor part of `context_kv`: what is compiled."""
        context = self.hidden_norm(self.fc(features_RSF))
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self.decoder_layers()]

    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def recompute(self, on: bool) -> None:
        """Recompute what lies between a feed-forward's products in the backward, instead of keeping it."""
        for layer in self.decoder_layers():
            layer.recompute = on

    def float8(self, on: bool) -> None:
        """Run the layers' products in float8 (the fusion and the norms stay as they are)."""
        for layer in self.decoder_layers():
            for module in layer.modules():
                if isinstance(module, Projection):
                    module.float8 = on

    def compile_parts(self, **options: Any) -> None:
        """Compile layer by layer: one graph serves all, and a step has few graphs. Options are torch.compile's."""
        for module in (*self.decoder_layers(), self.norm):
            module.compile(dynamic=False, fullgraph=True, **options)
        self.project = torch.compile(self.project, dynamic=False, fullgraph=True, **options)
