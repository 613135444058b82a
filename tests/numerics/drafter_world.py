"""A tiny drafter, packed documents and anchors made by hand, written with loops: what the oracles are run on."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.batches import BatchShape, FeatureBatch, FrozenEnds, TokenBatch
from paceline.drafter.init import build
from paceline.drafter.model import Drafter
from paceline.shapes import DrafterShape

SHAPE = DrafterShape(
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    layer_ids=(0, 1, 2),
    block_size=4,
    mask_token_id=96,
    vocabulary=97,
    target_layers=4,
    rope={"rope_type": "default", "rope_theta": 10_000.0},
)


@dataclass(frozen=True)
class World:
    drafter: Drafter
    ends: FrozenEnds
    batch: FeatureBatch
    shape: BatchShape


def world(  # noqa: PLR0917
    lengths: tuple[int, ...] = (13, 7, 20),
    tokens: int = 48,
    anchors: tuple[int, ...] = (0, 1, 5, 6, 11, 12, 14, 18, 25, 37, 38),
    padding_blocks: int = 2,
    block_size: int = 4,
    seed: int = 0,
    shape: DrafterShape = SHAPE,
    supervised: Tensor | None = None,
) -> World:
    """Documents of `lengths` packed into `tokens` places, with the given anchors (places in the row)."""
    generator = torch.Generator().manual_seed(seed)
    shape = dataclasses.replace(shape, block_size=block_size)
    drafter = build(shape, "random", seed)
    for name, parameter in drafter.named_parameters():
        # Weights large enough that every path matters, norms away from 1.
        spread = 0.3 if parameter.ndim > 1 else 0.2
        noise = torch.randn(parameter.shape, generator=generator) * spread
        parameter.data = parameter.data + noise if "norm" in name else noise
    table = torch.randn(shape.vocabulary, shape.hidden_size, generator=generator)
    gamma = 2.5
    tokens_batch = token_batch(lengths, tokens, anchors, padding_blocks, block_size, gamma, generator, supervised)
    features = torch.randn(tokens, shape.features, generator=generator)
    return World(
        drafter,
        FrozenEnds(table, table),
        FeatureBatch(tokens_batch, features),
        BatchShape(tokens, len(anchors) + padding_blocks, block_size, gamma),
    )


def token_batch(  # noqa: PLR0917
    lengths: tuple[int, ...],
    tokens: int,
    anchors: tuple[int, ...],
    padding_blocks: int,
    block_size: int,
    gamma: float,
    generator: torch.Generator,
    supervised: Tensor | None = None,
) -> TokenBatch:
    ids = torch.randint(0, 90, (tokens,), generator=generator)
    documents = torch.full((tokens,), -1, dtype=torch.int32)
    positions = torch.zeros(tokens, dtype=torch.int64)
    bounds = [0]
    for number, length in enumerate(lengths):
        for position in range(length):
            documents[bounds[-1] + position] = number
            positions[bounds[-1] + position] = position
        bounds.append(bounds[-1] + length)
    ids[bounds[-1] :] = 0
    if supervised is None:
        supervised = documents >= 0
    starts, labels, weights = [], [], []
    for anchor in anchors:
        document = int(documents[anchor])
        starts.append(bounds[document])
        labels.append([int(ids[anchor])] + [0] * (block_size - 1))
        weights.append([0.0] * block_size)
        for slot in range(1, block_size):
            place = anchor + slot
            if place >= tokens or int(documents[place]) != document or not supervised[place]:
                break
            labels[-1][slot] = int(ids[place])
            weights[-1][slot] = math.exp(-(slot - 1) / gamma)
    for _ in range(padding_blocks):
        starts.append(0)
        labels.append([0] * block_size)
        weights.append([0.0] * block_size)
    return TokenBatch(
        index=0,
        ids_S=ids,
        positions_S=positions,
        documents_S=documents,
        supervised_S=supervised,
        anchors_A=torch.tensor(list(anchors) + [0] * padding_blocks),
        starts_A=torch.tensor(starts),
        labels_AB=torch.tensor(labels),
        weights_AB=torch.tensor(weights),
        documents=tuple(range(len(lengths))),
        bounds=tuple(bounds),
    )


def gradients(drafter: Drafter) -> dict[str, Tensor]:
    """Each parameter's gradient, cloned and cleared."""
    found = {}
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.clone()
        parameter.grad = None
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))
