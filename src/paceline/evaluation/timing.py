"""What the parts of a decoding step cost on this machine: the target over b tokens, the drafter over b tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from paceline.evaluation.decode import DecodingLoop, Engine
from paceline.evaluation.predict import StepTimes, block_lengths


@torch.no_grad()
def step_times(engine: Engine, batch: int, context: int, repeats: int = 7) -> StepTimes:
    """Median seconds of the parts of a step after a context of so many tokens, at each block length worth serving.

    With `engine.graphs` each part is captured and replayed, as decoding does.
    """
    assert engine.shape is not None
    verify: dict[int, float] = {}
    draft: dict[int, float] = {}
    plain = 0.0
    for block in [1, *block_lengths(engine.shape.block_size)]:
        loop = _loop(engine, batch, context, block)
        drafts = loop.tokens_RC[:, 1:block]
        with loop.capture:
            loop.prefill()

            def target(loop: DecodingLoop = loop, drafts: torch.Tensor = drafts) -> None:
                loop.target_forward(drafts, loop.capacity)

            def drafter(loop: DecodingLoop = loop) -> None:
                loop.draft(loop.capacity)
                loop.note_features(loop.positions())

            forward = _median(target, repeats, engine)
            if block == 1:
                plain = forward
                continue
            verify[block] = forward
            draft[block] = _median(drafter, repeats, engine)
    return StepTimes(batch, plain, verify, draft)


def _loop(engine: Engine, batch: int, context: int, block: int) -> DecodingLoop:
    assert engine.shape is not None
    shape = dataclasses.replace(engine.shape, block_size=max(2, block))
    part = dataclasses.replace(engine, shape=shape, drafter=engine.drafter if block > 1 else None)
    return DecodingLoop(part, [[1] * max(1, context)] * batch, block, ())


def _median(run: Callable[[], None], repeats: int, engine: Engine) -> float:
    device = next(engine.model.parameters()).device
    run()
    if engine.graphs:
        run = _captured(run)
    taken = []
    for _ in range(repeats):
        start = _now(device)
        run()
        taken.append(_now(device) - start)
    return sorted(taken)[repeats // 2]


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
