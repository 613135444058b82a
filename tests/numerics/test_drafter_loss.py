"""The frozen-head loss against cross-entropy on full logits, and D-PACE's weights against loops."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from drafter_world import gradients, relative, world
from torch import Tensor
from torch.nn import functional

from paceline.batches import FrozenEnds
from paceline.config import TrainingConfig
from paceline.drafter import loss as loss_module
from paceline.drafter.loss import argmax_matches, chunk_rows, frozen_head_loss
from paceline.drafter.objective import Objective
from paceline.drafter.weighting import dpace

ENDS = {
    "plain": {},
    "bias": {"head_bias_V": True},
    "scale": {"logit_scale": 0.4},
    "cap": {"logit_softcap": 3.0},
    "all": {"head_bias_V": True, "logit_scale": 1.7, "logit_softcap": 2.0},
}


def rows(kind: str, count: int = 11, dtype: torch.dtype = torch.float32) -> tuple[Tensor, FrozenEnds, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(23, 6, generator=generator, dtype=dtype)
    options = dict(ENDS[kind])
    if "head_bias_V" in options:
        options["head_bias_V"] = torch.randn(23, generator=generator, dtype=dtype)
    hidden = torch.randn(count, 6, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(0, 23, (count,), generator=generator)
    weights = torch.rand(count, generator=generator) * (torch.arange(count) % 3 > 0)
    return hidden, FrozenEnds(head, head, **options), labels, weights  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
def test_values_and_gradients_equal_full_logits(kind: str, chunk: int) -> None:
    hidden, ends, labels, weights = rows(kind)
    found = frozen_head_loss(hidden, ends, labels, weights, chunk=chunk)
    (found.loss * 3).backward()
    mine, hidden.grad = hidden.grad, None
    logits = ends.logits(hidden)
    losses = functional.cross_entropy(logits, labels, reduction="none")
    expected = (losses * weights).sum()
    (expected * 3).backward()
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.losses_N, losses.detach())
    assert torch.equal(found.correct_N, logits.argmax(dim=1) == labels)
    assert mine is not None
    torch.testing.assert_close(mine, hidden.grad)
    assert torch.equal(argmax_matches(hidden, ends, labels, chunk), found.correct_N)


@pytest.mark.parametrize("kind", ENDS)
def test_gradient_by_finite_differences(kind: str) -> None:
    hidden, ends, labels, weights = rows(kind, count=5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: frozen_head_loss(x, ends, labels, weights, chunk=2).loss, (hidden,))


def test_never_more_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, ends, labels, weights = rows("plain", count=50)
    seen = []
    whole = loss_module._logits

    def watched(hidden_CH: Tensor, given: FrozenEnds) -> Tensor:
        seen.append(len(hidden_CH))
        return whole(hidden_CH, given)

    monkeypatch.setattr(loss_module, "_logits", watched)
    frozen_head_loss(hidden, ends, labels, weights, chunk=8).loss.backward()
    assert max(seen) == 8
    assert sum(seen) == 50


def test_without_gradient_nothing_is_prepared() -> None:
    hidden, ends, labels, weights = rows("plain")
    with torch.no_grad():
        found = frozen_head_loss(hidden, ends, labels, weights, chunk=4)
    assert not found.loss.requires_grad
    assert float(found.loss) == pytest.approx(float(frozen_head_loss(hidden, ends, labels, weights).loss.detach()))


def test_huge_logits_stay_finite() -> None:
    hidden, ends, labels, weights = rows("plain")
    hidden = (hidden.detach() * 1e4).requires_grad_()
    found = frozen_head_loss(hidden, ends, labels, weights, chunk=4)
    found.loss.backward()
    assert found.loss.isfinite()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize(("count", "group"), [(1, 1), (700, 15), (10_000, 7)])
def test_chunks_are_whole_groups(count: int, group: int) -> None:
    chunk = chunk_rows(count, torch.empty(5000, 4), group)
    assert 1 <= chunk <= max(count, group)
    assert chunk % group == 0 or chunk >= count


def looped_dpace(losses: list[list[float]], counted: list[list[bool]], alpha: float) -> Tensor:
    weights = torch.zeros(len(losses), len(losses[0]))
    for block, values in enumerate(losses):
        last = sum(counted[block])
        smooth = [(1 - alpha) * math.exp(-value) + alpha for value in values]
        for slot in range(last):
            weights[block, slot] = sum(math.prod(smooth[: until + 1]) for until in range(slot, last))
    return weights


def test_dpace_weights_are_the_papers() -> None:
    losses = torch.rand(6, 5) * 4
    counted = torch.arange(5) < torch.tensor([[5], [3], [1], [0], [5], [2]])
    found = dpace(5, alpha=0.3)(losses.flatten(), counted.flatten().float()).view(6, 5)
    torch.testing.assert_close(found, looped_dpace(losses.tolist(), counted.tolist(), 0.3))


def test_dpace_is_the_gradient_of_the_expected_accepted_length() -> None:
    """Without smoothing, weight_j is the derivative of sum_m prod_(i<=m) q_i in log q_j: what the paper starts from."""
    losses = (torch.rand(1, 6, dtype=torch.float64) * 3).requires_grad_()
    torch.exp(-losses).cumprod(dim=1).sum().backward()
    found = dpace(6, alpha=0.0)(losses.detach().flatten(), torch.ones(6))
    assert losses.grad is not None
    torch.testing.assert_close(found, -losses.grad.flatten())


def test_dpace_objective_weighs_the_plain_losses() -> None:
    it = world()
    objective = Objective(it.drafter, it.ends, it.shape, TrainingConfig(weighting="dpace", head_chunk=6), "dense")
    sums = objective.sums(it.batch)
    sums.loss.backward()
    found = gradients(it.drafter)
    logits = it.ends.logits(objective.hidden(it.batch))
    labels, counted = it.batch.tokens.labels_AB[:, 1:], it.batch.tokens.weights_AB[:, 1:] > 0
    losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    weights = looped_dpace(losses.tolist(), counted.tolist(), 0.5)
    expected = (weights * losses).sum()
    expected.backward()
    assert float(sums.weight) == float(counted.any(dim=1).sum())
    torch.testing.assert_close(sums.loss.detach(), expected.detach())
    for name, gradient in gradients(it.drafter).items():
        assert relative(found[name], gradient) < 1e-4, name


def test_a_part_of_the_vocabulary_is_an_exact_softmax_over_it() -> None:
    it = world()
    inside = it.batch.tokens.labels_AB[it.batch.tokens.weights_AB > 0].unique()
    dropped, kept = inside[:1], inside[1:]
    objective = Objective(it.drafter, it.ends, it.shape, TrainingConfig(), "dense", vocabulary_ids=kept)
    sums = objective.sums(it.batch)
    counts = (it.batch.tokens.weights_AB > 0) & (it.batch.tokens.labels_AB != dropped)
    logits = it.ends.logits(objective.hidden(it.batch))[..., kept]
    expected = torch.zeros(())
    for block, slot in counts.nonzero().tolist():
        label = (kept == it.batch.tokens.labels_AB[block, slot]).nonzero()[0, 0]
        weight = it.batch.tokens.weights_AB[block, slot]
        expected = expected + weight * functional.cross_entropy(logits[block, slot - 1], label)
    torch.testing.assert_close(sums.loss, expected)
    assert float(sums.weight) == pytest.approx(float((it.batch.tokens.weights_AB * counts).sum()))
    assert sums.count_B.tolist() == counts.sum(dim=0).float().tolist()
    whole = Objective(it.drafter, it.ends, it.shape, TrainingConfig(), "dense")
    assert torch.equal(objective.accepts(it.batch), whole.accepts(it.batch))


def test_scaled_ends_reach_loss_and_inputs() -> None:
    it = world()
    scaled = dataclasses.replace(it.ends, embedding_scale=1.9, logit_scale=0.5, logit_softcap=4.0)
    objective = Objective(it.drafter, scaled, it.shape, TrainingConfig(), "dense")
    logits = scaled.logits(objective.hidden(it.batch))
    labels, weights = it.batch.tokens.labels_AB[:, 1:], it.batch.tokens.weights_AB[:, 1:]
    expected = (functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * weights).sum()
    torch.testing.assert_close(objective.sums(it.batch).loss, expected)
    plain = Objective(it.drafter, it.ends, it.shape, TrainingConfig(), "dense")
    assert not torch.allclose(plain.hidden(it.batch), objective.hidden(it.batch))


@pytest.mark.parametrize(("drafter", "target"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_drafter_may_compute_in_another_dtype_than_its_target(drafter: str, target: str) -> None:
    it = world()
    expected = Objective(it.drafter, it.ends, it.shape, TrainingConfig(), "dense").sums(it.batch).loss.detach()
    head_VH = it.ends.head_VH.to(getattr(torch, target))
    ends = dataclasses.replace(it.ends, head_VH=head_VH, embedding_VH=it.ends.embedding_VH.to(head_VH.dtype))
    module = it.drafter.to(getattr(torch, drafter))
    objective = Objective(module, ends, it.shape, TrainingConfig(), "dense")
    batch = dataclasses.replace(it.batch, features_SF=it.batch.features_SF.to(head_VH.dtype))
    found = objective.sums(batch)
    found.loss.backward()
    assert float(found.loss.detach()) == pytest.approx(float(expected), rel=2e-2)
    assert all(gradient.isfinite().all() for gradient in gradients(module).values())
    assert objective.accepts(batch).shape == it.batch.tokens.labels_AB.shape
