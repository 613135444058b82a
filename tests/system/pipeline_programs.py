"""Worker programs of the pipeline's tests: real training, several runs in one set of processes, or killed midway."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import Config, RunConfig, TopologyConfig
from paceline.pipeline.process import World

TOPOLOGIES = {
    "split-5-3": (TopologyConfig(kind="split", targets=5, drafters=3), 8, False),
    "split-1-1": (TopologyConfig(kind="split", targets=1, drafters=1), 2, False),
    "split-2-1": (TopologyConfig(kind="split", targets=2, drafters=1), 3, False),
    "split-1-3": (TopologyConfig(kind="split", targets=1, drafters=3), 4, False),
    "colocated-4": (TopologyConfig(kind="colocated"), 4, False),
    "resumed-2-2": (TopologyConfig(kind="split", targets=2, drafters=2), 4, True),
}
"""Name of the run -> topology, processes, and whether it resumes from what lies in its folder."""


def several(config: Config, world: World, resume: bool) -> int:
    """Every topology in turn, each in a world of its own made of the first ranks. (Importing torch once is what costs.)

    Each runs `config` under its own run.name; the worlds keep apart by the attempt, a prefix of all that they share.
    """
    from paceline.training.loop import train

    for number, (name, (topology, size, resumes)) in enumerate(TOPOLOGIES.items()):
        if world.rank < size:
            run = RunConfig(name=name, folder=config.run.folder, seed=config.run.seed)
            place = replace(world, size=size, local_size=size, attempt=number)
            train(replace(config, run=run, topology=topology), place, resumes)
    return 0


def slow_features(config: Config, world: World, resume: bool) -> int:
    """Training whose target takes 16 s for the features of all documents, as a large one takes hours."""
    import time

    from paceline.target.feature_cache import CachedTarget
    from paceline.training.loop import train

    compute = CachedTarget._compute

    def slowly(cache: CachedTarget, shard: Any) -> None:
        honest, begun = cache._computing, time.monotonic()

        def beat() -> None:
            honest()
            time.sleep(2.0)

        cache._computing = beat
        while time.monotonic() - begun < 16.0:
            compute(cache, shard)

    CachedTarget._compute = slowly
    return train(config, world, resume)


def killed_twice(config: Config, world: World, resume: bool) -> int:
    """Training in which, at the first start, the drafter dies after its first checkpoint; at the second, the target."""
    from paceline.training import loop

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if world.attempt == 0 and world.rank == 0:
        save = loop.save

        def save_and_die(*arguments: Any, **named: Any) -> Path:
            save(*arguments, **named)
            die()
            raise AssertionError("it is dead")

        loop.save = save_and_die
    if world.attempt == 1 and world.rank == 1:
        from paceline.pipeline.split import _Sender

        make = _Sender.make

        def make_and_die(self: _Sender, item: Any, batches: Any) -> None:
            if item.index >= 8 * config.training.global_batch:
                die()
            make(self, item, batches)

        _Sender.make = make_and_die
    return loop.train(config, world, resume)
