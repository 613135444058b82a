"""The drafter's step: forward, backward and optimiser on random features.

S context tokens, A anchors, B block size, Q = A·B, H hidden, I intermediate, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.batches import BatchShape, FeatureBatch, FrozenEnds, TokenBatch
from paceline.bench import measuring
from paceline.bench.case import Case
from paceline.bench.geometry import layer_weights, synthetic_batch
from paceline.config import TrainingConfig
from paceline.drafter.model import Drafter
from paceline.drafter.objective import Objective, Sums
from paceline.shapes import DrafterShape
from paceline.training.optimizer import Optimizer


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of one step as the network is written, multiply and add counted apart, both ways."""

    blocks: float
    context: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.blocks + self.context + self.attention + self.head


def count_operations(shape: DrafterShape, batch: TokenBatch) -> Operations:
    """From the network's shapes and the batch's own visible keys.

    A weight costs 2 operations a token forward and 4 backward (2 where the input takes no gradient: `fc`). Attention is
    counted over visible pairs alone: two products forward, five backward (scores are recomputed). The head has no
    weight gradient and no row for slot 0. Elementwise work, optimiser and padding count for nothing. What a step spares
    (`Drafter.slots`: 2.2 per cent at Qwen3-8B's shape with B = 16) counts as done, as it does for every trainer.
    """
    anchors, block_size = batch.labels_AB.shape
    width = shape.heads * shape.head_dim
    key_values = 2 * shape.hidden_size * shape.kv_heads * shape.head_dim
    visible = int((batch.anchors_A - batch.starts_A).sum()) * block_size + anchors * block_size**2
    tokens = len(batch.ids_S)
    return Operations(
        blocks=6.0 * layer_weights(shape) * shape.layers * anchors * block_size,
        context=tokens * (6.0 * key_values * shape.layers + 4.0 * shape.features * shape.hidden_size),
        attention=14.0 * width * visible * shape.layers,
        head=4.0 * anchors * (block_size - 1) * shape.hidden_size * shape.vocabulary,
    )


@dataclass
class StepBench:
    """A drafter, its optimiser and a few batches, ready to step; weights and features are random."""

    shape: DrafterShape
    batch_shape: BatchShape
    device: torch.device
    dtype: torch.dtype
    config: TrainingConfig
    documents: int = 1
    compiled: bool = True
    batches: list[FeatureBatch] = field(default_factory=list)
    given_ends: FrozenEnds | None = None
    """A target's; random ones otherwise."""
    prepared: int = 2
    """Batches with random features to make."""

    def __post_init__(self) -> None:
        drafter = random_drafter(self.shape, self.device, self.dtype)
        self.ends = self.given_ends or self._random_ends()
        for seed in range(self.prepared):
            tokens = synthetic_batch(self.batch_shape, self.documents, self.shape.vocabulary, seed).to(self.device)
            features = torch.randn(self.batch_shape.tokens, self.shape.features, device=self.device, dtype=self.dtype)
            self.batches.append(FeatureBatch(tokens, features))
        on_gpu = self.device.type == "cuda"
        self.objective = Objective(drafter, self.ends, self.batch_shape, self.config, "flex" if on_gpu else "dense")
        if self.compiled and on_gpu:
            self.objective.compile()
        self.optimizer = Optimizer(drafter, self.config, 1000)
        self._next = 0

    def _random_ends(self) -> FrozenEnds:
        size = (self.shape.vocabulary, self.shape.hidden_size)
        head = torch.randn(*size, device=self.device, dtype=self.dtype) * 0.02
        return FrozenEnds(head, head)

    def step(self) -> Tensor:
        """Forward, backward, optimiser; the loss per weight, still on the device."""
        batch = self.batches[self._next % len(self.batches)]
        self._next += 1
        return self.train(batch)

    def train(self, batch: FeatureBatch) -> Tensor:
        """A whole step on a batch."""
        sums = self.backward(batch)
        self.optimizer.step(sums.weight)
        return sums.loss.detach() / sums.weight

    def backward(self, batch: FeatureBatch) -> Sums:
        """Forward and backward."""
        sums = self.objective.sums(batch)
        sums.loss.backward()
        self.optimizer.accumulate()
        return sums

    def parameters(self) -> int:
        """Weights that the optimiser updates."""
        return sum(parameter.numel() for parameter in self.objective.drafter.parameters())

    def kept_bytes(self) -> int:
        """Parameters, gradients, optimiser state, the frozen head, and the features of all batches but one."""
        parameters = self.parameters()
        width = torch.empty(0, dtype=self.dtype).element_size()
        masters = 0 if self.dtype == torch.float32 else 4
        spare = sum(batch.features_SF.nbytes for batch in self.batches[1:])
        return parameters * (2 * width + 8 + masters) + self.ends.head_VH.nbytes + spare


def measure(case: Case) -> dict[str, Any]:
    """Time whole drafter steps. Every number is of this process."""
    options, device = case.options, case.device
    top = measuring.ceilings(device)
    bench = step_bench(case)
    first = measuring.first_seconds(bench.step, device)
    measuring.forget_peak(device)
    times = measuring.seconds(bench.step, device, options.steps)
    memory = measuring.memory(device, bench.kept_bytes())
    operations = count_operations(bench.shape, bench.batches[0].tokens)
    median = statistics.median(times)
    return {
        "ceilings": dataclasses.asdict(top),
        "operations": measuring.counted(operations),
        "parameters": bench.parameters(),
        "step_seconds": median,
        "step_p99_over_p50": measuring.quantile(times, 0.99) / median,
        "share_of_matmul_peak": top.matmul_share(operations.total, median),
        "tokens_per_second": options.tokens / median,
        "first_step_seconds": first,
        "loss": float(bench.step()),
        **memory,
    }


def step_bench(case: Case, ends: FrozenEnds | None = None, prepared: int = 2) -> StepBench:
    """The drafter of a case, ready to step; `ends` are a target's, `prepared` batches have random features."""
    return StepBench(
        case.drafter,
        case.batch,
        case.device,
        case.dtype,
        case.training,
        case.options.documents,
        case.options.compile,
        given_ends=ends,
        prepared=prepared,
    )


def random_drafter(shape: DrafterShape, device: torch.device, dtype: torch.dtype) -> Drafter:
    torch.manual_seed(0)
    with device:
        drafter = Drafter(shape).to(dtype)
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02)
    return drafter
