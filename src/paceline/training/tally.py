"""The numbers of each step, from the device to the record, one step late and without a wait.

B block size, G batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.batches import TokenBatch
from paceline.drafter.objective import Sums
from paceline.errors import UserError
from paceline.permissions import apply_umask
from paceline.training.metrics import Clock, Delayed
from paceline.training.optimizer import StepReport
from paceline.training.run import Run
from paceline.training.scores import Scores


class Tally:
    """Adds up what the batches of a step give; delivers the record of step n while step n + 1 runs."""

    def __init__(self, run: Run, scores: Scores, reduce: Callable[[Tensor], None] | None) -> None:
        self._run, self._scores, self._reduce = run, scores, reduce
        self._block = run.setup.batch.block_size
        self._batches = run.config.training.global_batch
        self._delayed = Delayed(self._deliver)
        self._clock = Clock()
        self._skipped_in_a_row = 0
        self._sums: Tensor | None = None
        self._tokens = 0

    def start(self) -> None:
        """A step begins."""
        self._clock.start()

    def add(self, tokens: TokenBatch, sums: Sums) -> None:
        """[loss, weight, correct per slot, labels per slot, which batches have a loss that is not finite] of one."""
        loss = sums.loss.detach().float()[None]
        bad_G = loss.new_zeros(self._batches)
        if tokens.documents:
            bad_G[tokens.index % self._batches] = ~loss[0].isfinite()
        values = torch.cat([loss, sums.weight.float()[None], sums.correct_B, sums.count_B, bad_G])
        self._sums = values if self._sums is None else self._sums + values
        self._tokens += tokens.bounds[-1] if tokens.documents else 0

    @property
    def weight(self) -> Tensor:
        """Scalar float32 on the device: this rank's denominator of the step."""
        assert self._sums is not None
        return self._sums[1]

    def finish(self, step: int, report: StepReport, waited: float) -> None:
        """Close the step that ended as number `step` (1-based); `waited` are seconds of waiting for features."""
        assert self._sums is not None
        # Filled on the device: a tensor made of a host's list is a copy that waits for all that was launched.
        counted = torch.cat([self._sums, self._sums.new_full((1,), self._tokens)])
        if self._reduce is not None:
            self._reduce(counted)
        values = torch.cat([counted, report.grad_norm.float()[None], report.skipped.float()[None]])
        facts = {"learning_rate": report.learning_rate, "seconds": self._clock.lap(), "waited": waited}
        self._delayed.put(step, values, facts)
        self._sums, self._tokens = None, 0

    def flush(self) -> None:
        """Deliver the last step now; what follows is no part of a step's time."""
        self._delayed.flush()
        self._clock.stop()

    def _deliver(self, step: int, values: list[float], facts: dict[str, Any]) -> None:
        block = self._block
        loss, weight = values[0], values[1]
        correct, count = values[2 : 2 + block], values[2 + block : 2 + 2 * block]
        bad_G, (tokens, norm, skipped) = values[2 + 2 * block : -3], values[-3:]
        self._watch_skipped(step, bool(skipped), weight, bad_G)
        record = {
            "event": "step",
            "step": step,
            "loss": loss / weight if weight else 0.0,
            "accuracy": [right / max(seen, 1.0) for right, seen in zip(correct[1:], count[1:], strict=True)],
            "grad_norm": norm,
            "skipped": bool(skipped),
            "tokens": int(tokens),
            "labels": int(sum(count)),
            "tokens_per_second": tokens / max(facts["seconds"], 1e-9),
            **facts,
        }
        self._scores.record_step(record)

    def _watch_skipped(self, step: int, skipped: bool, weight: float, bad_G: list[float]) -> None:
        """Name and save the batches for which no rank applied a step; give up after too many such steps in a row."""
        if not skipped:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        first = (step - 1) * self._batches
        # A loss that is finite may have a gradient that is not: then it may be any of the step's batches.
        indices = [first + place for place in range(self._batches) if bad_G[place] or not any(bad_G)]
        reason = "no supervised token" if not weight else "values that are not finite"
        if self._run.world.rank == 0:
            for index in indices:
                _save_batch(self._run, index)
        self._run.say(
            f"step {step} was skipped on all ranks: {reason} in {_named(indices)} "
            f"(saved in {self._run.folder / 'skipped'})"
        )
        if self._skipped_in_a_row >= self._run.config.training.max_skipped:
            raise UserError(
                f"{self._skipped_in_a_row} steps in a row had {reason}, the last is {step}",
                "look at the saved batches and at the target's features; a lower training.learning_rate may help",
            )


def _named(indices: list[int]) -> str:
    if len(indices) == 1:
        return f"batch {indices[0]}"
    return f"batches {', '.join(map(str, indices[:8]))}{', …' if len(indices) > 8 else ''}"


def _save_batch(run: Run, index: int) -> None:
    """The batch as the stream makes it, so that it can be looked at without the run."""
    batch = run.stream.batch(index)
    tensors = {name: value.contiguous() for name, value in batch.__dict__.items() if isinstance(value, Tensor)}
    folder = run.folder / "skipped"
    folder.mkdir(exist_ok=True)
    path = folder / f"batch-{index}.safetensors"
    save_file(tensors, path, metadata={"documents": str(list(batch.documents))})
    apply_umask(path)
