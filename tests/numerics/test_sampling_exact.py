"""Speculative sampling is plain sampling in distribution: the functions, and the whole loop."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from decode_world import make_drafter, make_target
from torch import Tensor

from paceline.batches import FrozenEnds
from paceline.errors import UserError
from paceline.evaluation.decode import Engine, decode
from paceline.evaluation.sampling import (
    Sampling,
    distribution,
    expected_acceptance,
    residual,
    verify_greedy,
    verify_sampled,
)
from paceline.shapes import DrafterShape

SETTINGS = {
    "T 0.7": Sampling(0.7),
    "T 1.0": Sampling(1.0),
    "top-p 0.9": Sampling(1.0, top_p=0.9),
    "top-k 20": Sampling(1.0, top_k=20),
    "top-k 4, T 0.7": Sampling(0.7, top_k=4),
}


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X > statistic) of a chi-square, by the Wilson-Hilferty normal approximation."""
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """p-value of counts against probabilities; cells expected under 8 times are pooled."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token outside the kept set was drawn"
    rare = (expected < 8) & (expected > 0)
    common = expected >= 8
    observed = torch.cat((counts[common], counts[rare].sum()[None]))
    wanted = torch.cat((expected[common], expected[rare].sum()[None]))
    keep = wanted > 0
    statistic = ((observed[keep] - wanted[keep]) ** 2 / wanted[keep]).sum()
    return chi_square_tail(float(statistic), int(keep.sum()) - 1)


@pytest.mark.parametrize("name", SETTINGS)
def test_one_step_is_distributed_as_the_target(name: str):
    """The first token of a step, over 60,000 independent requests."""
    generator, count, vocabulary = torch.Generator().manual_seed(7), 60_000, 24
    p = distribution(torch.randn(4, vocabulary, generator=generator) * 2, SETTINGS[name])
    q = distribution(torch.randn(3, vocabulary, generator=generator) * 2, SETTINGS[name])
    drafts = torch.stack([torch.multinomial(row, count, replacement=True, generator=generator) for row in q], dim=1)
    accepted, bonus = verify_sampled(drafts, q.expand(count, -1, -1), p.expand(count, -1, -1), generator)
    first = torch.where(accepted > 0, drafts[:, 0], bonus)
    assert chi_square(torch.bincount(first, minlength=vocabulary).float(), p[0]) > 0.01
    expected = float(expected_acceptance(p[0], q[0]))
    assert abs(float((accepted > 0).float().mean()) - expected) < 0.01


TINY = 6


@pytest.mark.parametrize("name", SETTINGS)
def test_three_tokens_of_the_loop_are_distributed_as_plain_sampling(name: str):
    """20,000 answers of three tokens from the decoding loop with a drafter, against probabilities without one."""
    sampling, rows = SETTINGS[name], 20_000
    sizes = {"hidden_size": 8, "head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = make_target("llama", vocab_size=TINY, num_hidden_layers=1, intermediate_size=16, **sizes)
    ends = FrozenEnds(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    shape = DrafterShape(8, 16, 1, 2, 2, 4, (0,), 3, 5, TINY, 1)
    engine = Engine(model, ends, make_drafter(shape), shape, sampling, torch.Generator().manual_seed(11))
    prompt = [3, 1, 4]
    timed = decode(engine, [prompt] * rows, 3, ())
    triples = torch.tensor([answer.tokens for answer in timed.answers])
    counts = torch.bincount(triples @ torch.tensor([TINY**2, TINY, 1]), minlength=TINY**3).float()
    assert chi_square(counts, joint(model, prompt, sampling)) > 0.01
    drafted = sum(sum(answer.accepted) for answer in timed.answers)
    assert drafted > rows / 10, "nothing was accepted, so nothing was tested"


@torch.no_grad()
def joint(model: torch.nn.Module, prompt: list[int], sampling: Sampling) -> Tensor:
    """P(t1, t2, t3) by enumerating every continuation."""
    pairs = list(itertools.product(range(TINY), repeat=2))
    logits = model(torch.tensor([[*prompt, *pair] for pair in pairs]), use_cache=False).logits[:, -3:].double()
    p = distribution(logits, sampling).double()
    first = p[0, 0]
    second = torch.stack([p[TINY * token, 1] for token in range(TINY)])
    third = p[:, 2].view(TINY, TINY, TINY)
    return (first[:, None, None] * second[:, :, None] * third).flatten()


def test_residual_is_p_minus_q_and_p_after_the_last():
    p = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]])
    q = torch.tensor([[[0.2, 0.7, 0.1]]])
    assert torch.allclose(residual(torch.tensor([0]), q, p), torch.tensor([[0.75, 0.0, 0.25]]))
    assert torch.equal(residual(torch.tensor([1]), q, p), p[:, 1])


def test_equal_distributions_accept_everything():
    p = torch.full((5, 3, 4), 0.25)
    accepted, bonus = verify_sampled(torch.randint(0, 4, (5, 2)), p[:, :2], p, torch.Generator().manual_seed(0))
    assert accepted.tolist() == [2] * 5
    assert bonus.shape == (5,)


def test_greedy_accepts_the_longest_prefix():
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 1, 2, 0], [1, 1, 1, 1]]), 4).float()
    accepted, bonus = verify_greedy(torch.tensor([[3, 1, 0], [0, 1, 1]]), logits)
    assert accepted.tolist() == [2, 0]
    assert bonus.tolist() == [2, 1]


def test_top_k_and_top_p_keep_what_they_should():
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    assert distribution(logits, Sampling(1.0, top_k=2)).tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert distribution(logits, Sampling(1.0, top_p=0.65)).tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    # Top-p looks at what top-k kept: 4/7 alone reaches 0.5.
    assert distribution(logits, Sampling(1.0, top_k=2, top_p=0.5)).tolist() == pytest.approx([1, 0, 0, 0])
    assert distribution(logits, Sampling(0.5)).tolist() == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30])


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_absurd_settings_are_refused(bad: dict[str, float]):
    with pytest.raises(UserError, match="is"):
        Sampling(**bad)  # type: ignore[arg-type]
