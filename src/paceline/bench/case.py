"""Options with every name checked, every number chosen and every shape known: what a part is given to measure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.batches import BatchShape
from paceline.bench.geometry import GEOMETRIES, target_of
from paceline.bench.options import PARTS, BenchOptions, check, check_geometry
from paceline.config import DrafterConfig, TargetConfig, TrainingConfig, default_gamma
from paceline.drafter.sizes import shape_for
from paceline.errors import UserError
from paceline.shapes import DrafterShape, TargetShape
from paceline.target.describe import choose_layers, read_shape


@dataclass(frozen=True)
class Case:
    """Nothing is loaded yet."""

    options: BenchOptions
    """Every number chosen."""
    drafter: DrafterShape
    target: TargetShape
    batch: BatchShape
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.options.dtype)

    @property
    def training(self) -> TrainingConfig:
        return TrainingConfig(matmul=self.options.matmul)  # type: ignore[arg-type]

    @property
    def target_config(self) -> TargetConfig:
        """Of the real target, where there is one; its weights as they are (float8 is made from them later)."""
        return TargetConfig(model=self.options.model, dtype=self.options.dtype)  # type: ignore[arg-type]

    @property
    def compiles(self) -> bool:
        return self.options.compile and self.device.type == "cuda"


def make_case(options: BenchOptions, device: torch.device | None = None) -> Case:
    """Raises UserError for what cannot be timed."""
    check(options)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = _chosen(options, device)
    drafter, target = _shapes(options)
    options = dataclasses.replace(options, geometry=options.geometry or _name_of(options, target))
    batch = BatchShape(options.tokens, max(1, options.anchors), options.block_size, default_gamma(options.block_size))
    return Case(options, drafter, target, batch, device)


def _chosen(options: BenchOptions, device: torch.device) -> BenchOptions:
    on_gpu = device.type == "cuda"
    geometry = options.geometry or ("" if options.model else "qwen3-8b" if on_gpu else "tiny")
    if geometry:
        check_geometry(geometry, tuple(GEOMETRIES))
    large = on_gpu and geometry != "tiny"
    part = PARTS[options.part]
    defaults = {
        "tokens": 8192 if large else 256,
        "anchors": 1024 if large else 32,
        "steps": part.steps[0 if large else 1],
        "warm": 5 if large else 2,
        "context": 512 if large else 16,
        "answer": 256 if large else 24,
    }
    given = dataclasses.asdict(options)
    numbers: dict[str, Any] = {name: given[name] or value for name, value in defaults.items() if name in part.options}
    dtype = options.dtype if options.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
    chosen = dataclasses.replace(options, geometry=geometry, dtype=dtype, **numbers)
    if "tokens" in numbers and chosen.tokens < 2 * chosen.documents:
        raise UserError(
            f"--tokens = {chosen.tokens} are too few for {chosen.documents} documents", "give at least two a document"
        )
    if chosen.graphs == "on" and not on_gpu:
        raise UserError("--graphs = 'on', but torch sees no GPU", "leave it out, or install torch for CUDA")
    return chosen


def _shapes(options: BenchOptions) -> tuple[DrafterShape, TargetShape]:
    if not options.model:
        shape = GEOMETRIES[options.geometry]
        return dataclasses.replace(shape, block_size=options.block_size), target_of(options.geometry)
    target = read_shape(TargetConfig(model=options.model))
    if options.geometry and _sizes(target) != _sizes(target_of(options.geometry)):
        raise UserError(
            f"--model {options.model} has {_words(target)}, and --geometry {options.geometry} "
            f"{_words(target_of(options.geometry))}",
            "leave --geometry out: the model's own sizes are taken",
        )
    config = DrafterConfig(block_size=options.block_size)
    return shape_for(target, choose_layers(target.layers, 5), config, target.vocabulary - 1), target


def _sizes(shape: TargetShape) -> tuple[int, ...]:
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    return (shape.hidden_size, shape.intermediate_size, *heads, shape.layers, shape.vocabulary)


def _words(shape: TargetShape) -> str:
    return f"{shape.layers} layers of {shape.hidden_size} and a vocabulary of {shape.vocabulary}"


def _name_of(options: BenchOptions, target: TargetShape) -> str:
    known = (name for name in GEOMETRIES if _sizes(target_of(name)) == _sizes(target))
    return next(known, Path(options.model).name)
