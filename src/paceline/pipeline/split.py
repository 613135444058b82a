"""The two ends of a split run: a target rank that makes and sends features, a drafter rank that receives them.

S context tokens, F = K·H width of a token's feature.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.batches import EvaluationBatch, FeatureBatch
from paceline.pipeline.heartbeat import Heartbeat
from paceline.pipeline.reduce import gather_over_drafters
from paceline.pipeline.source import FeatureSource, TokenBatches
from paceline.pipeline.topology import RECEIVE_BUFFERS, Item, Receives, Role, Schedule
from paceline.pipeline.transport import Pending, Transport, open_transport
from paceline.pipeline.wire import Wire
from paceline.pipeline.world import Connection, Groups

if TYPE_CHECKING:
    from paceline.data.stream import Stream
    from paceline.target.base import Target


_KEPT_SPANS = 64


@dataclass(frozen=True)
class Link:
    """What both ends of a split run hold. `open_link` makes it."""

    connection: Connection
    groups: Groups
    schedule: Schedule
    wire: Wire
    transport: Transport
    heartbeat: Heartbeat

    @property
    def device(self) -> torch.device:
        return torch.device(self.connection.world.device)

    @property
    def role(self) -> Role:
        return self.schedule.topology.role(self.connection.world.rank)


def open_link(
    connection: Connection,
    groups: Groups,
    schedule: Schedule,
    wire: Wire,
    heartbeat: Heartbeat,
    facts: dict[str, Any],
) -> Link:
    """Agree with all other ranks on what will travel, and open the transport. Every rank calls it.

    `facts` (JSON: digests of configuration and data, versions) are compared first. Raises UserError that names what
    differs, and both values.
    """
    topology = schedule.topology
    agreed = {
        **facts,
        "topology": str(topology),
        "global batch": schedule.global_batch,
        "first step": schedule.start,
        "last step": schedule.stop,
        "held-out batches": schedule.held_out,
        **wire.facts(),
    }
    connection.require_same("features", agreed)
    rank = connection.world.rank
    member = rank in topology.drafter_ranks or rank in topology.sender_ranks
    transport = open_transport(groups, connection.world) if member else _NoTransport()
    return Link(connection, groups, schedule, wire, transport, heartbeat)


class _NoTransport(Transport):
    """Of the ranks that hold a shard of a target and leave the sending to shard 0."""

    def launch_send(self, buffer: Tensor, to: int) -> Pending:
        raise AssertionError("only shard 0 sends")

    def launch_receive(self, buffer: Tensor, source: int, free: torch.cuda.Event | None = None) -> Pending:
        raise AssertionError("a target receives nothing")

    def waited(self) -> float:
        return 0.0


def _broadcast_next_tokens(link: Link, held_out: tuple[EvaluationBatch, ...], target: Target | None) -> list[Tensor]:
    """The targets' own next tokens of all held-out batches, on every rank: int64 [S] each. Every rank calls it."""
    found = []
    for number, batch in enumerate(held_out):
        item = Item("held_out", number, link.schedule.start)
        if target is not None and link.role.target == link.schedule.maker(item):
            tokens_S = target.next_tokens(batch.tokens.to(link.device)).cpu().contiguous()
        else:
            tokens_S = torch.empty_like(batch.tokens.ids_S, device="cpu")
        if not link.connection.alone:
            dist.broadcast(tokens_S, link.schedule.sender_rank(item))
        found.append(tokens_S)
    return found


# --- the target's end ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """What a target rank did."""

    batches: int
    busy_seconds: float
    """Of its device, making features; the rest it waited for drafters, or for the host."""
    seconds: float


def serve_features(link: Link, stream: Stream, target: Target) -> Served:
    """A target rank's whole run: the held-out next tokens, then every batch of the schedule that this target makes.

    Returns when the last batch has been taken, with its share of busy time. The part of the model above the last
    captured layer is let go of after the held-out batches. Raises UserError for nothing of its own; a lost drafter
    shows as the transport's RuntimeError.
    """
    held_out = tuple(stream.evaluation_batches())
    link.heartbeat.beat("held-out agreement", link.schedule.start)
    _broadcast_next_tokens(link, held_out, target)
    target.close_upper_layers()
    return serve_batches(link, stream, target, held_out)


def serve_batches(link: Link, stream: Stream, target: Target, held_out: tuple[EvaluationBatch, ...]) -> Served:
    """Every batch of the schedule that this target makes, in order."""
    number = link.role.target
    assert number is not None
    items = link.schedule.for_target(number)
    batches = TokenBatches(stream, held_out, link.schedule.for_target(number), link.device.type == "cuda")
    sender = _Sender(link, target)
    try:
        for item in items:
            sender.make(item, batches)
        return sender.finish()
    finally:
        batches.close()


class Spans:
    """Adds up how long a device works on what is launched inside `with spans:`; waits only when asked for the total."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._host = 0.0
        self._begun = 0.0

    def __enter__(self) -> None:
        if self._device.type == "cuda":
            begin = torch.cuda.Event(enable_timing=True)
            begin.record(torch.cuda.current_stream(self._device))
            self._pairs.append((begin, torch.cuda.Event(enable_timing=True)))
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self._pairs[-1][1].record(torch.cuda.current_stream(self._device))
            if len(self._pairs) > _KEPT_SPANS:
                self._settle()
        else:
            self._host += time.perf_counter() - self._begun

    def total(self) -> float:
        """Seconds so far. Waits for the last span on a GPU."""
        if self._pairs:
            self._pairs[-1][1].synchronize()
            self._settle()
        return self._host

    def _settle(self) -> None:
        while self._pairs and self._pairs[0][1].query():
            begin, end = self._pairs.popleft()
            self._host += begin.elapsed_time(end) / 1000


class _Sender:
    """Fills the send buffers in turn; waits for one to be free before it is filled again."""

    def __init__(self, link: Link, target: Target) -> None:
        self._link = link
        self._target = target
        count = link.schedule.topology.send_buffers if link.role.shard == 0 else 1
        self._buffers = [link.wire.buffer(link.device) for _ in range(count)]
        self._pending: deque[tuple[Item, Pending]] = deque()
        self._made = 0
        self._busy = Spans(link.device)
        self._begun = time.perf_counter()

    def make(self, item: Item, batches: TokenBatches) -> None:
        buffer = self._free_buffer()
        self._link.heartbeat.beat("target", item.step, batch=item.index)
        tokens = batches.take(item).to(self._link.device)
        with self._busy:
            if self._link.wire.direct:
                self._target.features(tokens, out=self._link.wire.view(buffer))
            else:
                self._link.wire.write(self._target.features(tokens), buffer)
        if self._link.role.shard == 0:
            receiver = self._link.schedule.receiver_rank(item)
            self._pending.append((item, self._link.transport.launch_send(buffer, receiver)))

    def finish(self) -> Served:
        while self._pending:
            self._settle_oldest()
        return Served(self._made, self._busy.total(), time.perf_counter() - self._begun)

    def _free_buffer(self) -> Tensor:
        if len(self._pending) == len(self._buffers):
            self._settle_oldest()
        buffer = self._buffers[self._made % len(self._buffers)]
        self._made += 1
        return buffer

    def _settle_oldest(self) -> None:
        item, pending = self._pending.popleft()
        receiver = self._link.schedule.receiver_rank(item)
        waits_for = f"rank {receiver} to take batch {item.index}"
        self._link.heartbeat.beat("send", item.step, waits_for=waits_for, batch=item.index)
        pending.settle()


# --- the drafter's end ---------------------------------------------------------------------------------------------


class SplitSource(FeatureSource):
    """Features that target ranks made. One batch is in use while the next one arrives."""

    def __init__(self, link: Link, stream: Stream) -> None:
        schedule = link.schedule
        drafter = link.role.drafter
        assert drafter is not None
        super().__init__(stream, schedule, drafter, gather_over_drafters(link.groups, schedule.topology, drafter))
        self._link = link
        self._stream = stream
        self._parts = schedule.receives(drafter)
        self._batches = TokenBatches(stream, self.held_out, schedule.for_drafter(drafter), link.device.type == "cuda")
        self._buffers = [link.wire.buffer(link.device) for _ in range(RECEIVE_BUFFERS)]
        self._free: list[torch.cuda.Event | None] = [None] * RECEIVE_BUFFERS
        self._arriving: deque[tuple[Item, int, Pending]] = deque()
        self._launched = 0
        self._nothing: FeatureBatch | None = None

    def global_batch(self, step: int) -> Iterator[FeatureBatch]:
        self._steps_done = step + 1
        part = self._next_part("train", step)
        for _, features in self._use_all(part):
            yield features
        for _ in range(self.schedule.micro_batches - len(part.uses)):
            yield self._empty(step)

    def evaluation(self) -> Iterator[tuple[EvaluationBatch, FeatureBatch]]:
        part = self._next_part("held_out", self._steps_done)
        for item, features in self._use_all(part):
            yield self.held_out[item.index], features

    def next_tokens(self) -> list[Tensor]:
        return _broadcast_next_tokens(self._link, self.held_out, None)

    def waited(self) -> float:
        return self._link.transport.waited()

    def close(self) -> None:
        self._batches.close()

    def _next_part(self, kind: str, step: int) -> Receives:
        part = next(self._parts, None)
        assert part is not None, f"{kind} {step} lies beyond the end of the schedule"
        assert (part.phase.kind, part.phase.step) == (kind, step), f"{kind} {step} was asked for; due is {part.phase}"
        return part

    def _use_all(self, part: Receives) -> Iterator[tuple[Item, FeatureBatch]]:
        launches = deque(part.launches)
        for item in part.uses:
            if not self._arriving:
                self._launch(launches.popleft())
            if launches:
                self._launch(launches.popleft())
            slot, features = self._arrived(item)
            yield item, features
            self._give_back(slot)
        # A phase in which this drafter uses nothing still launches what the others count on: see topology.py.
        while launches:
            self._launch(launches.popleft())

    def _launch(self, item: Item) -> None:
        slot = self._launched % RECEIVE_BUFFERS
        self._launched += 1
        source = self._link.schedule.sender_rank(item)
        pending = self._link.transport.launch_receive(self._buffers[slot], source, self._free[slot])
        self._arriving.append((item, slot, pending))

    def _arrived(self, item: Item) -> tuple[int, FeatureBatch]:
        due, slot, pending = self._arriving.popleft()
        assert due == item, f"{due} arrives where {item} is used"
        tokens = self._batches.take(item).to(self._link.device)
        waits_for = f"features of batch {item.index} from rank {self._link.schedule.sender_rank(item)}"
        self._link.heartbeat.beat("receive", item.step, waits_for=waits_for, batch=item.index)
        pending.wait()
        self._link.heartbeat.beat("drafter", item.step, batch=item.index)
        return slot, FeatureBatch(tokens, self._link.wire.read(self._buffers[slot]))

    def _give_back(self, slot: int) -> None:
        """All work on the batch has been launched, so its buffer is free once the device has done what it has now."""
        if self._link.device.type == "cuda":
            used = torch.cuda.Event()
            used.record(torch.cuda.current_stream(self._link.device))
            self._free[slot] = used

    def _empty(self, step: int) -> FeatureBatch:
        if self._nothing is None:
            tokens = self._stream.empty(step).to(self._link.device)
            wire = self._link.wire
            features_SF = torch.zeros(wire.tokens, wire.width, dtype=wire.dtype, device=self._link.device)
            self._nothing = FeatureBatch(tokens, features_SF)
        return self._nothing
