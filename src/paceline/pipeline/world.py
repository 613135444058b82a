"""How the processes of a run meet, and the groups in which they talk.

Everything that waits has a time-out of its own, and what times out names who did not come.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from paceline.errors import UserError
from paceline.pipeline.process import World
from paceline.pipeline.topology import Topology

_PREFIX = "paceline"


class LostPeer(UserError):
    """Another rank failed, went away or did not come: never the first failure, if a rank has one of its own."""


class Connection:
    """The joined processes. `join` makes it; with one process every method is a formality."""

    def __init__(self, world: World, store: Store | None, seconds: float) -> None:
        self.world = world
        self.seconds = seconds
        self._store = store
        self._met: Counter[str] = Counter()

    @property
    def alone(self) -> bool:
        return self.world.size == 1

    def barrier(self, name: str, seconds: float | None = None) -> None:
        """Wait until every rank has called this with `name` as often as this one has.

        Raises UserError that names the missing ranks after `seconds`.
        """
        if self._store is None:
            return
        limit = self.seconds if seconds is None else seconds
        self._met[name] += 1
        key = f"meet/{name}/{self._met[name]}"
        self._store.set(f"{key}/{self.world.rank}", "1")
        if self._store.add(f"{key}/count", 1) == self.world.size:
            self._store.set(f"{key}/open", "1")
        self._wait(f"{key}/open", limit, lambda: self._missing(key), name)

    def _wait(self, key: str, seconds: float, missing: Callable[[], list[int]], name: str) -> None:
        assert self._store is not None
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except dist.DistStoreError:
            ranks = ", ".join(map(str, missing()))
            raise LostPeer(
                f"rank {ranks} of {self.world.size} did not come to {name!r} within {seconds:g} s",
                "its own log says why; raise launch.collective_seconds if it was only slow",
            ) from None
        except dist.DistNetworkError:
            raise UserError(
                f"the connection to the other ranks was lost at {name!r}", "see the first failure"
            ) from None

    def _missing(self, key: str) -> list[int]:
        assert self._store is not None
        return [rank for rank in range(self.world.size) if not self._store.check([f"{key}/{rank}"])]

    def agree(self, mine: bool) -> bool:
        """Whether all ranks say yes. Meets all ranks."""
        if self.alone:
            return mine
        vote = torch.tensor([int(mine)])
        dist.all_reduce(vote, dist.ReduceOp.MIN)
        return bool(vote.item())

    def share(self, name: str, value: Any) -> list[Any]:
        """Every rank's JSON value for `name`, in rank order. Meets all ranks."""
        if self._store is None:
            return [json.loads(json.dumps(value))]
        self._store.set(f"share/{name}/{self._met[name] + 1}/{self.world.rank}", json.dumps(value))
        self.barrier(name)
        return [
            json.loads(self._store.get(f"share/{name}/{self._met[name]}/{rank}")) for rank in range(self.world.size)
        ]

    def require_same(self, name: str, facts: dict[str, Any]) -> None:
        """Raise UserError on every rank when `facts` (JSON) are not the same everywhere; names the first difference.

        Facts are compared in their order, so put the one that explains most first.
        """
        everyone = self.share(name, facts)
        for rank, other in enumerate(everyone):
            for key in [*everyone[0], *other]:
                ours, theirs = everyone[0].get(key), other.get(key)
                if ours != theirs:
                    raise UserError(
                        f"{name}: {key} differs between ranks: rank 0 has {ours}, rank {rank} has {theirs}",
                        "start every node with the same configuration, data, model and version of paceline",
                    )

    def close(self) -> None:
        """Leave. No rank needs the others any more once all have come here."""
        if not self.alone and dist.is_initialized():
            dist.destroy_process_group()


def join(world: World, seconds: float) -> Connection:
    """Meet the other processes through the address in the environment (MASTER_ADDR, MASTER_PORT).

    Raises UserError that names the ranks that have not come within `seconds`, or the port that is taken.
    """
    if world.size == 1:
        return Connection(world, None, seconds)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    limit = timedelta(seconds=seconds)
    try:
        store = _open_store(world, limit)
    except (dist.DistStoreError, dist.DistNetworkError, ValueError) as error:
        raise _cannot_meet(where, world, seconds, str(error)) from None
    connection = Connection(world, PrefixStore(f"{_PREFIX}/{world.attempt}", store), seconds)
    connection.barrier("start", seconds)
    if world.nodes == 1:
        # Names of hosts need not resolve; one machine needs none.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"{_PREFIX}/groups/{world.attempt}", store),
        rank=world.rank,
        world_size=world.size,
        timeout=limit,
    )
    return connection


def _open_store(world: World, limit: timedelta) -> Store:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(iter(rendezvous("env://", world.rank, world.size, timeout=limit)))[0]
    # Without an agent rank 0 hosts it. It does not wait for the others here: the first barrier does, and names them.
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise UserError(
            f"MASTER_ADDR = {address!r} and MASTER_PORT = {port!r} do not say where rank 0 is",
            "set both on every process, or start with paceline train or torchrun",
        )
    rank, size = world.rank, world.size
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - documented there
        address, int(port), size, rank == 0, limit, wait_for_workers=False
    )


def _cannot_meet(where: str, world: World, seconds: float, reason: str) -> UserError:
    if "EADDRINUSE" in reason or "address already in use" in reason.lower():
        return UserError(
            f"the port of {where} is already taken by another process",
            "end that process or set MASTER_PORT to a free port; paceline train alone chooses a free one itself",
        )
    short = reason.splitlines()[0] if reason else "no reason given"
    return LostPeer(
        f"rank {world.rank} of {world.size} could not meet the others at {where} within {seconds:g} s ({short})",
        "check that rank 0 runs, that its address and port can be reached, and that every node was started",
    )


@dataclass(frozen=True)
class Groups:
    """Process groups of a topology; None where this process alone would be the group.

    All are made on every rank, in one order, and each has its own communicator and time-out.
    """

    drafters: dist.ProcessGroup | None = None
    """Gradients: on the compute device."""
    drafters_cpu: dist.ProcessGroup | None = None
    """Small results, on CPU."""
    features: dist.ProcessGroup | None = None
    """Senders and drafters; None when colocated."""
    target: dist.ProcessGroup | None = None
    """The ranks over which this rank's target is sharded."""


def open_groups(connection: Connection, topology: Topology) -> Groups:
    """The groups of this rank. Every rank must call it, with the same topology."""
    if connection.alone:
        return Groups()
    assert topology.world == connection.world.size
    backend = "nccl" if connection.world.device.startswith("cuda") else "gloo"
    drafters = _group(connection, topology.drafter_ranks, backend)
    drafters_cpu = _group(connection, topology.drafter_ranks, "gloo")
    if topology.kind == "colocated":
        return Groups(drafters, drafters_cpu)
    features = _group(connection, sorted({*topology.drafter_ranks, *topology.sender_ranks}), backend)
    shards = [_group(connection, ranks, backend) for ranks in topology.target_groups]
    role = topology.role(connection.world.rank)
    return Groups(drafters, drafters_cpu, features, None if role.target is None else shards[role.target])


def _group(connection: Connection, ranks: Iterable[int], backend: str) -> dist.ProcessGroup | None:
    """All ranks call this for every group, in one order; non-members, and groups of one, get None."""
    members = list(ranks)
    if len(members) == 1:
        return None
    group = dist.new_group(members, timeout=timedelta(seconds=connection.seconds), backend=backend)
    if connection.world.rank not in members:
        return None
    assert isinstance(group, dist.ProcessGroup)
    return group
