"""What a run knows of its drafter: the records, the exact held-out τ, and the best and the last drafter on disk."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import paceline
from paceline import config as configuration
from paceline import export
from paceline.batches import EvaluationBatch
from paceline.evaluation.acceptance import Acceptance, agreement_of, exact_tau
from paceline.export import CardFacts, TauRow
from paceline.export.origin import Origin, origin_of
from paceline.pipeline.source import FeatureSource
from paceline.training.metrics import MetricsFile, TensorBoardView
from paceline.training.parts import Learner, drafter_dtype
from paceline.training.progress import open_view
from paceline.training.run import Run

_LOW_AGREEMENT = 0.9


class Scores:
    """Writes on rank 0 only; every drafter rank takes part in an evaluation.

    `next_tokens` is the target's own choice at every place of every held-out batch: an answer is walked only as far as
    it is what the target would have written.
    """

    def __init__(self, run: Run, learner: Learner, next_tokens: list[Tensor]) -> None:
        self._run, self._learner = run, learner
        self._writes = run.world.rank == 0
        self._view = open_view(run.world.rank, run.total, run.schedule.start)
        self._file = self._open_file() if self._writes else None
        self._board = TensorBoardView(run.folder) if self._writes else None
        self._next_tokens = next_tokens
        self._agreement: list[Tensor] | None = None
        self.best_tau: float = run.resumed.facts["best_tau"] if run.resumed else 0.0
        self._last: Acceptance | None = None

    def _open_file(self) -> MetricsFile:
        schedule = self._run.schedule
        return MetricsFile(self._run.folder, schedule.start, looks_again=schedule.evaluates_first)

    def record_step(self, record: dict[str, Any]) -> None:
        self._write(record)
        self._view.step(record if self._last is None else {**record, "tau": self._last.tau})

    def evaluate(self, source: FeatureSource, step: int) -> None:
        """Exact τ on the held-out answers; keeps the drafter when it is the best so far."""
        if not source.held_out:
            return
        self._run.heartbeat.beat("evaluate", step)
        started = time.monotonic()
        acceptance = self._measure(source)
        self._last = acceptance
        record = evaluation_record(acceptance, step) | {"seconds": time.monotonic() - started}
        self._write(record)
        self._view.evaluation(record)
        if acceptance.tau > self.best_tau:
            self.best_tau = acceptance.tau
            self._export("best", step)

    def export_last(self, step: int) -> None:
        """Write the final drafter, reload it and compare."""
        masters = self._export("last", step)
        if self._writes:
            folder = self._run.folder / "last"
            difference = export.compare(folder, masters, self._run.setup.drafter)
            self._view.say(f"exported {folder}: reloaded, largest relative difference of a weight {difference:.1g}")

    def close(self) -> None:
        self._view.close()
        for writer in (self._file, self._board):
            if writer is not None:
                writer.close()

    def _measure(self, source: FeatureSource) -> Acceptance:
        objective = self._learner.objective
        on_host = self._run.device.type == "cpu"
        mine = [objective.accepts(batch, prefix_only=on_host).cpu() for _, batch in source.evaluation()]
        accepts = source.gather(mine)
        if self._agreement is None:
            pairs = zip(self._next_tokens, source.held_out, strict=True)
            self._agreement = [agreement_of(tokens, batch.tokens) for tokens, batch in pairs]
            self._warn_off_policy(exact_tau(accepts, source.held_out, self._agreement).agreement)
        return walked(accepts, source.held_out, self._agreement)

    def _warn_off_policy(self, share: float) -> None:
        if share < _LOW_AGREEMENT:
            self._view.say(
                f"warning: low agreement: only {share:.0%} of held-out answer tokens are what the target itself would "
                "write; drafters trained on others' answers accept little. `paceline regenerate` writes the target's "
                "own."
            )

    def _write(self, record: dict[str, Any]) -> None:
        for writer in (self._file, self._board):
            if writer is not None:
                writer.write(record)

    def _export(self, name: str, step: int) -> dict[str, Tensor]:
        """Every drafter rank calls it, for the weights may have to be gathered; they are returned where it writes."""
        masters = self._learner.optimizer.masters()
        if not self._writes:
            return {}
        run = self._run
        dtype = "float32" if drafter_dtype(run) == torch.float32 else "bfloat16"
        export.write(
            run.folder / name,
            masters,
            run.setup.drafter,
            run.setup.target,
            dtype=dtype,
            tokenizer=run.setup.tokenizer,
            card=self._card(step),
        )
        return masters

    @cached_property
    def _origin(self) -> Origin:
        """Computed once, for a fingerprint reads the target's files."""
        return origin_of(self._run.config.target)

    def _card(self, step: int) -> CardFacts:
        config = self._run.config
        return CardFacts(
            target=self._run.setup.target.name,
            target_revision=self._origin.revision,
            target_weights=self._origin.weights,
            data=config.data.train if step else (),
            settings=configuration.dump(config) if step else "",
            results=_rows(self._last) if self._last is not None else (),
            measured=f"exact τ on held-out answers after {step} steps, greedy, target in this run's dtype",
            version=paceline.__version__,
            notes=origin_notes(config.drafter.init, step),
        )


def origin_notes(init: str, step: int) -> tuple[str, ...]:
    """What a drafter's card says of where its weights come from. At step 0 this run has trained nothing."""
    if init in ("random", "target"):
        begun = "random weights" if init == "random" else "layers copied from the target"
        return () if step else (f"untrained: {begun}, before any step",)
    if step:
        return (f"continued from `{init}`",)
    return (f"the weights of `{init}` as they were: no step of training was added; its own card says how it was made",)


def walked(accepts: Sequence[Tensor], held_out: Sequence[EvaluationBatch], agreement: Sequence[Tensor]) -> Acceptance:
    """Exact τ over what the target would write itself; over all labels where that leaves no step to walk."""
    strict = exact_tau(accepts, held_out, agreement)
    if strict.steps:
        return strict
    return dataclasses.replace(exact_tau(accepts, held_out), agreement=strict.agreement)


def evaluation_record(acceptance: Acceptance, step: int) -> dict[str, Any]:
    """An evaluation as one JSON object."""
    return {
        "event": "evaluation",
        "step": step,
        "tau": acceptance.tau,
        "tau_macro": acceptance.tau_macro,
        "accepted": acceptance.accepted_only,
        "low": acceptance.low,
        "high": acceptance.high,
        "by_slot": list(acceptance.by_slot),
        "by_kind": {kind: found.tau for kind, found in acceptance.by_kind.items()},
        "agreement": acceptance.agreement,
        "answers": acceptance.requests,
        "walked_steps": acceptance.steps,
    }


def _rows(acceptance: Acceptance) -> tuple[TauRow, ...]:
    whole = TauRow("all", acceptance.tau, acceptance.accepted_only, acceptance.steps, acceptance.low, acceptance.high)
    kinds = [
        TauRow(kind or "no kind", found.tau, found.accepted, found.steps, found.low, found.high)
        for kind, found in sorted(acceptance.by_kind.items())
    ]
    return (whole, *kinds) if len(kinds) > 1 else (whole,)
