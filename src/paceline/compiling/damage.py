"""Finds damaged files in a compile cache, by a manifest where a warm-up finished, by their own form where not.

Torch notices damaged entries of ``fxgraph/`` and ``aotautograd/`` and rebuilds them; the same damage to the generated
code beside them is fatal at every start until someone deletes the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_BINARY = {".so", ".o", ".cubin", ".hsaco"}
_LEFTOVERS = (".tmp", ".half")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Damage:
    """A file that cannot be trusted, relative to its cache folder, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


Manifest = dict[str, tuple[int, str]]
"""Relative path -> (bytes, sha256 of the contents)."""


def cache_files(folders: Iterable[Path]) -> Iterator[Path]:
    """Every file of compiled code; locks, byte code and leftovers of interrupted writes are none."""
    for folder in folders:
        for where, _, names in os.walk(folder):
            parts = Path(where).relative_to(folder).parts
            if "locks" in parts or "__pycache__" in parts:
                continue
            yield from (Path(where) / name for name in sorted(names) if not name.endswith((".lock", *_LEFTOVERS)))


def write_manifest(root: Path, files: Iterable[Path]) -> Manifest:
    """Sizes and hashes of `files`, by their path relative to `root`."""
    return {str(file.relative_to(root)): _fact(file) for file in files}


def against_manifest(root: Path, manifest: Manifest) -> list[Damage]:
    """Files that are missing or are not what the warm-up left."""
    return [Damage(name, reason) for name, fact in manifest.items() if (reason := _changed(root / name, fact))]


def by_form(root: Path, files: Iterable[Path]) -> list[Damage]:
    """Files that cannot be whole, judged by what each kind of file must look like."""
    return [Damage(str(file.relative_to(root)), reason) for file in files if (reason := _malformed(file))]


def _fact(file: Path) -> tuple[int, str]:
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
    return file.stat().st_size, digest.hexdigest()


def _changed(file: Path, fact: tuple[int, str]) -> str | None:
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        return "missing"
    if size != fact[0]:
        return "empty" if size == 0 else f"cut or changed: {size} bytes, was {fact[0]}"
    return None if _fact(file) == fact else "contents changed"


def _malformed(file: Path) -> str | None:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return None  # another process replaced it meanwhile
    if not data:
        return "empty"
    if file.suffix == ".py":
        return _broken_python(data, str(file))
    if file.suffix == ".json":
        return _broken_json(data)
    if file.suffix in _BINARY:
        return _broken_elf(data)
    return None if data.strip(b"\0") else "nothing but zero bytes"


def _broken_python(data: bytes, name: str) -> str | None:
    try:
        compile(data, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return f"not Python: {error}"
    return None


def _broken_json(data: bytes) -> str | None:
    try:
        json.loads(data)
    except ValueError as error:
        return f"not JSON: {error}"
    return None


def _broken_elf(data: bytes) -> str | None:
    """The table of sections comes last in what linkers write: a cut file does not reach its end."""
    if data[:4] != b"\x7fELF":
        return "not an ELF file"
    if len(data) < 64:
        return "cut within its header"
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, entries = struct.unpack_from("<HH", data, 58)
    end = table + entry_size * entries
    return f"cut: {len(data)} bytes of {end}" if len(data) < end else None
