"""Worker programs of the tests of reported faults."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from paceline.batches import FeatureBatch
from paceline.compiling.forbid import CompiledAfterWarmup
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


def two_hundred_compiled_steps(config: Config, world: World, resume: bool) -> int:
    """A compiled run; then its own drafter is offered twenty batches of other shapes. Writes what was counted."""
    from paceline.drafter.objective import Objective
    from paceline.training import loop

    compile_parts, fit = Objective.compile, loop.fit
    Objective.compile = lambda self: compile_parts(self, backend="aot_eager")  # type: ignore[method-assign]

    def counted(run: Any, learner: Any, source: Any, watch: Any, target: Any) -> None:
        fit(run, learner, source, watch, target)
        in_the_run = watch._forbidden.compilations()
        refused = [_refused(run, learner, watch, count) for count in range(17, 37)]
        facts = {"run": str(in_the_run), "refused": refused, "offers": str(watch._forbidden.compilations())}
        (run.folder / "counted.json").write_text(json.dumps(facts))

    loop.fit = counted
    chosen = CompilingConfig(mode="on", cache=config.compiling.cache)
    return loop.train(dataclasses.replace(config, compiling=chosen), world, resume)


def _refused(run: Any, learner: Any, watch: Any, count: int) -> str:
    """What a batch of `count` anchors is told."""
    tokens = run.stream.batch(0)
    many = {
        name: torch.cat([getattr(tokens, name)] * 3)[:count]
        for name in ("anchors_A", "starts_A", "labels_AB", "weights_AB")
    }
    batch = FeatureBatch(
        dataclasses.replace(tokens, **many), torch.zeros(len(tokens.ids_S), run.setup.drafter.features)
    )
    try:
        with watch.explain(run.total):
            learner.objective.hidden(batch)
    except CompiledAfterWarmup as error:
        return str(error)
    return "it was taken"
