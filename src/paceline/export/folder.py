"""Drafter <-> folder: write whole, read strictly, compare what was written with what was trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paceline import __version__
from paceline.errors import UserError
from paceline.export import files, variants
from paceline.export.card import CardFacts, render
from paceline.export.facts import FACTS, facts_json, template_hash
from paceline.export.layout import DTYPES, check_kinds, check_tensors, config_json, shape_from_config
from paceline.export.speculators_layout import (
    VERIFIER_COPIES,
    is_speculators,
    shape_from_speculators,
    speculators_config,
)
from paceline.shapes import DrafterShape, TargetShape

Layout = Literal["dflash", "speculators"]


def write(  # noqa: PLR0913  (what a folder is made of)
    folder: Path,
    state: Mapping[str, Tensor],
    shape: DrafterShape,
    target: TargetShape,
    *,
    dtype: str = "bfloat16",
    layout: Layout = "dflash",
    tokenizer: PreTrainedTokenizerBase | None = None,
    card: CardFacts | None = None,
    template: str = "",
) -> Path:
    """Write a drafter's folder: config.json, model.safetensors, README.md, paceline.json, tokenizer files.

    template: the hash of the chat template that it was trained with; empty takes the tokenizer's.

    Written aside and renamed: a kill leaves the folder as it was. Raises UserError for tensors that do not fit the
    shape, for non-finite weights, for a drafter that does not fit the target, and for a folder that is something else.
    """
    folder = Path(folder)
    _check_writable(folder)
    check_fits(shape, target, "this drafter")
    check_tensors(state, shape, "this drafter")
    tensors = _weights(state, dtype)
    facts = card or CardFacts(target=target.name)
    facts = dataclasses.replace(facts, version=facts.version or __version__)
    noted = facts_json(shape, tensors, target, facts, template or template_hash(tokenizer))

    def fill(place: Path) -> None:
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        files.write_json(place / "config.json", _config(shape, dtype, layout, target))
        files.write_json(place / FACTS, noted)
        (place / "README.md").write_text(render(shape, facts, folder.name, layout), encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(place)

    files.write_folder(folder, fill)
    return folder


_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)


def strangers(folder: Path) -> list[str]:
    """What lies in a drafter's folder and is none of what `write` puts there: replacing the folder would delete it."""
    ours = {"config.json", "model.safetensors", "README.md", FACTS, *_TOKENIZER}
    return sorted(path.name for path in folder.iterdir() if path.name not in ours) if folder.is_dir() else []


def _check_writable(folder: Path) -> None:
    try:
        occupied = folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        raise UserError(f"cannot look into {folder}: {error.strerror}", "choose another folder") from None
    if occupied and not (folder / FACTS).exists():
        raise UserError(f"{folder} exists and is not a drafter that Paceline wrote", "choose another folder")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", "choose another folder")


def _weights(state: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    if dtype not in DTYPES:
        raise UserError(f"export dtype {dtype!r} is unknown", f"choose one of {', '.join(DTYPES)}")
    tensors = {name: state[name].detach().to("cpu", DTYPES[dtype]).contiguous().clone() for name in sorted(state)}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{name} has values that are not finite in {dtype}", "export an earlier checkpoint")
    return tensors


def _config(shape: DrafterShape, dtype: str, layout: Layout, target: TargetShape) -> dict[str, Any]:
    if layout == "dflash":
        return config_json(shape, dtype)
    if layout == "speculators":
        return speculators_config(shape, dtype, target.name, [_architecture(target)])
    raise UserError(f"layout {layout!r} is unknown", "choose dflash or speculators")


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def _architecture(target: TargetShape) -> str:
    return _ARCHITECTURES.get(target.model_type, f"{target.model_type.title().replace('_', '')}ForCausalLM")


def read(folder: Path) -> tuple[DrafterShape, dict[str, Tensor]]:
    """A drafter's shape and tensors from our folders, the authors' released ones, or the speculators layout.

    Raises UserError for other methods' drafters (by name), for a config that leaves something to guess, and for
    missing, unknown, misshapen or non-finite tensors. In the speculators layout the copies of the target's own
    embedding and head are left aside. `shape.target_layers` is 0 where that layout does not say it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"drafter folder not found: {folder}", "give a folder with config.json and model.safetensors")
    shape, config = read_shape(folder)
    tensors = files.read_tensors(folder)
    if is_speculators(config):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in VERIFIER_COPIES}
    variants.refuse(config, tensors, str(folder))
    check_tensors(tensors, shape, str(folder))
    for name, tensor in tensors.items():
        if tensor.dtype not in (*DTYPES.values(), torch.float64):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{folder}: {name} is in {dtype}", f"take weights in one of {', '.join(DTYPES)}")
        if not torch.isfinite(tensor).all():
            raise UserError(f"{folder}: {name} has values that are not finite", "take another checkpoint")
    return shape, tensors


def read_shape(folder: Path) -> tuple[DrafterShape, dict[str, Any]]:
    """The shape and the raw config.json of a drafter's folder, without its weights."""
    config = files.read_json(Path(folder) / "config.json")
    check_kinds(config, str(folder))
    variants.refuse(config, (), str(folder))
    if is_speculators(config):
        return shape_from_speculators(config, str(folder)), config
    if not config.get("dflash_config") and "DFlashDraftModel" not in (config.get("architectures") or []):
        kind = (config.get("architectures") or [config.get("model_type", "an unknown model")])[0]
        raise UserError(f"{folder} holds {kind}, not a DFlash drafter", "give the drafter's folder, not the target's")
    return shape_from_config(config, str(folder)), config


def check_fits(shape: DrafterShape, target: TargetShape, where: str) -> None:
    """One line with both names and both sizes when a drafter and a target do not belong together."""
    for word, ours, theirs in mismatches(shape, target):
        raise UserError(
            f"{where} was made for {word} {ours}, but {target.name} has {theirs}",
            "give the target that the drafter was trained on",
        )


def mismatches(shape: DrafterShape, target: TargetShape) -> list[tuple[str, Any, Any]]:
    """(what, the drafter's, the target's) for every size that differs."""
    pairs: list[tuple[str, Any, Any]] = [
        ("hidden size", shape.hidden_size, target.hidden_size),
        ("depth", shape.target_layers or target.layers, target.layers),
        ("vocabulary", shape.vocabulary, target.vocabulary),
        ("embedding scale", shape.embedding_scale, target.embedding_scale),
        ("logit scale", shape.logit_scale, target.logit_scale),
        ("logit soft-cap", shape.logit_softcap, target.logit_softcap),
    ]
    differing = [(word, ours, theirs) for word, ours, theirs in pairs if ours != theirs]
    if shape.mask_token_id >= target.vocabulary:
        differing.append(("mask token", shape.mask_token_id, f"{target.vocabulary} embedding rows"))
    return differing


def compare(folder: Path, state: Mapping[str, Tensor], shape: DrafterShape) -> float:
    """Reload a folder and return the largest absolute difference from the trained tensors, relative to their size.

    Zero when exported in the dtype trained in; about 4e-3 for bfloat16. Raises UserError when names, shapes or
    the DrafterShape differ.
    """
    back, tensors = read(folder)
    if back != shape:
        changed = [f.name for f in dataclasses.fields(shape) if vars(back)[f.name] != vars(shape)[f.name]]
        raise UserError(f"{folder} does not give back {', '.join(changed)}", "report this: an export must round-trip")
    worst = 0.0
    for name, tensor in tensors.items():
        trained = state[name].detach().to("cpu", torch.float32)
        scale = max(float(trained.abs().max()), 1e-30)
        worst = max(worst, float((tensor.float() - trained).abs().max()) / scale)
    return worst
