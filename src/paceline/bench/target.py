"""The frozen target's packed forward, layers up to the last captured one, eager and compiled.

S context tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.batches import TokenBatch
from paceline.bench import measuring
from paceline.bench.case import Case
from paceline.bench.geometry import layer_weights, mixed_batch, synthetic_batch
from paceline.bench.models import load_target
from paceline.shapes import TargetShape
from paceline.target.base import Target
from paceline.target.float8 import use_float8_weights
from paceline.target.transformers_body import TransformersTarget


@dataclass(frozen=True)
class TargetOperations:
    """Floating-point operations that one forward must do, multiply and add counted apart."""

    products: float
    attention: float

    @property
    def total(self) -> float:
        return self.products + self.attention


def count_target_operations(shape: TargetShape, layers: int, batch: TokenBatch) -> TargetOperations:
    """Of the first `layers` layers: 2 a weight and token, and two products over the pairs that a causal mask within
    documents leaves visible. Padding counts for nothing, and dense layers are assumed."""
    lengths = [end - start for start, end in itertools.pairwise(batch.bounds)]
    visible = sum(length * (length + 1) // 2 for length in lengths)
    return TargetOperations(
        products=2.0 * layer_weights(shape) * layers * sum(lengths),
        attention=4.0 * shape.heads * shape.head_dim * visible * layers,
    )


def measure(case: Case) -> dict[str, Any]:
    """Time the forward over rows of one document, of equal documents (the headline) and of mixed ones."""
    options, device = case.options, case.device
    top = measuring.ceilings(device)
    target = load_target(case)
    target.close_upper_layers()
    rows = {name: batch.to(device) for name, batch in _rows(case).items()}
    out = torch.empty(options.tokens, target.width, dtype=target.dtype, device=device)
    facts: dict[str, Any] = {}
    first = measuring.first_seconds(lambda: target.features(rows["equal"], out), device)
    forms = {"eager": _time_rows(case, target, rows, out)}
    if options.weights == "float8":
        facts["float8_relative_difference"] = _turn_float8(target, rows["mixed"])
    if case.compiles:
        target.compile_layers()
        facts["compile_seconds"] = measuring.first_seconds(lambda: target.features(rows["equal"], out), device)
    kept = measuring.allocated(device)
    measuring.forget_peak(device)
    form = _form(case)
    if form != "eager":
        forms[form] = _time_rows(case, target, rows, out)
    else:
        target.features(rows["equal"], out)
    layers, spent = target.layer_ids[-1] + 1, forms[form]["equal"]
    operations = count_target_operations(case.target, layers, rows["equal"])
    return {
        "ceilings": dataclasses.asdict(top),
        "operations": measuring.counted(operations),
        "layers": layers,
        "form": form,
        "step_seconds": spent,
        "share_of_matmul_peak": top.matmul_share(operations.total, spent),
        "tokens_per_second": options.tokens / spent,
        "first_step_seconds": first,
        **facts,
        "seconds_of_forms": forms,
        "shares_of_forms": {
            form: {
                name: top.matmul_share(count_target_operations(case.target, layers, rows[name]).total, of_row)
                for name, of_row in times.items()
            }
            for form, times in forms.items()
        },
        **measuring.memory(device, kept),
    }


def _form(case: Case) -> str:
    """How the headline's forward runs."""
    name = "compiled" if case.compiles else "eager"
    return name if case.options.weights == "full" else f"{name}_float8"


def _rows(case: Case) -> dict[str, TokenBatch]:
    shape, vocabulary = case.batch, case.target.vocabulary
    return {
        "one": synthetic_batch(shape, 1, vocabulary, 0),
        "equal": synthetic_batch(shape, case.options.documents, vocabulary, 0),
        "mixed": mixed_batch(shape, vocabulary, 0),
    }


def _time_rows(case: Case, target: Target, rows: Mapping[str, TokenBatch], out: Tensor) -> dict[str, float]:
    """Median seconds of each row."""
    return {
        name: statistics.median(
            measuring.seconds(lambda batch=batch: target.features(batch, out), case.device, case.options.steps)
        )
        for name, batch in rows.items()
    }


def _turn_float8(target: TransformersTarget, batch: TokenBatch) -> float:
    """Give the target float8 weights; how far its features move, relative to their size."""
    exact = target.features(batch).float()
    use_float8_weights(target.decoder, target.device)
    return float((target.features(batch).float() - exact).norm() / exact.norm())
