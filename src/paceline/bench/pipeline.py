"""The whole colocated loop in one process: the target's forward and the drafter's step, one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from paceline.bench import measuring
from paceline.bench.case import Case
from paceline.bench.drafter import StepBench, count_operations, step_bench
from paceline.bench.geometry import SyntheticStream, synthetic_batch
from paceline.bench.models import ready_target
from paceline.bench.target import count_target_operations
from paceline.pipeline.source import FeatureSource, InProcessSource
from paceline.pipeline.topology import Schedule, Topology


def measure(case: Case) -> dict[str, Any]:
    """Time steps of the loop that training runs, and the share of each part."""
    options, device = case.options, case.device
    top = measuring.ceilings(device)
    target = ready_target(case)
    bench = step_bench(case, target.ends, prepared=0)
    # One step more than is timed: the first, which compiles.
    schedule = Schedule(Topology("colocated", 1, 1), global_batch=1, start=0, stop=1 + options.warm + options.steps)
    stream: Any = SyntheticStream(case.batch, options.documents, case.target.vocabulary)
    marks = measuring.Marks(device)
    with contextlib.closing(InProcessSource(stream, target, schedule)) as source:
        first = measuring.first_seconds(lambda: _step(source, bench, 0), device)
        for step in range(1, 1 + options.warm):
            _step(source, bench, step)
        measuring.finish(device)
        kept = measuring.allocated(device)
        measuring.forget_peak(device)
        marks.mark("start")
        for step in range(1 + options.warm, schedule.stop):
            _step(source, bench, step, marks)
    parts = {name: total / options.steps for name, total in marks.seconds().items()}
    spent = sum(parts.values())
    batch = synthetic_batch(case.batch, options.documents, case.target.vocabulary, 0)
    of_target = count_target_operations(case.target, case.drafter.layer_ids[-1] + 1, batch).total
    of_drafter = count_operations(case.drafter, batch).total
    return {
        "ceilings": dataclasses.asdict(top),
        "operations": {"target": of_target, "drafter": of_drafter, "total": of_target + of_drafter},
        "step_seconds": spent,
        "seconds_of_parts": parts,
        "shares_of_parts": {name: part / spent for name, part in parts.items()},
        "share_of_matmul_peak": top.matmul_share(of_target + of_drafter, spent),
        "tokens_per_second": options.tokens / spent,
        "first_step_seconds": first,
        **measuring.memory(device, kept),
    }


def _step(source: FeatureSource, bench: StepBench, step: int, marks: measuring.Marks | None = None) -> None:
    for batch in source.global_batch(step):
        if marks is not None:
            marks.mark("target")
        sums = bench.backward(batch)
        if marks is not None:
            marks.mark("drafter")
        bench.optimizer.step(sums.weight)
        if marks is not None:
            marks.mark("optimizer")
