"""A target run by the transformers library.

S context tokens of a batch, K captured layers, H hidden size, F = K·H, V vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from paceline.batches import FrozenEnds, TokenBatch
from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.shapes import TargetShape
from paceline.target import gguf
from paceline.target.base import Target, checksum
from paceline.target.checks import check_target
from paceline.target.describe import choose_layers, read_shape
from paceline.target.ends import assemble
from paceline.target.float8 import use_float8_weights
from paceline.target.packing import check_positions, packed, row_of
from paceline.target.source import ModelSource, load_failure, resolve
from paceline.target.tensor_parallel import Adder, shard

_HEAD_ROWS = 1024


class TransformersTarget(Target):
    """A frozen causal language model with hooks on the layers that are captured."""

    def __init__(
        self,
        model: Any,
        shape: TargetShape,
        layer_ids: tuple[int, ...],
        device: torch.device,
        ends: FrozenEnds,
        adder: Adder | None = None,
    ) -> None:
        super().__init__(shape, layer_ids, device, ends.embedding_VH.dtype)
        self._ends = ends
        self._adder = adder
        self._model: Any | None = model
        self.decoder: nn.Module = model.get_decoder()
        self.layers = _layers(self.decoder, shape.name)
        self._lower = nn.ModuleList(list(self.layers)[: layer_ids[-1] + 1])
        self._rope: dict[str, Any] = self._config.to_dict().get("rope_parameters") or {}
        self._buffer: Tensor | None = None
        for place, layer_id in enumerate(layer_ids):
            self.layers[layer_id].register_forward_hook(self._writer(place))

    @classmethod
    def load(
        cls,
        config: TargetConfig,
        device: torch.device | str,
        layer_ids: tuple[int, ...] = (),
        *,
        device_mesh: Any | None = None,
    ) -> TransformersTarget:
        """Load a target's weights, frozen, in evaluation mode.

        Without `layer_ids` the configuration's are taken. `device_mesh` (one-dimensional) shards the layers over its
        ranks when target.tensor_parallel > 1. Raises UserError.
        """
        device = torch.device(device)
        source = gguf.as_folder(resolve(config))
        shape = read_shape(config)
        layer_ids = layer_ids or choose_layers(shape.layers, config.features, config.layer_ids)
        dtype = compute_dtype(config, device)
        model = _load_whole(source, dtype)
        adder = _shard(model, config, device_mesh) if config.tensor_parallel > 1 else None
        model = model.to(device)
        ends = _ends_of(model, shape)
        if config.weights == "float8":
            use_float8_weights(model.get_decoder(), device)
        return cls(model, shape, layer_ids, device, ends, adder)

    @property
    def ends(self) -> FrozenEnds:
        return self._ends

    @property
    def model(self) -> Any:
        """The whole transformers model, for decoding; gone after `close_upper_layers`."""
        if self._model is None:
            raise AssertionError("the target's upper layers and head were closed")
        return self._model

    @property
    def _config(self) -> Any:
        return self.decoder.config

    @torch.no_grad()
    def features(self, batch: TokenBatch, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(len(batch.ids_S), self.width, dtype=self.dtype, device=self.device)
        self._buffer = out
        try:
            with self._cut():
                self.hidden(batch)
        finally:
            self._buffer = None
        return out

    @torch.no_grad()
    def next_tokens(self, batch: TokenBatch) -> Tensor:
        hidden_SH = self.final_hidden(batch)
        rows = hidden_SH.split(_HEAD_ROWS)
        return torch.cat([self._ends.logits(part).argmax(dim=-1) for part in rows])

    @torch.no_grad()
    def final_hidden(self, batch: TokenBatch) -> Tensor:
        """States [S, H] after every layer and the final norm, as the head receives them."""
        assert self._model is not None, "the target's upper layers were closed"
        return self.hidden(batch)

    def hidden(self, batch: TokenBatch) -> Tensor:
        """Run the decoder, as far as it is kept, on a packed row; its output [S, H]."""
        row = row_of(batch, self.device)
        check_positions(self.shape.name, self._rope, self.shape.max_positions, row.longest)
        with packed(self._config, row):
            # use_cache=False, or the library takes the row for one document that continues a cache.
            result = self.decoder(
                input_ids=batch.ids_S.to(self.device).unsqueeze(0),
                position_ids=batch.positions_S.to(self.device).unsqueeze(0),
                use_cache=False,
            )
        return result.last_hidden_state[0]

    def self_check(self, batch: TokenBatch) -> None:
        """Compare packed features and the rest of the model with plain forwards of single documents.

        Raises UserError naming what differs and by how much. Needs the whole model.
        """
        check_target(self, batch)

    def close_upper_layers(self) -> None:
        """Drop the layers after the last captured one, the final norm and the model's own head."""
        self.layers = self._lower
        self.decoder.layers = self._lower
        self.decoder.norm = nn.Identity()
        self._model = None

    def silence(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._adder is None else self._adder.silence()

    @contextlib.contextmanager
    def _cut(self) -> Generator[None]:
        """The decoder without the layers above the last captured one and without its norm, for a while."""
        whole, norm = self.decoder.layers, self.decoder.norm
        self.decoder.layers, self.decoder.norm = self._lower, nn.Identity()
        try:
            yield
        finally:
            self.decoder.layers, self.decoder.norm = whole, norm

    def fingerprint(self) -> str:
        """Identity of every weight up to the last captured layer, and of what is captured."""
        weights = checksum(self._lower.state_dict().values())
        return hashlib.sha256(super().fingerprint().encode() + weights).hexdigest()

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile every kept layer by itself: one graph a layer kind and part, one shape, attention outside of it."""
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False, backend=backend)

    def _writer(self, place: int) -> Any:
        width = self.shape.hidden_size

        def write(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            if self._buffer is not None:
                hidden = output[0] if isinstance(output, tuple) else output
                self._buffer[:, place * width : (place + 1) * width].copy_(hidden[0])

        return write


def load_model(config: TargetConfig, dtype: torch.dtype) -> Any:
    """The whole transformers model on the CPU, frozen, in evaluation mode. Raises UserError."""
    return _load_whole(gguf.as_folder(resolve(config)), dtype)


def compute_dtype(config: TargetConfig, device: torch.device) -> torch.dtype:
    """The dtype that `target.dtype` names on this device."""
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
    return named.get(config.dtype, automatic)


def _layers(decoder: nn.Module, name: str) -> nn.ModuleList:
    children = dict(decoder.named_children())
    layers, norm = children.get("layers"), children.get("norm")
    if not isinstance(layers, nn.ModuleList) or norm is None:
        raise UserError(
            f"target {name}: {type(decoder).__name__} does not name its parts layers and norm",
            "choose a target of the Llama, Qwen, Gemma, Mistral, gpt-oss kind",
        )
    return layers


def _shard(model: Any, config: TargetConfig, mesh: Any | None) -> Adder:
    if mesh is None or mesh.size() != config.tensor_parallel:
        raise UserError(
            f"target.tensor_parallel = {config.tensor_parallel} without a group of {config.tensor_parallel} ranks",
            "give the target as many ranks as it is sharded over, or set target.tensor_parallel = 1",
        )
    decoder = model.get_decoder()
    return shard(decoder, decoder.config, mesh, config.model)


def _load_whole(source: ModelSource, dtype: torch.dtype) -> Any:
    try:
        with gguf.quiet():
            model, found = AutoModelForCausalLM.from_pretrained(
                **source.arguments(), dtype=dtype, use_safetensors=True, output_loading_info=True
            )
    except Exception as error:  # the readers of each format raise kinds of their own
        raise load_failure(source, "weights", error) from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise UserError(
            f"target {source.name} lacks {len(missing)} weights, for example {missing[0]}", "download the model again"
        )
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        # transformers before 5.24 gives such a model torch's attention, which leaves the cap out without a word.
        model.set_attn_implementation("eager")
    return model.eval().requires_grad_(False)


def _ends_of(model: Any, shape: TargetShape) -> FrozenEnds:
    head = model.get_output_embeddings()
    bias = dict(head.named_parameters()).get("bias")
    return assemble(model.get_input_embeddings().weight, head.weight, bias, shape)
