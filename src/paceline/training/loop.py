"""Training, as a table of contents."""

from __future__ import annotations

import contextlib

from paceline.config import Config
from paceline.pipeline.process import World
from paceline.pipeline.reduce import agreement_of_drafters, gather_over_drafters, gradient_reducer
from paceline.pipeline.source import FeatureSource, InProcessSource
from paceline.pipeline.split import Link, SplitSource, open_link, serve_features
from paceline.pipeline.wire import Wire
from paceline.target.base import Target
from paceline.target.transformers_body import compute_dtype
from paceline.training.checkpoint import save
from paceline.training.parts import Learner, load_target, make_learner, with_feature_cache
from paceline.training.run import Run, checkpoint_facts, keep_served, open_run, say_start
from paceline.training.scores import Scores
from paceline.training.tally import Tally
from paceline.training.warm import Watch, warm_worker


def train(config: Config, world: World, resume: bool = False) -> int:
    """One worker of a run, from configuration to drafter. Raises UserError."""
    with open_run(config, world, resume) as run:
        target = load_target(run) if run.role.target is not None else None
        learner = make_learner(run, target) if run.role.drafter is not None else None
        watch = warm_worker(run, learner, target)
        with watch.explain(run.schedule.start):
            target = with_feature_cache(run, target)
        link = _open_link(run) if run.topology.kind == "split" else None
        if learner is None:
            assert link is not None
            assert target is not None
            keep_served(run, serve_features(link, run.stream, target))
        else:
            source = SplitSource(link, run.stream) if link is not None else _colocated(run, target)
            with contextlib.closing(source):
                fit(run, learner, source, watch, target)
        run.connection.barrier("end")
    return 0


def warm_only(config: Config, world: World, resume: bool = False) -> int:
    """The start of a run up to its warm-up: leaves a warm cache behind, and no run. Raises UserError."""
    with open_run(config, world, resume, claims=False) as run:
        target = load_target(run) if run.role.target is not None else None
        learner = make_learner(run, target) if run.role.drafter is not None else None
        warm_worker(run, learner, target)
        run.connection.barrier("end")
    return 0


def fit(run: Run, learner: Learner, source: FeatureSource, watch: Watch, target: Target | None) -> None:
    """A drafter's whole run: evaluate, step, evaluate, save."""
    run.heartbeat.beat("held-out agreement", run.schedule.start)
    scores = Scores(run, learner, source.next_tokens())
    if target is not None:
        target.close_upper_layers()
    reduce = gradient_reducer(run.groups)
    tally = Tally(run, scores, reduce)
    step = run.schedule.start
    try:
        if step == 0 or step >= run.total:
            scores.evaluate(source, step)
        say_start(run)
        while step < run.total:
            run.heartbeat.beat("train", step)
            tally.start()
            with watch.explain(step):
                for batch in source.global_batch(step):
                    sums = learner.objective.sums(batch)
                    sums.loss.backward()
                    learner.optimizer.accumulate()
                    tally.add(batch.tokens, sums)
                report = learner.optimizer.step(tally.weight, reduce)
            step += 1
            tally.finish(step, report, source.waited())
            watch.check(step)
            if run.schedule.evaluates_after(step):
                tally.flush()
                scores.evaluate(source, step)
            if _saves_after(run, step):
                tally.flush()
                _save(run, learner, scores, step)
        scores.export_last(step)
    finally:
        scores.close()


def _saves_after(run: Run, step: int) -> bool:
    every = run.config.checkpoint.every
    return step == run.total or (every > 0 and step % every == 0)


def _save(run: Run, learner: Learner, scores: Scores, step: int) -> None:
    run.heartbeat.beat("save", step)
    save(
        run.folder / "checkpoints",
        step,
        learner.optimizer.share(),
        {"run": checkpoint_facts(run.setup, run.corpus), "best_tau": scores.best_tau},
        rank=run.world.rank,
        world=run.topology.drafters,
        keep=run.config.checkpoint.keep,
        agree=agreement_of_drafters(run.groups),
    )


def _colocated(run: Run, target: Target | None) -> FeatureSource:
    assert target is not None
    assert run.role.drafter is not None
    gather = gather_over_drafters(run.groups, run.topology, run.role.drafter)
    return InProcessSource(run.stream, target, run.schedule, run.role.drafter, gather)


def _open_link(run: Run) -> Link:
    shape = run.setup
    wire = Wire(
        tokens=shape.batch.tokens,
        layers=len(shape.drafter.layer_ids),
        hidden=shape.drafter.hidden_size,
        dtype=compute_dtype(run.config.target, run.device),
        form=run.config.topology.features,
    )
    return open_link(run.connection, run.groups, run.schedule, wire, run.heartbeat, checkpoint_facts(shape, run.corpus))
