"""Which topology is fastest: predicted from a few measured (or counted) times, printed as the table it was chosen from.

Letters: T targets, D drafters, N devices, G token batches of a step. In a steady state

- colocated: a step takes ⌈G/N⌉ batches of both parts on one device, an all-reduce over N, and the optimiser;
- split: drafters need ⌈G/D⌉ batches of their part, an all-reduce over D and the optimiser; targets need G/T batches
  (they run ahead, so they need not come out even in each step); the slower of the two, or the wire, sets the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.config import Config, ShardOptimizer
from paceline.errors import UserError
from paceline.pipeline.cost import GIB
from paceline.pipeline.topology import Topology, splits

RATES_FILE = "rates.json"
"""Where the pre-run of an automatic topology leaves what it measured, in the run folder."""


@dataclass(frozen=True)
class Rates:
    """Seconds of one device for one token batch, and bytes of memory; all measured, or all predicted."""

    target_seconds: float
    drafter_seconds: float
    """Forward and backward."""
    optimizer_seconds: float
    colocated_seconds: float
    """Both parts of one batch on one device, one after the other."""
    all_reduce_seconds: float
    """Of the gradient, per unit of 2(D - 1)/D: what a ring of many ranks takes, halved."""
    transfer_seconds: float
    """Of the features of one batch, between two devices."""
    target_bytes: int
    drafter_bytes: int
    colocated_bytes: int
    device_bytes: int
    """What a device offers."""
    optimizer_bytes: int = 0
    """Of `drafter_bytes` and of `colocated_bytes`: what D drafters can share, each keeping 1/D (ShardOptimizer)."""


@dataclass(frozen=True)
class Prediction:
    """One row of the table."""

    topology: Topology
    step_seconds: float
    batches_per_second: float
    limit: str
    """Which part sets the pace."""
    target_idle: float
    drafter_idle: float
    """Share of a step in which the part's devices have nothing to do."""
    short_bytes: int
    """Memory that is missing on the fullest kind of device; 0 when it fits."""


def predict(topology: Topology, rates: Rates, global_batch: int, sharding: ShardOptimizer = "off") -> Prediction:
    """Rate and limits of one topology; `sharding` is training.shard_optimizer."""
    micro = -(-global_batch // topology.drafters)
    ends = rates.optimizer_seconds + rates.all_reduce_seconds * 2 * (topology.drafters - 1) / topology.drafters
    if topology.kind == "colocated":
        step = micro * rates.colocated_seconds + ends
        short = _short(rates.colocated_bytes, topology, rates, sharding)
        return Prediction(topology, step, global_batch / step, "both parts", 0.0, 0.0, short)
    busy = {
        "drafters": micro * rates.drafter_seconds + ends,
        "targets": global_batch / topology.targets * rates.target_seconds,
        "wire": global_batch / min(topology.targets, topology.drafters) * rates.transfer_seconds,
    }
    limit = max(busy, key=lambda part: busy[part])
    step = busy[limit]
    short = max(rates.target_bytes - rates.device_bytes, _short(rates.drafter_bytes, topology, rates, sharding))
    idle = {part: 1 - seconds / step for part, seconds in busy.items()}
    return Prediction(topology, step, global_batch / step, limit, idle["targets"], idle["drafters"], max(0, short))


def _short(needed: int, topology: Topology, rates: Rates, sharding: ShardOptimizer) -> int:
    """Bytes that a drafter's device lacks, after sharding where that is chosen, or 0."""
    if sharding == "on" or (sharding == "auto" and needed > rates.device_bytes):
        needed -= rates.optimizer_bytes - rates.optimizer_bytes // topology.drafters
    return max(0, needed - rates.device_bytes)


@dataclass(frozen=True)
class Choice:
    """The fastest topology that fits, and the table that it was chosen from."""

    best: Prediction
    table: tuple[Prediction, ...]

    def render(self, tokens: int) -> str:
        """Lines of text; `tokens` of a batch turn its rate into tokens a second."""
        lines = [
            f"{'topology':<34}{'tokens/s':>12}{'step':>10}  {'limit':<12}{'targets idle':>13}{'drafters idle':>14}"
        ]
        for row in self.table:
            mark = " <- chosen" if row is self.best else ""
            note = f"  does not fit: {row.short_bytes / GIB:.1f} GiB short" if row.short_bytes else mark
            split = row.topology.kind == "split"
            idle = f"{row.target_idle:>13.0%}{row.drafter_idle:>14.0%}" if split else f"{'':>27}"
            rate = f"{row.batches_per_second * tokens:>12,.0f}{row.step_seconds:>9.3f}s"
            lines.append(f"{row.topology!s:<34}{rate}  {row.limit:<12}{idle}{note}")
        return "\n".join(line.rstrip() for line in lines)


def choose(
    world: int, rates: Rates, global_batch: int, tensor_parallel: int = 1, sharding: ShardOptimizer = "off"
) -> Choice:
    """The highest predicted rate among the topologies of a world that fit; the simpler one of equals.

    Raises UserError when none fits, with the least that is missing.
    """
    table = tuple(predict(topology, rates, global_batch, sharding) for topology in splits(world, tensor_parallel))
    if not table:
        raise UserError(
            f"{world} processes are too few for a target over {tensor_parallel} and a drafter",
            f"start at least {tensor_parallel + 1}, or lower target.tensor_parallel",
        )
    fitting = [row for row in table if not row.short_bytes]
    if not fitting:
        least = min(table, key=lambda row: row.short_bytes)
        raise UserError(
            f"no topology fits: {least.topology} is {least.short_bytes / GIB:.1f} GiB short on its fullest device",
            "lower training.tokens or training.anchors, set training.recompute = true, target.weights = 'float8', "
            "or shard the target (target.tensor_parallel)",
        )
    return Choice(_fastest(fitting), table)


def with_topology(config: Config, topology: Topology) -> Config:
    """The configuration with a decided topology in place of `auto`."""
    split = topology.kind == "split"
    targets, drafters = (topology.targets, topology.drafters) if split else (0, 0)
    return replace(config, topology=replace(config.topology, kind=topology.kind, targets=targets, drafters=drafters))


def _fastest(rows: Sequence[Prediction]) -> Prediction:
    # Predictions are not better than a per cent or two: within that, the earlier (simpler) one.
    best = max(row.batches_per_second for row in rows)
    return next(row for row in rows if row.batches_per_second >= 0.99 * best)
