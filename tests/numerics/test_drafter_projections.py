"""Joined products against separate ones, eager and traced, and float8 against the exact product."""

from __future__ import annotations

import pytest
import torch
from drafter_world import gradients, relative, world

from paceline.batches import FrozenEnds
from paceline.config import TrainingConfig
from paceline.drafter import float8
from paceline.drafter.objective import Objective
from paceline.drafter.projections import Projection, neighbours
from paceline.errors import UserError
from paceline.training.optimizer import Optimizer

# Sizes whose weights fill whole alignment units of the flat buffer, as real ones do.


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_joined_products_equal_separate_ones(traced: bool) -> None:
    apart, together = world(), world()
    objectives = [Objective(it.drafter, it.ends, it.shape, TrainingConfig(), "dense") for it in (apart, together)]
    Optimizer(together.drafter, TrainingConfig(), 1)
    if traced:
        objectives[1].compile(backend="aot_eager")
    sums = [objective.sums(it.batch) for objective, it in zip(objectives, (apart, together), strict=True)]
    for one in sums:
        one.loss.backward()
    layer = together.drafter.decoder_layers()[0]
    assert layer.self_attn._whole_qkv is not None
    assert layer.self_attn._whole_kv is not None
    assert layer.mlp._whole is not None
    assert apart.drafter.decoder_layers()[0].mlp._whole is None
    torch.testing.assert_close(sums[0].loss, sums[1].loss)
    expected, found = gradients(apart.drafter), gradients(together.drafter)
    assert max(relative(found[name], expected[name]) for name in expected) < 1e-5


def test_a_joined_weight_follows_its_parameters() -> None:
    """The optimiser writes into the very memory that the joined weight looks at."""
    it = world()
    objective = Objective(it.drafter, it.ends, it.shape, TrainingConfig(learning_rate=0.1, warmup=0.0), "dense")
    optimizer = Optimizer(it.drafter, objective.config, 5)
    sums = objective.sums(it.batch)
    sums.loss.backward()
    optimizer.step(sums.weight)
    attention = it.drafter.decoder_layers()[1].self_attn
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert attention._whole_qkv is not None
    assert torch.equal(attention._whole_qkv, torch.cat([weight.detach() for weight in weights]))


def test_only_neighbours_are_joined() -> None:
    flat = torch.randn(3 * 8 * 4)
    first, second, far = (Projection(4, 8) for _ in range(3))
    for place, projection in enumerate((first, second, far)):
        projection.weight.data = flat[place * 32 : (place + 1) * 32].view(8, 4)
    assert torch.equal(neighbours((first, second)), flat[:64].view(16, 4))  # type: ignore[arg-type]
    assert neighbours((first, far)) is None
    assert neighbours((second, first)) is None
    assert neighbours((Projection(4, 8), Projection(4, 8))) is None


@pytest.mark.parametrize(("dtype", "bound"), [(float8.VALUES, 0.04), (float8.GRADIENTS, 0.08)])
def test_float8_casts_keep_the_largest_entry_and_the_relative_error(dtype: torch.dtype, bound: float) -> None:
    x = torch.randn(16, 32) * torch.logspace(-6, 3, 16)[:, None]
    cast, scale = float8.cast_rows(x, dtype)
    assert scale.shape == (16, 1)
    back = cast.float() * scale
    assert relative(back, x) < bound
    assert ((back - x).norm(dim=1) / x.norm(dim=1)).max() < bound
    assert torch.equal(float8.cast(torch.zeros(4, 4), dtype)[0].float(), torch.zeros(4, 4))


def test_float8_says_where_it_cannot_run() -> None:
    table = torch.zeros(16, 16)
    with pytest.raises(UserError, match="float8"):
        float8.Float8Head(FrozenEnds(table, table))
