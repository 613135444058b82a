"""The target's embedding and head: from a loaded model, or straight from the files without the rest of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from paceline.batches import FrozenEnds
from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.shapes import TargetShape
from paceline.target import gguf
from paceline.target.describe import Outline, read_outline, read_shape
from paceline.target.source import ModelSource, load_failure, resolve

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")


def load_ends(config: TargetConfig, device: torch.device | str, dtype: torch.dtype) -> FrozenEnds:
    """Read the embedding and the head, and nothing else, from a target's files.

    A tied head is the embedding's own storage. Raises UserError for files that lack them.
    """
    source = gguf.as_folder(resolve(config))
    shape = read_shape(config)
    outline = read_outline(config)
    files = Files(source)
    embedding = files.read(_embedding_name(outline), _EMBEDDINGS, device, dtype)
    head, bias = embedding, None
    if not shape.tied:
        head = files.read(_head_name(outline), _HEADS, device, dtype)
        bias = files.find(_head_name(outline).removesuffix("weight") + "bias", device, dtype)
    return assemble(embedding, head, bias, shape)


def assemble(embedding: Tensor, head: Tensor, bias: Tensor | None, shape: TargetShape) -> FrozenEnds:
    """Frozen ends of a target; the embedding's scale is rounded as the target rounds it, to the weights' dtype."""
    scale = float(torch.tensor(shape.embedding_scale).to(embedding.dtype))
    tied = head.data_ptr() == embedding.data_ptr()
    embedding = embedding.detach().requires_grad_(False)
    return FrozenEnds(
        embedding_VH=embedding,
        head_VH=embedding if tied else head.detach().requires_grad_(False),
        head_bias_V=None if bias is None else bias.detach().requires_grad_(False),
        embedding_scale=scale,
        logit_scale=shape.logit_scale,
        logit_softcap=shape.logit_softcap,
    )


def _embedding_name(outline: Outline) -> str:
    return name_of(outline.model, outline.model.get_input_embeddings())


def _head_name(outline: Outline) -> str:
    return name_of(outline.model, outline.model.get_output_embeddings())


def name_of(model: Any, part: Any) -> str:
    for name, module in model.named_modules():
        if module is part:
            return f"{name}.weight"
    raise AssertionError("a model's ends are among its modules")


class Files:
    """The safetensors files of a model, read tensor by tensor."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.files = self._index()

    def read(self, name: str, endings: tuple[str, ...], device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """The tensor of this name, or else the only one with one of these endings (names vary between versions)."""
        found = self.find(name, device, dtype)
        if found is not None:
            return found
        near = [key for key in self.files if key.endswith(endings)]
        if len(near) != 1:
            raise UserError(
                f"target {self.source.name}: its files hold no tensor {name!r} ({len(near)} of a like name)",
                "check that the model is complete and its weights are safetensors",
            )
        tensor = self.find(near[0], device, dtype)
        assert tensor is not None
        return tensor

    def find(self, name: str, device: torch.device | str, dtype: torch.dtype) -> Tensor | None:
        if name not in self.files:
            return None
        try:
            with safe_open(self._path(self.files[name]), framework="pt") as file:
                return file.get_tensor(name).to(device=device, dtype=dtype)
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise load_failure(self.source, f"tensor {name}", error) from error

    def _index(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self._optional("model.safetensors.index.json")
        if index is not None:
            return self._read_index(index)
        single = self._optional("model.safetensors")
        if single is None:
            raise UserError(
                f"target {self.source.name} has no safetensors weights",
                "convert it to safetensors; pickled weights are not read",
            )
        try:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single.name)
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise load_failure(self.source, "weights", error) from error

    def _read_index(self, path: Path) -> dict[str, str]:
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise load_failure(self.source, "index of weights", error) from error
        found = said.get("weight_map") if isinstance(said, dict) else None
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
            raise UserError(
                f"target {self.source.name}: {path.name} does not say which file holds which weight",
                "download the model again",
            )
        return found

    def _optional(self, name: str) -> Path | None:
        folder = self.source.folder
        if folder is not None:
            return folder / name if (folder / name).is_file() else None
        try:
            found = cached_file(
                self.source.location,
                name,
                revision=self.source.revision or None,
                _raise_exceptions_for_missing_entries=False,
            )
        except OSError as error:
            raise load_failure(self.source, "weights", error) from error
        return Path(found) if found is not None else None

    def _path(self, name: str) -> Path:
        path = self._optional(name)
        if path is None:
            raise UserError(f"target {self.source.name} lacks the file {name}", "download the model again")
        return path
