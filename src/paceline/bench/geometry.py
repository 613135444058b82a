"""Sizes of known models, and batches of synthetic tokens.

S context tokens, A anchors, B block size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.batches import BatchShape, EvaluationBatch, TokenBatch
from paceline.shapes import DrafterShape, TargetShape


def _geometry(
    hidden: int, intermediate: int, heads: tuple[int, int, int], target_layers: int, vocabulary: int
) -> DrafterShape:
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

_TIED = ("qwen3-4b", "smollm2")


def target_of(name: str) -> TargetShape:
    """The target that a geometry's drafter belongs to, as a Qwen3."""
    shape = GEOMETRIES[name]
    return TargetShape(
        name=name,
        model_type="qwen3",
        hidden_size=shape.hidden_size,
        layers=shape.target_layers,
        vocabulary=shape.vocabulary,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        rms_eps=shape.rms_eps,
        rope=shape.rope,
        max_positions=shape.max_positions,
        tied=name in _TIED,
        bos_ids=(),
        eos_ids=(),
    )


def layer_weights(shape: DrafterShape | TargetShape) -> int:
    """Numbers in the matrices of one decoder layer."""
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.heads + shape.kv_heads)
    return attention + 3 * shape.hidden_size * shape.intermediate_size


def synthetic_batch(shape: BatchShape, documents: int, vocabulary: int, seed: int) -> TokenBatch:
    """Equal documents, wholly supervised, with anchors drawn without repetition, in place order."""
    length = shape.tokens // documents
    return batch_of([length] * documents, shape, vocabulary, seed)


def mixed_batch(shape: BatchShape, vocabulary: int, seed: int) -> TokenBatch:
    """Documents of very different lengths (a half, a quarter, and three short ones), and some padding."""
    parts = (shape.tokens // 4, shape.tokens // 2, *(shape.tokens * part // 8192 for part in (700, 500, 300)))
    return batch_of([length for length in parts if length], shape, vocabulary, seed)


def batch_of(lengths: list[int], shape: BatchShape, vocabulary: int, seed: int) -> TokenBatch:
    """Documents of these lengths one after the other, then padding; all else as in `synthetic_batch`."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor(lengths).cumsum(0)
    used = int(ends[-1])
    owners_S = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ends_S = ends[owners_S]
    starts_S = ends_S - torch.tensor(lengths)[owners_S]
    places = torch.arange(used)
    eligible = places[places < ends_S - 1]
    chosen = eligible[torch.randperm(len(eligible), generator=generator)[: shape.anchors]].sort().values
    slots = torch.arange(shape.block_size)
    target = chosen[:, None] + slots
    counts = (target < ends_S[chosen][:, None]) & (slots > 0)
    ids = torch.randint(0, vocabulary - 1, (shape.tokens,), generator=generator)
    weights = torch.exp(-(slots - 1) / shape.gamma) * counts
    labels = ids[target.clamp(max=shape.tokens - 1)] * (counts | (slots == 0))
    return TokenBatch(
        index=seed,
        ids_S=ids,
        positions_S=_padded(places - starts_S, shape.tokens),
        documents_S=_padded(owners_S, shape.tokens, -1).int(),
        supervised_S=torch.arange(shape.tokens) < used,
        anchors_A=_padded(chosen, shape.anchors),
        starts_A=_padded(starts_S[chosen], shape.anchors),
        labels_AB=_padded(labels, shape.anchors),
        weights_AB=_padded(weights, shape.anchors),
        documents=tuple(range(len(lengths))),
        bounds=(0, *ends.tolist()),
    )


def _padded(values: Tensor, rows: int, filling: int = 0) -> Tensor:
    return torch.cat((values, values.new_full((rows - len(values), *values.shape[1:]), filling)))


class SyntheticStream:
    """A few batches over and over, so that making them is not what is measured."""

    def __init__(self, shape: BatchShape, documents: int, vocabulary: int) -> None:
        self._batches = [synthetic_batch(shape, documents, vocabulary, seed) for seed in range(3)]

    def batch(self, index: int) -> TokenBatch:
        return self._batches[index % len(self._batches)]

    def empty(self, index: int) -> TokenBatch:
        return self._batches[0]

    def evaluation_batches(self) -> list[EvaluationBatch]:
        return []
