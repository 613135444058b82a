"""Kept features come to a device without a wait: in every form, all that leaves the host is page-locked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.target.feature_store import Encoding, Shards

LAYERS, HIDDEN = 2, 4


class PageLocked(TorchFunctionMode):
    """Stands in for page-locked memory, and refuses copies off the host that would wait without it."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: list[Tensor] = []
        self.moved = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            self.locked.append(args[0].clone())
            return self.locked[-1]
        found = func(*args, **kwargs)
        source = args[1] if name == "copy_" else args[0] if name in ("to", "cuda") else None
        if source is not None and source.device.type == "cpu" and found.device.type != "cpu":
            assert any(source is one for one in self.locked), f"{name} copies from memory that is not page-locked"
            assert kwargs.get("non_blocking"), f"{name} waits"
            self.moved += 1
        return found


@pytest.mark.parametrize("kept", ["same", "float8"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_features_kept_on_the_host_reach_a_device_without_a_wait(tmp_path: Path, kept: str, on_disk: bool) -> None:
    encoding = Encoding(kept, torch.bfloat16, LAYERS, HIDDEN)
    shards = Shards(encoding, np.asarray([3, 5, 4]), 1 << 20, tmp_path if on_disk else None, torch.device("cpu"))
    (shard,) = shards.shards
    shards.write(shard, torch.randn(shard.tokens, LAYERS * HIDDEN, dtype=torch.bfloat16))
    shards.open()
    # A device that no copy reaches: what counts is how the host's memory leaves.
    out_nF = torch.empty(5, LAYERS * HIDDEN, dtype=torch.bfloat16, device="meta")
    with PageLocked() as watch:
        shards.read(1, out_nF)
    assert watch.moved == (2 if kept == "float8" else 1)
