"""The drafter's sizes, taken from its target's."""

from __future__ import annotations

from typing import Any

from paceline.config import DrafterConfig
from paceline.drafter.rope import STATIC_KINDS
from paceline.errors import UserError
from paceline.shapes import DrafterShape, TargetShape

_ROPE_KEYS = (
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
)


def shape_for(
    target: TargetShape, layer_ids: tuple[int, ...], config: DrafterConfig, mask_token_id: int
) -> DrafterShape:
    """A drafter with the target's sizes. Raises UserError where the target's sizes cannot carry one."""
    if target.head_dim % 2:
        raise UserError(
            f"{target.name}: head_dim = {target.head_dim} is odd, so it has no rotary position embedding",
            "choose a target with an even head_dim",
        )
    if not layer_ids:
        raise UserError(f"{target.name}: no layer to capture", "set target.features or target.layer_ids")
    return DrafterShape(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        layers=config.layers,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        layer_ids=tuple(layer_ids),
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        vocabulary=target.vocabulary,
        target_layers=target.layers,
        rms_eps=target.rms_eps,
        rope=drafter_rope(target.rope),
        max_positions=target.max_positions,
        bos_token_id=target.bos_ids[0] if target.bos_ids else None,
        eos_token_ids=target.eos_ids,
        embedding_scale=target.embedding_scale,
        logit_scale=target.logit_scale,
        logit_softcap=target.logit_softcap,
    )


def drafter_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """The target's rope parameters, from a whitelist.

    A drafter rotates every dimension, and its rotation must not depend on the row's length: kinds that do, and partial
    rotation, become the default kind with the target's theta. The drafter is its own network, so this costs nothing.
    """
    rope = rope.get("full_attention", rope)  # a dictionary a kind of layer, where a target has several
    theta = float(rope.get("rope_theta", 10_000.0))
    if rope.get("rope_type", "default") not in STATIC_KINDS:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "default", "rope_theta": theta} | {key: rope[key] for key in _ROPE_KEYS if key in rope}
