"""What the workers of the launcher's tests run. Nothing here sleeps: workers block until they are ended."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from paceline.config import Config
from paceline.errors import UserError
from paceline.pipeline.heartbeat import Heartbeat
from paceline.pipeline.process import World


def folder(config: Config) -> Path:
    return Path(config.run.folder) / config.run.name


def ready(config: Config, world: World) -> None:
    """Tell the test, through its pipe, that this worker has come so far."""
    with (folder(config) / "ready").open("wb") as pipe:
        pipe.write(bytes([world.rank]))


def tell(config: Config, world: World, resume: bool) -> int:
    facts = {
        "world": vars(world) | {},
        "resume": resume,
        "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": os.environ["OMP_NUM_THREADS"],
        "cores": sorted(os.sched_getaffinity(0)),
        "port": os.environ.get("MASTER_PORT"),
    }
    (folder(config) / f"told-{world.rank}.json").write_text(json.dumps(facts))
    print(f"rank {world.rank} was here")
    return 0


def block(config: Config, world: World, resume: bool) -> int:
    beat = Heartbeat(folder(config), world.rank, f"role {world.rank}")
    beat.beat("train", 7)
    ready(config, world)
    threading.Event().wait()
    return 0


def follow_the_stopped(config: Config, world: World, resume: bool) -> int:
    """Rank 1 works, the others wait for it."""
    beat = Heartbeat(folder(config), world.rank, f"role {world.rank}")
    beat.beat("train", 7, waits_for=None if world.rank == 1 else "rank 1")
    ready(config, world)
    threading.Event().wait()
    return 0


def user_fault(config: Config, world: World, resume: bool) -> int:
    if world.rank == 1:
        raise UserError("data.train = 'nowhere' is not a file", "give a file")
    threading.Event().wait()
    return 0


def crash(config: Config, world: World, resume: bool) -> int:
    if world.rank == 1:
        return 1 // (world.rank - 1)
    threading.Event().wait()
    return 0


def crash_once(config: Config, world: World, resume: bool) -> int:
    if not resume and world.rank == 0:
        raise RuntimeError("the first start fails")
    return tell(config, world, resume)


def reduce_for_ever(config: Config, world: World, resume: bool) -> int:
    """Collectives without end, so that the others notice at once when one of them goes away."""
    import torch
    import torch.distributed as dist

    from paceline.pipeline.world import join

    beat = Heartbeat(folder(config), world.rank, f"role {world.rank}")
    join(world, config.launch.collective_seconds)
    step = 0
    while True:
        beat.beat("train", step, waits_for="the all-reduce")
        dist.all_reduce(torch.ones(1))
        step += 1
        if step == 3:
            ready(config, world)


def _measured(connection):  # type: ignore[no-untyped-def]
    import torch

    from paceline.pipeline.measure import Parts, measure_rates
    from paceline.pipeline.wire import Wire

    def work() -> None:
        torch.ones(64, 64) @ torch.ones(64, 64)

    return measure_rates(connection, Parts(work, work, work, work, 10, 20), Wire(8, 2, 4, torch.float32), 4096)


def meet(config: Config, world: World, resume: bool) -> int:
    """Meet once, agree, share, and leave."""
    from paceline.pipeline.world import join

    connection = join(world, config.launch.collective_seconds)
    assert connection.agree(True)
    assert not connection.agree(world.rank != world.size - 1)
    assert connection.share("rank", world.rank) == list(range(world.size))
    connection.require_same("facts", {"same": 1})
    rates = _measured(connection)
    assert connection.share("rates", vars(rates)) == [vars(rates)] * world.size
    assert rates.all_reduce_seconds > 0
    assert rates.transfer_seconds > 0
    tell(config, world, resume)
    connection.barrier("end")
    connection.close()
    return 0


def differ(config: Config, world: World, resume: bool) -> int:
    from paceline.pipeline.world import join

    connection = join(world, config.launch.collective_seconds)
    connection.require_same("features", {"digest": "d", "hidden size": 64 + world.rank})
    return 0
