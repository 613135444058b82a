"""The visibility rule and the BlockMask against loops over every query and key."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.drafter.blocks import (
    TILE,
    BlockMaskWriter,
    GroupedAttend,
    block_mask,
    dense_attend,
    dense_mask,
    flex_attend,
)


def looped_mask(starts: list[int], anchors: list[int], tokens: int, block_size: int) -> Tensor:
    queries = len(anchors) * block_size
    mask = torch.zeros(queries, tokens + queries, dtype=torch.bool)
    for query in range(queries):
        block = query // block_size
        for key in range(tokens + queries):
            if key < tokens:
                mask[query, key] = starts[block] <= key < anchors[block]
            else:
                mask[query, key] = (key - tokens) // block_size == block
    return mask


@st.composite
def layouts(draw: st.DrawFn, multiple: bool) -> tuple[list[int], list[int], int, int]:
    """Documents laid end to end, anchors in any order and as close as can be, padding blocks last."""
    block_size = draw(st.sampled_from([2, 3, 4, 8, 10, 16, 64, 128] if multiple else [2, 3, 5, 8]))
    unit = TILE if multiple else 1
    tokens = unit * draw(st.integers(1, 4 if multiple else 40))
    cuts = sorted(draw(st.sets(st.integers(1, tokens - 1), max_size=4))) if tokens > 1 else []
    bounds = [0, *cuts, tokens]
    count = draw(st.integers(1, 6))
    if multiple:
        while count * block_size % TILE:
            count += 1
    places = [draw(st.integers(0, tokens - 1)) for _ in range(min(count, 12))]
    if draw(st.booleans()):
        places.sort()
    places += [draw(st.integers(0, tokens - 1))] * (count - len(places) - 1)
    starts = [max(bound for bound in bounds if bound <= place) for place in places]
    padding = count - len(places)
    return starts + [0] * padding, places + [0] * padding, tokens, block_size


@settings(max_examples=40, deadline=None)
@given(layouts(multiple=False))
def test_dense_mask_is_the_rule(layout: tuple[list[int], list[int], int, int]) -> None:
    starts, anchors, tokens, block_size = layout
    assert torch.equal(
        dense_mask(torch.tensor(starts), torch.tensor(anchors), tokens, block_size),
        looped_mask(starts, anchors, tokens, block_size),
    )


def unfold(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    dense = torch.zeros(len(counts), columns, dtype=torch.bool)
    for row, count in enumerate(counts.tolist()):
        listed = indices[row, :count].tolist()
        assert len(set(listed)) == count
        dense[row, listed] = True
    return dense


@settings(max_examples=40, deadline=None)
@given(layouts(multiple=True))
def test_block_mask_is_the_evaluated_mask(layout: tuple[list[int], list[int], int, int]) -> None:
    starts, anchors, tokens, block_size = layout
    mask = block_mask(torch.tensor(starts), torch.tensor(anchors), tokens, block_size)
    expected = dense_mask(torch.tensor(starts), torch.tensor(anchors), tokens, block_size)
    queries, keys = expected.shape
    assert mask.shape == (1, 1, queries, keys)
    tiles = expected.view(queries // TILE, TILE, keys // TILE, TILE).transpose(1, 2).flatten(2)
    some, every = tiles.any(dim=2), tiles.all(dim=2)
    full = unfold(mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0], keys // TILE)
    partial = unfold(mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0], keys // TILE)
    assert not (full & ~every).any(), "a tile that is not wholly visible skips the rule"
    assert not (full & partial).any()
    assert torch.equal(full | partial, some)
    context = tokens // TILE
    assert torch.equal(full[:, :context], every[:, :context]), "a wholly visible context tile is masked for nothing"
    q_full = unfold(mask.full_q_num_blocks[0, 0], mask.full_q_indices[0, 0], queries // TILE)
    q_partial = unfold(mask.q_num_blocks[0, 0], mask.q_indices[0, 0], queries // TILE)
    assert torch.equal(q_full, full.T)
    assert torch.equal(q_partial, partial.T)
    rule = mask.mask_mod(
        torch.tensor(0), torch.tensor(0), torch.arange(queries)[:, None], torch.arange(keys)[None].expand(queries, -1)
    )
    assert torch.equal(rule, expected)


def test_tile_lists_have_room_for_every_tile() -> None:
    mask = block_mask(torch.zeros(16, dtype=torch.int64), torch.full((16,), 200), 256, 16)
    assert mask.kv_indices.shape[-1] == (256 + 256) // TILE
    assert mask.kv_indices.dtype == torch.int32


@pytest.mark.parametrize(("tokens", "anchors"), [(127, 8), (128, 9)])
def test_lengths_off_the_tile_are_refused(tokens: int, anchors: int) -> None:
    with pytest.raises(ValueError, match="multiples of 128"):
        BlockMaskWriter(tokens, anchors, 16, torch.device("cpu"))


def random_blocks(generator: torch.Generator, tokens: int, count: int) -> tuple[Tensor, Tensor]:
    bounds = torch.tensor([0, tokens // 3, tokens - 17])
    anchors = torch.randint(0, tokens, (count,), generator=generator).sort().values
    return bounds[torch.searchsorted(bounds, anchors, right=True) - 1], anchors


def test_flex_forward_equals_dense_and_never_compiles_again() -> None:
    """One writer, twenty batches: the same graph serves all. CPU has flex's forward only."""
    generator = torch.Generator().manual_seed(0)
    tokens, count, block_size = 256, 16, 8
    writer = BlockMaskWriter(tokens, count, block_size, torch.device("cpu"))
    q = torch.randn(1, 4, count * block_size, 16, generator=generator)
    k, v = torch.randn(2, 1, 2, tokens + count * block_size, 16, generator=generator)
    compiled = None
    for number in range(20):
        starts, anchors = random_blocks(generator, tokens, count)
        with torch.no_grad():
            found = flex_attend(writer.write(starts, anchors))(q, k, v)
        expected = dense_attend(dense_mask(starts, anchors, tokens, block_size))(q, k, v)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
        frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        compiled = frames if number == 0 else compiled
        assert frames == compiled


@settings(max_examples=30, deadline=None)
@given(layouts(multiple=False))
def test_documents_taken_apart_equal_the_dense_mask(layout: tuple[list[int], list[int], int, int]) -> None:
    starts, anchors, tokens, block_size = layout
    generator = torch.Generator().manual_seed(len(anchors))
    queries = len(anchors) * block_size
    q = torch.randn(1, 4, queries, 8, generator=generator).requires_grad_()
    k, v = (torch.randn(1, 2, tokens + queries, 8, generator=generator).requires_grad_() for _ in range(2))
    weights = torch.randn(1, 4, queries, 8, generator=generator)
    found = []
    for attend in (
        GroupedAttend(torch.tensor(starts), torch.tensor(anchors), tokens, block_size),
        dense_attend(dense_mask(torch.tensor(starts), torch.tensor(anchors), tokens, block_size)),
    ):
        out = attend(q, k, v)
        found.append((out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
