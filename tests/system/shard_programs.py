"""Worker programs: real runs whose drafters share their optimiser state, or whose target is sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from paceline.config import Config, RunConfig, TopologyConfig
from paceline.pipeline.process import World

if TYPE_CHECKING:
    from paceline.target.base import Target

COLOCATED = TopologyConfig(kind="colocated")


@dataclass(frozen=True)
class Trial:
    """One run: its topology, its processes, and how state and target are kept."""

    topology: TopologyConfig
    size: int
    optimizer: Literal["auto", "on", "off"] = "off"
    target: int = 1
    """target.tensor_parallel"""
    after: str = ""
    """It resumes the half-done run of this name."""


def _split(targets: int, drafters: int) -> TopologyConfig:
    return TopologyConfig(kind="split", targets=targets, drafters=drafters)


SHARED = {
    "shared-1-3": Trial(_split(1, 3), 4, "on"),
    "shared-2": Trial(COLOCATED, 2, "on"),
}
RESUMED = {
    "shared-1-3-to-shared-2": Trial(COLOCATED, 2, "on", after="shared-1-3"),
    "shared-1-3-to-whole-1-2": Trial(_split(1, 2), 3, "off", after="shared-1-3"),
    "shared-2-to-one": Trial(COLOCATED, 1, "on", after="shared-2"),
    "alone-to-shared-3": Trial(COLOCATED, 3, "on", after="alone"),
}
TARGETS = {
    "target-2-drafter-1": Trial(_split(1, 1), 3, target=2),
    "targets-2-2-drafter-1": Trial(_split(2, 1), 5, target=2),
    "target-2-drafters-2": Trial(_split(1, 2), 4, "on", target=2),
    "target-2-resumed": Trial(_split(1, 1), 3, target=2, after="alone"),
}


def shared(config: Config, world: World, resume: bool) -> int:
    return _each(SHARED, config, world)


def resumed(config: Config, world: World, resume: bool) -> int:
    return _each(RESUMED, config, world)


def targets(config: Config, world: World, resume: bool) -> int:
    return _each(TARGETS, config, world)


def warmed(config: Config, world: World, resume: bool) -> int:
    """A sharded target in a run that warms up: one rank of it leads, and the other waits for the leader."""
    from paceline.drafter.objective import Objective
    from paceline.target.transformers_body import TransformersTarget
    from paceline.training import loop, parts

    compile_parts, load = Objective.compile, parts.load_target
    Objective.compile = lambda self: compile_parts(self, backend="eager")  # type: ignore[method-assign]

    def load_and_compile(run: parts.Run) -> Target:
        target = load(run)
        assert isinstance(target, TransformersTarget)
        target.compile_layers(backend="eager")
        return target

    loop.load_target = load_and_compile
    return loop.train(config, world, resume)


def _each(trials: Mapping[str, Trial], config: Config, world: World) -> int:
    """Every run in turn, each in a world of its own made of the first ranks, kept apart by the attempt."""
    from paceline.training.loop import train

    for number, (name, trial) in enumerate(trials.items()):
        if world.rank < trial.size:
            own = replace(
                config,
                run=RunConfig(name=name, folder=config.run.folder, seed=config.run.seed),
                topology=trial.topology,
                training=replace(config.training, shard_optimizer=trial.optimizer),
                target=replace(config.target, tensor_parallel=trial.target),
            )
            place = replace(world, size=trial.size, local_size=trial.size, attempt=number)
            train(own, place, bool(trial.after))
    return 0
