"""The optimiser against torch's own AdamW and clip_grad_norm_."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn

from paceline.config import TrainingConfig
from paceline.training.optimizer import Optimizer, learning_rate

CONFIG = TrainingConfig(learning_rate=1e-2, warmup=0.2, weight_decay=0.1, clip=0.7, betas=(0.9, 0.95))


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 7, bias=False), nn.RMSNorm(7), nn.Linear(7, 3, bias=False))
    return module.to(dtype)


def loss_of(module: nn.Module, step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """An unnormalised sum and its weight."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    dtype = next(module.parameters()).dtype
    x, y = torch.randn(8, 5, generator=generator).to(dtype), torch.randn(8, 3, generator=generator).to(dtype)
    weights = torch.rand(8, generator=generator)
    return ((module(x) - y).square().sum(dim=1).float() * weights).sum(), weights.sum()


def parameters(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_equals_torch_adamw_with_clipping(schedule: str) -> None:
    config = dataclasses.replace(CONFIG, schedule=schedule)
    mine, theirs = network(), network()
    optimizer = Optimizer(mine, config, 30)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    for step in range(30):
        loss, weight = loss_of(mine, step)
        loss.backward()
        report = optimizer.step(weight)
        loss, weight = loss_of(theirs, step)
        (loss / weight).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.7)
        for group in reference.param_groups:
            group["lr"] = learning_rate(step, 30, config)
        reference.step()
        reference.zero_grad()
        assert float(report.grad_norm) == pytest.approx(float(norm), rel=1e-5)
        assert not report.skipped
    for found, expected in zip(parameters(mine), parameters(theirs), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_four_micro_batches_equal_one_large_batch() -> None:
    whole, parts = network(), network()
    one = Optimizer(whole, CONFIG, 5)
    four = Optimizer(parts, dataclasses.replace(CONFIG, global_batch=4), 5)
    for step in range(5):
        losses = [loss_of(whole, step, part) for part in range(4)]
        torch.stack([loss for loss, _ in losses]).sum().backward()
        one.step(torch.stack([weight for _, weight in losses]).sum())
        total = torch.zeros(())
        for part in range(4):
            loss, weight = loss_of(parts, step, part)
            loss.backward()
            four.accumulate()
            total += weight
        four.step(total)
    for found, expected in zip(parameters(parts), parameters(whole), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("global_batch", [1, 2])
def test_reduction_sees_the_whole_gradient_and_the_weights(global_batch: int) -> None:
    """Two ranks that see the same batch are one rank that sees it: everything doubles, the quotient does not."""
    alone, ranked = network(), network()
    config = dataclasses.replace(CONFIG, global_batch=global_batch)
    one, two = Optimizer(alone, config, 4), Optimizer(ranked, config, 4)
    sizes = []

    def double(tensor: Tensor) -> None:
        sizes.append(tensor.numel())
        tensor.mul_(2)

    for step in range(4):
        for module, optimizer, reduce in ((alone, one, None), (ranked, two, double)):
            loss, weight = loss_of(module, step)
            loss.backward()
            optimizer.accumulate()
            optimizer.step(weight, reduce)
    assert max(sizes) >= sum(p.numel() for p in alone.parameters())
    assert len(sizes) == 8
    for found, expected in zip(parameters(ranked), parameters(alone), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("global_batch", [1, 2])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, global_batch: int) -> None:
    module = network()
    optimizer = Optimizer(module, dataclasses.replace(CONFIG, global_batch=global_batch), 9)
    for step in range(6):
        loss, weight = loss_of(module, step)
        (loss * (bad if step in {0, 3} else 1.0)).backward()
        before = {name: tensor.clone() for name, tensor in optimizer.state().items() if name != "steps_done"}
        optimizer.accumulate()
        report = optimizer.step(weight)
        same = all(torch.equal(before[name], optimizer.state()[name]) for name in before)
        assert bool(report.skipped) == same == (step in {0, 3})
        assert all(p.isfinite().all() for p in module.parameters())
    assert optimizer.steps_done == 6


def test_a_step_without_labels_is_skipped() -> None:
    module = network()
    optimizer = Optimizer(module, CONFIG, 2)
    before = parameters(module)
    loss, _ = loss_of(module, 0)
    (loss * 0).backward()
    assert optimizer.step(torch.zeros(())).skipped
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(module), strict=True))


def test_a_rank_without_a_gradient_contributes_zero() -> None:
    module = network()
    optimizer = Optimizer(module, CONFIG, 2)
    report = optimizer.step(torch.ones(()), lambda tensor: None)
    assert float(report.grad_norm) == 0.0


def test_resumed_steps_are_the_same_bit_for_bit() -> None:
    straight, first, second = network(), network(), network(seed=5)
    config = dataclasses.replace(CONFIG, global_batch=2)
    through = Optimizer(straight, config, 10)
    before = Optimizer(first, config, 10)

    def advance(module: nn.Module, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            loss, weight = loss_of(module, step)
            loss.backward()
            optimizer.accumulate()
            optimizer.step(weight)

    advance(straight, through, range(10))
    advance(first, before, range(5))
    saved = {name: tensor.clone() for name, tensor in before.state().items()}
    after = Optimizer(second, config, 10)
    after.load_state(saved)
    advance(second, after, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(parameters(straight), parameters(second), strict=True))
    assert after.steps_done == 10


def test_masters_keep_what_bfloat16_loses() -> None:
    """Updates smaller than half a bfloat16 step of 1.0 add up in the masters until the norm weight moves."""
    module = network(dtype=torch.bfloat16)
    optimizer = Optimizer(module, dataclasses.replace(CONFIG, learning_rate=2e-4, warmup=0.0, schedule="constant"), 100)
    norm = dict(module.named_parameters())["1.weight"]
    assert (norm == 1.0).all()
    for _ in range(100):
        loss, weight = loss_of(module, 0)
        loss.backward()
        optimizer.step(weight)
    assert norm.dtype == torch.bfloat16
    assert (norm != 1.0).all()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.detach(), optimizer.masters()[name].to(torch.bfloat16))


def test_masters_start_from_float32_weights_when_given() -> None:
    exact = dict(network().named_parameters())
    module = network(dtype=torch.bfloat16)
    optimizer = Optimizer(module, CONFIG, 1, masters={name: tensor.detach() for name, tensor in exact.items()})
    assert all(torch.equal(optimizer.masters()[name], tensor) for name, tensor in exact.items())


def test_schedules() -> None:
    cosine = [learning_rate(step, 100, TrainingConfig(learning_rate=1.0, warmup=0.04)) for step in range(100)]
    assert cosine[:4] == [0.25, 0.5, 0.75, 1.0]
    assert cosine[4] == 1.0
    assert cosine[52] == pytest.approx(0.5)
    assert all(a >= b for a, b in itertools.pairwise(cosine[4:]))
    assert 0 < cosine[-1] < 0.001
    wsd = [learning_rate(step, 100, TrainingConfig(learning_rate=1.0, schedule="wsd")) for step in range(100)]
    assert set(wsd[4:81]) == {1.0}
    assert wsd[90] == pytest.approx(0.5)
    assert wsd[99] == pytest.approx(0.05)
    assert learning_rate(99, 100, TrainingConfig(learning_rate=1.0, schedule="constant")) == 1.0
    assert learning_rate(0, 1, TrainingConfig(learning_rate=1.0)) == 1.0
