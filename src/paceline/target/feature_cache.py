"""A target whose features are computed once and kept, in memory or on disk: later epochs cost no target compute.

Features of a document depend on the document alone, so they are kept a document each and gathered into whatever row
the document is packed in. T tokens of all documents, S tokens of a row, K captured layers, H hidden size, F = K·H.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline.batches import FrozenEnds, TokenBatch
from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.target.base import Target
from paceline.target.feature_store import Encoding, Shard, Shards
from paceline.target.source import user_cache

_FORM = 1
"""Raise it when the same inputs are stored otherwise than before."""
_SHARD_BYTES = 1 << 28
_CHECKED_CALLS = 64
Report = Callable[[str], None]


class Texts(Protocol):
    """Tokenised documents, as the data room keeps them."""

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]"""
        ...

    def document(self, index: int, /) -> tuple[np.ndarray, np.ndarray]:
        """(ids, supervised) of one document."""
        ...


class CachedTarget(Target):
    """A target with the features of `documents` kept; other calls go to the target itself.

    A batch is looked up by `batch.documents` and `batch.bounds`. Numbers below zero mean held-out documents: those
    batches are few and always the same, so their features are kept whole once they have been seen.
    """

    def __init__(
        self,
        target: Target,
        documents: Texts,
        tokens: int,
        config: TargetConfig,
        report: Report | None = None,
        computing: Callable[[], None] | None = None,
        waiting: Callable[[], None] | None = None,
    ) -> None:
        """Compute, or find, the features of every document's first `tokens` tokens (S of the run).

        `computing` is called before each row, `waiting` before a wait for another process's part.
        Raises UserError where memory or disk cannot hold them; nothing is computed before that is known.
        """
        self.target = target
        super().__init__(target.shape, target.layer_ids, target.device, target.dtype)
        self._documents = documents
        self._tokens = tokens
        self._held_out: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        self._calls = 0
        self._computing = computing or _nothing
        self._waiting = waiting or _nothing
        lengths = np.minimum(documents.lengths, tokens)
        encoding = Encoding(kept_form(config), target.dtype, len(target.layer_ids), target.shape.hidden_size)
        home = _home(target.device, encoding.bytes_per_token * int(lengths.sum()))
        self._shards = Shards(encoding, lengths, _SHARD_BYTES, self._folder(config), home)
        self._refuse_if_too_large(report or _silent)
        self._fill(report or _silent)

    @property
    def ends(self) -> FrozenEnds:
        return self.target.ends

    @torch.no_grad()
    def features(self, batch: TokenBatch, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(len(batch.ids_S), self.width, dtype=self.dtype, device=self.device)
        if batch.documents and min(batch.documents) < 0:
            return out.copy_(self._held_out_features(batch))
        self._check_ids(batch)
        for document, start, end in _spans(batch):
            self._shards.read(document, out[start:end])
        out[_spans_end(batch) :].zero_()
        return out

    def next_tokens(self, batch: TokenBatch) -> Tensor:
        return self.target.next_tokens(batch)

    def self_check(self, batch: TokenBatch) -> None:
        self.target.self_check(batch)

    def close_upper_layers(self) -> None:
        self.target.close_upper_layers()

    def _held_out_features(self, batch: TokenBatch) -> Tensor:
        key = (batch.documents, batch.bounds)
        if key not in self._held_out:
            self._held_out[key] = self.target.features(batch).cpu()
        return self._held_out[key]

    def _check_ids(self, batch: TokenBatch) -> None:
        """The batch must be of the documents that are kept. On a GPU only the first calls pay for looking."""
        self._calls += 1
        if batch.ids_S.is_cuda and self._calls > _CHECKED_CALLS:
            return
        ids_S = batch.ids_S.cpu().numpy()
        for document, start, end in _spans(batch):
            own = self._documents.document(document)[0][: end - start]
            if not np.array_equal(ids_S[start:end], own):
                raise AssertionError(f"batch {batch.index} is not of the documents whose features are kept")

    def _folder(self, config: TargetConfig) -> Path | None:
        if config.feature_cache != "disk":
            return None
        base = config.feature_cache_folder
        root = Path(base).expanduser() if base else user_cache() / "features"
        facts = {
            "form": _FORM,
            "target": self.target.fingerprint(),
            "documents": documents_digest(self._documents, self._tokens),
            "layers": list(self.layer_ids),
            "dtype": str(self.dtype),
            "kept": kept_form(config),
        }
        return root / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    def _refuse_if_too_large(self, report: Report) -> None:
        needed, total = self._shards.missing_bytes, self._shards.total_bytes
        where, free = self._room()
        tokens = self._shards.tokens
        report(
            f"feature cache: {len(self._documents.lengths):,} documents, {tokens:,} tokens, {_size(total)} {where}"
            f" ({_size(needed)} to compute, {_size(free)} free)"
        )
        if needed > 0.9 * free:
            raise UserError(
                f"the feature cache needs {_size(needed)} {where} and {_size(free)} are free",
                "set target.feature_cache_dtype = 'float8', target.feature_cache_folder to a larger disk, fewer "
                "target.features, less data, or target.feature_cache = 'none'",
            )

    def _room(self) -> tuple[str, int]:
        folder = self._shards.folder
        if folder is None and self._shards.device.type == "cuda":
            return f"on {self.device}", torch.cuda.mem_get_info(self.device)[0]
        if folder is None:
            return "in memory", free_memory()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error}", "set target.feature_cache_folder") from None
        facts = os.statvfs(folder)
        return f"in {folder}", facts.f_bavail * facts.f_frsize

    def _fill(self, report: Report) -> None:
        """Compute what is missing. Several processes share the work on disk: each takes shards that no one works on."""
        started, done = time.monotonic(), 0
        todo = self._shards.missing()
        for wait in (False, True):
            for shard in todo:
                if wait:
                    self._waiting()
                with self._shards.claim(shard, wait=wait) as mine:
                    if mine:
                        self._compute(shard)
                        done += shard.tokens
                        report(_progress(done, sum(item.tokens for item in todo), time.monotonic() - started))
        self._shards.open()

    def _compute(self, shard: Shard) -> None:
        # Gathered where they are computed, and moved once: fresh pages of the host's memory are the slow part.
        values_TF = torch.empty(shard.tokens, self.width, dtype=self.dtype, device=self.device)
        features_SF = torch.empty(self._tokens, self.width, dtype=self.dtype, device=self.device)
        for row in pack_rows(shard.lengths, self._tokens):
            self._computing()
            batch = self._row(shard, row)
            self.target.features(batch.to(self.device), features_SF)
            for number, start, end in _spans(batch):
                place = shard.offset(number)
                values_TF[place : place + end - start] = features_SF[start:end]
        try:
            self._shards.write(shard, values_TF)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"cannot write the feature cache: {error}", "free space or set target.feature_cache_folder"
            ) from None

    def _row(self, shard: Shard, row: list[int]) -> TokenBatch:
        """Documents of a shard (numbers within it) as one packed row without anchors."""
        S = self._tokens
        ids, positions, owners = np.zeros(S, np.int64), np.zeros(S, np.int64), np.full(S, -1, np.int32)
        bounds = [0]
        for place, number in enumerate(row):
            start, end = bounds[-1], bounds[-1] + int(shard.lengths[number])
            ids[start:end] = self._documents.document(shard.first + number)[0][: end - start]
            positions[start:end], owners[start:end] = np.arange(end - start), place
            bounds.append(end)
        nothing = torch.zeros(1, dtype=torch.int64)
        return TokenBatch(
            index=-1,
            ids_S=torch.from_numpy(ids),
            positions_S=torch.from_numpy(positions),
            documents_S=torch.from_numpy(owners),
            supervised_S=torch.zeros(S, dtype=torch.bool),
            anchors_A=nothing,
            starts_A=nothing,
            labels_AB=nothing.view(1, 1),
            weights_AB=torch.zeros(1, 1),
            documents=tuple(shard.first + number for number in row),
            bounds=tuple(bounds),
        )


def kept_form(config: TargetConfig) -> str:
    """`same` or `float8`: what `target.feature_cache_dtype` means for this kind of cache."""
    if config.feature_cache_dtype != "auto":
        return config.feature_cache_dtype
    return "float8" if config.feature_cache == "disk" else "same"


def _home(device: torch.device, needed: int) -> torch.device:
    """Kept features lie on the GPU where they leave most of it free, else in the host's memory."""
    if device.type == "cuda" and needed < torch.cuda.mem_get_info(device)[0] / 4:
        return device
    return torch.device("cpu")


def pack_rows(lengths: np.ndarray, tokens: int) -> list[list[int]]:
    """Numbers of documents, row by row: longest first, each into the first row that has room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        place = next((index for index, left in enumerate(room) if left >= length), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(tokens)
        rows[place].append(number)
        room[place] -= length
    return rows


def documents_digest(documents: Texts, tokens: int) -> str:
    """Hash of every document's first `tokens` ids."""
    digest = hashlib.sha256(np.minimum(documents.lengths, tokens).astype("<i8").tobytes())
    for index in range(len(documents.lengths)):
        digest.update(np.ascontiguousarray(documents.document(index)[0][:tokens], dtype="<i4").tobytes())
    return digest.hexdigest()


def free_memory() -> int:
    """Bytes that this process may still take: the machine's, or its control group's if that is less."""
    free = psutil.virtual_memory().available
    for limit, used in _GROUPS:
        try:
            free = min(free, int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
    return max(0, free)


_GROUPS = [
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
]


def _spans(batch: TokenBatch) -> list[tuple[int, int, int]]:
    """(document, start, end) of every document of the row."""
    return list(zip(batch.documents, batch.bounds, batch.bounds[1:], strict=False))


def _spans_end(batch: TokenBatch) -> int:
    return batch.bounds[-1] if batch.bounds else 0


def _progress(done: int, total: int, seconds: float) -> str:
    left = seconds * (total - done) / max(1, done)
    return f"feature cache: {done:,} of {total:,} tokens, {done / max(seconds, 1e-9):,.0f} tokens/s, {left:.0f} s left"


def _size(count: int) -> str:
    power = min(4, int(math.log(max(1, count), 1024)))
    return f"{count / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _silent(_text: str) -> None:
    pass


def _nothing() -> None:
    pass
