"""Sizes taken from a target, and what a new drafter starts from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.config import DrafterConfig
from paceline.drafter.init import build, source_layers
from paceline.drafter.rope import Rope
from paceline.drafter.sizes import drafter_rope, shape_for
from paceline.errors import UserError
from paceline.shapes import DrafterShape, TargetShape

TARGET = TargetShape(
    name="tiny",
    model_type="llama",
    hidden_size=16,
    layers=6,
    vocabulary=40,
    heads=2,
    kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    rms_eps=1e-5,
    rope={"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.5},
    max_positions=256,
    tied=True,
    bos_ids=(1,),
    eos_ids=(2, 3),
    embedding_scale=4.0,
    logit_softcap=30.0,
)
SHAPE = shape_for(TARGET, (1, 2), DrafterConfig(layers=2, block_size=4), 39)


def target_weights(name: str) -> Tensor | None:
    """A Llama-like target: no q_norm and no k_norm; every number says which tensor it is of."""
    if "q_norm" in name or "k_norm" in name or name in {"fc.weight", "hidden_norm.weight"}:
        return None
    template = build(dataclasses.replace(SHAPE, layers=6), "random", 9).state_dict()
    return torch.full_like(template[name], 1.0 + len(name) + (int(name.split(".")[1]) if "layers" in name else 0) / 8)


def test_sizes_are_the_targets() -> None:
    assert (SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim) == (
        16,
        24,
        2,
        1,
        8,
    )
    assert (SHAPE.features, SHAPE.block_size, SHAPE.mask_token_id, SHAPE.target_layers) == (32, 4, 39, 6)
    assert (SHAPE.bos_token_id, SHAPE.eos_token_ids) == (1, (2, 3))
    assert (SHAPE.embedding_scale, SHAPE.logit_scale, SHAPE.logit_softcap) == (4.0, 1.0, 30.0)
    assert SHAPE.rope == {"rope_type": "default", "rope_theta": 50_000.0}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e6}),
        ({"rope_type": "dynamic", "rope_theta": 7.0, "factor": 2.0}, {"rope_type": "default", "rope_theta": 7.0}),
        (
            {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0, "type": "linear"},
            {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
        ),
        (
            {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6, "rope_type": "default"}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
    ],
)
def test_rope_comes_from_a_whitelist(given: dict[str, object], expected: dict[str, object]) -> None:
    assert drafter_rope(given) == expected


def test_rope_tables_stay_float32_when_the_drafter_does_not() -> None:
    drafter = build(SHAPE, "random", 0).to(torch.bfloat16)
    cos, sin = drafter.rope.tables(torch.tensor([[0, 100, 5000]]))
    assert cos.dtype == sin.dtype == torch.float32
    exact = 5000.0 / 50_000.0 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(cos[0, 2].double(), exact.cos(), atol=2e-4, rtol=0)
    linear = dataclasses.replace(SHAPE, rope={"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0})
    torch.testing.assert_close(
        Rope(linear).tables(torch.tensor([[400]]))[0], Rope(SHAPE).tables(torch.tensor([[100]]))[0]
    )


def test_a_target_that_cannot_carry_a_drafter_is_refused() -> None:
    with pytest.raises(UserError, match="odd"):
        shape_for(dataclasses.replace(TARGET, head_dim=7), (1,), DrafterConfig(), 39)
    with pytest.raises(UserError, match="no layer"):
        shape_for(TARGET, (), DrafterConfig(), 39)


def test_the_same_seed_gives_the_same_weights() -> None:
    first, again, other = (build(SHAPE, "random", seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


@pytest.mark.parametrize(("layers", "depth", "expected"), [(1, 6, [5]), (2, 6, [2, 5]), (5, 30, [5, 11, 17, 23, 29])])
def test_layers_are_spread_over_the_targets_depth(layers: int, depth: int, expected: list[int]) -> None:
    assert source_layers(dataclasses.replace(SHAPE, layers=layers, target_layers=depth)) == expected


def test_more_draft_layers_than_the_target_has_still_start_from_it() -> None:
    sources = source_layers(dataclasses.replace(SHAPE, layers=5, target_layers=2))
    assert len(sources) == 5
    assert set(sources) <= {0, 1}


def test_target_start_copies_the_layers_and_is_gentle_at_the_end() -> None:
    state = build(SHAPE, "target", 0, target=target_weights).state_dict()
    random = build(SHAPE, "random", 0).state_dict()
    for name, tensor in state.items():
        if "layers" in name and "q_norm" not in name and "k_norm" not in name:
            source = name.replace("layers.0.", "layers.2.").replace("layers.1.", "layers.5.")
            assert torch.equal(tensor, target_weights(source)), name  # type: ignore[arg-type]
    assert torch.equal(state["layers.0.self_attn.q_norm.weight"], torch.ones(8))
    assert (state["norm.weight"] < random["norm.weight"]).all()
    features = torch.randn(3, 32)
    torch.testing.assert_close(features @ state["fc.weight"].T, features.view(3, 2, 16).mean(dim=1))


def test_tensors_of_other_shapes_are_left_as_they_were() -> None:
    def odd(name: str) -> Tensor | None:
        found = target_weights(name)
        return torch.zeros(3, 3) if "mlp" in name else found

    state, random = build(SHAPE, "target", 0, target=odd).state_dict(), build(SHAPE, "random", 0).state_dict()
    assert torch.equal(state["layers.1.mlp.up_proj.weight"], random["layers.1.mlp.up_proj.weight"])


def reader(shape: DrafterShape) -> object:
    state = build(shape, "random", 7).state_dict()
    return lambda folder: (shape, state)


def test_a_folder_continues_from_its_weights() -> None:
    state = build(SHAPE, "some/folder", 0, read=reader(SHAPE)).state_dict()  # type: ignore[arg-type]
    expected = build(SHAPE, "random", 7).state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"layers": 3}, "3 layers"), ({"hidden_size": 32}, "hidden size 32"), ({"layer_ids": (0, 2)}, r"layers \[0, 2\]")],
)
def test_a_folder_that_does_not_fit_is_refused(change: dict[str, object], words: str) -> None:
    other = dataclasses.replace(SHAPE, **change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=words):
        build(SHAPE, str(Path("some/folder")), 0, read=reader(other))  # type: ignore[arg-type]
