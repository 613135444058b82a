"""Who sees whom: the visibility rule, its dense form, and the BlockMask written straight from the anchors.

Keys are laid out as [context 0..S-1 | block tokens 0..Q-1], Q = A·B. A slot of block n sees the context keys p with
start_n <= p < anchor_n (strictly: the target's state AT the anchor does not exist at inference; from start_n on, so
that packed documents stay apart) and the keys of its own block, both ways. Nothing else. A padding block has
anchor = start = 0: it sees itself, so that no row is fully masked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from paceline.drafter.model import Attend

TILE = 128
"""Rows and columns of a BlockMask tile, and what flex_attention's lengths must be multiples of."""

_RUN = 32
"""Blocks of one document that a CPU takes together."""

_compiled_flex: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)


def dense_mask(starts_A: Tensor, anchors_A: Tensor, tokens: int, block_size: int) -> Tensor:
    """The rule as bool [Q, S + Q]; True is visible."""
    starts_Q = starts_A.repeat_interleave(block_size)[:, None]
    anchors_Q = anchors_A.repeat_interleave(block_size)[:, None]
    places_S = torch.arange(tokens, device=starts_A.device)
    context = (places_S >= starts_Q) & (places_S < anchors_Q)
    blocks_Q = torch.arange(len(starts_A), device=starts_A.device).repeat_interleave(block_size)
    return torch.cat((context, blocks_Q[:, None] == blocks_Q), dim=1)


def dense_attend(mask: Tensor) -> Attend:
    """Attention under a dense mask, bool [Q, S+Q] or [R, 1, Q, S+Q]: the CPU's body and the oracle of the other."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return attend


class GroupedAttend:
    """The rule for packed rows on a CPU: each run of blocks of one document attends to that document's keys alone.

    The same as `dense_attend(dense_mask(…))`, without the scores between documents: with documents of a tenth of the
    row, a sixth of the work. It asks the host for the anchors, so it is not for CUDA.
    """

    def __init__(self, starts_A: Tensor, anchors_A: Tensor, tokens: int, block_size: int) -> None:
        self._groups = [
            _Group.of(starts_A[first:stop], anchors_A[first:stop], block_size) for first, stop in _runs(starts_A)
        ]
        self._queries = [group.queries for group in self._groups]
        self._tokens = tokens
        self._starts = sorted({0, *(group.start for group in self._groups)})
        self._lengths = [after - start for start, after in itertools.pairwise([*self._starts, tokens])]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(self._groups, q.split(self._queries, dim=2), self._keys(k), self._keys(v), strict=True)
        return torch.cat([_attend_alone(*part) for part in parts], dim=2)

    def _keys(self, x: Tensor) -> list[Tensor]:
        """Of each group: its document's context and its own blocks.

        Split, not sliced one by one: the gradient of a slice is a whole tensor of zeros around it.
        """
        context, blocks = x.split([self._tokens, x.shape[2] - self._tokens], dim=2)
        documents = dict(zip(self._starts, context.split(self._lengths, dim=2), strict=True))
        return [
            torch.cat((documents[group.start][:, :, : group.stop - group.start], own), dim=2)
            for group, own in zip(self._groups, blocks.split(self._queries, dim=2), strict=True)
        ]


def _attend_alone(group: _Group, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = group.bias.to(q.dtype)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@dataclass(frozen=True)
class _Group:
    """Blocks that follow each other and start at the same document."""

    start: int
    stop: int
    """Context places that some block of it sees."""
    queries: int
    bias: Tensor
    """[queries, stop - start + queries]: 0 where visible, else -inf."""

    @staticmethod
    def of(starts_A: Tensor, anchors_A: Tensor, block_size: int) -> _Group:
        start = int(starts_A[0])
        stop = max(start, int(anchors_A.max()))
        seen = dense_mask(starts_A - start, anchors_A - start, stop - start, block_size)
        bias = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        return _Group(start, stop, len(starts_A) * block_size, bias)


def _runs(starts_A: Tensor) -> list[tuple[int, int]]:
    """(first, stop) of each run of equal values; long runs are cut, since a run pays for its blocks' square."""
    runs: list[tuple[int, int]] = []
    for place, start in enumerate(starts_A.tolist()):
        if runs and start == starts_A[runs[-1][0]] and place - runs[-1][0] < _RUN:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


class FlexAttend:
    """flex_attention under a BlockMask; compiled, alone or inside a compiled layer."""

    def __init__(self, mask: BlockMask, options: dict[str, Any] | None = None) -> None:
        self.mask = mask
        self.options = options

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return _compiled_flex(q, k, v, block_mask=self.mask, enable_gqa=grouped, kernel_options=self.options)


def flex_attend(mask: BlockMask, options: dict[str, Any] | None = None) -> Attend:
    """`options` are flex_attention's kernel options (BLOCK_M, num_warps, …)."""
    return FlexAttend(mask, options)


def block_mask(starts_A: Tensor, anchors_A: Tensor, tokens: int, block_size: int) -> BlockMask:
    """One BlockMask; a training run keeps a `BlockMaskWriter` instead, whose mask function stays the same object."""
    return BlockMaskWriter(tokens, len(anchors_A), block_size, anchors_A.device).write(starts_A, anchors_A)


class BlockMaskWriter:
    """Writes the BlockMask of a batch from its anchors: on the device, without evaluating or compiling anything.

    The mask function reads `starts` and `anchors` of the latest batch from two tensors that keep their addresses, so
    compiled code and captured graphs stay valid from batch to batch. Hence one mask of a writer is alive at a time:
    run a batch's backward before writing the next.

    tokens: S, a multiple of 128. anchors: A, with A·B a multiple of 128. Anchors in any order; sorted ones (as the
    stream draws them) make fewer partial tiles.
    """

    def __init__(self, tokens: int, anchors: int, block_size: int, device: torch.device) -> None:
        queries = anchors * block_size
        if tokens % TILE or queries % TILE:
            raise ValueError(f"{tokens} context tokens and {queries} block tokens must be multiples of {TILE}")
        self.lengths = (queries, tokens + queries)
        self._starts = torch.zeros(anchors, dtype=torch.int32, device=device)
        self._anchors = torch.zeros(anchors, dtype=torch.int32, device=device)
        self._members_TW = _tile_members(queries, block_size, device)
        self._own_TT = _own_tiles(self._members_TW, queries, block_size)
        self._low_C = torch.arange(0, tokens, TILE, device=device, dtype=torch.int32)
        self._rule = _rule(self._starts, self._anchors, tokens, block_size)

    def write(self, starts_A: Tensor, anchors_A: Tensor) -> BlockMask:
        self._starts.copy_(starts_A)
        self._anchors.copy_(anchors_A)
        partial, full = self._tiles()
        rows = torch.stack((partial, full))
        counts, indices = _ordered(rows)
        counts_T, indices_T = _ordered(rows.transpose(1, 2).contiguous())
        return BlockMask(
            seq_lengths=self.lengths,
            kv_num_blocks=counts[0],
            kv_indices=indices[0],
            full_kv_num_blocks=counts[1],
            full_kv_indices=indices[1],
            q_num_blocks=counts_T[0],
            q_indices=indices_T[0],
            full_q_num_blocks=counts_T[1],
            full_q_indices=indices_T[1],
            BLOCK_SIZE=(TILE, TILE),
            mask_mod=self._rule,
        )

    def _tiles(self) -> tuple[Tensor, Tensor]:
        """Partly and fully visible tiles, bool [query tiles, key tiles]."""
        starts = self._starts[self._members_TW][:, :, None]
        anchors = self._anchors[self._members_TW][:, :, None]
        low, high = self._low_C, self._low_C + TILE
        touched_TC = ((starts < high) & (anchors > low) & (starts < anchors)).any(dim=1)
        full_TC = ((starts <= low) & (anchors >= high)).all(dim=1)
        partial = torch.cat((touched_TC & ~full_TC, self._own_TT), dim=1)
        return partial, functional.pad(full_TC, (0, self._own_TT.shape[1]))


def _rule(starts_A: Tensor, anchors_A: Tensor, tokens: int, block_size: int) -> Callable[..., Tensor]:
    def visible(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        own = tokens + block * block_size
        context = (key >= starts_A[block]) & (key < anchors_A[block])
        return context | ((key >= own) & (key < own + block_size))

    return visible


def _tile_members(queries: int, block_size: int, device: torch.device) -> Tensor:
    """Blocks that have slots in each query tile, [tiles, W]; a tile with fewer than W repeats its last."""
    edges = torch.arange(0, queries, TILE, device=device)
    first, last = edges // block_size, (edges + TILE - 1) // block_size
    width = int((last - first).max()) + 1
    return torch.minimum(first[:, None] + torch.arange(width, device=device), last[:, None])


def _own_tiles(members_TW: Tensor, queries: int, block_size: int) -> Tensor:
    """Block-key tiles that hold a key of one of the query tile's own blocks, bool [tiles, tiles]."""
    low = (members_TW[:, :1] * block_size) // TILE
    high = (members_TW[:, -1:] * block_size + block_size - 1) // TILE
    tiles = torch.arange(queries // TILE, device=members_TW.device)
    return (tiles >= low) & (tiles <= high)


def _ordered(dense_XRC: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [X, 1, 1, R] and column indices [X, 1, 1, R, C], the True ones first and ascending, as flex reads them."""
    counts = dense_XRC.sum(dim=2, dtype=torch.int32)
    indices = torch.argsort(dense_XRC.to(torch.int8), dim=2, descending=True, stable=True).to(torch.int32)
    return counts[:, None, None], indices[:, None, None]
