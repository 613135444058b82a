"""Ranks that train a small network with a shared or a whole optimiser state: a process each, over gloo.

The batches of a step do not depend on the number of ranks. Each case leaves `{name}.{rank}.pt`.
"""

from __future__ import annotations

import datetime
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config import TrainingConfig
from paceline.pipeline.reduce import Shards
from paceline.training.checkpoint import load_latest, save
from paceline.training.optimizer import Optimizer

CONFIG = TrainingConfig(learning_rate=1e-2, warmup=0.2, weight_decay=0.1, clip=0.7, betas=(0.9, 0.95), global_batch=6)
STEPS, HALF = 10, 5
POISONED, UNLABELLED = 3, 4
"""Steps in which one batch is not finite, and in which one has no labels."""


@dataclass(frozen=True)
class Case:
    """One training: on how many ranks, sharded or not, in which dtype, and after which case's checkpoint."""

    ranks: int
    sharded: bool
    dtype: torch.dtype = torch.float32
    after: str = ""


CASES = {
    "whole-1": Case(1, False),
    "whole-2": Case(2, False),
    "shared-1": Case(1, True),
    "shared-2": Case(2, True),
    "shared-3": Case(3, True),
    "narrow-whole-3": Case(3, False, torch.bfloat16),
    "narrow-shared-3": Case(3, True, torch.bfloat16),
    "shared-2-after-shared-3": Case(2, True, after="shared-3"),
    "whole-2-after-shared-3": Case(2, False, after="shared-3"),
    "whole-1-after-shared-2": Case(1, False, after="shared-2"),
    "shared-3-after-whole-1": Case(3, True, after="whole-1"),
    "narrow-shared-2-after-narrow-shared-3": Case(2, True, torch.bfloat16, after="narrow-shared-3"),
}


def network(dtype: torch.dtype) -> nn.Module:
    """315 weights, which neither two nor three ranks (in whole cache lines) divide: shares end inside matrices."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 23, bias=False), nn.RMSNorm(23), nn.Linear(23, 7, bias=False)]
    return nn.Sequential(*layers, nn.Linear(7, 2, bias=True)).to(dtype)


def loss_of(module: nn.Module, step: int, part: int) -> tuple[Tensor, Tensor]:
    """An unnormalised sum and its weight, of batch `part` of a step."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    dtype = next(module.parameters()).dtype
    x, y = torch.randn(8, 5, generator=generator).to(dtype), torch.randn(8, 2, generator=generator).to(dtype)
    weights = torch.rand(8, generator=generator) * (0.0 if (step, part) == (UNLABELLED, 1) else 1.0)
    loss = ((module(x) - y).square().sum(dim=1).float() * weights).sum()
    return loss * (float("nan") if (step, part) == (POISONED, 2) else 1.0), weights.sum()


class HostLooksAway(TorchDispatchMode):
    """Refuses what makes the host wait for a device: reading a number, or a shape that depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _WAITING:
            raise AssertionError(f"the step waits for the device: {func}")
        return func(*args, **(kwargs or {}))


_WAITING = (
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.equal,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
)


def train(case: Case, name: str, folder: Path, group: dist.ProcessGroup) -> None:
    module = network(case.dtype)
    shards = Shards(group) if case.sharded else None
    optimizer = Optimizer(module, CONFIG, STEPS, dict(network(torch.float32).named_parameters()), shards)
    if case.after:
        found = load_latest(folder / case.after)
        assert found is not None
        optimizer.load_state(found.tensors)
    rank = dist.get_rank(group)

    def add_up(tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=group)

    losses, norms, skipped = [], [], []
    for step in range(optimizer.steps_done, STEPS):
        if step == HALF and not case.after:
            save(folder / name, step, optimizer.share(), {}, rank=rank, world=case.ranks, agree=_agreement(group))
        sums = torch.zeros(2)
        for part in range(rank, CONFIG.global_batch, case.ranks):
            loss, weight = loss_of(module, step, part)
            loss.backward()
            optimizer.accumulate()
            sums += torch.stack([loss.detach(), weight])
        with HostLooksAway():
            report = optimizer.step(sums[1], add_up)
        add_up(sums)
        losses.append(float(sums[0] / sums[1]))
        norms.append(float(report.grad_norm))
        skipped.append(bool(report.skipped))
    result = {
        "losses": losses,
        "norms": norms,
        "skipped": skipped,
        "kept": optimizer.kept_bytes,
        "masters": {key: value.clone() for key, value in optimizer.masters().items()},
        "weights": {key: value.detach().clone() for key, value in module.named_parameters()},
    }
    torch.save(result, folder / f"{name}.{rank}.pt")


def _agreement(group: dist.ProcessGroup):
    def agree(mine: bool) -> bool:
        vote = torch.tensor([int(mine)])
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=group)
        return bool(vote.item())

    return agree


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=100),
    )
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(1, size + 1)}
    for name, case in CASES.items():
        if rank < case.ranks:
            train(case, name, folder, groups[case.ranks])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
