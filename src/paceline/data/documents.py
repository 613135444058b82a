"""Tokenised documents as flat arrays on disk, memory-mapped: they cost no memory until they are looked at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

_HEADER = 128
_MOST_KINDS = 65536
_ARRAYS = {"ids": "<i4", "supervised": "|b1", "offsets": "<i8", "kind_of": "<u2", "hashes": "<u8", "repeats": "<u2"}


@dataclass(frozen=True, eq=False)
class Documents:
    """n documents. T tokens in all."""

    ids: np.ndarray
    """int32 [T]"""
    supervised: np.ndarray
    """bool [T]"""
    offsets: np.ndarray
    """int64 [n + 1]: document i is [offsets[i], offsets[i + 1])."""
    kind_of: np.ndarray
    """uint16 [n], into `kinds`."""
    kinds: tuple[str, ...]
    """Names of kinds; the empty string is "no kind"."""
    hashes: np.ndarray
    """uint64 [n]: hash of the conversation that the document comes from (documents of one conversation share it)."""
    repeats: np.ndarray
    """uint16 [n]: how often the document stands in an epoch (mixture weights)."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32, supervised bool) of one document."""
        low, high = int(self.offsets[index]), int(self.offsets[index + 1])
        return np.asarray(self.ids[low:high]), np.asarray(self.supervised[low:high])

    def kind(self, index: int) -> str:
        return self.kinds[int(self.kind_of[index])]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]"""
        return np.diff(self.offsets)

    @staticmethod
    def of(documents: Sequence[tuple[Sequence[int], Sequence[bool]]], kinds: Sequence[str] = ()) -> Documents:
        """Documents in memory, from pairs of ids and mask."""
        lengths = [len(ids) for ids, _ in documents]
        names = tuple(dict.fromkeys(kinds)) or ("",)
        flat = [np.asarray(ids, dtype=np.int32) for ids, _ in documents] or [np.zeros(0, np.int32)]
        masks = [np.asarray(mask, dtype=bool) for _, mask in documents] or [np.zeros(0, bool)]
        return Documents(
            ids=np.concatenate(flat),
            supervised=np.concatenate(masks),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            kind_of=np.asarray([names.index(kind) for kind in kinds] or [0] * len(lengths), dtype=np.uint16),
            kinds=names,
            hashes=np.arange(len(lengths), dtype=np.uint64),
            repeats=np.ones(len(lengths), dtype=np.uint16),
        )

    @staticmethod
    def load(folder: Path) -> Documents:
        """Memory-map what a Writer wrote."""
        kinds = tuple(json.loads((folder / "kinds.json").read_text(encoding="utf-8")))
        return Documents(kinds=kinds, **{name: load_array(folder / f"{name}.npy") for name in _ARRAYS})


def load_array(path: Path) -> np.ndarray:
    """Memory-map one array."""
    # An empty file cannot be mapped.
    return np.load(path, mmap_mode="r" if path.stat().st_size > _HEADER else None, allow_pickle=False)


class Columns:
    """Several .npy files that grow together; nothing of them stays in memory."""

    def __init__(self, folder: Path, kinds: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._columns = {name: _Column(folder / f"{name}.npy", kind) for name, kind in kinds.items()}

    def add(self, name: str, values: np.ndarray) -> None:
        self._columns[name].add(values)

    def close(self) -> None:
        for column in self._columns.values():
            column.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Writer(Columns):
    """Writes documents one after another into the arrays that `Documents.load` maps."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _ARRAYS)
        self._folder = folder
        self._end = 0
        self._kinds: dict[str, int] = {"": 0}
        self.add("offsets", np.zeros(1, np.int64))

    def append(self, ids: np.ndarray, supervised: np.ndarray, kind: str, digest: int, repeats: int = 1) -> None:
        self._end += len(ids)
        if kind not in self._kinds and len(self._kinds) < _MOST_KINDS:
            self._kinds[kind] = len(self._kinds)
        row = {"offsets": self._end, "kind_of": self._kinds.get(kind, 0), "hashes": digest, "repeats": repeats}
        self.add("ids", ids)
        self.add("supervised", supervised)
        for name, value in row.items():
            self.add(name, np.asarray([value], dtype=_ARRAYS[name]))

    def close(self) -> None:
        super().close()
        (self._folder / "kinds.json").write_text(json.dumps(list(self._kinds)), encoding="utf-8")


class _Column:
    """One .npy file of unknown length: its header is written last, into room left for it."""

    def __init__(self, path: Path, kind: str) -> None:
        self._file = path.open("wb", buffering=1 << 18)
        self._file.write(b" " * _HEADER)
        self._kind = np.dtype(kind)
        self._count = 0

    def add(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self._kind).tobytes())
        self._count += len(values)

    def close(self) -> None:
        fact = {"descr": self._kind.str, "fortran_order": False, "shape": (self._count,)}
        text = repr(fact).encode("latin-1").ljust(_HEADER - 11) + b"\n"
        self._file.seek(0)
        self._file.write(b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little") + text)
        self._file.close()
