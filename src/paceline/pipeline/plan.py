"""`paceline plan`: what a run will do and need, before any GPU is touched or any weight loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.errors import UserError
from paceline.pipeline.auto import Choice, Prediction, Rates, choose, predict
from paceline.pipeline.cost import (
    GIB,
    RESERVE,
    Sizes,
    checkpoint_bytes,
    drafter_operations,
    drafter_parameters,
    memory_of,
    optimizer_bytes,
    target_operations,
    target_parameters,
    wants_shards,
    wire_bytes,
)
from paceline.pipeline.topology import RECEIVE_BUFFERS, Role, Topology, assign, note_on_idle
from paceline.shapes import DrafterShape, TargetShape


@dataclass(frozen=True)
class Gpu:
    """A GPU's published numbers, per second where a rate: dense bf16 operations, bytes to a neighbour one way."""

    name: str
    memory: float
    flops: float
    memory_rate: float
    link_rate: float


_GPUS = {
    "H200": Gpu("H200", 141e9, 989e12, 4.8e12, 450e9),
    "H100": Gpu("H100", 80e9, 989e12, 3.35e12, 450e9),
    "H20": Gpu("H20", 96e9, 148e12, 4.0e12, 450e9),
    "A100": Gpu("A100", 80e9, 312e12, 2.0e12, 300e9),
    "B200": Gpu("B200", 180e9, 2250e12, 8.0e12, 900e9),
    "L40S": Gpu("L40S", 48e9, 362e12, 0.864e12, 32e9),
    "RTX 4090": Gpu("RTX 4090", 24e9, 165e12, 1.008e12, 32e9),
    "RTX 5090": Gpu("RTX 5090", 32e9, 209e12, 1.79e12, 64e9),
}
_HOST = 8
"""GPUs of one host, joined by their own links; beyond it everything is counted at the network's rate."""
_NETWORK_RATE = 50e9
"""Bytes a second, one way, of a 400 Gbit/s card for each GPU."""
_LINK_SHARE = 0.7
"""Of the published rate, that large messages reach."""
_SHARE_OF_PEAK = 0.45
"""Of the published peak, where no record says better."""


@dataclass(frozen=True)
class RankPlan:
    """One rank's part, and what fills its device: bytes by what holds them."""

    role: Role
    memory: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """What `paceline plan` prints."""

    sizes: Sizes
    gpu: Gpu
    topology: Topology
    ranks: tuple[RankPlan, ...]
    prediction: Prediction
    choice: Choice | None
    """The table, where the topology was chosen here."""
    basis: tuple[str, ...]
    """Where the predicted times come from."""
    sharded: bool = False
    """Whether drafters share their optimiser state."""


def find_gpu(name: str) -> Gpu:
    """By a part of its name, as nvidia-smi or people write it. Raises UserError that lists the known ones."""
    for key in sorted(_GPUS, key=len, reverse=True):
        if key.lower().replace(" ", "") in name.lower().replace(" ", ""):
            return _GPUS[key]
    raise UserError(f"GPU {name!r} is not in the table of published numbers", f"known: {', '.join(_GPUS)}")


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Benchmark records (JSON objects with a `kind`) of a folder; other files are passed over."""
    records = []
    for path in sorted(folder.rglob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and "kind" in record:
            records.append({**record, "file": path.name})
    return records


def make_plan(
    config: Config,
    target: TargetShape,
    drafter: DrafterShape,
    world: int,
    gpu: str,
    records: Sequence[dict[str, Any]] = (),
) -> Plan:
    """Roles, memory, traffic and rate of a run on `world` GPUs of a kind, from shapes and published numbers alone.

    Raises UserError when the roles do not add up, or when something cannot fit: it says what, where and by how much.
    """
    device = find_gpu(gpu)
    sizes = Sizes(config, target, drafter)
    rates, basis = _rates(sizes, device, world, records)
    global_batch, sharding = config.training.global_batch, config.training.shard_optimizer
    choice = None
    if config.topology.kind == "auto":
        choice = choose(world, rates, global_batch, config.target.tensor_parallel, sharding)
        topology = choice.best.topology
    else:
        topology = assign(config.topology, world, config.target.tensor_parallel)
    sharded = wants_shards(sizes, topology, _room(device))
    ranks = tuple(RankPlan(role, memory_of(sizes, topology, role, sharded)) for role in topology.roles())
    _refuse_what_cannot_fit(ranks, device, sharding == "off" and topology.drafters > 1)
    prediction = predict(topology, rates, global_batch, sharding)
    return Plan(sizes, device, topology, ranks, prediction, choice, basis, sharded)


def _room(gpu: Gpu) -> int:
    return int(gpu.memory) - RESERVE


def _refuse_what_cannot_fit(ranks: Sequence[RankPlan], gpu: Gpu, could_shard: bool) -> None:
    fullest = max(ranks, key=lambda rank: rank.total)
    short = fullest.total - _room(gpu)
    if short <= 0:
        return
    largest = max(fullest.memory, key=lambda name: fullest.memory[name])
    shard = "set training.shard_optimizer = 'auto', " if could_shard else ""
    raise UserError(
        f"rank {fullest.role.rank} ({fullest.role.name}) needs {fullest.total / GIB:.1f} GiB and {gpu.name} offers "
        f"{_room(gpu) / GIB:.1f}: {short / GIB:.1f} GiB short; most of it is {largest} "
        f"({fullest.memory[largest] / GIB:.1f} GiB)",
        f"{shard}split target and drafter (topology.kind = 'split'), lower training.tokens or anchors, "
        "set training.recompute, target.weights = 'float8', or shard the target (target.tensor_parallel)",
    )


# --- times ---------------------------------------------------------------------------------------------------------


def _rates(sizes: Sizes, gpu: Gpu, world: int, records: Sequence[dict[str, Any]]) -> tuple[Rates, tuple[str, ...]]:
    target, target_basis = _seconds(_target_work(sizes), gpu, records)
    drafter, drafter_basis = _seconds(_drafter_work(sizes), gpu, records)
    shards = sizes.config.target.tensor_parallel
    parameters = drafter_parameters(sizes)
    topology = Topology("split", 1, 1, shards)
    alone = Topology("colocated", 1, 1)
    link = _LINK_SHARE * (gpu.link_rate if world <= _HOST else _NETWORK_RATE)
    rates = Rates(
        target_seconds=target / shards,
        drafter_seconds=drafter,
        optimizer_seconds=_optimizer_seconds(parameters, gpu),
        colocated_seconds=target + drafter,
        all_reduce_seconds=parameters * 4 / link,
        transfer_seconds=wire_bytes(sizes) / link,
        target_bytes=sum(memory_of(sizes, topology, topology.role(1)).values()),
        drafter_bytes=sum(memory_of(sizes, topology, topology.role(0)).values()),
        colocated_bytes=sum(memory_of(sizes, alone, alone.role(0)).values()),
        device_bytes=_room(gpu),
        optimizer_bytes=optimizer_bytes(sizes),
    )
    between = "the GPUs' own links" if world <= _HOST else "a network card of 400 Gbit/s for each GPU"
    traffic = f"traffic: {_LINK_SHARE:.0%} of the rate of {between}"
    return rates, (target_basis, drafter_basis, traffic)


@dataclass(frozen=True)
class _Work:
    """A part of a token batch, and which records tell its speed."""

    part: str
    kind: str
    operations: float
    options: dict[str, Any]
    """What a record must have been taken with, where it says."""
    updated: int = 0
    """Weights of the optimiser step that a record of the kind includes, unless it says how many; a batch has none."""


def _target_work(sizes: Sizes) -> _Work:
    options = {"weights": sizes.config.target.weights, "dtype": _DTYPES[sizes.width], "compile": True}
    return _Work("target", "target forward", target_operations(sizes), options)


def _drafter_work(sizes: Sizes) -> _Work:
    options = {"matmul": sizes.config.training.matmul, "dtype": _DTYPES[sizes.drafter_width], "compile": True}
    return _Work("drafter", "drafter step", drafter_operations(sizes), options, drafter_parameters(sizes))


_DTYPES = {2: "bfloat16", 4: "float32"}


def _optimizer_seconds(parameters: int, gpu: Gpu) -> float:
    """Masters, two moments, gradient and weights are read and written once."""
    return parameters * 30 / gpu.memory_rate


def _seconds(work: _Work, gpu: Gpu, records: Sequence[dict[str, Any]]) -> tuple[float, str]:
    """Seconds of a batch, and where that comes from: the record with the nearest amount of work, or counting."""
    known = [record for record in records if _fits_record(record, work, gpu)]
    if known:
        # Of equally near ones, the record that timed more steps.
        nearest = min(known, key=lambda record: (_distance(record, work), -record.get("options", {}).get("steps", 0)))
        rate = nearest["operations"]["total"] / _batch_seconds(nearest, work, gpu)
        recorded = f"{work.part}: {rate / 1e12:.0f} TFLOP/s, as recorded in {nearest['file']}"
        remarks = "; ".join(_remarks(nearest, work))
        return work.operations / rate, f"{recorded} ({remarks})" if remarks else recorded
    rate = _SHARE_OF_PEAK * gpu.flops
    narrow = "".join(f" with {name} = float8" for name, value in work.options.items() if value == "float8")
    return work.operations / rate, (
        f"{work.part}: no record for {gpu.name}{narrow}; counted operations at {_SHARE_OF_PEAK:.0%} of its published "
        f"peak ({gpu.flops / 1e12:.0f} TFLOP/s in bf16)"
    )


def _distance(record: dict[str, Any], work: _Work) -> float:
    # Two counts of one work differ in how many pairs the drawn anchors see.
    return round(abs(record["operations"]["total"] / work.operations - 1), 2)


def _remarks(record: dict[str, Any], work: _Work) -> list[str]:
    """What a reader of the predicted rate should know of the record that it comes from."""
    larger = record["operations"]["total"] / work.operations
    remarks = ["its optimiser step counted apart"] if work.updated else []
    # Small products run at a smaller share of the peak.
    return remarks if 0.5 <= larger <= 2 else [*remarks, f"taken with {larger:.2g} times the work: a guess here"]


def _batch_seconds(record: dict[str, Any], work: _Work, gpu: Gpu) -> float:
    """Of a record's step, without the optimiser."""
    return record["step_seconds"] - _optimizer_seconds(record.get("parameters", work.updated), gpu)


def _fits_record(record: dict[str, Any], work: _Work, gpu: Gpu) -> bool:
    if record.get("kind") != work.kind or "step_seconds" not in record or "operations" not in record:
        return False
    options = record.get("options", {})
    if any(options.get(name, value) != value for name, value in work.options.items()):
        return False
    device = str(record.get("machine", {}).get("device", ""))
    return (
        any(gpu == known for name, known in _GPUS.items() if name in device) and _batch_seconds(record, work, gpu) > 0
    )


# --- words ---------------------------------------------------------------------------------------------------------


def render(plan: Plan) -> str:
    """The plan as text."""
    return "\n".join([*_heading(plan), "", *_roles(plan), "", *_traffic(plan), "", *_speed(plan)])


def _heading(plan: Plan) -> list[str]:
    sizes, training = plan.sizes, plan.sizes.config.training
    return [
        f"{plan.topology} on {plan.topology.world} × {plan.gpu.name}",
        f"target {sizes.target.name}: {target_parameters(sizes) / 1e9:.2f} B weights, layers "
        f"{list(sizes.drafter.layer_ids)} of {sizes.target.layers} captured",
        f"drafter: {drafter_parameters(sizes) / 1e6:.0f} M weights, {sizes.drafter.layers} layers, "
        f"block {sizes.drafter.block_size}",
        f"batch: {training.tokens} tokens, {training.anchors} anchors; {training.global_batch} of them a step "
        f"({training.tokens * training.global_batch:,} tokens)",
    ]


def _roles(plan: Plan) -> list[str]:
    """One line for ranks that do the same, with their memory (an estimate) by what holds it."""
    lines = [f"memory of each rank (estimated; {plan.gpu.name} offers {_room(plan.gpu) / GIB:.1f} GiB)"]
    done: set[tuple[str, int]] = set()
    for rank in plan.ranks:
        kind = (rank.role.name.split()[0], rank.total)
        if kind in done:
            continue
        done.add(kind)
        alike = [other.role.rank for other in plan.ranks if (other.role.name.split()[0], other.total) == kind]
        lines.append(f"  {_span(alike)}  {kind[0]}  {rank.total / GIB:.1f} GiB")
        lines += [f"      {size / GIB:8.2f}  {name}" for name, size in rank.memory.items()]
    return lines


def _span(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _traffic(plan: Plan) -> list[str]:
    config, topology, sizes = plan.sizes.config, plan.topology, plan.sizes
    lines = []
    if topology.kind == "split":
        each = wire_bytes(sizes)
        rate = plan.prediction.batches_per_second
        lines += [
            "schedule: batch i is made by target i mod "
            f"{topology.targets} and used by drafter i mod {topology.drafters}; "
            f"{topology.send_buffers} send and {RECEIVE_BUFFERS} receive buffers of {each / GIB:.2f} GiB",
            f"features: {each / sizes.tokens:,.0f} bytes a token; {rate * each / topology.targets / 1e9:.2f} GB/s out "
            f"of each target, {rate * each / topology.drafters / 1e9:.2f} GB/s into each drafter "
            f"(a link carries {plan.gpu.link_rate / 1e9:.0f})",
        ]
    else:
        lines.append(f"schedule: batch i is made and used by worker i mod {topology.drafters}; no feature travels")
    size = checkpoint_bytes(sizes)
    return [
        *lines,
        _exchange(plan),
        f"checkpoints: {size / GIB:.2f} GiB each, {config.checkpoint.keep} kept and one being written: "
        f"{size * (config.checkpoint.keep + 1) / GIB:.2f} GiB of disk",
    ]


def _exchange(plan: Plan) -> str:
    parameters, width = drafter_parameters(plan.sizes), plan.sizes.drafter_width
    # Without sums over batches gradients travel as the backward made them.
    gradient = 4 if plan.sizes.config.training.global_batch > 1 else width
    line = f"gradients: {parameters * gradient / 1e9:.2f} GB reduced over {plan.topology.drafters} ranks a step"
    if not plan.sharded:
        return line
    return f"{line}, each keeping its share; {parameters * width / 1e9:.2f} GB of weights gathered"


def _speed(plan: Plan) -> list[str]:
    prediction, training = plan.prediction, plan.sizes.config.training
    lines = [
        f"predicted: {prediction.batches_per_second * training.tokens:,.0f} tokens/s, "
        f"{prediction.step_seconds:.3f} s a step; the pace is set by: {prediction.limit}"
    ]
    if plan.topology.kind == "split":
        lines.append(f"idle: targets {prediction.target_idle:.0%}, drafters {prediction.drafter_idle:.0%}")
    lines += [f"  {basis}" for basis in plan.basis]
    lines += [note] if (note := note_on_idle(plan.topology, training.global_batch)) else []
    if plan.choice is not None:
        lines += ["", plan.choice.render(training.tokens)]
    return lines
