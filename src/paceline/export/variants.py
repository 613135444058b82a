"""Drafters that look like DFlash and are not: recognised by their keys and refused by name, never half-loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.errors import UserError
from paceline.fields import short

_DENY = "Paceline reads DFlash drafters of the first kind only; serve this one with the engine that it was made for"

_BY_ARCHITECTURE = (
    ("dflash2", "DFlash 2"),
    ("dspark", "DSpark"),
    ("domino", "Domino"),
    ("dflare", "DFlare"),
    ("jetspec", "JetSpec"),
    ("eagle", "EAGLE"),
    ("medusa", "Medusa"),
    ("mtp", "MTP"),
)

_BY_CONFIG = (
    ("DFlash 2", ("conv_kernel_size", "selector_rank", "selector_top_k")),
    ("DSpark", ("markov_rank", "markov_head_type", "enable_confidence_head")),
    ("Domino", ("gru_hidden_dim", "shift_label")),
)

_BY_TENSOR = (
    ("DFlash 2", re.compile(r"(^|\.)(attention_conv|mlp_conv|candidate_selector)\.")),
    ("DSpark", re.compile(r"(^|\.)(markov_head|markov_w[12]|confidence_head)\b")),
    ("Domino", re.compile(r"(^|\.)(gru|prefix_gru|embed_proj|domino)\b")),
    ("DFlare", re.compile(r"(^|\.)(layer_fusion|fusion_weights|fusion_logits|fc_layers|fcs)\b")),
    ("EAGLE", re.compile(r"(^|\.)midlayer\.")),
)


def name_of(config: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """The other method that a config or a tensor name gives away, or None."""
    return _from_config(config) or _from_tensors(tensors)


def _from_config(config: Mapping[str, Any]) -> str | None:
    block = config.get("dflash_config") or {}
    labels = [*(config.get("architectures") or []), config.get("speculators_model_type", ""), _projector(config, block)]
    for label in labels:
        for part, name in _BY_ARCHITECTURE:
            if part in str(label).lower():
                return name
    for name, keys in _BY_CONFIG:
        if any(block.get(key) or config.get(key) for key in keys):
            return name
    # JetSpec: a causal mask inside the block under the same tensor names, so only the config can tell.
    if config.get("is_causal") or block.get("causal"):
        return "JetSpec"
    return None


def _projector(config: Mapping[str, Any], block: Mapping[str, Any]) -> str:
    return str(block.get("projector_type") or config.get("projector_type") or "")


def _from_tensors(tensors: Iterable[str]) -> str | None:
    names = list(tensors)
    return next((name for name, pattern in _BY_TENSOR if any(pattern.search(item) for item in names)), None)


def refuse(config: Mapping[str, Any], tensors: Iterable[str], where: str) -> None:
    """Raise UserError for another method's drafter, or for a DFlash drafter of a kind that we do not compute."""
    if (name := name_of(config, tensors)) is not None:
        raise UserError(f"{where} is a {name} drafter, not a DFlash drafter", _DENY)
    body = config.get("transformer_layer_config") or config
    block = config.get("dflash_config") or {}
    if any(kind != "full_attention" for kind in body.get("layer_types") or ()) or block.get("use_swa"):
        raise UserError(f"{where} has sliding-window draft layers", "only full attention is computed here")
    if body.get("attention_bias") or block.get("attention_sink_bias"):
        raise UserError(f"{where} has attention biases or sinks", "only drafters without them are computed here")
    if config.get("sample_from_anchor"):
        raise UserError(
            f"{where} samples from the anchor slot", "only drafters whose slot 0 is known are computed here"
        )
    if body.get("is_neox_style") is False:
        raise UserError(f"{where} has interleaved rotary embeddings", "only the half-split form is computed here")
    act = body.get("hidden_act", "silu")
    if act != "silu":
        raise UserError(f"{where} has activation {short(act)}", "only silu is computed here")
