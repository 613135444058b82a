"""Sums over the drafter ranks: gradients in place on the device, and small results gathered on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.pipeline.topology import Topology
from paceline.pipeline.world import Groups

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # their names before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single


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


class Shards:
    """One rank's place among R ranks that share flat buffers in R equal, contiguous parts, and how they talk.

    Every method is called on all ranks, with buffers whose length R divides. None of them waits for the device, but
    `gather`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._group = group
        # gloo has a reduce-scatter in some versions and for some dtypes only.
        self._scatters = dist.get_backend(group) == "nccl"

    def part(self, flat: Tensor) -> Tensor:
        """This rank's part of a flat buffer, a view."""
        size = flat.numel() // self.ranks
        return flat[self.rank * size : (self.rank + 1) * size]

    def reduce_scatter(self, flat: Tensor) -> None:
        """In place: this rank's part becomes the sum over the ranks; what the other parts hold is undefined."""
        if self._scatters:
            reduce_scatter_single(self.part(flat), flat, group=self._group)
        else:
            dist.all_reduce(flat, group=self._group)

    def all_gather(self, flat: Tensor) -> None:
        """In place: every rank's part comes to all."""
        all_gather_single(flat, self.part(flat), group=self._group)

    def gather(self, part: Tensor) -> Tensor | None:
        """The whole buffer on the CPU of rank 0, from every rank's part; None on the others.

        Goes through the device in pieces, so that it needs a quarter of a GiB there and not the whole.
        """
        whole = torch.empty(self.ranks, part.numel(), dtype=part.dtype) if self.rank == 0 else None
        rows = max(1, _GATHERED_AT_ONCE // self.ranks)
        for start in range(0, part.numel(), rows):
            piece = part[start : start + rows]
            together = piece.new_empty(self.ranks * piece.numel())
            all_gather_single(together, piece, group=self._group)
            if whole is not None:
                whole[:, start : start + rows] = together.view(self.ranks, -1).cpu()
        return None if whole is None else whole.view(-1)


_GATHERED_AT_ONCE = 1 << 26


def shards_of_drafters(groups: Groups) -> Shards | None:
    """The drafters as ranks that share buffers; None where there is one drafter."""
    return None if groups.drafters is None else Shards(groups.drafters)


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
