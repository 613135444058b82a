"""Float8 casts and products, as far as a CPU has them; gradients on a device are in tests/gpu."""

from __future__ import annotations

import pytest
import torch
from drafter_world import relative, world

from paceline.batches import FrozenEnds
from paceline.config import TrainingConfig
from paceline.drafter import float8
from paceline.drafter.objective import Objective
from paceline.errors import UserError


@pytest.mark.parametrize(("dtype", "bound"), [(float8.VALUES, 0.04), (float8.GRADIENTS, 0.08)])
def test_casts_keep_the_largest_entry_and_the_relative_error(dtype: torch.dtype, bound: float) -> None:
    x = torch.randn(16, 32) * torch.logspace(-6, 3, 16)[:, None]
    cast, scale = float8.cast_rows(x, dtype)
    assert scale.shape == (16, 1)
    back = cast.float() * scale
    assert relative(back, x) < bound
    assert ((back - x).norm(dim=1) / x.norm(dim=1)).max() < bound
    assert torch.equal(float8.cast(torch.zeros(4, 4), dtype)[0].float(), torch.zeros(4, 4))


def test_a_float8_projection_is_near_the_exact_one_forward_and_backward() -> None:
    torch.manual_seed(0)
    projection = float8.Projection(64, 32).to(torch.bfloat16)
    x = torch.randn(2, 24, 64, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(2, 24, 32, dtype=torch.bfloat16)
    found = []
    for on in (False, True):
        projection.float8 = on
        y = projection(x)
        y.backward(grad)
        assert x.grad is not None
        assert projection.weight.grad is not None
        found.append((y.detach().float(), x.grad.float(), projection.weight.grad.float()))
        x.grad = projection.weight.grad = None
    for exact, near in zip(*found, strict=True):
        assert 0 < relative(near, exact) < 0.08


def test_a_traced_layer_equals_the_eager_one() -> None:
    """Per-layer compilation has no graph break and changes nothing, recomputing or not."""
    found = []
    for recompute, traced in ((False, False), (False, True), (True, True)):
        it = world()
        objective = Objective(it.drafter, it.ends, it.shape, TrainingConfig(recompute=recompute), "dense")
        if traced:
            objective.compile(backend="aot_eager")
        objective.sums(it.batch).loss.backward()
        found.append(it.drafter.fc.weight.grad)
    assert relative(found[1], found[0]) < 1e-6
    assert relative(found[2], found[0]) < 1e-6


def test_a_device_without_float8_is_refused() -> None:
    table = torch.zeros(16, 16)
    with pytest.raises(UserError, match="float8"):
        float8.Float8Head(FrozenEnds(table, table))
    it = world()
    with pytest.raises(UserError, match="float8"):
        Objective(it.drafter, it.ends, it.shape, TrainingConfig(matmul="float8"), "dense")
