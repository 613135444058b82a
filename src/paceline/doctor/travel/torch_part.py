"""What only torch itself can tell, in a process of its own."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from typing import Any

SETTINGS = (
    "error_on_nested_fx_trace",
    "recompile_limit",
    "accumulated_recompile_limit",
    "fail_on_recompile_limit_hit",
    "suppress_errors",
    "automatic_dynamic_shapes",
    "disable",
)


def main(argument: dict[str, Any]) -> dict[str, Any]:
    begun = time.perf_counter()
    import torch

    seconds = time.perf_counter() - begun

    return {
        "version": torch.__version__,
        "folder": os.path.dirname(torch.__file__),
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        "import_seconds": round(seconds, 2),
        "threads": torch.get_num_threads(),
        "gil": sys._is_gil_enabled() if sys.version_info >= (3, 13) else True,
        "cuda": _part(_cuda, torch),
        "triton": _part(_triton),
        "dynamo": _part(_dynamo),
        "inductor": _part(_inductor),
    }


def _part(reader: Any, *arguments: Any) -> dict[str, Any]:
    """One group of facts; a fault in it is a fact, and does not cost the others."""
    try:
        return reader(*arguments)
    except Exception as fault:  # noqa: BLE001  whatever this build raises is what we came to see
        return {"fault": f"{type(fault).__name__}: {fault}"[:300]}


def _cuda(torch: Any) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"available": False, "why": _why_not(torch)}
    count = torch.cuda.device_count()
    return {
        "available": True,
        "count": count,
        "devices": [
            {"name": torch.cuda.get_device_name(i), "capability": list(torch.cuda.get_device_capability(i))}
            for i in range(count)
        ],
        "built_for": torch.cuda.get_arch_list(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cudnn": torch.backends.cudnn.version(),
    }


def _why_not(torch: Any) -> str:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as fault:  # noqa: BLE001
        return str(fault).splitlines()[0][:300]
    return "no device is visible"


def _triton() -> dict[str, Any]:
    triton: Any = importlib.import_module("triton")
    own = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
    return {"version": triton.__version__, "ptxas": _ptxas_version(own) if os.path.exists(own) else None}


def _ptxas_version(place: str) -> str:
    import subprocess

    told = subprocess.run([place, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    return next((line.strip() for line in told.splitlines() if "release" in line), told.strip()[-80:])


def _dynamo() -> dict[str, Any]:
    """Settings as they are, and whether one made in the main thread is seen by another thread."""
    config: Any = importlib.import_module("torch._dynamo.config")
    values = config.get_config_copy()
    known = {name: values[name] for name in SETTINGS if name in values}
    seen: list[int] = []
    before = config.recompile_limit
    config.recompile_limit = before + 56
    reader = threading.Thread(target=lambda: seen.append(config.recompile_limit))
    reader.start()
    reader.join()
    config.recompile_limit = before
    return {"settings": known, "holds_in_threads": seen == [before + 56], "thread_saw": seen[0], "set": before + 56}


def _inductor() -> dict[str, Any]:
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    return {
        "fx_graph_cache": inductor.fx_graph_cache,
        "autograd_cache": functorch.enable_autograd_cache,
        "force_disable_caches": inductor.force_disable_caches,
        "compile_threads": inductor.compile_threads,
        "worker_start_method": inductor.worker_start_method,
    }
