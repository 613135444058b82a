"""A target's layer weights by name, straight from its files: what a new drafter may start from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.config import TargetConfig
from paceline.target import gguf
from paceline.target.describe import read_outline
from paceline.target.ends import Files, name_of
from paceline.target.source import resolve


def weights_reader(config: TargetConfig) -> Callable[[str], Tensor | None]:
    """Reads a float32 tensor by its name below the decoder ("layers.3.mlp.up_proj.weight", "norm.weight").

    The reader gives None for a name that the target does not have. Raises UserError for files that cannot be read.
    """
    files = Files(gguf.as_folder(resolve(config)))
    outline = read_outline(config)
    prefix = name_of(outline.model, outline.model.get_decoder()).removesuffix("weight")

    def read(name: str) -> Tensor | None:
        return files.find(prefix + name, "cpu", torch.float32)

    return read
