"""Worlds: start them, join them, watch them, restart them.

`run` is what `paceline train` calls. Where one process is enough it runs here; on a host with several GPUs it starts
one worker each; under torchrun this process is already one rank of a larger world.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from paceline import config as configuration
from paceline.config import Config
from paceline.errors import UserError
from paceline.launch.places import visible_gpus, workers_wanted
from paceline.launch.watch import Limits, Watcher
from paceline.launch.worker import load_program, run_here
from paceline.pipeline.auto import RATES_FILE, Rates, choose, with_topology
from paceline.pipeline.heartbeat import forget_earlier, unwritable
from paceline.pipeline.process import World
from paceline.pipeline.topology import Topology, assign

TRAINING = "paceline.training.loop:train"
_MEASURING = "paceline.training.measure:measure"


def run(config: Config, *, resume: bool = False, program: str = TRAINING) -> int:
    """Run `program` on every process that `config.launch` and `config.topology` ask for; returns the exit code.

    `program` is `module:function`, called as `function(config, world, resume) -> int` in each worker. Where there are
    several it must keep a `pipeline.heartbeat.Heartbeat`, or it is taken for stalled. Raises UserError
    for what is wrong before any worker starts; a failure inside a worker of a local world is printed, with its log's
    path, and gives 1, or 2 where the user can mend it.
    """
    run_folder = Path(config.run.folder) / config.run.name
    if config.topology.kind == "auto":
        config = _decide(config, run_folder)
    if under_torchrun():
        world = World.from_environment("cpu")
        with _stall_watch(config, run_folder, world):
            return run_here(config, world, run_folder, lambda: load_program(program), resume or world.attempt > 0)
    workers = workers_wanted(config, visible_gpus())
    # What every worker would refuse is refused here, before anything is written.
    assign(config.topology, workers, config.target.tensor_parallel)
    if workers == 1:
        forget_earlier(run_folder)
        with _stopped_by_signals():
            return run_here(config, World(), run_folder, lambda: load_program(program), resume)
    return _run_workers(config, run_folder, program, workers, resume)


def _decide(config: Config, run_folder: Path) -> Config:
    """Measure every worker in processes of their own, print the table, and put the best topology in place of `auto`."""
    if under_torchrun() or config.target.tensor_parallel > 1:
        raise UserError(
            "topology.kind = 'auto' measures unsharded targets on the GPUs of one host",
            "see `paceline plan --world N`, and set topology.kind = 'split' with targets and drafters",
        )
    workers = workers_wanted(config, visible_gpus())
    colocated = with_topology(config, Topology("colocated", workers, workers))
    if workers == 1:
        return colocated
    if run(colocated, program=_MEASURING):
        raise UserError(
            "topology.kind = 'auto' could not measure both parts on one device (see the failure above)",
            "if they do not fit together, set topology.kind = 'split'; `paceline plan` says what fits",
        )
    rates = Rates(**json.loads((run_folder / RATES_FILE).read_text()))
    choice = choose(workers, rates, config.training.global_batch, sharding=config.training.shard_optimizer)
    print(choice.render(config.training.tokens), file=sys.stderr, flush=True)
    return with_topology(config, choice.best.topology)


def under_torchrun() -> bool:
    """Whether somebody else (torchrun, Slurm with its variables set) has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _run_workers(config: Config, run_folder: Path, program: str, workers: int, resume: bool) -> int:
    from paceline.launch.local import LocalWorld, run_local  # noqa: PLC0415 - brings torch's elastic agent

    path = run_folder / "launch.toml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(configuration.dump(config))
    except OSError as error:
        raise UserError(*unwritable(run_folder, error)) from None
    return run_local(LocalWorld(config, path, run_folder, program, workers, resume))


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """What a scheduler or a closed terminal sends stops one process as Ctrl-C does: an interruption, not a crash."""
    asked: list[int] = []
    here = os.getpid()

    def stop(number: int, _: FrameType | None) -> None:
        if os.getpid() != here:  # a fork of ours
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not asked:
            asked.append(number)
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    # nohup's, or an embedding program's, is left alone.
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt:
        if not asked:
            raise
        print(f"stopped by {signal.Signals(asked[0]).name}", file=sys.stderr, flush=True)
        raise SystemExit(128 + asked[0]) from None
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _stall_watch(config: Config, run_folder: Path, world: World) -> Watcher | nullcontext[None]:
    """Where our own launcher does not watch, the first worker of each host does."""
    if world.local_rank != 0:
        return nullcontext()
    return Watcher(run_folder, Limits.of(config), time.time(), lambda text: print(text, file=sys.stderr, flush=True))
