"""Operations and bytes of a run, counted from shapes alone: no weights, no GPU.

S context tokens of a batch, A anchors, B block size, Q = A·B, H hidden, I intermediate, W = heads·head_dim, V
vocabulary, L layers, K captured layers. A multiply and its add are two operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import Config
from paceline.pipeline.topology import RECEIVE_BUFFERS, Role, Topology
from paceline.shapes import DrafterShape, TargetShape

GIB = 2**30
RESERVE = 2 * GIB
"""Of a device's memory, for the CUDA context, kernels and NCCL."""


@dataclass(frozen=True)
class Sizes:
    """The two models and the batch of a run."""

    config: Config
    target: TargetShape
    drafter: DrafterShape
    gpu: bool = True

    @property
    def tokens(self) -> int:
        return self.config.training.tokens

    @property
    def blocks(self) -> int:
        """Q, block tokens of a batch."""
        return self.config.training.anchors * self.drafter.block_size

    @property
    def document(self) -> int:
        """Tokens of a document, as long as they come: the work of attention is counted for these."""
        return min(self.tokens, self.config.data.max_tokens)

    @property
    def width(self) -> int:
        """Bytes of one number in the compute dtype of the target."""
        return _bytes(self.config.target.dtype, self.gpu)

    @property
    def drafter_width(self) -> int:
        return _bytes(self.config.training.dtype, self.gpu)


def _bytes(dtype: str, gpu: bool) -> int:
    return {"float32": 4, "bfloat16": 2, "auto": 2 if gpu else 4}[dtype]


# --- operations ----------------------------------------------------------------------------------------------------


def target_operations(sizes: Sizes) -> float:
    """One forward of the target over S tokens, up to the last captured layer; without the head.

    Dense layers are assumed: a mixture of experts does less.
    """
    shape = sizes.target
    run = (sizes.drafter.layer_ids[-1] + 1) if sizes.drafter.layer_ids else shape.layers
    products = 2.0 * _layer_weights(shape) * sizes.tokens
    # Two products over the visible half of each document's square.
    attention = 2.0 * shape.heads * shape.head_dim * sizes.tokens * sizes.document
    return run * (products + attention)


def drafter_operations(sizes: Sizes) -> float:
    """Forward and backward of one batch: 6 a weight and token, 4 for the fusion and the frozen head (whose inputs or
    weights take no gradient), attention over visible keys with scores recomputed in the backward (7 products)."""
    shape = sizes.drafter
    kv = 2 * shape.hidden_size * shape.kv_heads * shape.head_dim
    visible = sizes.blocks * (sizes.document / 2 + shape.block_size)
    blocks = 6.0 * _layer_weights(shape) * shape.layers * sizes.blocks
    context = sizes.tokens * (6.0 * kv * shape.layers + 4.0 * shape.features * shape.hidden_size)
    attention = 14.0 * shape.heads * shape.head_dim * visible * shape.layers
    # Slot 0 is the anchor's own token: the head does nothing for it.
    head = 4.0 * (sizes.blocks - sizes.config.training.anchors) * shape.hidden_size * shape.vocabulary
    return blocks + context + attention + head


def _layer_weights(shape: TargetShape | DrafterShape) -> int:
    """Weights of the matrices of one decoder layer."""
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.heads + shape.kv_heads)
    return attention + 3 * shape.hidden_size * shape.intermediate_size


# --- bytes ---------------------------------------------------------------------------------------------------------


def target_parameters(sizes: Sizes) -> int:
    shape = sizes.target
    counted = shape.layers * _layer_weights(shape) + (1 if shape.tied else 2) * shape.vocabulary * shape.hidden_size
    return shape.parameters or counted


def drafter_parameters(sizes: Sizes) -> int:
    shape = sizes.drafter
    norms = 2 * shape.hidden_size + shape.layers * 2 * (shape.hidden_size + shape.head_dim)
    return shape.layers * _layer_weights(shape) + shape.features * shape.hidden_size + norms


def wire_bytes(sizes: Sizes) -> int:
    """Features of one batch as they travel."""
    form, values = sizes.config.topology.features, sizes.tokens * sizes.drafter.features
    if form == "float8":
        return values + 4 * sizes.tokens * len(sizes.drafter.layer_ids)
    return values * (2 if form == "bfloat16" else sizes.width)


def target_bytes(sizes: Sizes, buffers: int) -> dict[str, int]:
    """Memory of one target rank by what holds it, with `buffers` batches of features. An estimate."""
    shape, shards = sizes.target, sizes.config.target.tensor_parallel
    each = 1 if sizes.config.target.weights == "float8" else sizes.width
    # Residual, its norm, queries, keys, values, attention's result, and the MLP's three.
    working = sizes.tokens * (4 * shape.hidden_size + 3 * shape.heads * shape.head_dim + 3 * shape.intermediate_size)
    return {
        "weights": target_parameters(sizes) * each // shards,
        "working memory": working * sizes.width,
        "features": buffers * wire_bytes(sizes),
    }


def drafter_bytes(sizes: Sizes, buffers: int, drafters: int, sharded: bool = False) -> dict[str, int]:
    """Memory of one drafter rank by what holds it, with `buffers` batches of features. An estimate.

    `sharded`: it keeps its share of the optimiser state.
    """
    shape, parameters, each = sizes.drafter, drafter_parameters(sizes), sizes.drafter_width
    sums = 4 if sizes.config.training.global_batch > 1 else 0
    flat = each if drafters > 1 and not sums else 0
    state = f"optimiser, 1/{drafters} of it" if sharded else "optimiser"
    head = sizes.target.vocabulary * shape.hidden_size * sizes.width * (1 if sizes.target.tied else 2)
    return {
        "weights and gradients": parameters * (2 * each + sums + flat),
        state: optimizer_bytes(sizes) // (drafters if sharded else 1),
        "embedding and head": head,
        "activations": _activations(sizes) * each,
        "features": buffers * wire_bytes(sizes),
    }


def optimizer_bytes(sizes: Sizes) -> int:
    """What drafters can share: masters (unless the weights themselves are float32) and both moments."""
    return drafter_parameters(sizes) * (8 if sizes.drafter_width == 4 else 12)


def memory_of(sizes: Sizes, topology: Topology, role: Role, sharded: bool = False) -> dict[str, int]:
    """Memory of one rank by what holds it; `sharded` as in `drafter_bytes`. An estimate."""
    colocated = topology.kind == "colocated"
    memory: dict[str, int] = {}
    if role.target is not None:
        buffers = 1 if colocated or role.shard else topology.send_buffers
        memory |= _prefixed("target", target_bytes(sizes, buffers))
    if role.drafter is not None:
        parts = drafter_bytes(sizes, 0 if colocated else RECEIVE_BUFFERS, topology.drafters, sharded)
        if colocated:
            # The target holds the embedding and the head already.
            del parts["embedding and head"]
        memory |= _prefixed("drafter", parts)
    return memory


def _prefixed(part: str, memory: dict[str, int]) -> dict[str, int]:
    return {f"{part}: {name}": size for name, size in memory.items() if size}


def wants_shards(sizes: Sizes, topology: Topology, room: int) -> bool:
    """Whether training.shard_optimizer has the drafters of a topology share their optimiser state.

    `room`: bytes that a device offers; `auto` shards where the whole state does not fit in there with the rest.
    """
    mode = sizes.config.training.shard_optimizer
    if mode == "off" or topology.drafters == 1:
        return False
    drafter = topology.role(topology.drafter_rank(0))
    return mode == "on" or sum(memory_of(sizes, topology, drafter).values()) > room


def _activations(sizes: Sizes) -> int:
    """Numbers kept from forward to backward, and the loss's chunk of logits."""
    shape = sizes.drafter
    attention, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    of_token = 5 * shape.hidden_size + 2 * attention + 4 * kv + 3 * shape.intermediate_size
    kept = of_token if not sizes.config.training.recompute else shape.hidden_size
    layers = shape.layers * (sizes.blocks * kept + sizes.tokens * 4 * kv)
    once = sizes.blocks * of_token if sizes.config.training.recompute else 0
    chunk = (sizes.config.training.head_chunk or 2048) * shape.vocabulary * 2
    return layers + once + 2 * sizes.tokens * shape.hidden_size + 2 * sizes.blocks * shape.hidden_size + chunk


def checkpoint_bytes(sizes: Sizes) -> int:
    """One training-state checkpoint: float32 weights and two moments."""
    return 12 * drafter_parameters(sizes)
