"""Tiny random target models of many families, and packed batches, for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.batches import TokenBatch

VOCABULARY = 97

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MIXED = ["sliding_attention", "full_attention"] * 2

FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "smol": (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24, "tie_word_embeddings": True},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"sliding_window": 5, "tie_word_embeddings": True, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 5, "layer_types": _MIXED, "tie_word_embeddings": True, "query_pre_attn_scalar": 8},
    ),
    "mistral": ("mistral", {"sliding_window": 6}),
    "qwen3-moe": ("qwen3_moe", _EXPERTS),
    "gpt-oss": (
        "gpt_oss",
        {
            **_EXPERTS,
            "sliding_window": 6,
            "layer_types": _MIXED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "phi3": ("phi3", {}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.7}),
    "cohere": ("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "deepseek": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "head_dim": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": None,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
        },
    ),
}


def write_model(family: str, folder: Path, **changes: object) -> Path:
    """A random model of a family, saved as a folder."""
    kind, own = FAMILIES[family]
    config = AutoConfig.for_model(kind, **(_COMMON | own | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases away from their defaults, so that a missed one shows
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


def documents(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def pack(rows: list[list[int]], tokens: int = 64, numbers: tuple[int, ...] = ()) -> TokenBatch:
    """Documents packed in a row of fixed size, without anchors."""
    used = sum(map(len, rows))
    tail = tokens - used
    assert tail >= 0
    bounds = [0]
    for row in rows:
        bounds.append(bounds[-1] + len(row))
    return TokenBatch(
        index=0,
        ids_S=torch.tensor([token for row in rows for token in row] + [0] * tail),
        positions_S=torch.tensor([place for row in rows for place in range(len(row))] + [0] * tail),
        documents_S=torch.tensor(
            [number for number, row in enumerate(rows) for _ in row] + [-1] * tail, dtype=torch.int32
        ),
        supervised_S=torch.zeros(tokens, dtype=torch.bool),
        anchors_A=torch.zeros(1, dtype=torch.int64),
        starts_A=torch.zeros(1, dtype=torch.int64),
        labels_AB=torch.zeros(1, 4, dtype=torch.int64),
        weights_AB=torch.zeros(1, 4),
        documents=numbers or tuple(range(len(rows))),
        bounds=tuple(bounds),
    )
