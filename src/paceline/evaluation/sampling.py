"""Speculative sampling, exact in distribution (Leviathan et al., arXiv 2211.17192), as pure functions.

Letters: R requests, B block size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import UserError

_COLDEST = 1e-6
"""Logits over less than this overflow."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy, top_k 0 and top_p 1 keep every token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature = {self.temperature} is not 0 or a positive number", "use 0 for greedy, or more"
            )
        if 0 < self.temperature < _COLDEST:
            raise UserError(f"temperature = {self.temperature} is below {_COLDEST:g}", "use 0 for greedy")
        if self.top_k < 0:
            raise UserError(f"top_k = {self.top_k} is negative", "use 0 to keep every token")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p} is outside (0, 1]", "use 1 to keep every token")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [..., V] in float32: temperature, then top-k, then top-p on what top-k kept.

    Top-p keeps the smallest set of most likely tokens whose sum reaches p. Only for temperature > 0.
    """
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kept, places = scores.topk(sampling.top_k, dim=-1)
        scores = torch.full_like(scores, -torch.inf).scatter(-1, places, kept)
    probabilities = scores.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, places = probabilities.sort(dim=-1, descending=True)
        ordered = ordered * (ordered.cumsum(dim=-1) - ordered < sampling.top_p)
        probabilities = torch.zeros_like(probabilities).scatter(-1, places, ordered)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities


def draw(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token for each row: [..., V] -> int64 [...]."""
    flat = probabilities.reshape(-1, probabilities.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).view(probabilities.shape[:-1])


def verify_greedy(drafts: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of drafts [R, B-1] that is the argmax of logits [R, B, V], and add one token.

    Returns (accepted [R], bonus [R]).
    """
    choice = logits.argmax(dim=-1)
    accepted = (drafts == choice[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    return accepted, choice.gather(1, accepted[:, None])[:, 0]


def verify_sampled(
    drafts: Tensor, draft_probabilities: Tensor, target_probabilities: Tensor, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Accept draft x with probability min(1, p(x)/q(x)) in turn; after the first refusal draw from (p - q)+.

    drafts [R, B-1] drawn from draft_probabilities q [R, B-1, V]; target_probabilities p [R, B, V]. When all are
    accepted, the bonus is drawn from the last p. Returns (accepted [R], bonus [R]); the tokens committed are
    distributed as plain sampling from p.
    """
    p = target_probabilities[:, :-1].gather(-1, drafts[..., None])[..., 0]
    q = draft_probabilities.gather(-1, drafts[..., None])[..., 0]
    uniform = torch.rand(p.shape, generator=generator, device=p.device, dtype=p.dtype)
    accepted = (uniform * q < p).long().cumprod(dim=1).sum(dim=1)
    return accepted, draw(residual(accepted, draft_probabilities, target_probabilities), generator)


def residual(accepted: Tensor, draft_probabilities: Tensor, target_probabilities: Tensor) -> Tensor:
    """The distribution [R, V] of the token after `accepted` [R] drafts: (p - q)+ normalised, or p after the last."""
    rows = torch.arange(len(accepted), device=accepted.device)
    p = target_probabilities[rows, accepted]
    q = torch.nn.functional.pad(draft_probabilities, (0, 0, 0, 1))[rows, accepted]
    left = (p - q).clamp_min(0)
    total = left.sum(dim=-1, keepdim=True)
    # p = q to the last bit leaves nothing, and then a refusal has probability zero.
    return torch.where(total > 0, left / total.clamp_min(torch.finfo(p.dtype).tiny), p)


def expected_acceptance(target_probabilities: Tensor, draft_probabilities: Tensor) -> Tensor:
    """The probability that a draft is accepted: the sum over tokens of min(p, q), [..., V] -> [...]."""
    return torch.minimum(target_probabilities, draft_probabilities).sum(dim=-1)
