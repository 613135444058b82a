"""Both parts on every device, timed: the pre-run of `topology.kind = "auto"`, in processes of its own.

It warms the compile cache for the run that follows, and leaves its memory to it.
"""

from __future__ import annotations

import dataclasses
import json

import torch

from paceline.batches import FeatureBatch
from paceline.config import Config
from paceline.pipeline.auto import RATES_FILE
from paceline.pipeline.measure import Parts, measure_rates
from paceline.pipeline.process import World
from paceline.pipeline.wire import Wire
from paceline.target.base import Target
from paceline.training.parts import Learner, load_target, make_learner
from paceline.training.run import Run, open_run
from paceline.training.warm import warm_worker


def measure(config: Config, world: World, resume: bool = False) -> int:
    """Measure a colocated world and write its rates into the run folder. Raises UserError."""
    with open_run(config, world, resume, claims=False) as run:
        before = _allocated(run.device)
        target = load_target(run)
        between = _allocated(run.device)
        learner = make_learner(run, target)
        after = _allocated(run.device)
        warm_worker(run, learner, target)
        target.close_upper_layers()
        run.heartbeat.beat("measure", run.schedule.start)
        whole = learner.optimizer.whole_bytes
        parts = _parts(run, target, learner, between - before, after - between + whole - learner.optimizer.kept_bytes)
        wire = Wire.for_run(config.topology, config.training.tokens, run.setup.drafter, target.dtype)
        gradient = 4 * sum(parameter.numel() for parameter in learner.drafter.parameters())
        rates = measure_rates(run.connection, parts, wire, gradient)
        if world.rank == 0:
            (run.folder / RATES_FILE).write_text(json.dumps(dataclasses.asdict(rates), indent=1))
        run.connection.barrier("end")
    return 0


def _parts(run: Run, target: Target, learner: Learner, target_bytes: int, drafter_bytes: int) -> Parts:
    tokens = run.stream.batch(0).to(run.device)
    batch = FeatureBatch(tokens, target.features(tokens).clone())
    weight = learner.objective.sums(batch).weight.detach()

    def train(given: FeatureBatch) -> None:
        learner.objective.sums(given).loss.backward()
        learner.optimizer.accumulate()

    return Parts(
        target=lambda: target.features(tokens),
        drafter=lambda: train(batch),
        both=lambda: train(FeatureBatch(tokens, target.features(tokens))),
        optimizer=lambda: learner.optimizer.step(weight),
        resident_target=target_bytes,
        resident_drafter=drafter_bytes,
        optimizer_bytes=learner.optimizer.whole_bytes,
    )


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
