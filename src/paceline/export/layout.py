"""The serving layout: tensor names, their shapes, and the whitelisted config.json.

H hidden size, I intermediate size, K captured layers, V vocabulary. The layout is that of the method's authors
(PyPI `dflash` 0.1.0), which vLLM, SGLang, transformers and llama.cpp's converter read.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.drafter.rope import STATIC_KINDS, inverse_frequencies
from paceline.errors import UserError
from paceline.fields import Fields, short
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

    Raises UserError for a field that is needed and missing (layer ids and the mask token are never guessed), and for a
    value that no drafter can have: such a file is damaged.
    """
    outer = Fields(config, where, REMEDY)
    block = outer.object("dflash_config")
    said = Fields(dict(config) | {key: _agreed(block, config, key, where) for key in _IN_EITHER}, where, REMEDY)
    inner = Fields(block, where, REMEDY)
    hidden, heads = said.whole("hidden_size", 1), said.whole("num_attention_heads", 1)
    vocabulary = said.whole("vocab_size", 1)
    bos = said.wholes("bos_token_id", -1, alone=True)
    shape = DrafterShape(
        hidden_size=hidden,
        intermediate_size=said.whole("intermediate_size", 1),
        layers=said.whole("num_hidden_layers", 1, _LARGEST_DEPTH),
        heads=heads,
        kv_heads=said.whole("num_key_value_heads", 1),
        head_dim=said.whole("head_dim", 1, default=max(1, hidden // heads)),
        layer_ids=_layer_ids(said),
        block_size=said.whole("block_size", 2, _LARGEST_BLOCK),
        mask_token_id=said.whole("mask_token_id", 0, vocabulary - 1),
        vocabulary=vocabulary,
        target_layers=said.whole("num_target_layers", 0, _LARGEST_DEPTH),
        rms_eps=said.number("rms_norm_eps", 1e-6, below=1.0),
        rope=rope_of(config, where),
        max_positions=said.whole("max_position_embeddings", 0, default=40_960),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=said.wholes("eos_token_id", -1, alone=True),
        embedding_scale=inner.number("input_embedding_scale", 1.0),
        logit_scale=inner.number("output_multiplier", 1.0),
        logit_softcap=inner.number("final_logit_softcapping", 0.0, zero=True),
    )
    _check_heads(shape, where)
    return shape


REMEDY = "get the drafter's config.json again; nothing is guessed"

_IN_EITHER = ("block_size", "mask_token_id", "num_target_layers", "target_layer_ids")
"""What a config.json may say at its top or in its dflash_config."""

_LARGEST_BLOCK = 1024
_LARGEST_DEPTH = 4096


def check_kinds(config: Mapping[str, Any], where: str) -> None:
    """Raise UserError where an object, a list or a number of a config.json is another kind of thing.

    Only of what is looked at before a shape is made of it, here or by an engine.
    """
    said = Fields(config, where, REMEDY)
    for key in ("dflash_config", "transformer_layer_config", "rope_parameters", "rope_scaling"):
        said.object(key)
    body = Fields(said.object("transformer_layer_config") or config, where, REMEDY)
    said.items("architectures", str)
    body.items("layer_types", str)
    said.wholes("eagle_aux_hidden_state_layer_ids", 0, _LARGEST_DEPTH)
    said.number("logit_scale", 1.0)
    for key in ("model_type", "dtype", "torch_dtype", "speculators_model_type"):
        said.text(key)


def _agreed(block: Mapping[str, Any], config: Mapping[str, Any], key: str, where: str) -> Any:
    nested, outer = block.get(key), config.get(key)
    if nested is not None and outer is not None and nested != outer:
        raise UserError(
            f"{where} says {key} = {short(outer)} at the top and {short(nested)} in dflash_config",
            "readers differ in which they take; make them equal",
        )
    return outer if nested is None else nested


def _layer_ids(said: Fields) -> tuple[int, ...]:
    said.need("target_layer_ids")
    ids = said.wholes("target_layer_ids", 0, _LARGEST_DEPTH)
    depth = said.whole("num_target_layers", 0, _LARGEST_DEPTH)
    if not ids or len(set(ids)) != len(ids) or (depth and max(ids) >= depth):
        raise UserError(
            f"{said.where}: target_layer_ids {list(ids)} do not name distinct layers of a target with {depth}",
            "layer ids are 0-based and lie below num_target_layers",
        )
    return ids


def _check_heads(shape: DrafterShape, where: str) -> None:
    if shape.heads % shape.kv_heads:
        raise UserError(
            f"{where}: num_attention_heads = {shape.heads} is not a multiple of num_key_value_heads = {shape.kv_heads}",
            REMEDY,
        )
    if shape.head_dim % 2:
        raise UserError(f"{where}: head_dim = {shape.head_dim} is odd, so its halves cannot be rotated", REMEDY)
    try:
        inverse_frequencies(shape)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"{where}: rope_parameters {short(shape.rope)} give no rotation: {type(error).__name__} {error}", REMEDY
        ) from None


def rope_of(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Rope parameters with theta in them, whichever of the spellings a config uses; refuse a contradiction."""
    said = Fields(config, where, REMEDY)
    rope, scaling = said.object("rope_parameters"), said.object("rope_scaling")
    top = {"rope_theta": config.get("rope_theta")}
    named = {"rope_parameters": rope, "rope_scaling": scaling, "the top of the file": top}
    for (name, one), (other, two) in itertools.combinations(named.items(), 2):
        _refuse_contradiction(one, name, two, other, where)
    rope = scaling | rope
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = top["rope_theta"]
    rope.setdefault("rope_type", rope.pop("type", "default"))
    _check_rope(Fields(rope, where, REMEDY))
    if any(part.get("partial_rotary_factor") not in (None, 1) for part in (rope, config)):
        raise UserError(
            f"{where} says partial_rotary_factor, which some engines follow and others do not",
            "remove it if the drafter was trained to rotate whole heads, as DFlash drafters are",
        )
    return rope


_ROPE_NUMBERS = ("rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow")
_ROPE_NUMBERS_OR_ZERO = ("mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor")


def _check_rope(rope: Fields) -> None:
    rope.need("rope_theta")
    for key in (*_ROPE_NUMBERS, *_ROPE_NUMBERS_OR_ZERO):
        if rope.has(key):
            rope.number(key, zero=key in _ROPE_NUMBERS_OR_ZERO)
    if rope.has("original_max_position_embeddings"):
        rope.whole("original_max_position_embeddings", 1)
    if (kind := rope.text("rope_type")) not in STATIC_KINDS:
        raise UserError(
            f"{rope.where}: rope_type = {kind!r} is not computed here",
            f"only drafters that rotate by {', '.join(sorted(STATIC_KINDS))} are",
        )


def _refuse_contradiction(
    mine: Mapping[str, Any], name: str, theirs: Mapping[str, Any], other: str, where: str
) -> None:
    for key in ("rope_theta", "rope_type", "factor"):
        one, two = mine.get(key), theirs.get(key)
        if one is not None and two is not None and one != two:
            raise UserError(
                f"{where} says {key} = {short(one)} in {name} and {short(two)} in {other}",
                "readers differ in which they take; make them equal",
            )
