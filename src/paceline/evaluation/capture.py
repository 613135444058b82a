"""The target's captured states during decoding, by hooks on its layers."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class Capture:
    """While active, keeps the raw output of each chosen decoder layer of the latest forward."""

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self._layers = [decoder_layers(model)[index] for index in layer_ids]
        self._outputs: list[Tensor | None] = [None] * len(self._layers)
        self._handles: list[Any] = []

    def __enter__(self) -> Capture:
        for place, layer in enumerate(self._layers):
            self._handles.append(layer.register_forward_hook(self._keeper(place)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _keeper(self, place: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs[place] = output[0] if isinstance(output, tuple) else output

        return keep

    def features(self) -> Tensor:
        """[R, T, F] of the latest forward, layers in the order asked for."""
        return torch.cat([output for output in self._outputs if output is not None], dim=-1)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The target's stack of decoder layers."""
    layers = model.get_decoder().layers
    assert isinstance(layers, nn.ModuleList)
    return layers
