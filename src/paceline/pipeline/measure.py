"""What `topology.kind = "auto"` chooses from: both parts, all-reduce, transfer and memory, measured on this world."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.pipeline.auto import Rates
from paceline.pipeline.transport import GlooTransport, NcclTransport, Transport
from paceline.pipeline.wire import Wire
from paceline.pipeline.world import Connection

Work = Callable[[], object]


@dataclass(frozen=True)
class Parts:
    """What one device can do with one token batch of the run's shape, after warm-up. Each call may be repeated."""

    target: Work
    """Forward of the target."""
    drafter: Work
    """Forward and backward of the drafter."""
    both: Work
    """The one after the other, as a colocated step does it."""
    optimizer: Work
    resident_target: int
    """Bytes that the target keeps on the device when it does nothing."""
    resident_drafter: int
    """The same, as if its optimiser state were whole."""
    optimizer_bytes: int = 0
    """Of `resident_drafter`, what drafters can share."""


@dataclass(frozen=True)
class _Timed:
    seconds: float
    peak: int
    """Bytes beyond what was there before."""


def measure_rates(connection: Connection, parts: Parts, wire: Wire, gradient_bytes: int, repeats: int = 5) -> Rates:
    """Time everything on every rank at once, and take the slowest rank's: the same Rates on all.

    Every rank calls it, with both parts on its device. `gradient_bytes`: of the flat gradient.
    """
    device = torch.device(connection.world.device)
    connection.barrier("measure")
    target = _time(parts.target, device, repeats)
    drafter = _time(parts.drafter, device, repeats)
    both = _time(parts.both, device, repeats)
    mine = {
        "target_seconds": target.seconds,
        "drafter_seconds": drafter.seconds,
        "optimizer_seconds": _time(parts.optimizer, device, repeats).seconds,
        "colocated_seconds": both.seconds,
        "all_reduce_seconds": _all_reduce(connection, device, gradient_bytes, repeats),
        "transfer_seconds": _transfer(connection, device, wire, repeats),
        "target_bytes": parts.resident_target + target.peak,
        "drafter_bytes": parts.resident_drafter + drafter.peak + 2 * wire.bytes,
        "colocated_bytes": parts.resident_target + parts.resident_drafter + both.peak,
        "device_bytes": -_room(device),
        "optimizer_bytes": parts.optimizer_bytes,
    }
    everyone = connection.share("rates", mine)
    worst = {key: max(rates[key] for rates in everyone) for key in mine}
    return Rates(**{**worst, "device_bytes": -worst["device_bytes"]})


def _room(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 62  # a CPU's memory is not what decides
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def _time(work: Work, device: torch.device, repeats: int) -> _Timed:
    """Median seconds of a call; the first, which may load or allocate, is not counted."""
    work()
    _finish(device)
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        _finish(device)
        seconds.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    return _Timed(statistics.median(seconds), peak)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _group(connection: Connection, device: torch.device) -> dist.ProcessGroup:
    backend = "nccl" if device.type == "cuda" else "gloo"
    ranks = list(range(connection.world.size))
    group = dist.new_group(ranks, timeout=timedelta(seconds=connection.seconds), backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _all_reduce(connection: Connection, device: torch.device, size: int, repeats: int) -> float:
    """Per unit of 2(N - 1)/N, see `Rates`."""
    ranks = connection.world.size
    if ranks == 1:
        return 0.0
    group = _group(connection, device)
    gradient = torch.zeros(max(1, size // 4), device=device)
    timed = _time(lambda: dist.all_reduce(gradient, group=group), device, repeats)
    return timed.seconds / (2 * (ranks - 1) / ranks)


def _transfer(connection: Connection, device: torch.device, wire: Wire, repeats: int) -> float:
    """Even ranks send to their odd neighbours, all pairs at once."""
    rank, ranks = connection.world.rank, connection.world.size
    if ranks == 1:
        return 0.0
    group = _group(connection, device)
    transport: Transport = NcclTransport(group, device) if device.type == "cuda" else GlooTransport(group)
    partner = rank ^ 1
    if partner >= ranks:
        return 0.0
    buffer = wire.buffer(device)

    def move() -> None:
        if rank % 2 == 0:
            transport.launch_send(buffer, partner).settle()
        else:
            transport.launch_receive(buffer, partner).settle()

    return _time(move, device, repeats).seconds
