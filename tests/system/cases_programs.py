"""Worker programs of the tests of reported faults."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch

from paceline.config import CompilingConfig, Config
from paceline.pipeline.process import World


def one_compiles_long(config: Config, world: World, resume: bool) -> int:
    """Training with compiling on, each rank on a host (and so a cache) of its own; rank 1 lost its cache.

    Its training step takes twice as long to compile as a collective may. The back end is one that needs no compiler, so
    that the test is short.
    """
    from paceline.drafter.objective import Objective
    from paceline.training import loop, warm

    compile_parts, step = Objective.compile, warm._one_step
    Objective.compile = lambda self: compile_parts(self, backend="eager")  # type: ignore[method-assign]

    def long_step(learner: warm.Learner, batch: warm.FeatureBatch) -> None:
        _work(2 * config.launch.collective_seconds)
        step(learner, batch)

    if world.rank == 1:
        warm._one_step = long_step
    place = dataclasses.replace(world, local_rank=0, local_size=1)
    root = Path(config.compiling.cache) / f"host-{world.rank}"
    return loop.train(dataclasses.replace(config, compiling=CompilingConfig(mode="on", cache=str(root))), place, resume)


def _work(seconds: float) -> None:
    """Keep the interpreter and a core busy, as a compiler does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.randn(64, 64) @ torch.randn(64, 64)
