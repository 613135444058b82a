"""What each engine's loader reads of a drafter's config and names, reproduced from facts as small pure functions.

The engines need GPU builds and cannot be imported where a drafter is made; `paceline verify` and the tests compare
what these functions give with the DrafterShape that was trained. Facts taken in October 2026 from vLLM
(`qwen3_dflash`, `eagle3_utils`), SGLang (`models/dflash`, `dflash_utils`), PyPI `dflash` 0.1.0 and llama.cpp's
`DFlashModel` converter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.shapes import DrafterShape


@dataclass(frozen=True)
class EngineView:
    """A drafter as one engine sees it."""

    engine: str
    layer_ids: tuple[int, ...] | None
    """0-based target layers whose output it takes; None where it would guess."""
    block_size: int
    draft_tokens: int
    """The number to give the engine, by its own counting."""
    mask_token_id: int | None
    rope: tuple[float, str]
    """theta and type"""
    head_dim: int
    heads: int
    kv_heads: int
    causal: bool
    sliding: bool
    rms_eps: float
    embedding_scale: float
    logit_scale: float
    logit_softcap: float


def vllm_reads(config: Mapping[str, Any]) -> EngineView:
    """vLLM: `dflash_config` first; layer ids plus one; B - 1 speculated tokens; no embedding scale or soft-cap."""
    block = config.get("dflash_config") or {}
    shifted = config.get("eagle_aux_hidden_state_layer_ids") or [i + 1 for i in block.get("target_layer_ids") or []]
    size = config.get("block_size") or block.get("block_size") or 0
    sliding = [kind == "sliding_attention" for kind in config.get("layer_types") or []]
    causal = config.get("is_causal", block.get("causal"))
    return EngineView(
        engine="vLLM",
        layer_ids=tuple(i - 1 for i in shifted) or None,
        block_size=size,
        draft_tokens=size - 1,
        mask_token_id=block.get("mask_token_id", config.get("mask_token_id")),
        causal=any(sliding) if causal is None else bool(causal),
        sliding=any(sliding) or bool(block.get("use_swa")),
        embedding_scale=1.0,
        logit_scale=float(_or(config, "logit_scale", 1.0)),
        logit_softcap=0.0,
        **_body(config, default_theta=1_000_000.0),
    )


def sglang_reads(config: Mapping[str, Any]) -> EngineView:
    """SGLang: `dflash_config` first, then the top level; B draft tokens, the anchor among them."""
    block = config.get("dflash_config") or {}
    size = block.get("block_size", config.get("block_size")) or 16
    sliding = [kind == "sliding_attention" for kind in config.get("layer_types") or []]
    ids = block.get("target_layer_ids", config.get("target_layer_ids"))
    return EngineView(
        engine="SGLang",
        layer_ids=tuple(ids) if ids else None,
        block_size=size,
        draft_tokens=size,
        mask_token_id=block.get("mask_token_id", config.get("mask_token_id")),
        causal=any(sliding),
        sliding=any(sliding),
        embedding_scale=1.0,
        logit_scale=float(_or(block, "output_multiplier", 1.0)),
        logit_softcap=float(block.get("final_logit_softcapping") or 0.0),
        **_body(config, default_theta=10_000.0),
    )


def authors_reads(config: Mapping[str, Any]) -> EngineView:
    """PyPI `dflash` 0.1.0 on transformers: block size 16 where none is given; all three scales."""
    block = config.get("dflash_config") or {}
    sliding = [kind == "sliding_attention" for kind in config.get("layer_types") or []]
    causal = config.get("is_causal")
    size = _nested(block, config, "block_size") or 16
    ids = _nested(block, config, "target_layer_ids")
    return EngineView(
        engine="dflash (transformers)",
        layer_ids=tuple(ids) if ids else None,
        block_size=size,
        draft_tokens=size,
        mask_token_id=_nested(block, config, "mask_token_id"),
        causal=any(sliding) if causal is None else bool(causal),
        sliding=any(sliding),
        embedding_scale=float(_nested(block, config, "input_embedding_scale") or 1.0),
        logit_scale=float(_nested(block, config, "output_multiplier") or 1.0),
        logit_softcap=float(_nested(block, config, "final_logit_softcapping") or 0.0),
        **_body(config, default_theta=10_000.0),
    )


def llama_cpp_reads(config: Mapping[str, Any]) -> EngineView:
    """llama.cpp's converter: the block size from the top level alone (16 without), the ids from `dflash_config`."""
    block = config.get("dflash_config") or {}
    ids = block.get("target_layer_ids")
    size = config.get("block_size", 16) or 0
    return EngineView(
        engine="llama.cpp converter",
        layer_ids=tuple(ids) if ids else None,
        block_size=size,
        draft_tokens=size - 1,
        mask_token_id=block.get("mask_token_id"),
        causal=False,
        sliding=False,
        embedding_scale=1.0,
        logit_scale=1.0,
        logit_softcap=0.0,
        **_body(config, default_theta=10_000.0),
    )


READERS = (vllm_reads, sglang_reads, authors_reads, llama_cpp_reads)


def _nested(block: Mapping[str, Any], config: Mapping[str, Any], key: str) -> Any:
    return block.get(key, config.get(key))


def _body(config: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    hidden, heads = config.get("hidden_size", 0), config.get("num_attention_heads", 1)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = _or(rope, "rope_theta", _or(config, "rope_theta", default_theta))
    return {
        "rope": (float(theta), str(rope.get("rope_type", rope.get("type", "default")))),
        "head_dim": config.get("head_dim") or hidden // heads,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        "rms_eps": float(_or(config, "rms_norm_eps", 1e-6)),
    }


def _or(said: Mapping[str, Any], key: str, default: float) -> Any:
    """What is said, or the default for nothing and for null."""
    return default if said.get(key) is None else said[key]


def differences(view: EngineView, shape: DrafterShape) -> list[str]:
    """Every field in which an engine's view departs from the drafter that was trained; soft-caps and positive logit
    scales keep the order of tokens, so they matter to sampled drafts alone and are named apart."""
    pairs = [
        ("layer ids", view.layer_ids, shape.layer_ids),
        ("block size", view.block_size, shape.block_size),
        ("mask token", view.mask_token_id, shape.mask_token_id),
        ("rope", view.rope, (float(shape.rope["rope_theta"]), str(shape.rope.get("rope_type", "default")))),
        ("head_dim", view.head_dim, shape.head_dim),
        ("heads", (view.heads, view.kv_heads), (shape.heads, shape.kv_heads)),
        ("causal blocks", view.causal, False),
        ("sliding window", view.sliding, False),
        ("rms_norm_eps", view.rms_eps, shape.rms_eps),
        ("embedding scale", view.embedding_scale, shape.embedding_scale),
    ]
    return [f"{word} {read!r} instead of {trained!r}" for word, read, trained in pairs if read != trained]


_FUSED = ((".q_proj.", ".qkv_proj.", "q"), (".k_proj.", ".qkv_proj.", "k"), (".v_proj.", ".qkv_proj.", "v"))
_FUSED_MLP = ((".gate_proj.", ".gate_up_proj.", "0"), (".up_proj.", ".gate_up_proj.", "1"))


def engine_slots(layers: int) -> set[str]:
    """The parameters that vLLM and SGLang build for a drafter, each shard of a fused one by itself."""
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for index in range(layers):
        stem = f"layers.{index}"
        names |= {f"{stem}.self_attn.qkv_proj.weight[{part}]" for part in "qkv"}
        names |= {f"{stem}.mlp.gate_up_proj.weight[{part}]" for part in "01"}
        names |= {f"{stem}.self_attn.{name}.weight" for name in ("o_proj", "q_norm", "k_norm")}
        names |= {f"{stem}.{name}.weight" for name in ("mlp.down_proj", "input_layernorm", "post_attention_layernorm")}
    return names


def engine_name(tensor: str) -> str:
    """Where a checkpoint's tensor goes in vLLM and SGLang, or its own name if it is not fused."""
    name = re.sub(r"^model\.", "", tensor)
    for old, new, part in (*_FUSED, *_FUSED_MLP):
        if old in name:
            return f"{name.replace(old, new)}[{part}]"
    return name


def unfilled_and_unknown(tensors: Iterable[str], layers: int) -> tuple[list[str], list[str]]:
    """Parameters an engine would leave at random, and tensors it would drop (SGLang) or stop at (vLLM)."""
    given, wanted = {engine_name(name) for name in tensors}, engine_slots(layers)
    return sorted(wanted - given), sorted(given - wanted)
