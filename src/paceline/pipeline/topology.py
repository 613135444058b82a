"""Who does what, and in which order: pure functions of the configuration and the size of the world.

Letters: T targets, D drafters, G token batches of one optimiser step (the global batch), N processes.

Batch i is made by target `i mod T` and used by drafter `i mod D`, in increasing i on every rank; optimiser step s uses
batches `s·G … s·G + G - 1`, whatever T and D are. A drafter takes part in every step with ⌈G/D⌉ micro-batches; one
that is short of a batch takes an empty one of weight zero. So every rank can compute the whole schedule, nothing but
features is on the wire, and a run gives the same numbers on any number of workers.

**Why it cannot deadlock.** The run is a sequence of phases: the batches of a step, ended by the drafters' all-reduce,
or the held-out batches of an evaluation, ended by the gathering of its results. Every transfer has one place in ONE
order of transfers and phase ends, and every rank launches its own in that order. The earliest unfinished operation of
the world is then the next one of each of its members, so it can always run, even if every launch blocked its rank.

A drafter receives one batch ahead, and that must not break the order: "each launches its next receive early" does (one
target, two drafters, G = 1: drafter 1 waits for its second batch, the target for drafter 0 to take an earlier one,
drafter 0 in the all-reduce for drafter 1). So before a phase ends, drafters launch exactly the receives of the items
that follow it up to the first drafter that would get a second one. That window is the same for all, and gives each at
most one item ahead: two buffers. On the sending side buffers only let a target run ahead of its drafters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.config import Config, TopologyConfig
from paceline.errors import UserError

RECEIVE_BUFFERS = 2
"""Feature buffers of a drafter: one in use, one arriving."""

Kind = Literal["colocated", "split"]


@dataclass(frozen=True)
class Role:
    """What one process does. `target` or `drafter` is its number in that part, None where it has no such part."""

    rank: int
    target: int | None
    drafter: int | None
    shard: int = 0
    """Place within a target that is sharded over several ranks; shard 0 sends the features."""

    @property
    def name(self) -> str:
        if self.target is not None and self.drafter is not None:
            return f"worker {self.rank}"
        if self.drafter is not None:
            return f"drafter {self.drafter}"
        return f"target {self.target}" + (f" shard {self.shard}" if self.shard else "")


@dataclass(frozen=True)
class Topology:
    """Roles of all ranks. Drafters come first, so that rank 0 always trains, writes and prints."""

    kind: Kind
    targets: int
    drafters: int
    tensor_parallel: int = 1

    @property
    def world(self) -> int:
        return self.drafters if self.kind == "colocated" else self.drafters + self.targets * self.tensor_parallel

    def role(self, rank: int) -> Role:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in a world of {self.world}")
        if self.kind == "colocated":
            return Role(rank, rank, rank)
        if rank < self.drafters:
            return Role(rank, None, rank)
        place = rank - self.drafters
        return Role(rank, place // self.tensor_parallel, None, place % self.tensor_parallel)

    def roles(self) -> tuple[Role, ...]:
        return tuple(self.role(rank) for rank in range(self.world))

    def drafter_rank(self, drafter: int) -> int:
        return drafter

    def target_rank(self, target: int) -> int:
        """The rank that sends the features of this target."""
        return target if self.kind == "colocated" else self.drafters + target * self.tensor_parallel

    @property
    def drafter_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.drafters))

    @property
    def target_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each target, its sharding group."""
        return tuple(
            tuple(range(self.target_rank(target), self.target_rank(target) + self.tensor_parallel))
            for target in range(self.targets)
        )

    @property
    def sender_ranks(self) -> tuple[int, ...]:
        return tuple(self.target_rank(target) for target in range(self.targets))

    @property
    def send_buffers(self) -> int:
        """Feature buffers of a target: one for each batch that may wait for its drafter, and one being filled."""
        return -(-self.targets // self.drafters) + 1

    def __str__(self) -> str:
        if self.kind == "colocated":
            return f"colocated × {self.drafters}"
        shards = f" of {self.tensor_parallel} ranks" if self.tensor_parallel > 1 else ""
        return f"split {_count(self.targets, 'target')}{shards} + {_count(self.drafters, 'drafter')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def assign(config: TopologyConfig, world: int, tensor_parallel: int = 1) -> Topology:
    """Roles for `world` processes. Raises UserError when they do not add up; `auto` must have been decided before."""
    if world < 1:
        raise ValueError(f"world = {world}")
    if config.kind == "auto":
        raise ValueError("topology 'auto' is decided by auto.choose before roles are assigned")
    if config.kind == "colocated":
        if tensor_parallel > 1:
            raise UserError(
                f"target.tensor_parallel = {tensor_parallel} with topology.kind = 'colocated'",
                "a sharded target needs ranks of its own: topology.kind = 'split'",
            )
        return Topology("colocated", world, world)
    needed = config.targets * tensor_parallel + config.drafters
    if needed != world:
        each = f" × {tensor_parallel} ranks each" if tensor_parallel > 1 else ""
        raise UserError(
            f"topology of {config.targets} targets{each} and {config.drafters} drafters needs {needed} processes, "
            f"and there are {world}",
            f"set launch.workers = {needed} or make targets and drafters add up to {world}",
        )
    return Topology("split", config.targets, config.drafters, tensor_parallel)


def splits(world: int, tensor_parallel: int = 1) -> Iterator[Topology]:
    """Every topology that uses a whole world of N processes: colocated first, then each split."""
    if tensor_parallel == 1:
        yield Topology("colocated", world, world)
    for targets in range(1, world // tensor_parallel + 1):
        drafters = world - targets * tensor_parallel
        if drafters >= 1:
            yield Topology("split", targets, drafters, tensor_parallel)


@dataclass(frozen=True)
class Item:
    """One batch of the global order: training batch number `index`, or held-out batch number `index`."""

    kind: Literal["train", "held_out"]
    index: int
    step: int
    """Optimiser steps done before it."""


@dataclass(frozen=True)
class Phase:
    """Consecutive items, ended by a meeting of all drafters (an all-reduce, or the gathering of an evaluation)."""

    kind: Literal["train", "held_out"]
    step: int
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Receives:
    """One drafter's part of a phase: what it uses, and the items whose receive it launches before the phase ends."""

    phase: Phase
    uses: tuple[Item, ...]
    launches: tuple[Item, ...]


def note_on_idle(topology: Topology, global_batch: int) -> str:
    """A line on drafters that have fewer batches in a step than others; empty where all are alike, or nearly."""
    drafters = topology.drafters
    rounds = -(-global_batch // drafters)
    idle = 1 - global_batch / (rounds * drafters)
    if idle < _WORTH_A_LINE:
        return ""
    without = f"in a step {drafters - global_batch} of {drafters} drafters get no batch"
    uneven = f"drafters stand idle for {idle:.0%} of a step"
    return (
        f"note: {without if global_batch < drafters else uneven}, for training.global_batch = {global_batch}; "
        f"set it to {rounds * drafters}, or another multiple of {drafters}"
    )


_WORTH_A_LINE = 0.1
"""Of the drafters' time."""


@dataclass(frozen=True)
class Schedule:
    """The global order of batches from step `start` to step `stop`, and each rank's part of it."""

    topology: Topology
    global_batch: int
    start: int
    stop: int
    evaluate_every: int = 0
    held_out: int = 0
    """Held-out batches of one evaluation."""

    @property
    def micro_batches(self) -> int:
        """⌈G/D⌉, the batches (empty ones counted) that each drafter runs in a step."""
        return -(-self.global_batch // self.topology.drafters)

    @property
    def evaluates_first(self) -> bool:
        """Whether held-out data is looked at before anything else: a new run, or one with no step left."""
        return self.held_out > 0 and (self.start == 0 or self.start >= self.stop)

    def evaluates_after(self, steps_done: int) -> bool:
        """Whether held-out data is looked at once a step has been taken and this many are done."""
        every = self.evaluate_every
        return self.held_out > 0 and (steps_done == self.stop or (every > 0 and steps_done % every == 0))

    def items(self) -> Iterator[Item]:
        """Every batch in the order in which it is made and used."""
        return (item for phase in self.phases() for item in phase.items)

    def phases(self) -> Iterator[Phase]:
        """Steps and evaluations in order."""
        if self.evaluates_first:
            yield self._evaluation(self.start)
        for step in range(self.start, self.stop):
            yield Phase("train", step, tuple(self.step_items(step)))
            if self.evaluates_after(step + 1):
                yield self._evaluation(step + 1)

    def step_items(self, step: int) -> Iterator[Item]:
        first = step * self.global_batch
        return (Item("train", index, step) for index in range(first, first + self.global_batch))

    def _evaluation(self, steps_done: int) -> Phase:
        items = (Item("held_out", index, steps_done) for index in range(self.held_out))
        return Phase("held_out", steps_done, tuple(items))

    def receives(self, drafter: int) -> Iterator[Receives]:
        """Phases as one drafter sees them; the rule of the launches is the one at the top of this file."""
        items = self.items()
        upcoming = next(items, None)
        ahead: deque[Item] = deque()  # launched by someone, of phases to come
        for phase in self.phases():
            launched: list[Item] = []
            for _ in phase.items:
                if ahead:
                    ahead.popleft()
                elif upcoming is not None:
                    launched.append(upcoming)
                    upcoming = next(items, None)
            users = {self.user(item) for item in ahead}
            while upcoming is not None and self.user(upcoming) not in users:
                users.add(self.user(upcoming))
                launched.append(upcoming)
                ahead.append(upcoming)
                upcoming = next(items, None)
            yield Receives(phase, self._own(phase.items, drafter), self._own(launched, drafter))

    def _own(self, items: Iterable[Item], drafter: int) -> tuple[Item, ...]:
        return tuple(item for item in items if self.user(item) == drafter)

    def maker(self, item: Item) -> int:
        """Number of the target that makes the features."""
        return self.user(item) if self.topology.kind == "colocated" else item.index % self.topology.targets

    def user(self, item: Item) -> int:
        """Number of the drafter that uses the features."""
        return item.index % self.topology.drafters

    def sender_rank(self, item: Item) -> int:
        return self.topology.target_rank(self.maker(item))

    def receiver_rank(self, item: Item) -> int:
        return self.topology.drafter_rank(self.user(item))

    def for_target(self, target: int) -> Iterator[Item]:
        return (item for item in self.items() if self.maker(item) == target)

    def for_drafter(self, drafter: int) -> Iterator[Item]:
        return (item for item in self.items() if self.user(item) == drafter)

    def batches_of(self, drafter: int, step: int) -> tuple[int, ...]:
        """Training batches that a drafter uses in a step, at most `micro_batches` of them."""
        return tuple(item.index for item in self.step_items(step) if self.user(item) == drafter)

    def held_out_of(self, drafter: int) -> tuple[int, ...]:
        return tuple(range(drafter, self.held_out, self.topology.drafters))


def make_schedule(config: Config, topology: Topology, *, start: int, stop: int, held_out: int) -> Schedule:
    """The schedule of a run from optimiser step `start` to `stop`, with `held_out` batches in each evaluation."""
    return Schedule(topology, config.training.global_batch, start, stop, config.evaluation.every, held_out)
