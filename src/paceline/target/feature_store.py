"""Where kept features lie: shards of whole documents, in memory or as safetensors files.

T tokens of a shard, n of a document, K captured layers, H hidden size, F = K·H.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import UserError
from paceline.permissions import apply_umask

_E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0


@dataclass(frozen=True)
class Encoding:
    """How one token's feature is kept."""

    kept: str
    """`same`, or `float8`: e4m3 with a float32 scale for each token and captured layer."""
    dtype: torch.dtype
    layers: int
    hidden_size: int

    @property
    def bytes_per_token(self) -> int:
        if self.kept == "float8":
            return self.layers * (self.hidden_size + 4)
        return self.layers * self.hidden_size * self.dtype.itemsize

    def encode(self, values_TF: Tensor) -> dict[str, Tensor]:
        """Tensors to keep. Layers are scaled apart, since their sizes differ by orders of magnitude."""
        if self.kept != "float8":
            return {"values": values_TF.contiguous()}
        values_TKH = values_TF.view(-1, self.layers, self.hidden_size).float()
        scales_TK = values_TKH.abs().amax(dim=-1).clamp(min=1e-30) / _LARGEST
        values = (values_TKH / scales_TK.unsqueeze(-1)).to(_E4M3)
        return {"values": values.view(-1, self.layers * self.hidden_size), "scales": scales_TK}

    def decode(self, kept: dict[str, Tensor], out_nF: Tensor) -> None:
        """Write [n, F] features from what `encode` gave."""
        values = _moved(kept["values"], out_nF.device)
        if self.kept != "float8":
            out_nF.copy_(values)
            return
        scales_nK = _moved(kept["scales"], out_nF.device)
        values_nKH = values.to(torch.float32).view(-1, self.layers, self.hidden_size)
        out_nF.copy_((values_nKH * scales_nK.unsqueeze(-1)).view_as(out_nF))


def _moved(kept: Tensor, device: torch.device) -> Tensor:
    """On the device, without a wait: a copy from memory that is not page-locked waits for all that was launched."""
    if device.type == "cpu" or kept.device.type != "cpu":
        return kept.to(device)
    return kept.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Shard:
    """Consecutive documents that are kept together."""

    number: int
    first: int
    """Number of its first document."""
    lengths: np.ndarray
    """int64, tokens of its documents."""
    starts: np.ndarray
    """int64, where they begin within the shard; one more for the end."""

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    def offset(self, document: int) -> int:
        return int(self.starts[document - self.first])


class Shards:
    """All features of a set of documents. Without a folder they are kept in memory."""

    def __init__(
        self,
        encoding: Encoding,
        lengths: np.ndarray,
        shard_bytes: int,
        folder: Path | None,
        device: torch.device,
    ) -> None:
        self.encoding = encoding
        self.folder = folder
        self.device = device
        """Where they lie in memory; not used with a folder."""
        self.shards = _cut(lengths, max(1, shard_bytes // encoding.bytes_per_token))
        self._first = np.asarray([shard.first for shard in self.shards], np.int64)
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._files: dict[int, safe_open] = {}

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def total_bytes(self) -> int:
        return self.tokens * self.encoding.bytes_per_token

    @property
    def missing_bytes(self) -> int:
        return sum(shard.tokens for shard in self.missing()) * self.encoding.bytes_per_token

    def missing(self) -> list[Shard]:
        """Shards that are not kept yet, or not whole."""
        return [shard for shard in self.shards if not self._is_kept(shard)]

    @contextlib.contextmanager
    def claim(self, shard: Shard, *, wait: bool) -> Generator[bool]:
        """Whether the shard is this process's to compute now; on disk, no other process computes it meanwhile."""
        if self._is_kept(shard):
            yield False
            return
        if self.folder is None:
            yield True
            return
        with self._path(shard).with_suffix(".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield not self._is_kept(shard)

    def write(self, shard: Shard, values_TF: Tensor) -> None:
        """Keep a shard. On disk it takes its name only when it is whole. Raises OSError, SafetensorError."""
        kept = self.encoding.encode(values_TF)
        if self.folder is None:
            self._kept[shard.number] = {name: tensor.to(self.device) for name, tensor in kept.items()}
            return
        path = self._path(shard)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            save_file(kept, scratch)
            apply_umask(scratch)
            with scratch.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)

    def open(self) -> None:
        """Map the files of every shard."""
        if self.folder is not None:
            self._files = {shard.number: safe_open(self._path(shard), framework="pt") for shard in self.shards}

    def read(self, document: int, out_nF: Tensor) -> None:
        """Write the first n tokens' features of a document into [n, F]."""
        number = int(np.searchsorted(self._first, document, side="right")) - 1
        shard = self.shards[number]
        start = shard.offset(document)
        span = slice(start, start + len(out_nF))
        if start + len(out_nF) > int(shard.starts[document - shard.first + 1]):
            raise AssertionError(f"document {document} is longer in the batch than its features")
        self.encoding.decode(self._slices(number, span), out_nF)

    def _slices(self, number: int, span: slice) -> dict[str, Tensor]:
        if self.folder is None:
            return {name: tensor[span] for name, tensor in self._kept[number].items()}
        file = self._files[number]
        return {name: file.get_slice(name)[span] for name in file.keys()}  # noqa: SIM118  (no mapping)

    def _is_kept(self, shard: Shard) -> bool:
        if self.folder is None:
            return shard.number in self._kept
        path = self._path(shard)
        if not path.is_file():
            return False
        try:
            with safe_open(path, framework="pt") as file:
                shape = file.get_slice("values").get_shape()
        except (OSError, SafetensorError):
            return False
        if shape != [shard.tokens, self.encoding.layers * self.encoding.hidden_size]:
            raise UserError(f"{path} holds features of another shape", "remove it, and they are computed anew")
        return True

    def _path(self, shard: Shard) -> Path:
        assert self.folder is not None
        return self.folder / f"features-{shard.number:05d}.safetensors"


def _cut(lengths: np.ndarray, most_tokens: int) -> list[Shard]:
    """Consecutive documents, a shard ending where the next one would pass `most_tokens`."""
    shards: list[Shard] = []
    first = 0
    ends = np.concatenate([[0], np.cumsum(lengths)])
    while first < len(lengths):
        last = int(np.searchsorted(ends, ends[first] + most_tokens, side="right")) - 1
        last = max(first + 1, last)
        part = np.asarray(lengths[first:last], np.int64)
        shards.append(Shard(len(shards), first, part, np.concatenate([[0], np.cumsum(part)]).astype(np.int64)))
        first = last
    return shards
