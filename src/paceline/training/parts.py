"""The models of a worker, built in one order: target, ends, drafter, objective, optimiser."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from paceline import export
from paceline.batches import FrozenEnds
from paceline.drafter.init import build
from paceline.drafter.model import Drafter
from paceline.drafter.objective import Objective
from paceline.pipeline.cost import RESERVE, Sizes, wants_shards
from paceline.pipeline.heartbeat import WAIT_FOR_FEATURES
from paceline.pipeline.reduce import Shards, agreement_of_drafters, shards_of_drafters
from paceline.target.base import Target
from paceline.target.ends import load_ends
from paceline.target.feature_cache import CachedTarget
from paceline.target.transformers_body import TransformersTarget, compute_dtype
from paceline.target.weights import weights_reader
from paceline.training.optimizer import Optimizer
from paceline.training.run import Run
from paceline.training.setup import check_init

_PATIENCE = 7 * 24 * 3600.0
"""Seconds at the meeting after the feature cache: a worker that hangs or dies is noticed by its heartbeat."""


@dataclass(frozen=True)
class Learner:
    """What a drafter rank trains with."""

    drafter: Drafter
    objective: Objective
    optimizer: Optimizer


def load_target(run: Run) -> Target:
    """The frozen target on this worker's device, checked against itself on the first batch."""
    run.heartbeat.beat("load target", run.schedule.start)
    mesh = None
    if run.config.target.tensor_parallel > 1:
        assert run.groups.target is not None, "a sharded target has a group of its own"
        mesh = DeviceMesh.from_group(run.groups.target, run.device.type)
    target = TransformersTarget.load(run.config.target, run.device, run.setup.drafter.layer_ids, device_mesh=mesh)
    run.heartbeat.beat("check target", run.schedule.start)
    target.self_check(run.stream.batch(0).to(run.device))
    if run.compiles and run.device.type == "cuda":
        target.compile_layers()
    return target


def with_feature_cache(run: Run, target: Target | None) -> Target | None:
    """The target, or one that keeps the features of every training document, where the configuration asks for it.

    Every rank calls it, and goes on when all have their features: that may take hours, which no limit for meeting
    between steps should end.
    """
    if run.config.target.feature_cache == "none" or run.schedule.start >= run.total:
        return target  # or no step is left that would read them
    start = run.schedule.start
    if target is not None:
        target = CachedTarget(
            target,
            run.corpus.train,
            run.setup.batch.tokens,
            run.config.target,
            run.say,
            lambda: run.heartbeat.beat("features of the data", start),
            lambda: run.heartbeat.beat(WAIT_FOR_FEATURES, start, waits_for="the features that another worker computes"),
        )
    run.heartbeat.beat(WAIT_FOR_FEATURES, start, waits_for="the other workers' features")
    run.connection.barrier("features of the data", _PATIENCE)
    return target


def drafter_dtype(run: Run) -> torch.dtype:
    """The dtype that the drafter computes in; its masters are float32 always."""
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    automatic = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    return named.get(run.config.training.dtype, automatic)


def make_learner(run: Run, target: Target | None) -> Learner:
    """A new drafter, or the resumed one, with its objective and optimiser."""
    run.heartbeat.beat("build drafter", run.schedule.start)
    drafter = _new_drafter(run)
    masters = dict(drafter.state_dict())
    drafter = drafter.to(device=run.device, dtype=drafter_dtype(run))
    optimizer = Optimizer(drafter, run.config.training, run.total, masters, choose_shards(run))
    if run.resumed is not None:
        optimizer.load_state(run.resumed.tensors)
    ends = target.ends if target is not None else _ends(run)
    return Learner(drafter, _objective(run, drafter, ends), optimizer)


def choose_shards(run: Run) -> Shards | None:
    """Whether this run's drafters share their optimiser state, the same on all of them; every drafter calls it."""
    mode, shards = run.config.training.shard_optimizer, shards_of_drafters(run.groups)
    if shards is None or mode == "off":
        return None
    if mode == "auto":
        agree = agreement_of_drafters(run.groups)
        assert agree is not None
        if agree(not _short_of_memory(run)):
            return None
    run.say(f"optimiser state: each of {shards.ranks} drafters keeps its share")
    return shards


def _short_of_memory(run: Run) -> bool:
    """Whether the whole state would not fit on this device with the rest, by the estimate that the plan makes."""
    if run.device.type != "cuda":
        return False  # a CPU's memory is not what decides
    room = torch.cuda.get_device_properties(run.device).total_memory - RESERVE
    return wants_shards(Sizes(run.config, run.setup.target, run.setup.drafter), run.topology, room)


def _new_drafter(run: Run) -> Drafter:
    init = run.config.drafter.init
    # A resumed run takes its weights from the checkpoint: what it started from may be gone.
    init = "random" if run.resumed is not None else init
    if run.resumed is None:
        check_init(run.setup)
    reader = weights_reader(run.config.target) if init == "target" else None
    return build(run.setup.drafter, init, run.config.run.seed, target=reader, read=export.read)


def _ends(run: Run) -> FrozenEnds:
    return load_ends(run.config.target, run.device, compute_dtype(run.config.target, run.device))


def _objective(run: Run, drafter: Drafter, ends: FrozenEnds) -> Objective:
    attention = "flex" if run.device.type == "cuda" else "dense"
    vocabulary = _data_vocabulary(run) if run.config.training.vocabulary == "data" else None
    return Objective(drafter, ends, run.setup.batch, run.config.training, attention, vocabulary_ids=vocabulary)


def _data_vocabulary(run: Run) -> torch.Tensor:
    """Ids that occur as labels in the training data, ascending."""
    documents = run.corpus.train
    ids = np.unique(np.asarray(documents.ids)[np.asarray(documents.supervised, dtype=bool)])
    return torch.from_numpy(ids.astype(np.int64)).to(run.device)
