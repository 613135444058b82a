"""The two models of a case: random weights of its shape, made on the device, or real ones."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from paceline.bench.case import Case
from paceline.shapes import TargetShape
from paceline.target.ends import assemble
from paceline.target.float8 import use_float8_weights
from paceline.target.transformers_body import TransformersTarget


def load_target(case: Case) -> TransformersTarget:
    """The whole target, with weights in the case's dtype. Raises UserError."""
    if case.options.model:
        return TransformersTarget.load(case.target_config, case.device, case.drafter.layer_ids)
    return random_target(case.target, case.drafter.layer_ids, case.device, case.dtype)


def ready_target(case: Case) -> TransformersTarget:
    """The target as a run uses it: closed above the last captured layer, in float8 and compiled where asked for."""
    target = load_target(case)
    target.close_upper_layers()
    if case.options.weights == "float8":
        use_float8_weights(target.decoder, case.device)
    if case.compiles:
        target.compile_layers()
    return target


def random_target(
    shape: TargetShape, layer_ids: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> TransformersTarget:
    """A Qwen3 of the shape with random weights."""
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters=dict(shape.rope),
        tie_word_embeddings=shape.tied,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    ends = assemble(model.get_input_embeddings().weight, model.get_output_embeddings().weight, None, shape)
    return TransformersTarget(model, shape, layer_ids, device, ends)
