"""How much of the hand-off of features is hidden behind compute: one target and one drafter as two processes.

Over NCCL on two GPUs, over gloo on a CPU; synthetic data, random weights.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from paceline import launch
from paceline.bench import measuring
from paceline.bench.case import Case, make_case
from paceline.bench.drafter import StepBench, count_operations, step_bench
from paceline.bench.geometry import SyntheticStream, synthetic_batch
from paceline.bench.models import ready_target
from paceline.bench.options import BenchOptions
from paceline.bench.target import count_target_operations
from paceline.config import Config, LaunchConfig, RunConfig
from paceline.errors import UserError
from paceline.pipeline.heartbeat import Heartbeat
from paceline.pipeline.process import World
from paceline.pipeline.split import Link, SplitSource, open_link, serve_features
from paceline.pipeline.topology import Schedule, Topology
from paceline.pipeline.wire import Wire
from paceline.pipeline.world import Connection, join, open_groups

_OPTIONS = "options.json"
_ALONE_REPEATS = 5
_PATIENCE = 600.0
"""Seconds that one rank waits while the other compiles."""


def measure(case: Case) -> dict[str, Any]:
    """Start both processes, and put together what each has measured. Raises UserError where they fail."""
    if launch.under_torchrun():
        raise UserError("the hand-off starts its own two processes", "run it without torchrun")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        place.mkdir()
        (place / _OPTIONS).write_text(json.dumps(dataclasses.asdict(case.options)))
        config = Config(
            run=RunConfig(name=place.name, folder=folder),
            launch=LaunchConfig(workers=2, collective_seconds=_PATIENCE, stall_seconds=_PATIENCE),
        )
        if launch.run(config, program=f"{__name__}:worker"):
            raise UserError("the hand-off's two processes did not end well", "see the failure above")
        drafter, target = (json.loads(_facts_file(place, rank).read_text()) for rank in range(2))
    return _together(case, drafter, target)


def _together(case: Case, drafter: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    spent, alone = drafter.pop("step_seconds"), (drafter.pop("alone_seconds"), target.pop("alone_seconds"))
    batch = synthetic_batch(case.batch, case.options.documents, case.target.vocabulary, 0)
    of_target = count_target_operations(case.target, case.drafter.layer_ids[-1] + 1, batch).total
    of_drafter = count_operations(case.drafter, batch).total
    peak = sum(rank["ceilings"]["matmul_tflops"] for rank in (drafter, target)) * 1e12
    firsts = (drafter.pop("first_step_seconds"), target.pop("first_step_seconds"))
    return {
        "ceilings": drafter.pop("ceilings"),
        "ceilings_of_target": target.pop("ceilings"),
        "operations": {"target": of_target, "drafter": of_drafter, "total": of_target + of_drafter},
        "step_seconds": spent,
        "drafter_alone_seconds": alone[0],
        "target_alone_seconds": alone[1],
        "step_over_slower_part": spent / max(alone),
        "waited_seconds": drafter.pop("waited_seconds"),
        "waited_share": drafter.pop("waited_share"),
        "bytes_of_a_batch": _wire(case).bytes,
        "share_of_matmul_peak": (of_target + of_drafter) / spent / peak,
        "tokens_per_second": case.options.tokens / spent,
        "first_step_seconds": max(firsts),
        "drafter": drafter,
        "target": target,
    }


def worker(config: Config, world: World, resume: bool) -> int:
    """One of the two ranks: 0 trains, 1 runs the target."""
    folder = Path(config.run.folder) / config.run.name
    given = json.loads((folder / _OPTIONS).read_text())
    case = make_case(BenchOptions(**given | {"batches": tuple(given["batches"])}), torch.device(world.device))
    connection = join(world, config.launch.collective_seconds)
    ends = _drafter_end if world.rank == 0 else _target_end
    facts = ends(case, connection, Heartbeat(folder, world.rank, "worker"))
    _facts_file(folder, world.rank).write_text(json.dumps(facts))
    connection.barrier("end")
    connection.close()
    return 0


def _facts_file(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank}.json"


def _wire(case: Case) -> Wire:
    shape = case.drafter
    return Wire(case.batch.tokens, len(shape.layer_ids), shape.hidden_size, case.dtype, case.options.form)  # type: ignore[arg-type]


def _link(case: Case, connection: Connection, beat: Heartbeat) -> Link:
    """Both ranks have compiled by now, or wait here for the other."""
    connection.barrier("ready", _PATIENCE)
    steps = case.options.warm + case.options.steps
    schedule = Schedule(Topology("split", 1, 1), global_batch=1, start=0, stop=steps)
    return open_link(connection, open_groups(connection, schedule.topology), schedule, _wire(case), beat, {})


def _stream(case: Case) -> Any:
    return SyntheticStream(case.batch, case.options.documents, case.target.vocabulary)


def _drafter_end(case: Case, connection: Connection, beat: Heartbeat) -> dict[str, Any]:
    top = measuring.ceilings(case.device)
    bench = step_bench(case)
    first = measuring.first_seconds(bench.step, case.device)
    alone = statistics.median(measuring.seconds(bench.step, case.device, _ALONE_REPEATS))
    kept = bench.kept_bytes()
    measuring.forget_peak(case.device)
    trained = _train(SplitSource(_link(case, connection, beat), _stream(case)), bench, case.options.warm)
    return {
        "ceilings": dataclasses.asdict(top),
        "first_step_seconds": first,
        "alone_seconds": alone,
        **trained,
        **measuring.memory(case.device, kept),
    }


def _target_end(case: Case, connection: Connection, beat: Heartbeat) -> dict[str, Any]:
    top = measuring.ceilings(case.device)
    target, stream = ready_target(case), _stream(case)
    batch = stream.batch(0).to(case.device)
    first = measuring.first_seconds(lambda: target.features(batch), case.device)
    alone = statistics.median(measuring.seconds(lambda: target.features(batch), case.device, _ALONE_REPEATS))
    kept = measuring.allocated(case.device)
    measuring.forget_peak(case.device)
    served = serve_features(_link(case, connection, beat), stream, target)
    return {
        "ceilings": dataclasses.asdict(top),
        "first_step_seconds": first,
        "alone_seconds": alone,
        "busy_share": served.busy_seconds / served.seconds,
        **measuring.memory(case.device, kept),
    }


def _train(source: SplitSource, bench: StepBench, warm: int) -> dict[str, Any]:
    """Steps without a host synchronisation inside; the first ones are not counted."""
    begun = 0.0
    for step in range(source.schedule.stop):
        if step == warm:
            measuring.finish(bench.device)
            source.waited()
            begun = time.perf_counter()
        for batch in source.global_batch(step):
            bench.train(batch)
    measuring.finish(bench.device)
    spent = time.perf_counter() - begun
    waited = source.waited()
    source.close()
    steps = source.schedule.stop - warm
    return {"step_seconds": spent / steps, "waited_seconds": waited / steps, "waited_share": waited / spent}
