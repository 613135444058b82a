"""The draft model: a network that knows no ranks, no loss and no target. `state_dict()` names are the checkpoint's.

arXiv 2602.06036, §4.2: queries come from the block alone; keys and values come from the fused features of the context
and from the block, through the same projections in every layer.

Letters: R rows, S context tokens, A anchors, B block size, J = B - 1 predicted slots, Q = A·B block tokens, F = K·H
features, H hidden, I intermediate, D head dimension.
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

Projected = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values before norm and rotation, each [R, tokens, heads, D]."""


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
        return self.mix(self.project(x), cos, sin, context, attend)

    def project(self, x: Tensor) -> Projected:
        """Queries, keys and values as they leave their products, each [R, T, heads, D]."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self._heads(q), self._heads(k), self._heads(v)

    def mix(self, projected: Projected, cos: Tensor, sin: Tensor, context: KeyValue, attend: Attend) -> Tensor:
        q, k, v = projected
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k, v = self._placed(k, v, cos, sin)
        k, v = torch.cat((context[0], k), dim=2), torch.cat((context[1], v), dim=2)
        return self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))

    def keys_values(self, context_RSH: Tensor, cos: Tensor, sin: Tensor) -> KeyValue:
        """Of the fused context, which no norm of the layer precedes."""
        return self._placed(self._heads(self.k_proj(context_RSH)), self._heads(self.v_proj(context_RSH)), cos, sin)

    def _placed(self, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> KeyValue:
        return rotate(self.k_norm(k).transpose(1, 2), cos, sin), v.transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


def _spread(rows: Tensor, anchors: int, block_size: int) -> Tensor:
    """[R, U, …], A anchors and then the mask token, to blocks of an anchor and B - 1 masks, [R, A·B, …]."""
    known = rows[:, :anchors, None]
    masks = rows[:, anchors : anchors + 1, None].expand(-1, anchors, block_size - 1, *rows.shape[2:])
    return torch.cat((known, masks), dim=2).flatten(1, 2)


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
        return self.feed_forward(self.mix(x, self.project(x), cos, sin, context, attend))

    def project(self, x: Tensor) -> Projected:
        """What precedes position and attention."""
        return self.self_attn.project(self.input_layernorm(x))

    def mix(
        self, x: Tensor, projected: Projected, cos: Tensor, sin: Tensor, context: KeyValue, attend: Attend
    ) -> Tensor:
        """The rest of the first half, residual included."""
        return x + self.self_attn.mix(projected, cos, sin, context, attend)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The second half, residual included."""
        if self.recompute and torch.is_grad_enabled():
            return x + checkpoint(self._feed, x, use_reentrant=False, context_fn=_keep_products)  # type: ignore
        return x + self._feed(x)

    def _feed(self, x: Tensor) -> Tensor:
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
        context = self.fuse(features_RSF)
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self.decoder_layers()]

    def fuse(self, features_RSF: Tensor) -> Tensor:
        """The context that all layers see, [R, S, H]."""
        return self.hidden_norm(self.fc(features_RSF))

    def blocks(self, block_RQH: Tensor, positions_RQ: Tensor, context: list[KeyValue], attend: Attend) -> Tensor:
        """States after the final norm, [R, Q, H], of blocks given as token embeddings [R, Q, H]."""
        cos, sin = self.rope.tables(positions_RQ)
        hidden = block_RQH
        for layer, key_value in zip(self.layers, context, strict=True):
            hidden = layer(hidden, cos, sin, key_value, attend)
        return self.norm(hidden)

    def slots(
        self, embedded_RUH: Tensor, positions_RQ: Tensor, context: list[KeyValue], attend: Attend, block_size: int
    ) -> Tensor:
        """States after the final norm of the predicted slots alone, [R, A, J, H]: `blocks` without what repeats.

        The embeddings are the A anchors', then the mask token's, one time or more. The first layer projects those
        rows, not each of the A·J masks again, and nothing after the last attention is done for slot 0.
        """
        cos, sin = self.rope.tables(positions_RQ)
        anchors = positions_RQ.shape[1] // block_size
        layers = self.decoder_layers()
        q, k, v = (_spread(part, anchors, block_size) for part in layers[0].project(embedded_RUH))
        # Every layer's input takes a gradient, so that all run the same compiled code; this one's costs nothing.
        hidden = _spread(embedded_RUH, anchors, block_size).requires_grad_(torch.is_grad_enabled())
        hidden = layers[0].mix(hidden, (q, k, v), cos, sin, context[0], attend)
        for before, layer, key_value in zip(layers, layers[1:], context[1:], strict=False):
            hidden = before.feed_forward(hidden)
            hidden = layer.mix(hidden, layer.project(hidden), cos, sin, key_value, attend)
        return self.finish(hidden.unflatten(1, (-1, block_size)))

    def finish(self, hidden_RABH: Tensor) -> Tensor:
        """The last layer's feed-forward and the final norm, without slot 0."""
        return self.norm(self.decoder_layers()[-1].feed_forward(hidden_RABH[:, :, 1:]))

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
        """Compile what `context_kv` and `slots` run, in parts that the layers share. Options are torch.compile's.

        Five pairs of graphs, since each costs a start some seconds: a layer's context keys and values, its products,
        the rest of its attention, its feed-forward, and the last layer's without slot 0. The first layer's products
        (of few rows) and the fusion run as they are.
        """
        # Several configurations of every pointwise kernel would be compiled and timed, for no gain in a step.
        defaults: dict[str, Any] = {} if "backend" in options else {"options": {"triton.autotune_pointwise": False}}

        def compiled(function: Callable[..., Any]) -> Any:
            return torch.compile(function, dynamic=False, fullgraph=True, **(defaults | options))

        self.finish = compiled(self.finish)
        for number, layer in enumerate(self.decoder_layers()):
            layer.self_attn.keys_values = compiled(layer.self_attn.keys_values)
            layer.mix, layer.feed_forward = compiled(layer.mix), compiled(layer.feed_forward)
            if number:
                layer.project = compiled(layer.project)
