"""Attention over a packed row in which documents do not see each other, plugged into transformers' models.

transformers decides by itself whether a row is packed, from arguments and defaults that changed between versions, and
a default cache argument silently makes it one long document. So the row's bounds are not left to it: while a row is
active, attention is one of the functions below, and no mask is made at all.

S tokens of the row, D head dimension.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from paceline.batches import TokenBatch
from paceline.errors import UserError

IMPLEMENTATION = "paceline_packed_row"

_HALF = (torch.bfloat16, torch.float16)
# torch 2.11 takes fewer key heads than query heads as they are; later versions ask for the flag.
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}


@dataclass(frozen=True)
class PackedRow:
    """Where the documents of a row begin and end."""

    bounds: tuple[int, ...]
    """Ascending, from 0; the last entry is the end of the last document."""
    tokens: int
    bounds_device: Tensor | None = None
    """The same with the padding tail as one more document, int32 on the device: only for the varlen kernel."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document (host arithmetic, no synchronisation)."""
        return max((end - start for start, end in itertools.pairwise(self.bounds)), default=self.tokens)


_active: PackedRow | None = None


def row_of(batch: TokenBatch, device: torch.device) -> PackedRow:
    """The packed row of a batch. A batch without bounds is asked for its documents, which waits for the device."""
    tokens = len(batch.ids_S)
    bounds = batch.bounds or _bounds_of(batch.documents_S)
    if device.type != "cuda":
        return PackedRow(bounds, tokens)
    row = PackedRow(bounds, tokens)
    # The padding tail becomes documents too, none longer than the longest: its rows must be finite, and cheap.
    ends = (*bounds, *range(bounds[-1] + row.longest, tokens, row.longest), tokens)
    on_host = torch.tensor(ends, dtype=torch.int32).pin_memory()
    return dataclasses.replace(row, bounds_device=on_host.to(device, non_blocking=True))


def _bounds_of(documents_S: Tensor) -> tuple[int, ...]:
    documents = documents_S.cpu()
    real = documents[documents >= 0]
    starts = torch.nonzero(torch.diff(real, prepend=torch.tensor([-1], dtype=real.dtype))).flatten()
    return (*starts.tolist(), len(real))


@contextlib.contextmanager
def packed(config: Any, row: PackedRow) -> Generator[None]:
    """Run the model of this transformers configuration on one packed row; its own attention returns afterwards."""
    global _active  # noqa: PLW0603  (one thread of a process drives a model; keyword arguments do not reach every layer)
    own = config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    _active = row
    try:
        yield
    finally:
        _active = None
        config._attn_implementation = own


@torch.compiler.disable
def attend(  # noqa: PLR0913  (the signature is transformers')
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_other: Any,
) -> tuple[Tensor, None]:
    """Causal attention of [1, heads, S, D] within each document; the result is [1, S, heads, D_v].

    `_other` is what transformers hands to every attention function and what changes nothing here (dropout, positions).
    """
    row = _active
    if row is None or query.shape[0] != 1 or query.shape[2] != row.tokens:
        raise AssertionError("packed attention was called outside a packed row")
    plain = softcap is None and s_aux is None
    square = query.shape[-1] == value.shape[-1] and query.shape[-1] <= 256
    if plain and square and row.bounds_device is not None and query.dtype in _HALF:
        return _varlen(query, key, value, row, scaling, sliding_window), None
    return _by_document(query, key, value, row, _Rule(scaling, sliding_window, softcap, s_aux)), None


AttentionInterface.register(IMPLEMENTATION, attend)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, row: PackedRow, scaling: float | None, window: int | None
) -> Tensor:
    bounds = row.bounds_device
    assert bounds is not None
    left = -1 if window is None or window >= row.longest else window - 1
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    longest = row.longest
    out = varlen.varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(left, 0), **_GQA)
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)


@dataclass(frozen=True)
class _Rule:
    """What a layer asks of its attention beside causality."""

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    """[heads], logits of a slot that takes attention and gives nothing (gpt-oss)."""


def _by_document(query: Tensor, key: Tensor, value: Tensor, row: PackedRow, rule: _Rule) -> Tensor:
    """One attention call a document: any device and dtype, and the sum of squares instead of the square of the sum."""
    out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
    for start, end in itertools.pairwise(row.bounds):
        q, k, v = (part[:, :, start:end] for part in (query, key, value))
        attended = _plain(q, k, v, rule) if rule.softcap is None and rule.sinks is None else _odd(q, k, v, rule)
        out[:, start:end] = attended.transpose(1, 2)
    return out


def _plain(q: Tensor, k: Tensor, v: Tensor, rule: _Rule) -> Tensor:
    length = q.shape[2]
    if rule.window is None or rule.window >= length:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.scaling, enable_gqa=True)
    mask = _window_mask(length, rule.window, q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scaling, enable_gqa=True)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """bool [length, length]: a query sees itself and the `window - 1` tokens before it."""
    back = torch.arange(length, device=device).unsqueeze(1) - torch.arange(length, device=device)
    return (back >= 0) & (back < (window or length))


def _odd(q: Tensor, k: Tensor, v: Tensor, rule: _Rule) -> Tensor:
    """Attention with soft-capped scores or sinks, written out: scores of one document are held whole."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scale = rule.scaling if rule.scaling is not None else q.shape[-1] ** -0.5
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    mask = _window_mask(q.shape[2], rule.window, q.device)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).float()
    if rule.sinks is not None:
        sink = rule.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.matmul(weights.to(v.dtype), v)


def check_positions(name: str, rope: dict[str, Any], max_positions: int, longest: int) -> None:
    """Refuse rotations whose frequencies would follow the longest document of a row. Raises UserError."""
    parts = rope.values() if all(isinstance(part, dict) for part in rope.values()) else [rope]
    for part in parts:
        limit = int(part.get("original_max_position_embeddings") or max_positions)
        kind = str(part.get("rope_type", "default"))
        if ("dynamic" in kind or kind == "longrope") and limit and longest > limit:
            raise UserError(
                f"target {name} rotates with {kind!r}, whose frequencies change beyond {limit} tokens for the whole "
                f"row; this row holds a document of {longest}",
                f"set data.max_tokens to at most {limit}",
            )
