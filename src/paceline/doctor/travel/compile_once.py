"""Compiles and runs one small flex_attention; says how long each part took and what the cache had."""

from __future__ import annotations

import time
from typing import Any


def main(argument: dict[str, Any]) -> dict[str, Any]:
    """`argument`: ``device``, or nothing to take CUDA where there is one. flex_attention has no backward on CPU."""
    seconds: dict[str, float] = {}
    begun = time.perf_counter()
    import torch
    from torch._dynamo.utils import counters
    from torch.nn.attention.flex_attention import flex_attention

    seconds["import torch"] = time.perf_counter() - begun
    device = argument.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    traces = _count_traces()
    q, k, v = _inputs(torch, device)
    compiled = torch.compile(flex_attention, dynamic=False)
    for name in ("first call", "second call"):
        begun = time.perf_counter()
        out = compiled(q, k, v, score_mod=_causal)
        if device == "cuda":
            out.sum().backward()
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - begun
    error = (out.detach().cpu() - _dense(torch, q, k, v)).abs().max().item()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "backward": device == "cuda",
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "largest_error": error,
        "traces": traces[0],
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
    }


def _count_traces() -> list[int]:
    from torch.fx import Tracer

    count, original = [0], Tracer.trace

    def counted(self: Any, *words: Any, **named: Any) -> Any:
        count[0] += 1
        return original(self, *words, **named)

    Tracer.trace = counted
    return count


def _inputs(torch: Any, device: str) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 128, 32, generator=generator) for _ in range(3)]
    return [tensor.to(device).requires_grad_(device == "cuda") for tensor in tensors]


def _causal(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    import torch

    return torch.where(query >= key, score, -float("inf"))


def _dense(torch: Any, q: Any, k: Any, v: Any) -> Any:
    """The oracle: plain softmax attention in float64 on the CPU."""
    q, k, v = (tensor.detach().double().cpu() for tensor in (q, k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(hidden, -float("inf")), -1) @ v
