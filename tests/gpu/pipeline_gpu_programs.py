"""Worker programs of the two-GPU tests: features over NCCL that must arrive exactly, batch after batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from paceline.batches import EvaluationBatch, TokenBatch
from paceline.config import Config
from paceline.pipeline.heartbeat import Heartbeat
from paceline.pipeline.process import World
from paceline.pipeline.split import Link, SplitSource, open_link, serve_features
from paceline.pipeline.topology import Schedule, Topology
from paceline.pipeline.wire import Wire
from paceline.pipeline.world import join, open_groups

TOKENS, LAYERS, HIDDEN = (2048, 4, 1024) if torch.cuda.is_available() else (64, 4, 16)


class Numbers:
    """A stream whose batches are told apart by their ids."""

    def batch(self, index: int, weight: float = 1.0) -> TokenBatch:
        return TokenBatch(
            index=index,
            ids_S=torch.arange(TOKENS) % 97 + index,
            positions_S=torch.arange(TOKENS),
            documents_S=torch.zeros(TOKENS, dtype=torch.int32),
            supervised_S=torch.ones(TOKENS, dtype=torch.bool),
            anchors_A=torch.tensor([0]),
            starts_A=torch.tensor([0]),
            labels_AB=torch.zeros(1, 2, dtype=torch.int64),
            weights_AB=torch.full((1, 2), weight),
        )

    def empty(self, index: int) -> TokenBatch:
        return self.batch(index, weight=0.0)

    def evaluation_batches(self) -> list[EvaluationBatch]:
        return [EvaluationBatch(self.batch(-1 - number), torch.tensor([0])) for number in range(3)]


def features_of(batch: TokenBatch, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, exact in bfloat16 and float32."""
    columns = torch.arange(LAYERS * HIDDEN, device=batch.ids_S.device) % 5
    return ((batch.ids_S[:, None] + columns) % 127).to(dtype)


def _ballast(device: torch.device) -> torch.Tensor:
    size = 2048 if device.type == "cuda" else 64
    return torch.randn(size, size, device=device)


class SlowTarget:
    """Takes a while on the device before its features are right, so that a receive that is too early shows."""

    layer_ids = tuple(range(LAYERS))

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._ballast = _ballast(device)

    def features(self, batch: TokenBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        for _ in range(20):
            self._ballast @ self._ballast
        made = features_of(batch, self.dtype)
        return made if out is None else out.copy_(made)

    def next_tokens(self, batch: TokenBatch) -> torch.Tensor:
        return batch.ids_S + 1

    def close_upper_layers(self) -> None:
        pass


def exact(config: Config, world: World, resume: bool) -> int:
    """One target, one drafter; wire forms one after another. The drafter writes how many batches were wrong."""
    folder = Path(config.run.folder) / config.run.name
    beat = Heartbeat(folder, world.rank, "worker")
    connection = join(world, config.launch.collective_seconds)
    schedule = Schedule(Topology("split", 1, 1), global_batch=3, start=0, stop=30, evaluate_every=7, held_out=3)
    groups = open_groups(connection, schedule.topology)
    result = {}
    for form, dtype in (("same", torch.bfloat16), ("bfloat16", torch.float32), ("float8", torch.bfloat16)):
        wire = Wire(TOKENS, LAYERS, HIDDEN, dtype, form)  # type: ignore[arg-type]
        link = open_link(connection, groups, schedule, wire, beat, {"form": form})
        if link.role.drafter is None:
            target: Any = SlowTarget(link.device, dtype)
            serve_features(link, Numbers(), target)  # type: ignore[arg-type]
        else:
            result[form] = _wrong(link)
    if world.rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    connection.barrier("end")
    connection.close()
    return 0


def _wrong(link: Link) -> dict[str, float]:
    source = SplitSource(link, Numbers())  # type: ignore[arg-type]
    tokens = source.next_tokens()
    assert all(tokens[n].equal(source.held_out[n].tokens.ids_S + 1) for n in range(3))
    # Counted on the device, as training would use them: nothing here waits for the GPU.
    worst = torch.zeros((), device=link.device)
    ballast = _ballast(link.device)
    count = 0
    schedule = link.schedule
    looks = list(source.evaluation()) if schedule.evaluates_first else []
    count += len(looks)
    for step in range(schedule.stop):
        for batch in source.global_batch(step):
            for _ in range(10 * (step % 3)):
                ballast @ ballast
            worst = torch.maximum(worst, _error(batch.features_SF, batch.tokens))
            count += 1
        if schedule.evaluates_after(step + 1):
            for _, features in source.evaluation():
                worst = torch.maximum(worst, _error(features.features_SF, features.tokens))
                count += 1
    source.close()
    return {"worst": float(worst), "batches": count, "waited": source.waited()}


def _error(features: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    expected = features_of(tokens, torch.float32)
    return ((features.float() - expected).abs() / expected.clamp(min=1)).max()


def reduce_beside_features(config: Config, world: World, resume: bool) -> int:
    """Colocated on two GPUs: gradient all-reduce and CPU gathering."""
    from paceline.pipeline.reduce import gather_over_drafters, gradient_reducer

    folder = Path(config.run.folder) / config.run.name
    connection = join(world, config.launch.collective_seconds)
    topology = Topology("colocated", 2, 2)
    groups = open_groups(connection, topology)
    reduce = gradient_reducer(groups)
    assert reduce is not None
    gradient = torch.full((1 << 20,), float(world.rank + 1), device=world.device)
    reduce(gradient)
    gathered = gather_over_drafters(groups, topology, world.rank)([torch.tensor([world.rank])], 2)
    numbers = [int(part) for part in gathered]
    facts = {"sum": float(gradient.mean()), "gathered": numbers, "visible": torch.cuda.device_count()}
    (folder / f"result-{world.rank}.json").write_text(json.dumps(facts))
    connection.barrier("end")
    connection.close()
    return 0


def share(config: Config, world: World, resume: bool) -> int:
    """Two drafters: reduce-scatter and all-gather in place, and the gathering on the host."""
    from paceline.pipeline.reduce import shards_of_drafters

    folder = Path(config.run.folder) / config.run.name
    connection = join(world, config.launch.collective_seconds)
    shards = shards_of_drafters(open_groups(connection, Topology("colocated", 2, 2)))
    assert shards is not None
    assert shards.rank == world.rank
    numbers = torch.arange(1 << 20, device=world.device) % 64
    reduced, gathered = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        flat = numbers.to(dtype) * (world.rank + 1)
        shards.reduce_scatter(flat)
        reduced[name] = torch.equal(shards.part(flat), shards.part(numbers.to(dtype) * 3))
        own = torch.zeros_like(flat)
        shards.part(own).copy_(shards.part(numbers).to(dtype))
        shards.all_gather(own)
        gathered[name] = torch.equal(own, numbers.to(dtype))
    whole = shards.gather(shards.part(numbers.float()))
    on_host = whole is not None and torch.equal(whole, numbers.float().cpu())
    facts = {"reduced": reduced, "gathered": gathered, "on the host": on_host}
    (folder / f"result-{world.rank}.json").write_text(json.dumps(facts))
    connection.barrier("end")
    connection.close()
    return 0
