"""Roles and the static schedule: complete, balanced, the same numbers on any world, and free of deadlock."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import TopologyConfig
from paceline.errors import UserError
from paceline.pipeline.topology import RECEIVE_BUFFERS, Item, Schedule, Topology, assign, splits

sizes = st.integers(1, 7)
topologies = st.one_of(
    st.builds(lambda n: Topology("colocated", n, n), sizes),
    st.builds(Topology, st.just("split"), sizes, sizes, st.integers(1, 3)),
)
schedules = st.builds(
    Schedule,
    topologies,
    global_batch=st.integers(1, 9),
    start=st.integers(0, 3),
    stop=st.integers(0, 9),
    evaluate_every=st.integers(0, 4),
    held_out=st.integers(0, 9),
)


@given(topologies)
def test_every_rank_has_a_role_and_every_part_a_rank(topology: Topology) -> None:
    roles = topology.roles()
    assert [role.rank for role in roles] == list(range(topology.world))
    assert sorted(role.drafter for role in roles if role.drafter is not None) == list(range(topology.drafters))
    shards = Counter(role.target for role in roles if role.target is not None)
    assert shards == dict.fromkeys(range(topology.targets), topology.tensor_parallel)
    assert roles[0].drafter == 0
    for target in range(topology.targets):
        sender = topology.role(topology.target_rank(target))
        assert (sender.target, sender.shard) == (target, 0)
        assert all(topology.role(rank).target == target for rank in topology.target_groups[target])
    assert len({role.name for role in roles}) == topology.world


@given(schedules)
def test_ranks_together_do_every_batch_once_in_increasing_order(schedule: Schedule) -> None:
    everything = list(schedule.items())
    trained = [item.index for item in everything if item.kind == "train"]
    assert trained == list(
        range(schedule.start * schedule.global_batch, max(schedule.stop, schedule.start) * schedule.global_batch)
    )
    for parts in (
        [list(schedule.for_drafter(d)) for d in range(schedule.topology.drafters)],
        [list(schedule.for_target(t)) for t in range(schedule.topology.targets)],
    ):
        assert Counter(item for part in parts for item in part) == Counter(everything)
        place = {item: number for number, item in enumerate(everything)}
        assert all([place[item] for item in part] == sorted(place[item] for item in part) for part in parts)


@given(schedules)
def test_what_is_trained_does_not_depend_on_the_world(schedule: Schedule) -> None:
    alone = replace(schedule, topology=Topology("colocated", 1, 1))
    assert list(schedule.items()) == list(alone.items())


@given(schedules)
def test_drafters_run_equally_many_micro_batches(schedule: Schedule) -> None:
    for step in range(schedule.start, schedule.stop):
        batches = [schedule.batches_of(d, step) for d in range(schedule.topology.drafters)]
        assert sorted(sum(batches, ())) == [item.index for item in schedule.step_items(step)]
        assert max(map(len, batches)) == schedule.micro_batches


@given(schedules)
def test_evaluation_comes_at_its_steps_and_always_at_the_end(schedule: Schedule) -> None:
    looks = [phase.step for phase in schedule.phases() if phase.kind == "held_out"]
    every = schedule.evaluate_every
    expected = [0] if schedule.start == 0 else []
    expected += [
        step
        for step in range(schedule.start + 1, schedule.stop + 1)
        if step == schedule.stop or (every and not step % every)
    ]
    if schedule.start >= schedule.stop:
        expected = [schedule.start]
    assert looks == (expected if schedule.held_out else [])
    numbers = [schedule.held_out_of(d) for d in range(schedule.topology.drafters)]
    assert sorted(sum(numbers, ())) == list(range(schedule.held_out))


# --- the schedule played with bounded buffers -----------------------------------------------------------------------


@dataclass
class _Op:
    """One blocking operation of a rank: all members must stand at it together."""

    key: tuple
    members: frozenset[int]


def _program_of_drafter(schedule: Schedule, drafter: int) -> list[_Op]:
    """A drafter's blocking launches, in order; checks on the way that its buffers suffice."""
    topology = schedule.topology
    rank = topology.drafter_rank(drafter)
    held: deque[Item] = deque()  # received or arriving, not yet used up
    ops: list[_Op] = []
    for part in schedule.receives(drafter):
        launches = deque(part.launches)
        for item in part.uses:
            for _ in range(2):
                if launches and (item not in held or len(held) < RECEIVE_BUFFERS):
                    held.append(launches.popleft())
                    ops.append(_move(schedule, held[-1], rank))
            assert len(held) <= RECEIVE_BUFFERS
            assert held.popleft() == item
        held.extend(launches)
        ops += [_move(schedule, item, rank) for item in launches]
        assert len(held) <= RECEIVE_BUFFERS - 1
        ops.append(_Op((part.phase.kind, part.phase.step), frozenset(topology.drafter_ranks)))
    assert not held
    return ops


def _move(schedule: Schedule, item: Item, rank: int) -> _Op:
    return _Op(("move", item), frozenset({schedule.topology.target_rank(schedule.maker(item)), rank}))


def _programs(schedule: Schedule) -> dict[int, deque[_Op]]:
    topology = schedule.topology
    programs = {topology.drafter_rank(d): deque(_program_of_drafter(schedule, d)) for d in range(topology.drafters)}
    if topology.kind == "split":
        for target in range(topology.targets):
            rank = topology.target_rank(target)
            programs[rank] = deque(
                _move(schedule, item, topology.drafter_rank(schedule.user(item)))
                for item in schedule.for_target(target)
            )
    return programs


@given(schedules)
@settings(max_examples=300)
def test_blocking_launches_in_schedule_order_never_deadlock(schedule: Schedule) -> None:
    """The hardest reading: no buffering at all, each launch blocks its rank until every member stands at it."""
    programs = _programs(schedule)
    while any(programs.values()):
        ready = [
            program[0]
            for rank, program in programs.items()
            if program
            and min(program[0].members) == rank
            and all(programs[other] and programs[other][0].key == program[0].key for other in program[0].members)
        ]
        assert ready, {rank: program[0].key for rank, program in programs.items() if program}
        for op in ready:
            for rank in op.members:
                programs[rank].popleft()


def test_receiving_early_without_the_common_window_would_deadlock() -> None:
    """The counter-example of the module's text, so that nobody simplifies the rule away."""
    schedule = Schedule(Topology("split", 1, 2), global_batch=1, start=0, stop=3, held_out=2)
    early = {d: [item for part in schedule.receives(d) for item in part.launches] for d in (0, 1)}
    assert early == {d: list(schedule.for_drafter(d)) for d in (0, 1)}
    second = Item("held_out", 1, 3)
    phase = next(part.phase for part in schedule.receives(1) if second in part.launches)
    assert (phase.kind, phase.step) == ("train", 2)  # not in step 1, whose batch it uses, with a buffer free


def test_assign_refuses_what_does_not_add_up() -> None:
    split = TopologyConfig(kind="split", targets=5, drafters=3)
    assert assign(split, 8) == Topology("split", 5, 3)
    with pytest.raises(UserError, match="needs 8 processes, and there are 7"):
        assign(split, 7)
    with pytest.raises(UserError, match="needs 13"):
        assign(split, 8, tensor_parallel=2)
    with pytest.raises(UserError, match="ranks of its own"):
        assign(TopologyConfig(), 4, tensor_parallel=2)
    assert assign(TopologyConfig(), 4) == Topology("colocated", 4, 4)


def test_splits_of_a_world() -> None:
    assert [str(topology) for topology in splits(3)] == [
        "colocated × 3",
        "split 1 target + 2 drafters",
        "split 2 targets + 1 drafter",
    ]
    assert [(t.targets, t.drafters) for t in splits(8, tensor_parallel=2)] == [(1, 6), (2, 4), (3, 2)]


def test_the_missions_own_scene() -> None:
    schedule = Schedule(Topology("split", 5, 3), global_batch=6, start=0, stop=2)
    assert [schedule.topology.role(rank).name for rank in (0, 2, 3, 7)] == [
        "drafter 0",
        "drafter 2",
        "target 0",
        "target 4",
    ]
    assert [item.index for item in schedule.for_target(4)] == [4, 9]
    assert schedule.batches_of(1, 1) == (7, 10)
    assert schedule.topology.send_buffers == 3
