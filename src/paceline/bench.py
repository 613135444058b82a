"""A timed run as one JSON record, with this machine's ceilings measured beside it, and compared with an earlier one.

Shares of peak are counted operations over measured seconds over the rate that a large matrix product reached in the
same process. Letters: S context tokens, A anchors, B block size, Q = A·B, H hidden, I intermediate, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.batches import BatchShape, FeatureBatch, FrozenEnds, TokenBatch
from paceline.config import TrainingConfig, default_gamma
from paceline.drafter.model import Drafter
from paceline.drafter.objective import Objective
from paceline.errors import UserError
from paceline.shapes import DrafterShape
from paceline.training.optimizer import Optimizer


@dataclass(frozen=True)
class BenchOptions:
    """What to time."""

    geometry: str = "qwen3-8b"
    """qwen3-4b, qwen3-8b, qwen3-32b, smollm2, or tiny (for CPU)."""
    tokens: int = 8192
    documents: int = 2
    """Documents of equal length in a batch."""
    anchors: int = 1024
    block_size: int = 16
    steps: int = 200
    dtype: str = "auto"
    """float32 or bfloat16; auto is bfloat16 on CUDA."""
    matmul: str = "same"
    compile: bool = True
    """On CUDA; a CPU always runs uncompiled."""
    out: str = ""
    """Write the record here as JSON."""
    compare: str = ""
    """A record to compare with; slower than it by more than `tolerance` is a failure."""
    tolerance: float = 0.05


def _geometry(hidden: int, intermediate: int, heads: tuple[int, int, int], target_layers: int, vocabulary: int) -> Any:
    ids = tuple(round(1 + i * (target_layers - 4) / 4) for i in range(5))
    return DrafterShape(
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=5,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=heads[2],
        layer_ids=ids,
        block_size=16,
        mask_token_id=vocabulary - 1,
        vocabulary=vocabulary,
        target_layers=target_layers,
        rope={"rope_type": "default", "rope_theta": 1_000_000.0},
    )


GEOMETRIES: dict[str, DrafterShape] = {
    "qwen3-4b": _geometry(2560, 9728, (32, 8, 128), 36, 151_936),
    "qwen3-8b": _geometry(4096, 12_288, (32, 8, 128), 36, 151_936),
    "qwen3-32b": _geometry(5120, 25_600, (64, 8, 128), 64, 151_936),
    "smollm2": _geometry(576, 1536, (9, 3, 64), 30, 49_152),
    "tiny": _geometry(64, 128, (4, 2, 16), 12, 512),
}


@dataclass(frozen=True)
class Operations:
    """Floating-point operations that one step must do, multiply and add counted apart, in forward and backward."""

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
    weight gradient and no row for slot 0. Elementwise work, optimiser and padding count for nothing.
    """
    anchors, block_size = batch.labels_AB.shape
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    key_values = 2 * shape.hidden_size * kv_width
    layer = 2 * shape.hidden_size * width + key_values + 3 * shape.hidden_size * shape.intermediate_size
    visible = int((batch.anchors_A - batch.starts_A).sum()) * block_size + anchors * block_size**2
    tokens = len(batch.ids_S)
    return Operations(
        blocks=6.0 * layer * shape.layers * anchors * block_size,
        context=tokens * (6.0 * key_values * shape.layers + 4.0 * shape.features * shape.hidden_size),
        attention=14.0 * width * visible * shape.layers,
        head=4.0 * anchors * (block_size - 1) * shape.hidden_size * shape.vocabulary,
    )


def synthetic_batch(shape: BatchShape, documents: int, vocabulary: int, seed: int) -> TokenBatch:
    """Equal documents, wholly supervised, with anchors drawn without repetition, in place order."""
    generator = torch.Generator().manual_seed(seed)
    length = shape.tokens // documents
    places = torch.arange(documents * length)
    inside = places % length
    eligible = places[inside < length - 1]
    chosen = eligible[torch.randperm(len(eligible), generator=generator)[: shape.anchors]].sort().values
    starts = chosen // length * length
    slots = torch.arange(shape.block_size)
    target = chosen[:, None] + slots
    counts = (target < (starts + length)[:, None]) & (slots > 0)
    ids = torch.randint(0, vocabulary - 1, (shape.tokens,), generator=generator)
    pad = shape.anchors - len(chosen)

    def padded(x: Tensor) -> Tensor:
        return torch.cat((x, x.new_zeros(pad, *x.shape[1:])))

    weights = torch.exp(-(slots - 1) / shape.gamma) * counts
    labels = ids[target.clamp(max=shape.tokens - 1)] * (counts | (slots == 0))
    real = torch.arange(shape.tokens) < documents * length
    return TokenBatch(
        index=seed,
        ids_S=ids,
        positions_S=torch.arange(shape.tokens) % length * real,
        documents_S=torch.where(real, torch.arange(shape.tokens) // length, -1).int(),
        supervised_S=real,
        anchors_A=padded(chosen),
        starts_A=padded(starts),
        labels_AB=padded(labels),
        weights_AB=padded(weights),
        documents=tuple(range(documents)),
        bounds=tuple(range(0, documents * length + 1, length)),
    )


@dataclass(frozen=True)
class Ceilings:
    """What this machine reached in this process."""

    matmul_tflops: float
    copy_gbytes: float
    """Bytes read plus bytes written, a second."""
    size: int
    dtype: str


def ceilings(device: torch.device, size: int | None = None) -> Ceilings:
    """A square matrix product on random data, and a large copy, on the device; medians."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = size or (8192 if device.type == "cuda" else 768)
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    product = statistics.median(seconds(lambda: a @ b, device, 20))
    source = torch.randn(1 << (31 if device.type == "cuda" else 24), device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = statistics.median(seconds(lambda: target.copy_(source), device, 10))
    return Ceilings(2 * size**3 / product / 1e12, 2 * source.nbytes / copy / 1e9, size, str(dtype))


def seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each repeat: device events on CUDA (after three warm-ups), the clock elsewhere (after one)."""
    if device.type != "cuda":
        work()
        return [_clocked(work) for _ in range(repeats)]
    for _ in range(3):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def _clocked(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        with self.device:
            drafter = Drafter(self.shape).to(self.dtype)
            for parameter in drafter.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=0.02)
            head = torch.randn(self.shape.vocabulary, self.shape.hidden_size, dtype=self.dtype) * 0.02
        self.ends = FrozenEnds(head, head)
        for seed in range(2):
            tokens = synthetic_batch(self.batch_shape, self.documents, self.shape.vocabulary, seed).to(self.device)
            features = torch.randn(self.batch_shape.tokens, self.shape.features, device=self.device, dtype=self.dtype)
            self.batches.append(FeatureBatch(tokens, features))
        on_gpu = self.device.type == "cuda"
        self.objective = Objective(drafter, self.ends, self.batch_shape, self.config, "flex" if on_gpu else "dense")
        if self.compiled and on_gpu:
            self.objective.compile()
        self.optimizer = Optimizer(drafter, self.config, 1000)
        self._next = 0

    def step(self) -> Tensor:
        """Forward, backward, optimiser; the loss per weight, still on the device."""
        batch = self.batches[self._next % len(self.batches)]
        self._next += 1
        sums = self.objective.sums(batch)
        sums.loss.backward()
        self.optimizer.step(sums.weight)
        return sums.loss.detach() / sums.weight

    def kept_bytes(self) -> int:
        """Parameters, gradients, optimiser state, the frozen head, and the features of all batches but one."""
        parameters = sum(p.numel() for p in self.objective.drafter.parameters())
        width = torch.empty(0, dtype=self.dtype).element_size()
        masters = 0 if self.dtype == torch.float32 else 4
        spare = sum(batch.features_SF.nbytes for batch in self.batches[1:])
        return parameters * (2 * width + 8 + masters) + self.ends.head_VH.nbytes + spare


def drafter_record(options: BenchOptions) -> dict[str, Any]:
    """Time whole drafter steps. Every number of the record is of this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench, first = _first_step(options, device)
    top = ceilings(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = seconds(bench.step, device, options.steps)
    loss = float(bench.step())
    operations = count_operations(bench.shape, bench.batches[0].tokens)
    median = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "kind": "drafter step",
        "options": dataclasses.asdict(options),
        "machine": machine(),
        "ceilings": dataclasses.asdict(top),
        "operations": dataclasses.asdict(operations) | {"total": operations.total},
        "step_seconds": median,
        "step_p99_over_p50": _quantile(times, 0.99) / median,
        "share_of_matmul_peak": operations.total / median / (top.matmul_tflops * 1e12),
        "tokens_per_second": options.tokens / median,
        "first_step_seconds": first,
        "peak_gib": peak / 2**30,
        "beyond_kept_gib": max(0, peak - bench.kept_bytes()) / 2**30,
        "loss": loss,
    }


def _first_step(options: BenchOptions, device: torch.device) -> tuple[StepBench, float]:
    if options.geometry not in GEOMETRIES:
        raise UserError(f"geometry {options.geometry!r} is unknown", f"choose one of {', '.join(GEOMETRIES)}")
    dtype = options.dtype if options.dtype != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
    shape = dataclasses.replace(GEOMETRIES[options.geometry], block_size=options.block_size)
    gamma = default_gamma(options.block_size)
    bench = StepBench(
        shape,
        BatchShape(options.tokens, options.anchors, options.block_size, gamma),
        device,
        getattr(torch, dtype),
        TrainingConfig(matmul=options.matmul),  # type: ignore[arg-type]
        options.documents,
        options.compile,
    )
    started = time.perf_counter()
    float(bench.step())
    return bench, time.perf_counter() - started


def machine() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def compare(record: dict[str, Any], earlier: dict[str, Any], tolerance: float) -> list[str]:
    """What became worse by more than the tolerance, one line each."""
    worse = []
    for key in ("step_seconds", "beyond_kept_gib"):
        before, now = earlier.get(key), record.get(key)
        if before and now and now > before * (1 + tolerance):
            worse.append(f"{key}: {before:.4g} -> {now:.4g} (+{100 * (now / before - 1):.1f} %)")
    return worse


def run_bench(options: BenchOptions) -> int:
    """Time, print, write, compare. Returns the exit status: 1 when slower than the record compared with."""
    earlier = _read(options.compare) if options.compare else None
    record = {"command": ["paceline", *sys.argv[1:]]} | drafter_record(options)
    print(json.dumps(record, indent=1))
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if earlier is None:
        return 0
    worse = compare(record, earlier, options.tolerance)
    for line in worse:
        print(f"worse than {options.compare}: {line}", file=sys.stderr)
    return 1 if worse else 0


def _read(path: str) -> dict[str, Any]:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read the record {path}: {error}", "give a file that `paceline bench` wrote") from None
