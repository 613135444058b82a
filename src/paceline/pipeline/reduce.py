"""Sums over the drafter ranks: gradients in place on the device, and small results gathered on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.pipeline.topology import Topology
from paceline.pipeline.world import Groups


def gradient_reducer(groups: Groups) -> Callable[[Tensor], None] | None:
    """What the optimiser calls on its flat gradient and on the weight sum; None where there is one drafter.

    Sums are unnormalised: the optimiser divides by the reduced weight sum afterwards, so that the loss is that of the
    whole global batch whatever the number of ranks, and a rank without supervision adds zero and steps with the rest.
    """
    group = groups.drafters
    if group is None:
        return None

    def add_up(tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=group)

    return add_up


def agreement_of_drafters(groups: Groups) -> Callable[[bool], bool] | None:
    """Whether all drafters say yes, for the saving of checkpoints; None where there is one drafter."""
    group = groups.drafters_cpu
    if group is None:
        return None

    def agree(mine: bool) -> bool:
        vote = torch.tensor([int(mine)])
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=group)
        return bool(vote.item())

    return agree


def gather_over_drafters(
    groups: Groups, topology: Topology, drafter: int
) -> Callable[[Sequence[Tensor], int], list[Tensor]]:
    """A `Gather`: each drafter's equal-shaped CPU tensors (item number i is drafter `i mod D`'s) -> all, in order."""

    def gather(mine: Sequence[Tensor], total: int) -> list[Tensor]:
        if groups.drafters_cpu is None or total == 0:
            return list(mine)
        places = range(drafter, total, topology.drafters)
        assert len(places) == len(mine)
        example = _example(mine, groups)
        rows = torch.zeros(-(-total // topology.drafters), *example.shape, dtype=example.dtype)
        for row, tensor in enumerate(mine):
            rows[row] = tensor
        parts = [torch.empty_like(rows) for _ in range(topology.drafters)]
        dist.all_gather([_bytes(part) for part in parts], _bytes(rows), group=groups.drafters_cpu)
        return [parts[number % topology.drafters][number // topology.drafters] for number in range(total)]

    return gather


_GATHERED = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)


def _example(mine: Sequence[Tensor], groups: Groups) -> Tensor:
    """A tensor of the common shape and dtype, also on a drafter that has none: drafter 0 always has one."""
    facts = torch.zeros(10, dtype=torch.int64)
    if mine and dist.get_rank(groups.drafters_cpu) == 0:
        shape = mine[0].shape
        facts[: 2 + len(shape)] = torch.tensor([_GATHERED.index(mine[0].dtype), len(shape), *shape])
    dist.broadcast(facts, group_src=0, group=groups.drafters_cpu)
    kind, dimensions, *sizes = facts.tolist()
    return torch.empty(sizes[:dimensions], dtype=_GATHERED[kind])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
