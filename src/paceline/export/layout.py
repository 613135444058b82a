"""The serving layout: tensor names, their shapes, and the whitelisted config.json.

H hidden size, I intermediate size, K captured layers, V vocabulary. The layout is that of the method's authors
(PyPI `dflash` 0.1.0), which vLLM, SGLang, transformers and llama.cpp's converter read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UserError
from paceline.shapes import DrafterShape

ARCHITECTURE = "DFlashDraftModel"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tensor_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint and its shape: 3 + 11 a layer, no prefix, nothing else."""
    hidden = shape.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, shape.features),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(shape.layers):
        shapes |= {f"layers.{index}.{name}": size for name, size in _layer_shapes(shape).items()}
    return shapes


def _layer_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    hidden, queries, keys = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (shape.head_dim,),
        "self_attn.k_norm.weight": (shape.head_dim,),
        "mlp.gate_proj.weight": (shape.intermediate_size, hidden),
        "mlp.up_proj.weight": (shape.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, shape.intermediate_size),
    }


def check_tensors(state: Mapping[str, Tensor], shape: DrafterShape, where: str) -> None:
    """Refuse missing, unknown or misshapen tensors: a loader that ignores names would serve a random drafter."""
    expected = tensor_shapes(shape)
    if missing := sorted(expected.keys() - state.keys()):
        raise UserError(f"{where} lacks {_few(missing)}", "export the whole drafter again; nothing may be missing")
    if unknown := sorted(state.keys() - expected.keys()):
        raise UserError(
            f"{where} holds tensors that no DFlash drafter has: {_few(unknown)}",
            "this is another method's drafter, or a damaged one; give a DFlash drafter",
        )
    for name, size in expected.items():
        if tuple(state[name].shape) != size:
            raise UserError(
                f"{where}: {name} is {list(state[name].shape)}, its config says {list(size)}",
                "config and weights do not belong together; export again",
            )


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def config_json(shape: DrafterShape, dtype: str) -> dict[str, Any]:
    """The config.json of a drafter: a whitelist, never a copy of the target's config.

    Values that readers take from different places (block size, rope) stand in each of them.
    """
    rope_type = shape.rope.get("rope_type", "default")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "num_target_layers": shape.target_layers,
        "dflash_config": _dflash_config(shape),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope["rope_theta"],
        "rope_scaling": None if rope_type == "default" else dict(shape.rope),
        "rope_parameters": dict(shape.rope),
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocabulary,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * shape.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.layers,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": _one_or_list(shape.eos_token_ids),
    }


def _dflash_config(shape: DrafterShape) -> dict[str, Any]:
    block: dict[str, Any] = {
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.layer_ids),
        "block_size": shape.block_size,
    }
    if shape.embedding_scale != 1.0:
        block["input_embedding_scale"] = shape.embedding_scale
    if shape.logit_scale != 1.0:
        block["output_multiplier"] = shape.logit_scale
    if shape.logit_softcap:
        block["final_logit_softcapping"] = shape.logit_softcap
    return block


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def shape_from_config(config: Mapping[str, Any], where: str) -> DrafterShape:
    """The DrafterShape that a config.json in the authors' layout describes.

    Raises UserError for a field that is needed and missing: layer ids and the mask token are never guessed.
    """
    block = config.get("dflash_config") or {}
    return DrafterShape(
        hidden_size=need(config, "hidden_size", where),
        intermediate_size=need(config, "intermediate_size", where),
        layers=need(config, "num_hidden_layers", where),
        heads=need(config, "num_attention_heads", where),
        kv_heads=need(config, "num_key_value_heads", where),
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        layer_ids=_layer_ids(config, where),
        block_size=_first(block, config, "block_size", where),
        mask_token_id=_first(block, config, "mask_token_id", where),
        vocabulary=need(config, "vocab_size", where),
        target_layers=_first(block, config, "num_target_layers", where),
        rms_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope_of(config, where),
        max_positions=config.get("max_position_embeddings", 40_960),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_as_tuple(config.get("eos_token_id")),
        embedding_scale=float(block.get("input_embedding_scale") or 1.0),
        logit_scale=float(block.get("output_multiplier") or 1.0),
        logit_softcap=float(block.get("final_logit_softcapping") or 0.0),
    )


def need(config: Mapping[str, Any], key: str, where: str) -> Any:
    if config.get(key) is None:
        raise UserError(f"{where} does not say {key}", "take a complete drafter folder; nothing is guessed")
    return config[key]


def _first(block: Mapping[str, Any], config: Mapping[str, Any], key: str, where: str) -> Any:
    nested, outer = block.get(key), config.get(key)
    if nested is not None and outer is not None and nested != outer:
        raise UserError(
            f"{where} says {key} = {outer} at the top and {nested} in dflash_config",
            "readers differ in which they take; make them equal",
        )
    return nested if nested is not None else need(config, key, where)


def _layer_ids(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    ids = tuple(_first(config.get("dflash_config") or {}, config, "target_layer_ids", where))
    depth = config.get("num_target_layers")
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0 or (depth and max(ids) >= depth):
        raise UserError(
            f"{where}: target_layer_ids {list(ids)} do not name distinct layers of a target with {depth}",
            "layer ids are 0-based and lie below num_target_layers",
        )
    return ids


def _as_tuple(value: Any) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def rope_of(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Rope parameters with theta in them, whichever of the spellings a config uses; refuse a contradiction."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta, outer = rope.get("rope_theta"), config.get("rope_theta")
    if theta is None and outer is None:
        raise UserError(f"{where} does not say rope_theta", "take a complete drafter folder; nothing is guessed")
    if theta is not None and outer is not None and float(theta) != float(outer):
        raise UserError(
            f"{where} says rope_theta = {outer} at the top and {theta} in rope_parameters",
            "readers differ in which they take; make them equal",
        )
    rope["rope_theta"] = theta if theta is not None else outer
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return rope
