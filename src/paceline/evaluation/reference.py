"""The drafter as an engine computes it, from config.json and the tensors alone.

The slow, obvious oracle of `drafter.model` and of the export: it shares no code with either. Rotary tables, norms and
the MLP are the transformers library's Qwen3 modules, built from the exported config.json as an engine builds them; the
attention is written out. So a rope, an epsilon or a name that the export gets wrong shows as other numbers.

Letters: S context tokens, B block size, H hidden size, F = K·H.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half


@torch.no_grad()
def reference_hidden(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], features_SF: Tensor, block_BH: Tensor, first: int
) -> Tensor:
    """Final-normed states [B, H] of one block in float32.

    The context's positions are first … first + S - 1, the block's follow. `config` is a config.json in the authors'
    layout as a dict.
    """
    built = Qwen3Config(**{key: value for key, value in config.items() if key != "architectures"})
    weights = {name: tensor.float() for name, tensor in tensors.items()}
    eps = built.rms_norm_eps
    positions = torch.arange(first, first + len(features_SF) + len(block_BH))[None]
    cos, sin = (table[0] for table in Qwen3RotaryEmbedding(built)(features_SF.float(), positions))
    context = _norm(features_SF.float() @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    hidden = block_BH.float()
    for index in range(built.num_hidden_layers):
        layer = {name.removeprefix(f"layers.{index}."): tensor for name, tensor in weights.items()}
        hidden = _layer(layer, hidden, context, (cos, sin), built)
    return _norm(hidden, weights["norm.weight"], eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def _layer(
    w: Mapping[str, Tensor], hidden: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], config: Any
) -> Tensor:
    eps, size = config.rms_norm_eps, config.head_dim
    block = _norm(hidden, w["input_layernorm.weight"], eps)
    both = torch.cat((context, block))
    queries = _norm(
        (block @ w["self_attn.q_proj.weight"].T).unflatten(1, (-1, size)), w["self_attn.q_norm.weight"], eps
    )
    keys = _norm((both @ w["self_attn.k_proj.weight"].T).unflatten(1, (-1, size)), w["self_attn.k_norm.weight"], eps)
    values = (both @ w["self_attn.v_proj.weight"].T).unflatten(1, (-1, size))
    cos, sin = rope[0][:, None], rope[1][:, None]
    keys = keys * cos + rotate_half(keys) * sin
    cos, sin = cos[len(context) :], sin[len(context) :]
    queries = queries * cos + rotate_half(queries) * sin
    group = config.num_attention_heads // config.num_key_value_heads
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    weights = (torch.einsum("qhd,khd->hqk", queries, keys) * size**-0.5).softmax(dim=-1)
    attended = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
    hidden = hidden + attended @ w["self_attn.o_proj.weight"].T
    normed = _norm(hidden, w["post_attention_layernorm.weight"], eps)
    gate = functional.silu(normed @ w["mlp.gate_proj.weight"].T) * (normed @ w["mlp.up_proj.weight"].T)
    return hidden + gate @ w["mlp.down_proj.weight"].T
