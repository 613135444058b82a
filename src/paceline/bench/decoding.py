"""Decoding with a drafter beside plain decoding, over the same caches, at each batch size.

With random weights next to no draft is accepted: then the forwards' times, and the acceptance length from which a
drafter pays, are what there is to read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.bench import measuring
from paceline.bench.case import Case
from paceline.bench.drafter import random_drafter
from paceline.bench.geometry import layer_weights
from paceline.bench.models import load_target
from paceline.evaluation.acceptance import summarise
from paceline.evaluation.command import EvalOptions, prepare
from paceline.evaluation.decode import Engine
from paceline.evaluation.predict import StepTimes, speedup
from paceline.evaluation.report import EncodedPrompt, measured_speed, run_batches, warm_up
from paceline.evaluation.sampling import Sampling
from paceline.evaluation.timing import step_times
from paceline.shapes import DrafterShape, TargetShape


@dataclass(frozen=True)
class DecodingOperations:
    """Floating-point operations of the products of one step with a drafter; attention, small here, is left out."""

    target: float
    drafter: float

    @property
    def total(self) -> float:
        return self.target + self.drafter


def count_decoding_operations(target: TargetShape, drafter: DrafterShape, batch: int) -> DecodingOperations:
    """Every block token runs through the target with its head and through the drafter; slot 0 has no drafted logits;
    features of all of them become context (fusion, keys and values)."""
    tokens, head = batch * drafter.block_size, drafter.hidden_size * drafter.vocabulary
    keys_values = 2 * drafter.hidden_size * drafter.kv_heads * drafter.head_dim * drafter.layers
    context = drafter.features * drafter.hidden_size + keys_values
    return DecodingOperations(
        target=2.0 * tokens * (target.layers * layer_weights(target) + head),
        drafter=2.0 * (tokens * (drafter.layers * layer_weights(drafter) + context) + (tokens - batch) * head),
    )


def measure(case: Case) -> dict[str, Any]:
    """Measured tokens a second both ways, and the seconds of each forward. Raises UserError."""
    top = measuring.ceilings(case.device)
    engine, prompts = _real(case) if case.options.model else _random(case)
    assert engine.shape is not None
    end_ids = engine.shape.eos_token_ids
    first = measuring.first_seconds(lambda: warm_up(engine, prompts[0].ids, end_ids), case.device)
    kept = measuring.allocated(case.device)
    measuring.forget_peak(case.device)
    sizes = {str(size): _at(case, engine, prompts, size, end_ids) for size in case.options.batches}
    headline = sizes[str(case.options.batches[0])]
    operations = count_decoding_operations(case.target, engine.shape, case.options.batches[0])
    read = _weight_bytes(case.target, case.dtype) / headline["plain_seconds"]
    return {
        "ceilings": dataclasses.asdict(top),
        "operations": measuring.counted(operations),
        "step_seconds": headline["step_seconds"],
        "share_of_matmul_peak": top.matmul_share(operations.total, headline["step_seconds"]),
        "plain_share_of_copy_rate": read / (top.copy_gbytes * 1e9),
        "first_step_seconds": first,
        "graphs": engine.graphs,
        "prompts": len(prompts),
        "by_batch": sizes,
        **measuring.memory(case.device, kept),
    }


def _at(
    case: Case, engine: Engine, prompts: Sequence[EncodedPrompt], size: int, end_ids: Sequence[int]
) -> dict[str, Any]:
    """Everything of one batch size."""
    assert engine.shape is not None
    limit, block = case.options.answer, engine.shape.block_size
    drafted = run_batches(engine, prompts, size, limit, end_ids)
    plain = run_batches(engine.without_drafter(), prompts, size, limit, end_ids)
    speed = measured_speed(size, drafted, plain)
    answers = [answer for batch in drafted for answer in batch.answers]
    reference = [answer for batch in plain for answer in batch.answers]
    acceptance = summarise((answer.walk() for answer in answers), block)
    times = step_times(engine, size, len(prompts[0].ids))
    step = times.verify[block] + times.draft[block]
    return {
        "plain_tokens_per_second": speed.plain,
        "speculative_tokens_per_second": speed.speculative,
        "speedup": speed.speedup,
        "tau": acceptance.tau_micro,
        "differing_answers": sum(a.tokens != b.tokens for a, b in zip(answers, reference, strict=True)),
        "plain_seconds": times.plain,
        "step_seconds": step,
        "predicted_speedup": speedup(acceptance.tau_micro, times.plain, times.verify[block], times.draft[block]),
        "tau_that_pays": step / times.plain,
        "forwards": _forwards(times),
    }


def _forwards(times: StepTimes) -> dict[str, Any]:
    """Seconds of verification and drafting by block length."""
    return {
        "verify": {str(block): value for block, value in times.verify.items()},
        "draft": {str(block): value for block, value in times.draft.items()},
    }


def _weight_bytes(shape: TargetShape, dtype: torch.dtype) -> int:
    """What one plain step must read: every layer and the head."""
    numbers = shape.layers * layer_weights(shape) + shape.hidden_size * shape.vocabulary
    return numbers * dtype.itemsize


def _graphs(case: Case) -> bool:
    return case.device.type == "cuda" and case.options.graphs != "off"


def _random(case: Case) -> tuple[Engine, list[EncodedPrompt]]:
    """Answers never end early, and prompts are random ids."""
    body = load_target(case)
    drafter = random_drafter(case.drafter, case.device, case.dtype).eval().requires_grad_(False)
    graphs = _graphs(case)
    engine = Engine(body.model, body.ends, drafter, case.drafter, Sampling(), static=graphs, graphs=graphs)
    ids = torch.randint(
        case.target.vocabulary - 1,
        (max(case.options.batches), case.options.context),
        generator=torch.Generator().manual_seed(0),
    )
    return engine, [EncodedPrompt(tuple(row)) for row in ids.tolist()]


def _real(case: Case) -> tuple[Engine, list[EncodedPrompt]]:
    """As `paceline eval` loads them, greedily."""
    options = EvalOptions(
        drafter=case.options.drafter,
        target=case.options.model,
        prompts=case.options.prompts,
        count=max(case.options.batches),
        tokens=case.options.answer,
        device=case.device.type,
        dtype=case.options.dtype,
        graphs="on" if _graphs(case) else "off",
    )
    ready = prepare(options, Sampling())
    engine, prompts = ready.engine, ready.prompts
    return engine, prompts
