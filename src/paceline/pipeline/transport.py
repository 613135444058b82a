"""Moving one buffer from one rank to another, launched early and waited for late.

There are three bodies: in-process (two ends in one process, for tests and as the model of the others), gloo (CPU) and
NCCL (GPU). All keep the same promise: transfers between two ranks arrive in the order in which they were launched, a
buffer belongs to the transfer from `launch_*` until `wait` returns, and after `wait` what the caller launches next
sees the received bytes.
"""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.pipeline.process import World
from paceline.pipeline.world import Groups


class Pending(ABC):
    """A launched transfer."""

    @abstractmethod
    def wait(self) -> None:
        """Make what is launched next wait for the transfer; on CPU, wait here."""

    @abstractmethod
    def settle(self) -> None:
        """Wait here until the transfer is over, on any device."""


class Transport(ABC):
    """One rank's end. Use it from one thread."""

    @abstractmethod
    def launch_send(self, buffer: Tensor, to: int) -> Pending:
        """Send a uint8 buffer to a rank, once what was launched before on the current stream has filled it."""

    @abstractmethod
    def launch_receive(self, buffer: Tensor, source: int, free: torch.cuda.Event | None = None) -> Pending:
        """Receive into a uint8 buffer, once `free` has happened (its former content is used up)."""

    @abstractmethod
    def waited(self) -> float:
        """Seconds that this end was held up in `Pending.wait` since this was last asked.

        On a GPU, only transfers that are over count, and the rest count the next time: asking waits for nothing.
        """


# --- in-process ----------------------------------------------------------------------------------------------------


@dataclass
class Exchange:
    """What the ends of one process share. `seconds` bounds every wait."""

    seconds: float = 60.0
    lanes: dict[tuple[int, int], queue.Queue[_Parcel]] = field(default_factory=lambda: defaultdict(queue.Queue))


@dataclass
class _Parcel:
    content: Tensor
    taken: queue.Queue[None] = field(default_factory=queue.Queue)


class InProcessTransport(Transport):
    """Ends in threads of one process. A send is over when the other end has copied the buffer, as with the others."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange = exchange
        self._rank = rank
        self._clock = _Stopwatch()

    def launch_send(self, buffer: Tensor, to: int) -> Pending:
        parcel = _Parcel(buffer)
        self._exchange.lanes[self._rank, to].put(parcel)
        return _Sent(parcel, self._exchange.seconds)

    def launch_receive(self, buffer: Tensor, source: int, free: torch.cuda.Event | None = None) -> Pending:
        return _Arriving(self._exchange.lanes[source, self._rank], buffer, self._exchange.seconds, self._clock)

    def waited(self) -> float:
        return self._clock.read()


class _Stopwatch:
    """Adds up seconds of waiting on the host."""

    def __init__(self) -> None:
        self._total = 0.0
        self._begun = 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._total += time.perf_counter() - self._begun

    def read(self) -> float:
        total, self._total = self._total, 0.0
        return total


@dataclass
class _Sent(Pending):
    parcel: _Parcel
    seconds: float

    def wait(self) -> None:
        self.parcel.taken.get(timeout=self.seconds)

    def settle(self) -> None:
        self.wait()


@dataclass
class _Arriving(Pending):
    lane: queue.Queue[_Parcel]
    buffer: Tensor
    seconds: float
    clock: _Stopwatch

    def wait(self) -> None:
        with self.clock:
            parcel = self.lane.get(timeout=self.seconds)
        self.buffer.copy_(parcel.content)
        parcel.taken.put(None)

    def settle(self) -> None:
        self.wait()


# --- gloo ----------------------------------------------------------------------------------------------------------


class GlooTransport(Transport):
    """CPU buffers over TCP. gloo's own threads move them while the worker computes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._clock = _Stopwatch()

    def launch_send(self, buffer: Tensor, to: int) -> Pending:
        return _GlooWork(_launched(dist.isend(buffer, to, group=self._group)), buffer, self._clock)

    def launch_receive(self, buffer: Tensor, source: int, free: torch.cuda.Event | None = None) -> Pending:
        return _GlooWork(_launched(dist.irecv(buffer, source, group=self._group)), buffer, self._clock)

    def waited(self) -> float:
        return self._clock.read()


def _launched(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not a member of the group"
    return work


@dataclass
class _GlooWork(Pending):
    work: dist.Work
    buffer: Tensor
    """Kept alive: gloo holds only its address."""
    clock: _Stopwatch

    def wait(self) -> None:
        with self.clock:
            self.work.wait()

    def settle(self) -> None:
        self.wait()


# --- NCCL ----------------------------------------------------------------------------------------------------------


_Waits = deque[tuple[torch.cuda.Event, torch.cuda.Event]]
"""Begin and end of each wait on the compute stream, oldest first."""


class NcclTransport(Transport):
    """GPU buffers, point to point, on the features' own communicator and stream.

    All transfers of a rank run on one stream in the order of the schedule (see topology.py), beside the compute
    stream: a receive waits only for the event that its buffer is free, a send only for what fills its buffer.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._waits: _Waits = deque(maxlen=4096)
        # The communicator is made here, by all members together, and not by the first transfer of two of them.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize(device)

    def launch_send(self, buffer: Tensor, to: int) -> Pending:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._launch(dist.isend, buffer, to)

    def launch_receive(self, buffer: Tensor, source: int, free: torch.cuda.Event | None = None) -> Pending:
        if free is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        else:
            self._stream.wait_event(free)
        return self._launch(dist.irecv, buffer, source)

    def _launch(self, operation: Callable[..., dist.Work | None], buffer: Tensor, peer: int) -> Pending:
        with torch.cuda.stream(self._stream):
            # As a batch of one it runs on the group's communicator; a single isend would open one for each pair.
            for work in dist.batch_isend_irecv([dist.P2POp(operation, buffer, peer, self._group)]):
                work.wait()
            over = torch.cuda.Event()
            over.record(self._stream)
        return _NcclWork(over, self._device, self._waits)

    def waited(self) -> float:
        total = 0.0
        while self._waits and self._waits[0][1].query():
            begin, end = self._waits.popleft()
            total += begin.elapsed_time(end) / 1000
        return total


@dataclass
class _NcclWork(Pending):
    over: torch.cuda.Event
    device: torch.device
    waits: _Waits

    def wait(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        stream.wait_event(self.over)
        end.record(stream)
        self.waits.append((begin, end))

    def settle(self) -> None:
        self.over.synchronize()


def open_transport(groups: Groups, world: World) -> Transport:
    """The body for this world's device. Every member of the features group calls it."""
    assert groups.features is not None, "a colocated world moves no features"
    if world.device.startswith("cuda"):
        return NcclTransport(groups.features, torch.device(world.device))
    return GlooTransport(groups.features)
