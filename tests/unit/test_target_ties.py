"""The self-check's notion of the model's own choice, in dtypes that tie logits."""

import torch

from paceline.target.checks import _as_good


def test_a_tie_of_rounding_is_no_disagreement() -> None:
    logits = torch.tensor([[1.0, 20.0, 20.0, 3.0], [9.0, 20.0, 19.875, 0.0]], dtype=torch.bfloat16)
    assert _as_good(torch.tensor([2, 2]), logits).tolist() == [True, True]


def test_another_token_is_a_disagreement() -> None:
    logits = torch.tensor([[1.0, 20.0, 19.0], [1.0, 20.0, 19.0]], dtype=torch.bfloat16)
    assert _as_good(torch.tensor([2, 0]), logits).tolist() == [False, False]
    exact = torch.tensor([[1.0, 20.0, 19.9999]])
    assert _as_good(torch.tensor([2]), exact).tolist() == [False]
