"""A drafter measured on prompts: acceptance, losslessness, speed beside plain decoding, and what to serve with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.errors import UserError
from paceline.evaluation.acceptance import Acceptance, KindAcceptance, summarise
from paceline.evaluation.decode import Decoded, Engine, Timed, decode
from paceline.evaluation.predict import Prediction, StepTimes, best_block, speedup, tau_at
from paceline.evaluation.prompts import EncodedPrompt
from paceline.evaluation.timing import step_times

ENOUGH_STEPS = 200
"""Below this many steps, acceptance by slot says too little to advise on, and nothing accepted may be chance."""

CONTEXT_EDGES = (0, 128, 512, 2_048, 8_192, 32_768)


@dataclass(frozen=True)
class Speed:
    """Measured on this machine in this run, both ways over the same caches."""

    batch: int
    speculative: float
    """Tokens a second, after the prefill."""
    plain: float
    steps_saved: float
    """Share of the target's forwards that speculation did without."""

    @property
    def speedup(self) -> float:
        return self.speculative / self.plain if self.plain else math.nan


@dataclass(frozen=True)
class Evaluation:
    """Everything that one evaluation measured."""

    acceptance: Acceptance
    by_context: dict[str, KindAcceptance]
    speeds: list[Speed]
    predictions: list[Prediction]
    """Best block length at each batch size, predicted from acceptance by slot and the forwards' times."""
    predicted_speedup: float
    """At the first batch size and the trained block, from τ and the two forward times."""
    lossless: bool | None
    """Greedy output equal to plain decoding's; None when sampled."""
    differing: int
    identity: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"speedup": [speed.speedup for speed in self.speeds]}


def evaluate(
    engine: Engine,
    prompts: Sequence[EncodedPrompt],
    *,
    limit: int,
    end_ids: Sequence[int],
    batches: Sequence[int] = (1,),
    identity: dict[str, Any] | None = None,
    report: Callable[[str], None] = lambda _line: None,
) -> Evaluation:
    """Decode every prompt with and without the drafter, at each batch size, and compare.

    Acceptance is taken at the first batch size. Raises UserError for a limit below 2, for a drafter that proposes
    nothing useful at all (no slot of any step accepted), and in float32 greedy decoding for output that differs from
    plain decoding's.
    """
    check_limit("limit", limit)
    if engine.drafter is None or engine.shape is None:
        raise AssertionError("an engine with a drafter is evaluated")
    warm_up(engine, prompts[0].ids, end_ids)
    speeds, first = [], None
    for size in batches:
        report(f"batch {size}, with the drafter")
        drafted = run_batches(engine, prompts, size, limit, end_ids)
        report(f"batch {size}, without the drafter")
        plain = run_batches(engine.without_drafter(), prompts, size, limit, end_ids)
        speeds.append(measured_speed(size, drafted, plain))
        first = first or (drafted, plain)
    assert first is not None
    answers, reference = _answers(first[0]), _answers(first[1])
    acceptance = summarise(
        (answer.walk(prompt.kind) for answer, prompt in zip(answers, prompts, strict=True)), engine.shape.block_size
    )
    _refuse_silence(acceptance)
    differing = sum(a.tokens != b.tokens for a, b in zip(answers, reference, strict=True))
    greedy = engine.sampling.greedy
    exact = greedy and engine.model.dtype == torch.float32
    if exact and differing:
        raise UserError(
            f"{differing} of {len(answers)} greedy answers in float32 differ from plain decoding",
            "report this: speculative decoding must be lossless",
        )
    report("timing the forwards at each block length")
    times = [step_times(engine, size, len(prompts[0].ids)) for size in batches]
    return Evaluation(
        acceptance=acceptance,
        by_context=by_context(answers, prompts, engine.shape.block_size),
        speeds=speeds,
        predictions=[best_block(acceptance.by_slot, item) for item in times],
        predicted_speedup=_predicted(acceptance, times[0], engine.shape.block_size),
        lossless=differing == 0 if greedy else None,
        differing=differing,
        identity=identity or {},
        settings={"limit": limit, "batches": list(batches), "prompts": len(prompts)}
        | dataclasses.asdict(engine.sampling)
        | {"dtype": str(engine.model.dtype).removeprefix("torch."), "graphs": engine.graphs, "static": engine.static},
    )


def check_limit(name: str, tokens: int) -> None:
    """Refuse answers so short that no step is made."""
    if tokens < 2:
        raise UserError(
            f"{name} = {tokens} leaves nothing to draft: an answer's first token is the prefill's", "give at least 2"
        )


def _predicted(acceptance: Acceptance, times: StepTimes, block: int) -> float:
    return speedup(tau_at(acceptance.by_slot, block), times.plain, times.verify[block], times.draft[block])


def warm_up(engine: Engine, prompt: Sequence[int], end_ids: Sequence[int]) -> None:
    """A few steps both ways, so that neither pays for first calls."""
    decode(engine, [prompt], 8, end_ids)
    decode(engine.without_drafter(), [prompt], 8, end_ids)


def run_batches(
    engine: Engine, prompts: Sequence[EncodedPrompt], size: int, limit: int, end_ids: Sequence[int]
) -> list[Timed]:
    """Decode in batches of `size`, in the order given (so that requests of a batch are the same both ways)."""
    return [
        decode(engine, [prompt.ids for prompt in prompts[start : start + size]], limit, end_ids)
        for start in range(0, len(prompts), size)
    ]


def _answers(timed: Sequence[Timed]) -> list[Decoded]:
    return [answer for batch in timed for answer in batch.answers]


def measured_speed(size: int, drafted: Sequence[Timed], plain: Sequence[Timed]) -> Speed:
    """Of the same prompts, decoded both ways in batches of `size`."""
    steps = sum(answer.steps for answer in _answers(drafted))
    forwards = sum(answer.steps for answer in _answers(plain))
    return Speed(size, _rate(drafted), _rate(plain), 1 - steps / forwards if forwards else 0.0)


def _rate(timed: Sequence[Timed]) -> float:
    seconds = sum(batch.decode_seconds for batch in timed)
    tokens = sum(len(answer.tokens) - 1 for answer in _answers(timed))
    return tokens / seconds if seconds else 0.0


def _refuse_silence(acceptance: Acceptance) -> None:
    if not acceptance.steps:
        raise UserError("every answer ended with its first token, so nothing was drafted", "give other prompts")
    # A drafter that has learnt nothing still hits by chance now and then: nothing at all in many steps is a fault.
    if acceptance.steps >= ENOUGH_STEPS and acceptance.accepted_only == 0:
        raise UserError(
            f"the drafter proposed nothing that was accepted in {acceptance.steps} steps",
            "check with `paceline verify` that it belongs to this target",
        )


def by_context(
    answers: Sequence[Decoded], prompts: Sequence[EncodedPrompt], block_size: int
) -> dict[str, KindAcceptance]:
    """Acceptance by tokens before the answer."""
    walks = [answer.walk(_bucket(len(prompt.ids))) for answer, prompt in zip(answers, prompts, strict=True)]
    found = summarise(walks, block_size).by_kind
    return {name: found[name] for low in CONTEXT_EDGES if (name := _bucket(low)) in found}


def _bucket(length: int) -> str:
    low = max(edge for edge in CONTEXT_EDGES if edge <= length)
    above = [edge for edge in CONTEXT_EDGES if edge > low]
    return f"{low}–{above[0] - 1}" if above else f"{low}–"


def lines(evaluation: Evaluation) -> list[str]:
    """The result in words, for a terminal."""
    found = evaluation.acceptance
    kinds = [f"  {kind}: τ {item.tau:.3f} over {item.steps} steps" for kind, item in found.by_kind.items()]
    contexts = [f"  context {name}: τ {item.tau:.3f}" for name, item in evaluation.by_context.items()]
    slots = " ".join(f"{share:.2f}" for share in found.by_slot)
    speeds = [
        f"batch {s.batch}: {s.speculative:.1f} tok/s with, {s.plain:.1f} without the drafter: {s.speedup:.2f}×, "
        f"{s.steps_saved:.0%} of the target's forwards saved"
        for s in evaluation.speeds
    ]
    same = {
        None: "sampled, so not compared",
        True: "equal to plain decoding",
        False: f"{evaluation.differing} answers differ",
    }
    interval = f"{found.low:.3f} … {found.high:.3f}" if found.low == found.low else "one answer gives no interval"
    return [
        f"τ {found.tau_micro:.3f} committed a step ({interval}), "
        f"accepted drafts {found.accepted_only:.3f} (the rest is the bonus token, which an answer's end may cut), "
        f"mean over requests {found.tau_macro:.3f}, {found.steps} steps",
        *kinds,
        *contexts,
        f"accepted by slot 1 …: {slots}",
        f"output: {same[evaluation.lossless]}",
        *speeds,
        f"predicted from τ and the forwards' times: {evaluation.predicted_speedup:.2f}×",
        *_advice(evaluation),
    ]


def _advice(evaluation: Evaluation) -> list[str]:
    """The block length to serve at each batch size, and how where it is not the trained one."""
    steps = evaluation.acceptance.steps
    if steps < ENOUGH_STEPS:
        return [f"block length: {steps} steps are too few to recommend one; measure at least {ENOUGH_STEPS}"]
    trained = len(evaluation.acceptance.by_slot) + 1
    return [
        f"batch {p.batch}: serve blocks of {p.block}{_how(p.block, trained)} "
        f"(predicted τ {p.tau:.2f}, {p.speedup:.2f}×)"
        for p in evaluation.predictions
    ]


def _how(block: int, trained: int) -> str:
    if block == trained:
        return ", as trained,"
    return (
        f" instead of {trained}: vLLM num_speculative_tokens {block - 1}, SGLang --speculative-num-draft-tokens {block}"
    )
