"""Everything that a worker will run, run once before step 0; then compiling is an error.

The parts are the real modules on the run's own shapes: a training step (forward, backward, optimiser), an evaluation
(which runs the step's graphs), the target's forward. Their state is put back bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.batches import BatchShape, FeatureBatch, TokenBatch
from paceline.compiling import fingerprint, guard
from paceline.compiling.cache import CompileCache, last_warmup_seconds
from paceline.compiling.forbid import Forbidden, dense_flex_raises, forbid
from paceline.compiling.places import chosen_root
from paceline.compiling.warmup import Role, WarmPart, WarmReport, warm_up
from paceline.drafter.blocks import dense_attend, dense_mask
from paceline.drafter.objective import Objective
from paceline.errors import UserError
from paceline.shapes import DrafterShape
from paceline.target.base import Target
from paceline.training.parts import Learner, drafter_dtype
from paceline.training.run import Run, Say

_CHECKED_BLOCKS = 16
_TOLERANCE = 5e-2
"""Of the norm, between two attention kernels in bfloat16; a wrong mask is off by tens of per cent."""


class Watch:
    """Looks, between steps, for what must not happen: a leaked tracing flag, a compilation. Costs microseconds."""

    def __init__(self, forbidden: Forbidden | None) -> None:
        self._forbidden = forbidden

    def check(self, step: int) -> None:
        guard.check(f"step {step}")
        if self._forbidden is not None:
            self._forbidden.check(f"step {step}")

    def explain(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Wrap a step in this: torch's errors about tracing and recompiling come out explained."""
        return guard.explain(f"step {step}") if self._forbidden is None else self._forbidden.explain(f"step {step}")


def open_cache(run: Run) -> CompileCache:
    """Point the compilers at this machine's cache; say what changed since the run's last start."""
    root = chosen_root(run.config.compiling.cache)
    now = fingerprint.take(flags={"matmul": run.config.training.matmul})
    cache = CompileCache(root, now)
    cache.activate()
    change = fingerprint.announce_change(fingerprint.previous(run.folder), now, last_warmup_seconds(root))
    if change:
        run.say(change)
    if run.world.rank == 0:
        fingerprint.remember(run.folder, now)
    return cache


def warm_worker(run: Run, learner: Learner | None, target: Target | None) -> Watch:
    """The warm-up phase of this worker; every rank calls it."""
    guard.install()
    if not run.compiles:
        run.connection.barrier("warm-up", run.config.compiling.warmup_seconds)
        return Watch(None)
    cache = open_cache(run)
    tokens = run.stream.batch(0).to(run.device)
    check = None if learner is None else SelfCheck(learner, tokens, run)
    if learner is not None:
        learner.objective.compile()
    run.heartbeat.beat("warm-up", run.schedule.start)
    report = warm_up(
        [*_parts(run, learner, target, tokens), *([] if check is None else [check.part])],
        cache,
        Role(_leads(run), f"rank {run.world.rank}", run.config.compiling.warmup_seconds),
        lambda name: run.connection.barrier(name, run.config.compiling.warmup_seconds),
        lambda phase: run.say(str(phase)),
    )
    _keep(run, report)
    for warning in report.warnings:
        print(f"rank {run.world.rank}: {warning}", file=sys.stderr, flush=True)
    if check is not None:
        check.judge(run.say)
    dense_flex_raises()
    return Watch(forbid())


def _keep(run: Run, report: WarmReport) -> None:
    """What this worker's warm-up took and compiled, beside the run: `warmup/rank-N.json`."""
    folder = run.folder / "warmup"
    folder.mkdir(parents=True, exist_ok=True)
    facts = dataclasses.asdict(report) | {"total": dataclasses.asdict(report.counters)}
    (folder / f"rank-{run.world.rank}.json").write_text(json.dumps(facts, indent=1, default=str))


def _leads(run: Run) -> bool:
    """The first worker of each part on each host compiles for the others of its kind."""
    if run.world.local_rank == 0:
        return True
    role = run.role
    before = [run.topology.role(rank) for rank in range(run.world.rank - run.world.local_rank, run.world.rank)]
    return not any((other.drafter is None) == (role.drafter is None) for other in before)


def _parts(run: Run, learner: Learner | None, target: Target | None, tokens: TokenBatch) -> list[WarmPart]:
    parts = []
    signature = f"{run.setup.batch}"
    if target is not None:
        parts.append(WarmPart("target forward", lambda: _alone(target, target.features, tokens), (), signature))
        # The held-out agreement runs the layers above the last captured one too, once, before they are let go.
        parts.append(WarmPart("whole target", lambda: _alone(target, target.next_tokens, tokens), (), signature))
    if learner is not None:
        batch = FeatureBatch(tokens, _noise(run))
        state = (learner.drafter, learner.optimizer)
        parts.append(WarmPart("training step", lambda: _one_step(learner, batch), state, signature))
        parts.append(WarmPart("evaluation", lambda: _discard(learner.objective.accepts(batch)), (), signature))
    return parts


def _one_step(learner: Learner, batch: FeatureBatch) -> None:
    sums = learner.objective.sums(batch)
    sums.loss.backward()
    learner.optimizer.accumulate()
    learner.optimizer.step(sums.weight)


def _alone(target: Target, call: Callable[[TokenBatch], Tensor], tokens: TokenBatch) -> None:
    """The ranks of a sharded target warm up one after another."""
    with target.silence():
        _discard(call(tokens))


def _discard(_: Tensor) -> None:
    """The warm-up wants what a call compiles, not what it gives."""


def _noise(run: Run) -> Tensor:
    """Features of unit size, [S, F]."""
    generator = torch.Generator(run.device).manual_seed(run.config.run.seed)
    shape = (run.setup.batch.tokens, run.setup.drafter.features)
    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    return torch.randn(shape, device=run.device, dtype=dtype, generator=generator)


# --- fast attention against the dense oracle ------------------------------------------------------------------------


class SelfCheck:
    """Compiled against dense, on a few blocks, which can be taken alone: they do not see each other.

    Attention alone, since a wrong mask shows there whatever it is added to; and the whole drafter, unless in float8,
    where two differ by rounding (0.16 of the norm after five layers on an H200, where bfloat16 has 0.02). It runs as a
    part of the warm-up, after the step that it looks at.
    """

    def __init__(self, learner: Learner, tokens: TokenBatch, run: Run) -> None:
        """Before anything is compiled."""
        self._learner, self._tokens, self._run = learner, tokens, run
        exact = run.config.training.matmul != "float8"
        self._expected = _dense_hidden(learner, tokens, run) if exact else None
        self._found: dict[str, float] = {}
        self.part = WarmPart("self-check", self._look, (), f"{run.setup.batch}")

    def _look(self) -> None:
        run, objective = self._run, self._learner.objective
        self._found["attention"] = attention_error(objective, run.setup.drafter, self._tokens, drafter_dtype(run))
        if self._expected is not None:
            states = objective.looked_at(FeatureBatch(self._tokens, _noise(run)))[_chosen(run.setup.batch)]
            self._found["drafter"] = _distance(states, self._expected)

    def judge(self, say: Say) -> None:
        """Raise UserError when the two differ."""
        told = ", ".join(f"{what} {error:.1e}" for what, error in self._found.items())
        say(f"self-check: compiled against dense differs by {told} of the norm")
        for what, error in self._found.items():
            if not error < _TOLERANCE:
                raise UserError(
                    f"the compiled {what} differs from the dense one by {error:.2g} of its norm on this device",
                    "run `paceline doctor --compile-check`, and report it with its output; training would be wrong",
                )


@torch.no_grad()
def _dense_hidden(learner: Learner, tokens: TokenBatch, run: Run) -> Tensor:
    """A few blocks through the uncompiled dense path."""
    chosen = _chosen(run.setup.batch)
    shape = dataclasses.replace(run.setup.batch, anchors=len(chosen))
    few = dataclasses.replace(
        tokens,
        anchors_A=tokens.anchors_A[chosen],
        starts_A=tokens.starts_A[chosen],
        labels_AB=tokens.labels_AB[chosen],
        weights_AB=tokens.weights_AB[chosen],
    )
    dense = Objective(learner.drafter, learner.objective.ends, shape, run.config.training, "dense")
    return dense.hidden(FeatureBatch(few, _noise(run)))


@torch.no_grad()
def attention_error(objective: Objective, shape: DrafterShape, tokens: TokenBatch, dtype: torch.dtype) -> float:
    """How far a batch's attention of random queries, keys and values is from the dense one, over the norm."""
    queries, context = objective.lengths()
    generator = torch.Generator(tokens.ids_S.device).manual_seed(0)

    def noise(heads: int, length: int) -> Tensor:
        size = (1, heads, length, shape.head_dim)
        return torch.randn(size, device=generator.device, dtype=dtype, generator=generator)

    q = noise(shape.heads, queries)
    k, v = noise(shape.kv_heads, context + queries), noise(shape.kv_heads, context + queries)
    chosen = torch.tensor(_chosen(objective.shape), device=generator.device)
    slots = torch.arange(shape.block_size, device=generator.device)
    own = (chosen[:, None] * shape.block_size + slots).flatten()
    seen = torch.cat((torch.arange(context, device=generator.device), context + own))
    dense = dense_attend(dense_mask(tokens.starts_A[chosen], tokens.anchors_A[chosen], context, shape.block_size))
    expected = dense(q[:, :, own], k[:, :, seen], v[:, :, seen])
    return _distance(objective.attend(tokens)(q, k, v)[:, :, own], expected)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12))


def _chosen(shape: BatchShape) -> list[int]:
    count = min(_CHECKED_BLOCKS, shape.anchors)
    return [index * shape.anchors // count for index in range(count)]
