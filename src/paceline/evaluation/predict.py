"""What an acceptance by slot is worth: predicted speed-up, and the best block length to serve with.

With s_j the share of steps whose slot j is accepted, blocks of b slots commit τ(b) = 1 + s_1 + … + s_{b-1} tokens a
step (accepted drafts and the bonus). A step costs one forward of the drafter over b tokens and one of the target over b
tokens; plain decoding pays one forward of the target for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one forward at a batch size, by tokens a request."""

    batch: int
    plain: float
    """The target on one token."""
    verify: dict[int, float]
    """Block length -> the target on that many tokens."""
    draft: dict[int, float]
    """Block length -> drafter, its head and the context's keys and values."""


@dataclass(frozen=True)
class Prediction:
    batch: int
    block: int
    tau: float
    speedup: float


def tau_at(by_slot: Sequence[float], block: int) -> float:
    """τ with blocks cut to `block` slots: exact for the first step, and an estimate after, since walks change."""
    return 1.0 + sum(by_slot[: block - 1])


def speedup(tau: float, plain: float, verify: float, draft: float) -> float:
    """Speed of speculative decoding over plain: τ tokens for the price of a draft and a verification."""
    return tau * plain / (verify + draft)


def best_block(by_slot: Sequence[float], times: StepTimes) -> Prediction:
    """The block length among those timed with the highest predicted speed-up at this batch size."""
    found = [
        Prediction(
            times.batch,
            block,
            tau_at(by_slot, block),
            speedup(tau_at(by_slot, block), times.plain, times.verify[block], times.draft[block]),
        )
        for block in sorted(times.verify)
    ]
    return max(found, key=lambda item: item.speedup)


def block_lengths(block_size: int) -> list[int]:
    """Lengths worth timing: 2, 4, 8, … and the trained one."""
    lengths = []
    length = 2
    while length < block_size:
        lengths.append(length)
        length *= 2
    return [*lengths, block_size]
