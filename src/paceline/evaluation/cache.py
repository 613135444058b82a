"""Key-value caches whose rows have lengths of their own, and in which going back is free.

Every token is written at its position: row r keeps position p in slot p. What a step rejected stays behind in slots
that no query may see (a query at p sees slots ≤ p), until the next tokens overwrite them. So there is nothing to crop,
which for sliding windows cannot be done once a window has moved on; shapes can stay fixed; and requests of different
lengths share a batch. Windows are kept by the mask, over slots that are all still there.

Letters: R requests, T tokens of this forward, C capacity in slots.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from paceline.errors import UserError


class Cursor:
    """Where the current forward writes (`slots_RT`) and how many slots it reads; shared by all layers."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots_RT: Tensor | None = None
        self.visible = capacity


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [R, kv, C, D]."""

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()
        self.cursor = cursor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, _ = key_states.shape
        place = (rows, heads, self.cursor.capacity)
        self.keys = key_states.new_zeros(*place, key_states.shape[-1])
        self.values = value_states.new_zeros(*place, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        assert self.cursor.slots_RT is not None
        put(self.keys, key_states, self.cursor.slots_RT)
        put(self.values, value_states, self.cursor.slots_RT)
        return self.keys[:, :, : self.cursor.visible], self.values[:, :, : self.cursor.visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cursor.visible, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.cursor.capacity

    def get_max_cache_shape(self) -> int:
        return self.cursor.capacity


def put(buffer: Tensor, values: Tensor, slots_RT: Tensor) -> None:
    """buffer[r, :, slots[r, t]] = values[r, :, t], in place. buffer [R, kv, C, D], values [R, kv, T, D]."""
    index = slots_RT[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3])
    buffer.scatter_(2, index, values)


class TargetCache:
    """The target's cache and the masks that go with it."""

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        config = model.config.get_text_config().to_dict()
        self.cursor = Cursor(capacity)
        self.cache = Cache(layers=[SlotLayer(self.cursor) for _ in range(config["num_hidden_layers"])])
        self._windows = attention_windows(config)
        self._boolean = model.config.get_text_config()._attn_implementation == "sdpa"
        self._dtype = model.dtype
        self._argument = cache_argument(model)

    def arguments(self, positions_RT: Tensor, visible: int) -> dict[str, Any]:
        """Keyword arguments of a forward of tokens at `positions_RT` that reads the first `visible` slots."""
        self.cursor.slots_RT, self.cursor.visible = positions_RT, visible
        masks = {kind: self._mask(positions_RT, visible, window) for kind, window in self._windows.items()}
        mask = next(iter(masks.values())) if len(masks) == 1 else masks
        return {
            "position_ids": positions_RT,
            "attention_mask": mask,
            "use_cache": True,
            self._argument: self.cache,
        }

    def _mask(self, positions_RT: Tensor, visible: int, window: int) -> Tensor:
        slots = torch.arange(visible, device=positions_RT.device)
        back = positions_RT[:, None, :, None] - slots
        seen = (back >= 0) & (back < window) if window else back >= 0
        if self._boolean:
            return seen
        lowest = torch.finfo(self._dtype).min
        return torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill(~seen, lowest)


def attention_windows(config: dict[str, Any]) -> dict[str, int]:
    """Kind of layer -> its window in tokens, 0 for none, for the kinds that a target has.

    Raises UserError for layers whose state cannot go back a few tokens: recurrent ones (linear attention, Mamba) and
    chunked attention.
    """
    kinds = set(config.get("layer_types") or ())
    window = config.get("sliding_window") or 0
    if foreign := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise UserError(
            f"the target has {', '.join(foreign)} layers, whose state cannot go back to before a rejected token",
            "decode it with an engine that keeps such states by position (SGLang, vLLM)",
        )
    if not kinds:
        # Mistral's kind: one window for all layers, without a list of kinds.
        in_use = window if config.get("use_sliding_window", True) else 0
        return {"sliding_attention" if in_use else "full_attention": in_use}
    return {kind: window if kind == "sliding_attention" else 0 for kind in sorted(kinds)}


def cache_argument(model: PreTrainedModel) -> str:
    """The forward's name for the cache, which transformers renamed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
