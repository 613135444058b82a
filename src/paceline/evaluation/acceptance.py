"""The acceptance length τ, one definition for the decoding loop and for the exact value without decoding.

A step COMMITS the tokens that it appends: accepted drafts and the bonus token, cut at the first end token or at the
length limit. τ is tokens committed over steps, over all requests (micro); beside it the mean over requests of that
ratio (macro) and accepted drafts alone over steps. The token that the prefill gives is not counted.

Letters: A anchors, B block size, S tokens of a batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.batches import EvaluationBatch, TokenBatch


@dataclass(frozen=True)
class Walk:
    """The steps of one request."""

    committed: tuple[int, ...]
    """Tokens appended by each step."""
    accepted: tuple[int, ...]
    """Of those, how many the drafter proposed."""
    kind: str = ""


@dataclass(frozen=True)
class KindAcceptance:
    tau: float
    accepted: float
    steps: int
    requests: int
    low: float
    high: float


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over a set of requests."""

    tau_micro: float
    tau_macro: float
    accepted_only: float
    steps: int
    committed: int
    requests: int
    low: float
    """95 % confidence interval of tau_micro, requests taken as independent; nan below two requests."""
    high: float
    by_slot: tuple[float, ...]
    """Share of steps whose slot j = 1 … B-1 was accepted; their sum is `accepted_only`."""
    by_kind: dict[str, KindAcceptance] = field(default_factory=dict)
    agreement: float = 1.0
    """Share of answer tokens looked at that are the target's own greedy choice."""

    @property
    def tau(self) -> float:
        return self.tau_micro


def exact_tau(
    accepts: Sequence[Tensor], batches: Sequence[EvaluationBatch], agreement: Sequence[Tensor] | None = None
) -> Acceptance:
    """τ of the decoding loop, without decoding (exact where the answers are the target's greedy choice).

    accepts: bool [A, B] of each batch, the draft's argmax equals the label (`Objective.accepts`).
    batches: every answer position an anchor, in one batch or spread over several.
    agreement: bool [S] of each batch, the token at a place is the target's choice (`agreement_of`). Where given, an
    answer is walked only up to its first disagreement, as if it ended before it.

    An answer that no step can be walked on (a single token) is not counted. Raises ValueError when an answer's anchors
    are not complete.
    """
    answers = _gather(accepts, batches, agreement)
    kinds = next((batch.kinds for batch in batches if batch.kinds), ())
    block = accepts[0].shape[1] if accepts else 1
    walks = [answer.walk(block, kinds[number] if kinds else "") for number, answer in sorted(answers.items())]
    share = 1.0
    if agreement is not None and answers:
        share = sum(a.agreed for a in answers.values()) / max(1, sum(a.tokens for a in answers.values()))
    return summarise((walk for walk in walks if walk.committed), block, share)


def agreement_of(next_tokens_S: Tensor, batch: TokenBatch) -> Tensor:
    """bool [S]: the token at a place is what the target chooses after the place before it, in the same document.

    next_tokens_S: int64 [S], the target's argmax after each place. Documents' first tokens count as agreed.
    """
    chosen = batch.ids_S[1:] == next_tokens_S[:-1]
    first = batch.documents_S[1:] != batch.documents_S[:-1]
    return torch.cat((torch.ones(1, dtype=torch.bool, device=chosen.device), chosen | first))


@dataclass
class _Answer:
    """Right slots in a row, by the anchor's position in its document."""

    runs: dict[int, int] = field(default_factory=dict)
    disagreed: set[int] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        return len(self.runs)

    @property
    def agreed(self) -> int:
        return len(self.runs) - len(self.disagreed)

    def walk(self, block: int, kind: str) -> Walk:
        first, last = min(self.runs), max(self.runs) + 1
        if len(self.runs) != last - first:
            raise ValueError(f"an answer lacks anchors: {len(self.runs)} of {last - first}")
        last = min(self.disagreed, default=last + 1) - 1
        at, committed, accepted = first, [], []
        while at < last:
            drafted = min(self.runs[at], block - 1, last - at)
            committed.append(min(drafted + 1, last - at))
            accepted.append(drafted)
            at += committed[-1]
        return Walk(tuple(committed), tuple(accepted), kind)


def _gather(
    accepts: Sequence[Tensor], batches: Sequence[EvaluationBatch], agreement: Sequence[Tensor] | None
) -> dict[int, _Answer]:
    answers: dict[int, _Answer] = defaultdict(_Answer)
    for index, (right_AB, batch) in enumerate(zip(accepts, batches, strict=True)):
        runs = right_AB[:, 1:].long().cumprod(dim=1).sum(dim=1).tolist()
        anchors = batch.tokens.anchors_A
        positions = batch.tokens.positions_S[anchors].tolist()
        agreed = None if agreement is None else agreement[index].cpu()
        for run, place, position, number in zip(
            runs, anchors.tolist(), positions, batch.answer_A.tolist(), strict=True
        ):
            if number < 0:
                continue
            answers[number].runs[position] = run
            # The anchor's successor is the first that a step at this anchor can commit.
            if agreed is not None and not bool(agreed[place + 1]):
                answers[number].disagreed.add(position + 1)
    return answers


def summarise(walks: Iterable[Walk], block_size: int, agreement: float = 1.0) -> Acceptance:
    """Totals over requests. With no step at all, τ is nan and `steps` 0."""
    walks = list(walks)
    total = _ratio(walks)
    kinds = sorted({walk.kind for walk in walks} - {""})
    steps = sum(len(walk.committed) for walk in walks)
    ratios = [sum(walk.committed) / len(walk.committed) for walk in walks if walk.committed]
    return Acceptance(
        tau_micro=total.tau,
        tau_macro=sum(ratios) / len(ratios) if ratios else math.nan,
        accepted_only=total.accepted,
        steps=steps,
        committed=sum(sum(walk.committed) for walk in walks),
        requests=len(walks),
        low=total.low,
        high=total.high,
        by_slot=_by_slot(walks, block_size, steps),
        by_kind={kind: _ratio([walk for walk in walks if walk.kind == kind]) for kind in kinds},
        agreement=agreement,
    )


def _by_slot(walks: Sequence[Walk], block_size: int, steps: int) -> tuple[float, ...]:
    counts = [0] * (block_size + 1)
    for walk in walks:
        for drafted in walk.accepted:
            counts[drafted] += 1
    reached = [sum(counts[slot:]) for slot in range(1, block_size)]
    return tuple(count / steps if steps else math.nan for count in reached)


def _ratio(walks: Sequence[Walk]) -> KindAcceptance:
    """τ and its interval by the ratio estimator's linearised standard error, requests as the sampled units."""
    steps = sum(len(walk.committed) for walk in walks)
    if not steps:
        return KindAcceptance(math.nan, math.nan, 0, len(walks), math.nan, math.nan)
    tau = sum(sum(walk.committed) for walk in walks) / steps
    accepted = sum(sum(walk.accepted) for walk in walks) / steps
    low = high = math.nan
    if (count := len(walks)) > 1:
        residue = sum((sum(walk.committed) - tau * len(walk.committed)) ** 2 for walk in walks)
        half = 1.96 * math.sqrt(count / (count - 1) * residue) / steps
        low, high = tau - half, tau + half
    return KindAcceptance(tau, accepted, steps, len(walks), low, high)
