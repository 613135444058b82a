"""A target's facts without its weights: sizes, tokenizer, layers to capture, and the mask token."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.fields import Fields
from paceline.shapes import TargetShape
from paceline.target import gguf
from paceline.target.source import ModelSource, load_failure, resolve

_LAYER_KINDS = ("full_attention", "sliding_attention")
_RESERVED = re.compile(r"reserved|unused|extra|dummy|placeholder|<\|?(fim|file|repo|gh_|issue|jupyter|mask)", re.I)


@dataclass(frozen=True)
class Outline:
    """A target's configuration, and its modules without storage."""

    source: ModelSource
    config: Any
    """The text part of the model's configuration."""
    model: Any
    """The transformers model on the meta device."""


def read_shape(config: TargetConfig) -> TargetShape:
    """Read a target's facts from its configuration alone.

    Raises UserError for a model that is missing, unreadable, or of a kind whose packed documents cannot be kept apart.
    """
    outline = read_outline(config)
    facts = outline.config.to_dict()
    said = _fields(outline.source.name, facts)
    hidden, heads = said.whole("hidden_size", 1), said.whole("num_attention_heads", 1)
    widths = said.wholes("intermediate_size", 1, alone=True)
    return TargetShape(
        name=config.model,
        model_type=str(facts["model_type"]),
        hidden_size=hidden,
        layers=said.whole("num_hidden_layers", 1),
        vocabulary=outline.model.get_input_embeddings().num_embeddings,
        heads=heads,
        kv_heads=said.whole("num_key_value_heads", 1, default=heads),
        head_dim=said.whole("head_dim", 1, default=max(1, hidden // heads)),
        intermediate_size=widths[0] if widths else 4 * hidden,
        rms_eps=said.number("rms_norm_eps", 1e-6, below=1.0),
        rope=_rope(facts),
        max_positions=facts.get("max_position_embeddings") or 0,
        tied=bool(facts.get("tie_word_embeddings")),
        bos_ids=_ids(said, "bos_token_id"),
        eos_ids=_end_ids(outline.source, facts),
        parameters=outline.model.num_parameters(),
        embedding_scale=_embedding_scale(facts),
        logit_scale=_logit_scale(facts),
        logit_softcap=said.number("final_logit_softcapping", 0.0, zero=True),
    )


def _fields(name: str, facts: dict[str, Any]) -> Fields:
    return Fields(facts, f"target {name}", "check its config.json, or download the model again")


def read_outline(config: TargetConfig) -> Outline:
    """The target's configuration and its empty modules. Raises UserError as `read_shape` does."""
    source = gguf.located(resolve(config))
    whole = read_config(source)
    text = whole.get_text_config()
    _refuse_layer_kinds(source.name, text.to_dict())
    _check_numbers(source.name, text.to_dict())
    try:
        with torch.device("meta"), gguf.quiet():
            model = AutoModelForCausalLM.from_config(whole, trust_remote_code=False)
    except Exception as error:
        raise load_failure(source, "architecture", error) from error
    if not type(model)._supports_attention_backend:
        raise UserError(
            f"target {source.name}: {type(model).__name__} has no exchangeable attention in transformers, so packed "
            "documents cannot be kept apart",
            "choose a target of the Llama, Qwen, Gemma, Mistral, gpt-oss kind",
        )
    return Outline(source, text, model)


def read_config(source: ModelSource) -> Any:
    """The model's transformers configuration. Raises UserError."""
    try:
        with gguf.quiet():
            return AutoConfig.from_pretrained(**source.arguments())
    except Exception as error:
        raise load_failure(source, "configuration", error) from error


_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_LARGEST_DEPTH = 4096
_SCALES = ("embedding_multiplier", "logits_scaling", "logit_scale")


def _check_numbers(name: str, facts: dict[str, Any]) -> None:
    """Raise UserError for numbers that no model has, before modules are built of them: transformers checks kinds only.

    What a configuration leaves out is its kind's own business.
    """
    said = _fields(name, facts)
    for key in (*_SIZES, "max_position_embeddings"):
        said.whole(key, 1, default=1)
    said.whole("num_hidden_layers", 1, _LARGEST_DEPTH, default=1)
    said.wholes("intermediate_size", 1, alone=True)
    said.number("rms_norm_eps", 1e-6, below=1.0)
    for key in _SCALES:
        said.number(key, 1.0)
    said.number("final_logit_softcapping", 0.0, zero=True)
    rope = said.object("rope_parameters")
    for part in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        _fields(name, part).number("rope_theta", 1.0)


def _refuse_layer_kinds(name: str, facts: dict[str, Any]) -> None:
    """Layers that carry a state along the row mix packed documents; chunked attention counts from the row's start."""
    odd = sorted({str(kind) for kind in facts.get("layer_types") or () if kind not in _LAYER_KINDS})
    if odd:
        raise UserError(
            f"target {name} has layers of kind {', '.join(odd)}, which carry state from one packed document to the "
            "next or count from the start of the row",
            "choose a target whose layers are all full or sliding-window attention",
        )


def _rope(facts: dict[str, Any]) -> dict[str, Any]:
    """The rotation that a full-attention drafter layer of this target uses: whole heads, full-attention base."""
    rope = facts.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10_000.0}
    if "full_attention" in rope:
        rope = rope["full_attention"]
    # Drafters rotate whole heads: carrying the target's partial factor over would unmake what they were trained with.
    return {key: value for key, value in rope.items() if key != "partial_rotary_factor"}


def _ids(said: Fields, key: str) -> tuple[int, ...]:
    """Token ids; a negative one stands for none."""
    return tuple(item for item in said.wholes(key, -1, alone=True) if item >= 0)


def _end_ids(source: ModelSource, facts: dict[str, Any]) -> tuple[int, ...]:
    """Ends of an answer named by the configuration, the generation configuration or the GGUF header."""
    found = _ids(_fields(source.name, facts), "eos_token_id")
    if source.gguf_file is not None:
        found += gguf.end_ids(gguf.metadata(source.gguf_file))
    else:
        found += _generation_ends(source)
    return tuple(dict.fromkeys(found))


def _generation_ends(source: ModelSource) -> tuple[int, ...]:
    """The file is optional; one that is there must be readable."""
    try:
        with gguf.quiet():
            said = {"eos_token_id": GenerationConfig.from_pretrained(source.location).eos_token_id}
    except Exception as error:
        if isinstance(error, OSError) and not Path(source.location, "generation_config.json").is_file():
            return ()
        raise load_failure(source, "generation configuration", error) from error
    return _ids(_fields(source.name, said), "eos_token_id")


def _embedding_scale(facts: dict[str, Any]) -> float:
    if str(facts["model_type"]).startswith("gemma"):
        return math.sqrt(facts["hidden_size"])
    return float(facts.get("embedding_multiplier") or 1.0)


def _logit_scale(facts: dict[str, Any]) -> float:
    if facts.get("logits_scaling"):  # Granite divides
        return 1.0 / float(facts["logits_scaling"])
    return float(facts.get("logit_scale") or 1.0)  # Cohere multiplies


def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer: GGUF repairs made, and `target.chat_template` in place of its own. Raises UserError."""
    source = gguf.located(resolve(config))
    tokenizer = gguf.load_tokenizer(source) if source.gguf_file is not None else _plain_tokenizer(source)
    if config.chat_template:
        tokenizer.chat_template = _read_template(Path(config.chat_template))
    return tokenizer


def _plain_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    try:
        with gguf.quiet():
            loaded: Any = AutoTokenizer.from_pretrained(**source.arguments())
            return loaded
    except Exception as error:
        raise load_failure(source, "tokenizer", error) from error


def _read_template(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"target.chat_template = {str(path)!r}: {error}", "give a readable Jinja file") from None


def choose_layers(layers: int, features: int, layer_ids: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Layers whose outputs are captured: the configured ids, or the method's spacing (arXiv 2602.06036).

    One feature takes layer N // 2; K take round(1 + i (N - 4) / (K - 1)), halves to even. A shallow target gets the
    largest K' <= K whose ids are distinct and in range. Raises UserError for ids out of range, repeated or unsorted.
    """
    if layer_ids:
        return _checked_layers(layers, layer_ids)
    for count in range(features, 1, -1):
        ids = tuple(round(1 + index * (layers - 4) / (count - 1)) for index in range(count))
        if len(set(ids)) == count and list(ids) == sorted(ids) and ids[-1] < layers:
            return ids
    return (layers // 2,)


def _checked_layers(layers: int, layer_ids: tuple[int, ...]) -> tuple[int, ...]:
    for layer in layer_ids:
        if not 0 <= layer < layers:
            raise UserError(
                f"target.layer_ids holds {layer}, and the target has layers 0 … {layers - 1}",
                "ids are 0-based; leave target.layer_ids out for the method's spacing",
            )
    if list(layer_ids) != sorted(set(layer_ids)):
        raise UserError(f"target.layer_ids = {list(layer_ids)}: ids must ascend without repetition", "sort them")
    return tuple(layer_ids)


def check_mask_token(config: TargetConfig, shape: TargetShape, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a mask id that is missing, has no embedding row, or means something. Raises UserError."""
    mask = config.mask_token_id
    offer = mask_offer(shape, tokenizer)
    if mask < 0:
        raise UserError("target.mask_token_id is not set, and it is never guessed", offer)
    if mask >= shape.vocabulary:
        raise UserError(
            f"target.mask_token_id = {mask} has no row in the target's embedding of {shape.vocabulary} rows", offer
        )
    role = _role(mask, shape, tokenizer)
    if role:
        raise UserError(f"target.mask_token_id = {mask} is the target's {role}", offer)


def _role(token_id: int, shape: TargetShape, tokenizer: PreTrainedTokenizerBase) -> str:
    if token_id in shape.eos_ids or token_id == tokenizer.eos_token_id:
        return "end-of-sequence token"
    if token_id in shape.bos_ids or token_id == tokenizer.bos_token_id:
        return "beginning-of-sequence token"
    if token_id == tokenizer.pad_token_id:
        return "padding token"
    if token_id == tokenizer.unk_token_id:
        return "token for unknown text"
    if token_id >= len(tokenizer):
        return ""
    text = str(tokenizer.convert_ids_to_tokens(token_id))
    added = token_id in tokenizer.added_tokens_decoder
    return f"chat template's token {text!r}" if added and text in _template_text(tokenizer) else ""


def mask_note(mask: int, shape: TargetShape, tokenizer: PreTrainedTokenizerBase) -> str:
    """What speaks against an id as the mask: what it means to the target, or that text can hold it; else empty."""
    if role := _role(mask, shape, tokenizer):
        return f"the target's {role}"
    if mask >= len(tokenizer) or mask in tokenizer.added_tokens_decoder:
        return ""
    text = tokenizer.convert_ids_to_tokens(mask)
    if text is None or _RESERVED.search(str(text)):
        return ""
    return f"an ordinary token of the target, {str(text)!r}"


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else (template or "")


def mask_candidates(shape: TargetShape, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, str]]:
    """Ids that could serve as the mask, best first: rows of the padded vocabulary, then reserved special tokens."""
    padding = [(token_id, "unused row") for token_id in range(len(tokenizer), shape.vocabulary)]
    added = [(token_id, token.content) for token_id, token in sorted(tokenizer.added_tokens_decoder.items())]
    reserved = [item for item in added if _RESERVED.search(item[1])]
    other = [item for item in added if item not in reserved]
    return [item for item in padding + reserved + other if not _role(item[0], shape, tokenizer)]


def mask_offer(shape: TargetShape, tokenizer: PreTrainedTokenizerBase) -> str:
    """What to do about the mask id, with ids that would serve."""
    candidates = mask_candidates(shape, tokenizer)
    if not candidates:
        return "set target.mask_token_id to an id that never occurs in your text (the tokenizer names none as reserved)"
    listed = ", ".join(f"{token_id} ({text})" for token_id, text in candidates[:6])
    return f"set target.mask_token_id to an id that never occurs in text; it could be {listed}"
