"""One worker of a launch on CPU: warms up on a cache and prints what happened as JSON.

    python warm_worker.py ROOT NAME [--leader] [--flex] [--bare-first] [--die-in-backward] [--cut-entries]

`--die-in-backward` is kill -9 in the middle of the first compilation: after the forward was compiled and saved, as the
backward's compilation starts. `--bare-first` runs the parts without Paceline's warm-up before it, on the cache as it
lies there. `--cut-entries` cuts what torch saved of its graphs, in the middle of the warm-up, before torch reads it.
"""

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from fast_cpu import skip_probes
from torch import nn

from paceline.compiling.cache import CompileCache
from paceline.compiling.fingerprint import take
from paceline.compiling.warmup import PhaseReport, Role, WarmPart, warm_up

WIDTH = 16
SHAPE = "rows=8"


class Block(nn.Module):
    """One kernel forward, one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).sin().sum()


def step_part() -> WarmPart:
    """Forward, backward and optimiser of a small module."""
    module = Block()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    compiled = torch.compile(module, dynamic=False)

    def run() -> None:
        compiled(torch.randn(8, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return WarmPart("training step", run, state=(module, optimizer), signature=SHAPE)


def flex_part() -> WarmPart:
    """flex_attention forward, as evaluation runs it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
    inputs = [torch.randn(1, 2, 128, WIDTH) for _ in range(3)]
    return WarmPart("evaluation", lambda: void(compiled(*inputs, block_mask=mask)), signature="tokens=128")


def void(_: object) -> None:
    pass


def cutting_part(cache: CompileCache) -> WarmPart:
    """What a stray process does to the cache while the warm-up runs."""

    def run() -> None:
        for kind in ("fxgraph", "aotautograd"):
            for file in (cache.compiled[0] / kind).rglob("*"):
                if file.is_file():
                    os.truncate(file, file.stat().st_size // 2)

    return WarmPart("damage", run)


class Complaints(logging.Handler):
    """What torch warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        logging.getLogger("torch._inductor.codecache").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def die_when_backward_compiles() -> None:
    from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

    def die(args: CallbackArgs) -> None:
        if args.callback_trigger is CallbackTrigger.LAZY_BACKWARD:
            os.kill(os.getpid(), signal.SIGKILL)

    callback_handler.register_start_callback(die)


def bare_error(parts: list[WarmPart]) -> str | None:
    """What torch dies of on this cache, if it does."""
    try:
        for part in parts:
            part.run()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch._dynamo.reset()
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("name")
    for flag in ("--leader", "--flex", "--bare-first", "--die-in-backward", "--cut-entries"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    cache = CompileCache(options.root, take(files=[Path(__file__)], modules=()))
    cache.activate()
    skip_probes()
    parts = [step_part(), *([flex_part()] if options.flex else [])]
    if options.cut_entries:
        parts.insert(0, cutting_part(cache))
    complaints = Complaints()
    if options.die_in_backward:
        die_when_backward_compiles()
    bare = bare_error(parts) if options.bare_first else None
    answer = warm(parts, cache, Role(options.leader, options.name, 120.0))
    print(json.dumps({"folder": str(cache.folder), "bare_error": bare, "complaints": complaints.said, **answer}))


def warm(parts: list[WarmPart], cache: CompileCache, role: Role) -> dict:
    phases: list[str] = []
    meet: Callable[[str], None] = void
    report: Callable[[PhaseReport], None] = lambda phase: phases.append(str(phase))  # noqa: E731
    outcome = warm_up(parts, cache, role, meet, report)
    return {
        "compiled": outcome.counters.compiled,
        "loaded": outcome.counters.loaded,
        "traces": outcome.counters.traces,
        "repair": outcome.repair,
        "seconds": sum(part.seconds for part in outcome.parts),
        "warnings": list(outcome.warnings),
        "phases": phases,
    }


if __name__ == "__main__":
    sys.exit(main())
