"""vLLM's `speculators` layout (PyPI `speculators` 0.9.0): the same tensors under a config of its own.

Its `aux_hidden_state_layer_ids` are ours plus one (there, 0 is the embedding's output), and the target is named in it.
It has no fields for scaled embeddings and soft-capped logits, so drafters of such targets are refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import UserError
from paceline.export.layout import REMEDY, config_json, shape_from_config
from paceline.fields import Fields, short
from paceline.shapes import DrafterShape

VERSION = "0.9.0"

# Copies of the target's own weights that some versions save beside the drafter; a loader takes the target's.
VERIFIER_COPIES = frozenset(
    {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"}
)

_NOT_OF_THE_LAYERS = ("architectures", "block_size", "num_target_layers", "dflash_config", "dtype")


def is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config


def speculators_config(shape: DrafterShape, dtype: str, target: str, architectures: list[str]) -> dict[str, Any]:
    """config.json in the speculators layout for a drafter of the target called `target`."""
    if shape.embedding_scale != 1.0 or shape.logit_scale != 1.0 or shape.logit_softcap:
        raise UserError(
            f"the speculators layout cannot carry {target}'s scaled embeddings or logits",
            "export in the dflash layout",
        )
    body = {key: value for key, value in config_json(shape, dtype).items() if key not in _NOT_OF_THE_LAYERS}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "transformer_layer_config": body,
        "draft_vocab_size": shape.vocabulary,
        "block_size": shape.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in shape.layer_ids],
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": False,
        "num_target_layers": shape.target_layers,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": shape.block_size - 1}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
    }


def shape_from_speculators(config: Mapping[str, Any], where: str) -> DrafterShape:
    """The DrafterShape of a speculators config; `target_layers` is 0 where it is not recorded."""
    kind = config["speculators_model_type"]
    if kind != "dflash":
        raise UserError(f"{where} is a {short(kind)} drafter, not a DFlash drafter", "give a DFlash drafter")
    said = Fields(config, where, REMEDY)
    said.need("transformer_layer_config")
    body = said.object("transformer_layer_config")
    vocabulary = Fields(body, where, REMEDY).whole("vocab_size", 1)
    if said.whole("draft_vocab_size", 1, default=vocabulary) != vocabulary:
        raise UserError(
            f"{where} drafts from {said.values['draft_vocab_size']} of the target's {vocabulary} tokens",
            "only drafters with the target's whole vocabulary are read",
        )
    said.need("aux_hidden_state_layer_ids")
    flat = body | {
        "num_target_layers": said.whole("num_target_layers", 0, default=0),
        "dflash_config": {
            "mask_token_id": said.need("mask_token_id"),
            "target_layer_ids": [layer - 1 for layer in said.wholes("aux_hidden_state_layer_ids", 1)],
            "block_size": said.need("block_size"),
        },
    }
    return shape_from_config(flat, where)
