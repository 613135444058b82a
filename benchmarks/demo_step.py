"""Where a step of the CPU demo goes: its time with documents attended apart and under one dense mask, and a profile.

    python benchmarks/demo_step.py --model SmolLM2.gguf --out benchmarks/records/demo-step-cpu.json

Real weights, real batches of the demo's configuration; features are random, since a step does not care what they are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paceline import demo
from paceline.batches import FeatureBatch
from paceline.bench import machine
from paceline.drafter.blocks import dense_attend, dense_mask
from paceline.drafter.init import build
from paceline.drafter.objective import Objective
from paceline.export import read
from paceline.pipeline.process import World
from paceline.target.ends import load_ends
from paceline.target.weights import weights_reader
from paceline.training.optimizer import Optimizer
from paceline.training.run import open_run


class Dense(Objective):
    """The oracle's attention: one mask over the whole row."""

    def _attend(self, starts_A: torch.Tensor, anchors_A: torch.Tensor) -> Any:
        return dense_attend(dense_mask(starts_A, anchors_A, self.shape.tokens, self.shape.block_size))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    config = demo.demo_config(options.model, Path("runs/demo-step"), demo.CPU, gpu=False)
    record: dict[str, Any] = {"kind": "demo step", "command": sys.argv, "machine": machine()}
    with open_run(config, World(), False, claims=False) as run:
        ends = load_ends(config.target, "cpu", torch.float32)
        ids = torch.from_numpy(_label_ids(run.corpus.train))
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(config.training.tokens, run.setup.drafter.features, generator=generator)
        batches = [FeatureBatch(run.stream.batch(index), features) for index in range(options.steps)]
        for name, kind in (("documents apart", Objective), ("dense mask", Dense)):
            drafter = build(run.setup.drafter, "target", 0, target=weights_reader(config.target), read=read)
            optimizer = Optimizer(drafter, config.training, run.total)
            objective = kind(drafter, ends, run.setup.batch, config.training, "dense", vocabulary_ids=ids)
            record[name] = timed(objective, optimizer, batches)
    print(json.dumps({name: record[name]["step_ms"] for name in ("documents apart", "dense mask")}))
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _label_ids(documents: Any) -> Any:
    import numpy as np  # noqa: PLC0415 - as the run does it

    return np.unique(np.asarray(documents.ids)[np.asarray(documents.supervised, dtype=bool)]).astype(np.int64)


def timed(objective: Objective, optimizer: Optimizer, batches: list[FeatureBatch]) -> dict[str, Any]:
    """Median milliseconds of a step and of its parts, and the operators that take most of it."""

    def step(batch: FeatureBatch) -> tuple[float, float, float]:
        begun = time.perf_counter()
        sums = objective.sums(batch)
        forward = time.perf_counter()
        sums.loss.backward()
        backward = time.perf_counter()
        optimizer.accumulate()
        optimizer.step(sums.weight)
        return forward - begun, backward - forward, time.perf_counter() - backward

    step(batches[0])
    parts = [step(batch) for batch in batches]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for batch in batches[:4]:
            step(batch)
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_cpu_time_total)
    whole = sum(row.self_cpu_time_total for row in rows)
    return {
        "step_ms": 1e3 * statistics.median(sum(part) for part in parts),
        "forward_ms": 1e3 * statistics.median(part[0] for part in parts),
        "backward_ms": 1e3 * statistics.median(part[1] for part in parts),
        "optimizer_ms": 1e3 * statistics.median(part[2] for part in parts),
        "share_of_operators": {row.key: round(row.self_cpu_time_total / whole, 3) for row in rows[:12]},
    }


if __name__ == "__main__":
    sys.exit(main())
