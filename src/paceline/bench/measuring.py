"""Clocks, ceilings and memory of this process."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

GIB = 2**30


@dataclass(frozen=True)
class Ceilings:
    """What this machine reached in this process."""

    matmul_tflops: float
    copy_gbytes: float
    """Bytes read plus bytes written, a second."""
    size: int
    dtype: str

    def matmul_share(self, operations: float, spent: float) -> float:
        """Counted operations over seconds, over the matrix product's rate."""
        return operations / spent / (self.matmul_tflops * 1e12)


def ceilings(device: torch.device, size: int | None = None) -> Ceilings:
    """A square matrix product on random data, and a large copy, on the device; medians. Leaves no memory behind."""
    size = size or (8192 if device.type == "cuda" else 768)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = Ceilings(_product_rate(device, size, dtype) / 1e12, _copy_rate(device) / 1e9, size, str(dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _product_rate(device: torch.device, size: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / statistics.median(seconds(lambda: a @ b, device, 20))


def _copy_rate(device: torch.device) -> float:
    source = torch.randn(1 << (31 if device.type == "cuda" else 24), device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(seconds(lambda: target.copy_(source), device, 10))


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


def first_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call until the device is done with it; compiling counts, importing the compiler does not."""
    if device.type == "cuda":
        for name in ("torch._inductor.compile_fx", "torch._inductor.codegen.triton", "triton"):
            importlib.import_module(name)
    finish(device)
    start = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - start


class Marks:
    """Times the parts of a repeated step without making the host wait: device events on CUDA, the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._laps: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        """`part` ends here; it began at the mark before."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._laps.append((part, event))
        else:
            self._laps.append((part, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Seconds of each part over all steps. Waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for (_, before), (part, now) in itertools.pairwise(self._laps):
            total[part] = total.get(part, 0.0) + (before.elapsed_time(now) / 1e3 if self._on_gpu else now - before)
        return total


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Start anew with the peak that `memory` tells."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def allocated(device: torch.device) -> int:
    """Bytes that tensors hold on a GPU now; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def memory(device: torch.device, kept: int) -> dict[str, float | None]:
    """The device's peak since `forget_peak`, what of it lies beyond `kept` bytes, and this process's peak on the host.

    On a CPU the first two are None.
    """
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
    if device.type != "cuda":
        return {"peak_gib": None, "beyond_kept_gib": None, "host_peak_gib": host}
    peak = torch.cuda.max_memory_allocated(device)
    return {"peak_gib": peak / GIB, "beyond_kept_gib": max(0, peak - kept) / GIB, "host_peak_gib": host}


def machine() -> dict[str, Any]:
    """What the record was taken on."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def counted(operations: Any) -> dict[str, float]:
    """The fields of a count, and its `total`, for a record."""
    return dataclasses.asdict(operations) | {"total": operations.total}


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
