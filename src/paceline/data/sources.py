"""Entries of `data.train` -> files -> rows.

An entry is a file, a folder, a glob, or `hub:owner/name[:subset][@split]`. The form of a file is read from its first
bytes (gzip, zstd, Parquet, Arrow, JSON lines, a JSON array), never from its name.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from paceline.data.conversations import convert
from paceline.data.rows import Place, Problem, Row, RowError, excerpt
from paceline.data.values import Numbered, read_values
from paceline.errors import UserError

_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".arrow", ".gz", ".zst", ".zstd")
_NOT_ROWS = ("dataset_info.json", "state.json", "dataset_dict.json")
_DAMAGE = (OSError, EOFError, zlib.error, zstandard.ZstdError, pa.ArrowException, ValueError)


@dataclass(frozen=True)
class File:
    """One file of one entry; `hub` holds the loaded data set instead where the entry is one."""

    path: Path
    source: int
    hub: Any = None

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.stored())

    def stored(self) -> list[Path]:
        return [self.path] if self.hub is None else [Path(item["filename"]) for item in self.hub.cache_files]


def resolve(sources: tuple[str, ...]) -> list[File]:
    """The files of all entries, in the order given, sorted within each. Raises UserError where there are none."""
    if not sources:
        raise UserError("no data: data.train is empty", "give files, folders, globs or hub:owner/name")
    return [file for number, entry in enumerate(sources) for file in _resolve_entry(entry, number)]


def _resolve_entry(entry: str, number: int) -> list[File]:
    if entry.startswith("hub:"):
        return [_load_hub(entry, number)]
    path = Path(entry).expanduser()
    if os.path.isfile(path):  # false also for a name that cannot be one
        return [File(path, number)]
    if os.path.isdir(path):
        found = sorted(item for item in path.rglob("*") if _holds_rows(item, path))
        hint = f"it holds no file ending in {', '.join(_SUFFIXES)}"
    else:
        found = [Path(item) for item in sorted(glob.glob(str(path), recursive=True)) if Path(item).is_file()]
        hint = "give a file, a folder, a glob or hub:owner/name"
    if not found:
        raise UserError(f"no data at {entry!r}", hint)
    return [File(item, number) for item in found]


def _holds_rows(item: Path, root: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in item.relative_to(root).parts)
    return item.is_file() and item.suffix in _SUFFIXES and item.name not in _NOT_ROWS and not hidden


def _load_hub(entry: str, number: int) -> File:
    name, _, split = entry.removeprefix("hub:").partition("@")
    name, _, subset = name.partition(":")
    try:
        import datasets  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f"{entry!r} needs the package `datasets`", "pip install 'paceline[hub]'") from None
    try:
        loaded = datasets.load_dataset(name, subset or None, split=split or "train")
    except Exception as error:  # noqa: BLE001 - the package and what it calls raise kinds of their own
        raise UserError(
            f"cannot load the data set {entry!r}: {excerpt(str(error))}", "check its name and split"
        ) from None
    return File(Path(entry), number, loaded)


def read(sources: tuple[str, ...], shape: str = "auto") -> Iterator[Row]:
    """Every row of every entry, in order. Bad rows carry a Problem; only a missing source raises (UserError)."""
    for file in resolve(sources):
        yield from read_file(file, shape)


def read_file(file: File, shape: str = "auto") -> Iterator[Row]:
    for number, value in read_numbered(file):
        place = Place(file.name, number)
        if isinstance(value, Problem):
            yield Row(place, file.source, problem=value)
            continue
        try:
            found, conversation = convert(value, shape)
        except RowError as error:
            yield Row(place, file.source, problem=error.problem)
        except RecursionError:
            yield Row(place, file.source, problem=Problem("not-json", "nested too deeply"))
        else:
            yield Row(place, file.source, found, conversation)


def read_numbered(file: File) -> Iterator[Numbered]:
    """Parsed values of a file with their numbers; damage from which nothing more can be read ends it with a Problem."""
    number = 0
    try:
        for number, value in _values(file):
            yield number, value
    except _DAMAGE as error:
        yield number + 1, Problem("unreadable-file", excerpt(f"{type(error).__name__}: {error}"))


def _values(file: File) -> Iterator[Numbered]:
    if file.hub is not None:
        yield from enumerate(file.hub, 1)
        return
    with open_bytes(file.path) as stream:
        head = stream.peek(8)[:8]
        if head.startswith(b"PAR1"):
            yield from _columnar(pq.ParquetFile(file.path).iter_batches(batch_size=256))
        elif head.startswith(b"ARROW1"):
            reader = pa.ipc.open_file(pa.memory_map(str(file.path)))
            yield from _columnar(reader.get_batch(index) for index in range(reader.num_record_batches))
        elif head.startswith(b"\xff\xff\xff\xff"):
            yield from _columnar(pa.ipc.open_stream(stream))
        else:
            yield from read_values(stream, named_lines=_plain_suffix(file.path) in (".jsonl", ".ndjson"))


def _plain_suffix(path: Path) -> str:
    suffixes = [item for item in path.suffixes if item not in (".gz", ".zst", ".zstd")]
    return suffixes[-1].lower() if suffixes else ""


def _columnar(batches: Any) -> Iterator[Numbered]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, 256):
            for value in batch.slice(start, 256).to_pylist():
                number += 1
                yield number, value


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """The file's bytes, decompressed where its first bytes say gzip or zstd. Raises UserError where it is missing."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}", "check the path and its permissions"
        ) from None
    with raw:
        head = raw.peek(4)[:4]
        if head.startswith(b"\x1f\x8b"):
            yield io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)  # type: ignore[arg-type]
        elif head == b"\x28\xb5\x2f\xfd":
            reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            yield io.BufferedReader(reader, 1 << 20)  # type: ignore[arg-type]
        else:
            yield raw


def _opened(path: Path) -> io.BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}", "check the path and its permissions"
        ) from None


def content_digest(files: list[File]) -> str:
    """Hash of everything that is read, in order: the tokenised data is found by content, never by name."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.source}:".encode())
        stored = file.stored()
        for path in stored:
            with _opened(path) as stream:
                digest.update(hashlib.file_digest(stream, _blake).digest())
        if not stored:  # a data set that lives in memory alone
            for value in file.hub:
                digest.update(json.dumps(value, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _blake() -> Any:
    return hashlib.blake2b(digest_size=16)
