"""Variants of the drafter step on one GPU: correctness first, then times, a table last.

    PYTHONPATH=src python3 benchmarks/h200.py --out FOLDER [--only PREFIX ...] [--tiny]

Each variant is a process of its own (a failure or a time limit costs that variant alone). Processes of a wave compile
side by side; their timings then run one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from paceline.batches import BatchShape
from paceline.bench import GEOMETRIES, StepBench, ceilings, count_operations, seconds, synthetic_batch
from paceline.config import TrainingConfig
from paceline.drafter import loss
from paceline.drafter.blocks import BlockMaskWriter, flex_attend

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32

FLEX: dict[str, dict[str, Any]] = {
    "default": {},
    "safe": {"ROWS_GUARANTEED_SAFE": True, "PRESCALE_QK": True},
    "fwd 128x128 s2 w8": {
        "fwd_BLOCK_M": 128,
        "fwd_BLOCK_N": 128,
        "fwd_num_stages": 2,
        "fwd_num_warps": 8,
        "bwd_num_stages": 2,
    },
    "fwd 64x64 s3 w4, bwd 64 s3 w4": {
        "fwd_BLOCK_M": 64,
        "fwd_BLOCK_N": 64,
        "fwd_num_stages": 3,
        "fwd_num_warps": 4,
        "bwd_BLOCK_M1": 64,
        "bwd_BLOCK_N1": 64,
        "bwd_BLOCK_M2": 64,
        "bwd_BLOCK_N2": 64,
        "bwd_num_stages": 3,
        "bwd_num_warps": 4,
    },
    "tma": {"USE_TMA": True},
    "fwd 128x64 s2 w4, bwd 64 s2 w4": {
        "fwd_BLOCK_M": 128,
        "fwd_BLOCK_N": 64,
        "fwd_num_stages": 2,
        "fwd_num_warps": 4,
        "bwd_BLOCK_M1": 64,
        "bwd_BLOCK_N1": 64,
        "bwd_BLOCK_M2": 64,
        "bwd_BLOCK_N2": 64,
        "bwd_num_stages": 2,
        "bwd_num_warps": 4,
    },
    "fwd 128x128 s3 w8, bwd 128": {
        "fwd_BLOCK_M": 128,
        "fwd_BLOCK_N": 128,
        "fwd_num_stages": 3,
        "fwd_num_warps": 8,
        "bwd_BLOCK_M1": 32,
        "bwd_BLOCK_N1": 128,
        "bwd_BLOCK_M2": 128,
        "bwd_BLOCK_N2": 32,
        "bwd_num_stages": 3,
        "bwd_num_warps": 4,
    },
}


def shapes(tiny: bool, tokens: int = 8192, anchors: int = 1024) -> tuple[Any, BatchShape, int]:
    if tiny:
        return GEOMETRIES["tiny"], BatchShape(256, 32, 16, 7.0), 2
    return GEOMETRIES["qwen3-8b"], BatchShape(tokens, anchors, 16, 7.0), 2


def ready() -> None:
    """Tell the driver that everything is compiled; go on when it is this process's turn."""
    if ON_GPU:
        torch.cuda.synchronize()
    print("READY", flush=True)
    sys.stdin.readline()


def median(work: Any, repeats: int) -> float:
    return 1e3 * statistics.median(seconds(work, DEVICE, repeats))


def variant_flex(name: str, tiny: bool) -> dict[str, Any]:
    shape, batch_shape, documents = shapes(tiny)
    batch = synthetic_batch(batch_shape, documents, shape.vocabulary, 0)
    queries, keys = batch_shape.anchors * 16, batch_shape.tokens + batch_shape.anchors * 16
    q = torch.randn(1, shape.heads, queries, shape.head_dim, device=DEVICE, dtype=DTYPE, requires_grad=ON_GPU)
    k, v = (
        torch.randn(1, shape.kv_heads, keys, shape.head_dim, device=DEVICE, dtype=DTYPE, requires_grad=ON_GPU)
        for _ in range(2)
    )
    writer = BlockMaskWriter(batch_shape.tokens, batch_shape.anchors, 16, DEVICE)
    attend = flex_attend(writer.write(batch.starts_A.to(DEVICE), batch.anchors_A.to(DEVICE)), FLEX[name])
    out = attend(q, k, v)
    grad = torch.randn_like(out)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    if ON_GPU:
        backward()
    ready()
    result = {"forward ms": median(lambda: attend(q, k, v), 10)}
    if ON_GPU:
        result["backward ms"] = median(backward, 10)
        result["forward + backward ms"] = result["forward ms"] + result["backward ms"]
    count = count_operations(shape, batch).attention / shape.layers
    return result | {"TFLOP/s": count / 1e9 / result.get("forward + backward ms", result["forward ms"])}


def variant_head(name: str, tiny: bool) -> dict[str, Any]:
    shape, batch_shape, _ = shapes(tiny)
    rows = batch_shape.anchors * 15
    head = torch.randn(shape.vocabulary, shape.hidden_size, device=DEVICE, dtype=DTYPE) * 0.02
    ends = loss.FrozenEnds(head, head)
    hidden = torch.randn(rows, shape.hidden_size, device=DEVICE, dtype=DTYPE, requires_grad=True)
    labels = torch.randint(0, shape.vocabulary, (rows,), device=DEVICE)
    weights = torch.rand(rows, device=DEVICE)
    chunks = [int(part) for part in name.split(",")] if not tiny else [64]

    def run(chunk: int) -> None:
        loss.frozen_head_loss(hidden, ends, labels, weights, chunk=chunk).loss.backward()
        hidden.grad = None

    run(chunks[0])
    ready()
    result: dict[str, Any] = {f"chunk {chunk} ms": median(lambda chunk=chunk: run(chunk), 5) for chunk in chunks}
    logits = torch.randn(min(1024, rows), shape.vocabulary, device=DEVICE, dtype=DTYPE)
    part = slice(0, len(logits))
    losses, correct = torch.empty(len(logits), device=DEVICE), torch.empty(len(logits), device=DEVICE, dtype=torch.bool)
    sweep = loss.Sweep(ends, None, True)
    given = loss.Rows(labels[part], weights[part], losses, correct)
    if ON_GPU:
        from paceline.drafter import kernels  # noqa: PLC0415 - needs triton

        result["sweep of 1024 rows ms"] = median(lambda: kernels.sweep(given, logits, logits, sweep), 10)
    result["logits matmul of 1024 rows ms"] = median(lambda: hidden[part] @ head.T, 10)
    result["d(hidden) matmul of 1024 rows ms"] = median(lambda: logits @ head, 10)
    return result


def variant_misc(_name: str, tiny: bool) -> dict[str, Any]:
    shape, batch_shape, documents = shapes(tiny)
    batch = synthetic_batch(batch_shape, documents, shape.vocabulary, 0).to(DEVICE)
    writer = BlockMaskWriter(batch_shape.tokens, batch_shape.anchors, 16, DEVICE)
    ready()
    result: dict[str, Any] = {}
    host = time.perf_counter()
    result["mask ms"] = median(lambda: writer.write(batch.starts_A, batch.anchors_A), 20)
    result["mask host ms"] = 1e3 * (time.perf_counter() - host) / 23
    top = ceilings(DEVICE)
    result |= {"matmul TFLOP/s": top.matmul_tflops, "copy GB/s": top.copy_gbytes}
    rows, hidden, inner = batch_shape.anchors * 16, shape.hidden_size, shape.intermediate_size
    for label, (m, k, n) in {
        "gate": (rows, hidden, inner),
        "gate + up": (rows, hidden, 2 * inner),
        "down": (rows, inner, hidden),
        "q": (rows, hidden, hidden),
        "k": (rows, hidden, hidden // 4),
        "weight of gate": (hidden, rows, inner),
    }.items():
        a, b = torch.randn(m, k, device=DEVICE, dtype=DTYPE), torch.randn(n, k, device=DEVICE, dtype=DTYPE)
        took = median(lambda a=a, b=b: a @ b.T, 10)
        result[f"{label} matmul TFLOP/s"] = 2 * m * k * n / took / 1e9
    if ON_GPU:
        result |= float8_rates(rows, hidden, inner)
    return result


def float8_rates(rows: int, hidden: int, inner: int) -> dict[str, Any]:
    """Rates of torch's own float8 product, scaled by tensor and by row, at the sizes of a gate projection."""
    a = torch.randn(rows, hidden, device=DEVICE, dtype=DTYPE).to(torch.float8_e4m3fn)
    b = torch.randn(inner, hidden, device=DEVICE, dtype=DTYPE).to(torch.float8_e4m3fn)
    one = torch.ones((), device=DEVICE)
    by_row = torch.ones(rows, 1, device=DEVICE), torch.ones(1, inner, device=DEVICE)
    found: dict[str, Any] = {}
    for label, scales in {"tensor": (one, one), "row": by_row}.items():
        for fast in (True, False):
            with contextlib.suppress(RuntimeError):
                took = median(
                    lambda s=scales, f=fast: torch._scaled_mm(
                        a, b.T, scale_a=s[0], scale_b=s[1], out_dtype=DTYPE, use_fast_accum=f
                    ),
                    10,
                )
                found[f"float8 by {label}, fast={fast} TFLOP/s"] = 2 * rows * hidden * inner / took / 1e9
    return found


def variant_step(name: str, tiny: bool) -> dict[str, Any]:
    """`name` is a list of switches: base, joined, safe, anchors=N, tokens=N, compile option."""
    switches = dict(part.partition("=")[::2] for part in name.split(","))
    shape, batch_shape, documents = shapes(tiny, int(switches.get("tokens", 8192)), int(switches.get("anchors", 1024)))
    if "documents" in switches:
        documents = int(switches["documents"])
    config = TrainingConfig(
        head_chunk=int(switches.get("chunk", 0)),
        recompute="recompute" in switches,
        matmul="float8" if "float8" in switches else "same",
    )
    started = time.perf_counter()
    bench = StepBench(shape, batch_shape, DEVICE, DTYPE, config, documents, compiled=False)
    built = time.perf_counter() - started
    if "layers8" in switches:
        bench.objective.drafter.float8(True)
    if "flex" in switches:
        bench.objective._flex_options = FLEX[switches["flex"]]
    if ON_GPU:
        bench.objective.compile(**({"mode": switches["mode"]} if "mode" in switches else {}))
    started = time.perf_counter()
    float(bench.step())
    first = time.perf_counter() - started
    for _ in range(3):
        bench.step()
    ready()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    times = seconds(bench.step, DEVICE, 2 if tiny else int(switches.get("steps", 15)))
    took = statistics.median(times)
    operations = count_operations(shape, bench.batches[0].tokens).total
    result = {
        "step ms": 1e3 * took,
        "TFLOP/s": operations / took / 1e12,
        "p99/p50": sorted(times)[int(0.99 * len(times))] / took,
        "first step s": first,
        "build s": built,
        "loss": float(bench.step()),
    }
    if ON_GPU:
        peak = torch.cuda.max_memory_allocated()
        result |= {"peak GiB": peak / 2**30, "beyond kept GiB": (peak - bench.kept_bytes()) / 2**30}
    if "profile" in switches and ON_GPU:
        result["kernels"] = profile(bench)
    return result


def profile(bench: StepBench) -> list[tuple[str, float, int]]:
    """Kernels of one step: name, milliseconds, calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            bench.step()
        torch.cuda.synchronize()
    rows = [(row.key[:110], row.self_device_time_total / 3e3, row.count // 3) for row in prof.key_averages()]
    return sorted(rows, key=lambda row: -row[1])[:45]


VARIANTS = {"flex": variant_flex, "head": variant_head, "misc": variant_misc, "step": variant_step}


class Child:
    """One variant's process; `turn` lets it time itself."""

    def __init__(self, title: str, out: Path, tiny: bool) -> None:
        self.title = title
        folder = out.parent / "caches" / title.translate({ord(c): "_" for c in " :,=/"})
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
        }
        arguments = [sys.executable, __file__, "--out", str(out), "--variant", title] + (["--tiny"] if tiny else [])
        self.log = open(out / "variants.log", "ab")  # noqa: SIM115 - lives as long as the child
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, env=environment, text=True
        )
        self.lines: list[str] = []
        self.ready = threading.Event()
        self.ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("READY"):
                self.ready.set()
            else:
                self.lines.append(line)
        self.ready.set()
        self.ended.set()

    def turn(self, limit: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, OSError):
            self.process.stdin.write("GO\n")
            self.process.stdin.flush()
        self.ended.wait(limit)
        self.process.kill()
        for line in reversed(self.lines):
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        return {"failed": "see variants.log"}


def start_tests(out: Path) -> subprocess.Popen[bytes]:
    """The correctness tests, which compile beside the variants and end before anything is timed."""
    log = open(out / "tests.log", "wb")  # noqa: SIM115
    arguments = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "tests/gpu/test_drafter_gpu.py"]
    return subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT)


def finish_tests(tests: subprocess.Popen[bytes], out: Path, limit: float) -> None:
    try:
        tests.wait(limit)
    except subprocess.TimeoutExpired:
        tests.kill()
    print("\n".join((out / "tests.log").read_text(errors="replace").splitlines()[-60:]))


def wave(titles: list[str], out: Path, options: argparse.Namespace) -> dict[str, Any]:
    deadline = time.monotonic() + options.limit
    tests = start_tests(out) if options.tests else None
    children = [Child(title, out, options.tiny) for title in titles]
    for child in children:
        child.ready.wait(max(0.1, deadline - time.monotonic()))
    for child in children:
        if not child.ready.is_set():
            child.process.kill()
    if tests is not None:
        finish_tests(tests, out, max(1.0, deadline - time.monotonic()))
        options.tests = False
    return {child.title: child.turn(40) for child in children}


WAVES: dict[str, list[str]] = {
    "steps": ["step:base,profile", "step:float8,profile", "step:recompute", "head:1024,3072,5120"],
    "sizes": ["step:anchors=2048", "step:tokens=32768,anchors=2048,documents=1,steps=6"],
    "flex": [f"flex:{name}" for name in FLEX],
    "misc": ["misc:"],
}


def show(results: dict[str, Any]) -> None:
    for title, result in results.items():
        for name, milliseconds, calls in result.pop("kernels", []):
            print(f"    {milliseconds:9.3f} ms {calls:4d} x  {name}")
        numbers = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()
        )
        print(f"{title:45s} {numbers}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--waves", nargs="*", default=["steps"])
    parser.add_argument("--variant")
    parser.add_argument("--limit", type=float, default=150)
    parser.add_argument("--tiny", action="store_true", help="check the script itself, on a CPU")
    parser.add_argument("--tests", action="store_true", help="run tests/gpu beside the first wave")
    options = parser.parse_args()
    if options.variant:
        kind, _, name = options.variant.partition(":")
        print("RESULT " + json.dumps(VARIANTS[kind](name, options.tiny)), flush=True)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.waves:
        started = time.monotonic()
        results = wave(WAVES[name], options.out, options)
        (options.out / f"{name}.json").write_text(json.dumps(results, indent=1))
        print(f"--- wave {name}, {time.monotonic() - started:.0f} s")
        show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
