"""What every worker of a run has, whatever its role: data, schedule, run folder, and the way to the others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

import paceline
from paceline import config as configuration
from paceline import live
from paceline.compiling import guard
from paceline.config import Config
from paceline.data.corpus import Corpus, build_corpus
from paceline.data.stream import Stream
from paceline.errors import UserError
from paceline.pipeline.heartbeat import Heartbeat, unwritable
from paceline.pipeline.process import World
from paceline.pipeline.split import Served
from paceline.pipeline.topology import Role, Schedule, Topology, assign, make_schedule, note_on_idle
from paceline.pipeline.world import Connection, Groups, join, open_groups
from paceline.target.describe import mask_note, mask_offer
from paceline.training.checkpoint import Checkpoint, load_latest
from paceline.training.setup import Setup, refuse_used_folder, set_up, total_steps

Say = Callable[[str], None]
_IMPORTED = time.time()


@dataclass(frozen=True)
class Run:
    """One worker's share of a run, before any weight is loaded."""

    setup: Setup
    connection: Connection
    topology: Topology
    groups: Groups
    folder: Path
    corpus: Corpus
    stream: Stream
    schedule: Schedule
    total: int
    """Optimiser steps of the whole run."""
    resumed: Checkpoint | None
    heartbeat: Heartbeat
    say: Say
    """Prints on rank 0."""

    @property
    def config(self) -> Config:
        return self.setup.config

    @property
    def world(self) -> World:
        return self.connection.world

    @property
    def role(self) -> Role:
        return self.topology.role(self.world.rank)

    @property
    def device(self) -> torch.device:
        return torch.device(self.world.device)

    @property
    def compiles(self) -> bool:
        mode = self.config.compiling.mode
        return self.device.type == "cuda" if mode == "auto" else mode == "on"


@contextlib.contextmanager
def open_run(config: Config, world: World, resume: bool, *, claims: bool = True) -> Iterator[Run]:
    """Check everything, meet the others, claim the run folder; in that order, so that a fault leaves nothing behind.

    Without `claims` the folder does not become that of a run (a warm-up alone).
    """
    say = _printer(world.rank)
    setup = set_up(config)
    _use_device(world.device, config.launch.threads)
    with contextlib.ExitStack() as stack:
        connection = join(world, config.launch.collective_seconds)
        stack.callback(connection.close)
        topology = assign(config.topology, world.size, config.target.tensor_parallel)
        read = time.time()
        corpus = _corpus(setup, say)
        stream = _stream(setup, corpus)
        earlier = {"imports": _IMPORTED - psutil.Process().create_time(), "data": time.time() - read}
        folder = Path(config.run.folder) / config.run.name
        if world.rank == 0 and claims:
            claim_folder(folder, config, resume)
        connection.barrier("run folder")
        heartbeat = Heartbeat(folder, world.rank, topology.role(world.rank).name, earlier)
        stack.callback(heartbeat.close)
        stack.enter_context(live.serve(folder, world.rank, heartbeat.status, guard.state))
        resumed = _resume(folder, setup, corpus, say) if resume else None
        total = total_steps(config, stream.batches_per_epoch)
        held_out = len(stream.evaluation_batches())
        start = resumed.step if resumed else 0
        schedule = make_schedule(config, topology, start=start, stop=total, held_out=held_out)
        groups = open_groups(connection, topology)
        _introduce(setup, stream, schedule, say)
        yield Run(setup, connection, topology, groups, folder, corpus, stream, schedule, total, resumed, heartbeat, say)


def _printer(rank: int) -> Say:
    def say(text: str) -> None:
        if rank == 0:
            print(text, file=sys.stderr, flush=True)

    return say


def _use_device(name: str, threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UserError(
                f"device {name} was asked for, and torch {torch.__version__} sees no GPU",
                "run `paceline doctor`, or install a CUDA build of torch",
            )
        torch.cuda.set_device(torch.device(name))


def _corpus(setup: Setup, say: Say) -> Corpus:
    return build_corpus(
        setup.config.data,
        setup.tokenizer,
        mask_token_id=setup.drafter.mask_token_id,
        eos_ids=setup.target.eos_ids,
        seed=setup.config.run.seed,
        report=say,
    )


def _stream(setup: Setup, corpus: Corpus) -> Stream:
    config = setup.config
    return Stream(corpus.train, setup.batch, config.run.seed, corpus.held_out, config.evaluation.anchors)


def claim_folder(folder: Path, config: Config, resume: bool) -> None:
    """Make the run folder able to rebuild the run: command, resolved configuration, versions.

    Raises UserError when it holds another run that was not meant to be resumed.
    """
    if not resume:
        refuse_used_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(configuration.dump(config))
        with (folder / "starts.jsonl").open("a") as file:
            file.write(json.dumps(_origin()) + "\n")
    except OSError as error:
        raise UserError(*unwritable(folder, error)) from None


def _origin() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        "paceline": paceline.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
    }


def say_start(run: Run) -> None:
    """Where the time before the first step went."""
    spent = {phase: seconds for phase, seconds in run.heartbeat.spent().items() if seconds >= 0.1}
    parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in spent.items())
    run.say(f"ready after {sum(spent.values()):.0f} s: {parts}")


def keep_served(run: Run, served: Served) -> None:
    """A target's share of busy time, beside the run: `targets/rank-N.json`."""
    folder = run.folder / "targets"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{run.world.rank}.json").write_text(json.dumps(dataclasses.asdict(served)))


def checkpoint_facts(setup: Setup, corpus: Corpus) -> dict[str, Any]:
    """What must be the same for a checkpoint to be continued to the same losses (JSON)."""
    config = setup.config
    return {
        "data": corpus.digest,
        "seed": config.run.seed,
        "drafter": f"{setup.drafter.layers} layers, block {setup.drafter.block_size}",
        "target layers": list(setup.drafter.layer_ids),
        "hidden size": setup.drafter.hidden_size,
        "tokens": config.training.tokens,
        "anchors": config.training.anchors,
        "global batch": config.training.global_batch,
    }


def _resume(folder: Path, setup: Setup, corpus: Corpus, say: Say) -> Checkpoint | None:
    found = load_latest(folder / "checkpoints", say)
    if found is None:
        say("no checkpoint to resume from: starting at step 0")
        return None
    for key, value in checkpoint_facts(setup, corpus).items():
        if found.facts["run"].get(key) != value:
            raise UserError(
                f"{found.path} was made with {key} = {found.facts['run'].get(key)}, and this run has {value}",
                "resume with the configuration in the run folder, or start under another run.name",
            )
    say(f"resuming from step {found.step}")
    return found


def _introduce(setup: Setup, stream: Stream, schedule: Schedule, say: Say) -> None:
    packing = stream.packing()
    say(
        f"target {setup.target.name}: layers {list(setup.drafter.layer_ids)} of {setup.target.layers}; "
        f"drafter: {setup.drafter.layers} layers, block {setup.drafter.block_size}"
    )
    mask = setup.drafter.mask_token_id
    if found := mask_note(mask, setup.target, setup.tokenizer):
        offer = mask_offer(setup.target, setup.tokenizer)
        say(f"note: target.mask_token_id = {mask} is {found}: rows that hold it are left out; {offer}")
    say(
        f"data: {packing.documents} documents in {packing.rows} batches of {stream.shape.tokens} tokens "
        f"({packing.fill:.1%} filled), {packing.anchors_per_supervised:.2f} anchors a supervised token, "
        f"{packing.padded_slots:.1%} of slots on padding"
    )
    say(f"{schedule.topology}; {schedule.stop} steps of {schedule.global_batch} batches")
    if schedule.start >= schedule.stop:
        say(f"all {schedule.stop} steps are done: the drafter is only evaluated and written; training.steps sets more")
    if note := note_on_idle(schedule.topology, schedule.global_batch):
        say(note)
