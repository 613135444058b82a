"""The form in which features travel: one flat buffer of bytes for each batch, of a size that is fixed for the run.

S context tokens of a batch, K captured layers, H hidden size, F = K·H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.config import TopologyConfig
from paceline.shapes import DrafterShape

_FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MAX = torch.finfo(_FLOAT8).max


@dataclass(frozen=True)
class Wire:
    """Shapes and form of the features of one batch.

    `same` sends the compute dtype as it is, `bfloat16` rounds to it, `float8` sends e4m3 with one float32 scale for
    each token and captured layer (states of different layers differ in size by orders of magnitude).
    """

    tokens: int
    layers: int
    hidden: int
    dtype: torch.dtype
    """The compute dtype, that the drafter receives."""
    form: Literal["same", "bfloat16", "float8"] = "same"

    @staticmethod
    def for_run(config: TopologyConfig, tokens: int, shape: DrafterShape, dtype: torch.dtype) -> Wire:
        """The wire of a run whose target computes in `dtype`."""
        return Wire(tokens, len(shape.layer_ids), shape.hidden_size, dtype, config.features)

    @property
    def width(self) -> int:
        return self.layers * self.hidden

    @property
    def bytes(self) -> int:
        """Of one batch."""
        if self.form == "float8":
            return self.tokens * (self.width + 4 * self.layers)
        return self.tokens * self.width * self._sent.itemsize

    @property
    def _sent(self) -> torch.dtype:
        return torch.bfloat16 if self.form == "bfloat16" else self.dtype

    @property
    def direct(self) -> bool:
        """Whether the buffer holds the features as the drafter reads them, so that nothing need be copied."""
        return self._sent == self.dtype and self.form != "float8"

    def facts(self) -> dict[str, Any]:
        """What both sides must agree on."""
        return {
            "tokens of a batch": self.tokens,
            "captured layers": self.layers,
            "hidden size": self.hidden,
            "dtype of features": str(self.dtype),
            "form of features": self.form,
            "bytes of a batch": self.bytes,
        }

    def buffer(self, device: torch.device) -> Tensor:
        """uint8 [bytes]"""
        return torch.zeros(self.bytes, dtype=torch.uint8, device=device)

    def view(self, buffer: Tensor) -> Tensor:
        """The buffer as features [S, F]; only where `direct`."""
        assert self.direct
        return buffer.view(self.dtype).view(self.tokens, self.width)

    def write(self, features_SF: Tensor, buffer: Tensor) -> None:
        """Put features into the buffer; nothing to do for those that were made in it."""
        if self.form != "float8":
            place = buffer.view(self._sent).view(self.tokens, self.width)
            if place.data_ptr() != features_SF.data_ptr():
                place.copy_(features_SF)
            return
        values_SKH = features_SF.view(self.tokens, self.layers, self.hidden)
        codes_SKH, scales_SK = self._split(buffer)
        scales_SK.copy_(values_SKH.abs().amax(-1).float().clamp(min=1e-30) / _FLOAT8_MAX)
        codes_SKH.copy_((values_SKH.float() / scales_SK[..., None]).to(_FLOAT8))

    def read(self, buffer: Tensor) -> Tensor:
        """Features [S, F] of the buffer in the compute dtype; a view of it where `direct`."""
        if self.direct:
            return self.view(buffer)
        if self.form == "bfloat16":
            return buffer.view(torch.bfloat16).view(self.tokens, self.width).to(self.dtype)
        codes_SKH, scales_SK = self._split(buffer)
        return (codes_SKH.float() * scales_SK[..., None]).to(self.dtype).view(self.tokens, self.width)

    def _split(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        # The scales come first: they need the stricter alignment.
        end = 4 * self.tokens * self.layers
        scales_SK = buffer[:end].view(torch.float32).view(self.tokens, self.layers)
        return buffer[end:].view(_FLOAT8).view(self.tokens, self.layers, self.hidden), scales_SK
