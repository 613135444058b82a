"""How much of the hand-off of features is hidden behind compute: one target and one drafter on two GPUs, over NCCL.

    PYTHONPATH=src:benchmarks python benchmarks/handoff.py --geometry qwen3-8b --out benchmarks/records/handoff.json

Both models have random weights of the named shape; the data is synthetic. Prints and writes one JSON record. On a host
without GPUs it runs on CPU with the shape `tiny`, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from paceline import launch
from paceline.batches import BatchShape, EvaluationBatch, FeatureBatch, FrozenEnds, TokenBatch
from paceline.bench import GEOMETRIES, StepBench, machine, synthetic_batch
from paceline.config import Config, LaunchConfig, RunConfig, TrainingConfig, default_gamma
from paceline.pipeline.heartbeat import Heartbeat
from paceline.pipeline.process import World
from paceline.pipeline.split import Link, SplitSource, open_link, serve_features
from paceline.pipeline.topology import Schedule, Topology
from paceline.pipeline.wire import Wire
from paceline.pipeline.world import join, open_groups
from paceline.shapes import DrafterShape, TargetShape
from paceline.target.transformers_body import TransformersTarget

OPTIONS = "PACELINE_HANDOFF"


class Synthetic:
    """A few batches over and over, so that the CPU is not what is measured."""

    def __init__(self, shape: BatchShape, documents: int, vocabulary: int) -> None:
        self._batches = [synthetic_batch(shape, documents, vocabulary, seed) for seed in range(3)]

    def batch(self, index: int) -> TokenBatch:
        return self._batches[index % 3]

    def empty(self, index: int) -> TokenBatch:
        return self._batches[0]

    def evaluation_batches(self) -> list[EvaluationBatch]:
        return []


def random_target(shape: DrafterShape, device: torch.device, dtype: torch.dtype) -> TransformersTarget:
    """A Qwen3 of the shape with random weights, made on the device."""
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.target_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=False,
    )
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    facts = TargetShape(
        name="random Qwen3",
        model_type="qwen3",
        hidden_size=shape.hidden_size,
        layers=shape.target_layers,
        vocabulary=shape.vocabulary,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        rms_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 10_000.0},
        max_positions=32_768,
        tied=False,
        bos_ids=(),
        eos_ids=(),
    )
    weights = model.get_input_embeddings().weight
    return TransformersTarget(model, facts, shape.layer_ids, device, FrozenEnds(weights, weights))


def worker(config: Config, world: World, resume: bool) -> int:
    """One of the two ranks."""
    options = json.loads(os.environ[OPTIONS])
    device = torch.device(world.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = GEOMETRIES[options["geometry"]]
    batch_shape = BatchShape(options["tokens"], options["anchors"], shape.block_size, default_gamma(shape.block_size))
    stream: Any = Synthetic(batch_shape, 2, shape.vocabulary)
    steps = options["warm"] + options["steps"]
    schedule = Schedule(Topology("split", 1, 1), global_batch=1, start=0, stop=steps)
    folder = Path(config.run.folder) / config.run.name
    beat = Heartbeat(folder, world.rank, "worker")
    connection = join(world, config.launch.collective_seconds)
    wire = Wire(batch_shape.tokens, len(shape.layer_ids), shape.hidden_size, dtype, options["form"])
    facts: dict[str, Any] = {}
    if world.rank == 0:
        bench = StepBench(shape, batch_shape, device, dtype, TrainingConfig(), 2)
        facts["drafter_alone_seconds"] = _alone(bench.step, device)
        connection.barrier("ready", 600)
        link = open_link(connection, open_groups(connection, schedule.topology), schedule, wire, beat, {})
        facts |= _train(SplitSource(link, stream), bench, options["warm"])
    else:
        target = random_target(shape, device, dtype)
        target.close_upper_layers()
        if device.type == "cuda":
            target.compile_layers()
        batch = stream.batch(0).to(device)
        facts["target_alone_seconds"] = _alone(lambda: target.features(batch), device)
        connection.barrier("ready", 600)
        link = open_link(connection, open_groups(connection, schedule.topology), schedule, wire, beat, {})
        _serve(link, stream, target)
    (folder / f"part-{world.rank}.json").write_text(json.dumps(facts))
    connection.barrier("end")
    connection.close()
    return 0


def _serve(link: Link, stream: Any, target: TransformersTarget) -> None:
    serve_features(link, stream, target)


def _alone(work: Any, device: torch.device, repeats: int = 5) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _train(source: SplitSource, bench: StepBench, warm: int) -> dict[str, Any]:
    """Steps without a host synchronisation inside; the first ones are not counted."""
    schedule = source.schedule
    begun = 0.0
    for step in range(schedule.stop):
        if step == warm:
            _finish(bench.device)
            source.waited()
            begun = time.perf_counter()
        for batch in source.global_batch(step):
            sums = bench.objective.sums(FeatureBatch(batch.tokens, batch.features_SF))
            sums.loss.backward()
            bench.optimizer.step(sums.weight)
    _finish(bench.device)
    seconds = time.perf_counter() - begun
    waited = source.waited()
    source.close()
    steps = schedule.stop - warm
    return {"step_seconds": seconds / steps, "waited_seconds": waited / steps, "waited_share": waited / seconds}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument("--geometry", default="qwen3-8b" if gpu else "tiny", choices=sorted(GEOMETRIES))
    parser.add_argument("--tokens", type=int, default=8192 if gpu else 128)
    parser.add_argument("--anchors", type=int, default=1024 if gpu else 16)
    parser.add_argument("--form", default="same", choices=["same", "float8"])
    parser.add_argument("--steps", type=int, default=40 if gpu else 4)
    parser.add_argument("--warm", type=int, default=5 if gpu else 2)
    parser.add_argument("--out", default="")
    options = vars(parser.parse_args())
    os.environ[OPTIONS] = json.dumps(options)
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            run=RunConfig(folder=folder), launch=LaunchConfig(workers=2, collective_seconds=600.0, stall_seconds=300.0)
        )
        code = launch.run(config, program="handoff:worker")
        if code:
            return code
        parts = [json.loads((Path(folder) / "run" / f"part-{rank}.json").read_text()) for rank in range(2)]
    tokens = options["tokens"]
    record = {
        "kind": "hand-off",
        "command": sys.argv,
        "options": options,
        "machine": machine(),
        **parts[0],
        **parts[1],
    }
    record["tokens_per_second"] = tokens / record["step_seconds"]
    print(json.dumps(record, indent=1))
    if options["out"]:
        Path(options["out"]).parent.mkdir(parents=True, exist_ok=True)
        Path(options["out"]).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
