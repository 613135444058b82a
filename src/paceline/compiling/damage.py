"""Finds damaged files in a compile cache, by a manifest where a warm-up finished, by their own form where not.

Torch notices damaged entries of ``fxgraph/`` and ``aotautograd/`` and rebuilds them, but it never removes them, and
complains of them at every start; the same damage to the generated code beside them is fatal at every start until
someone deletes the file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickletools
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_BINARY = {".so", ".o", ".cubin", ".hsaco"}
_LEFTOVERS = (".tmp", ".half", ".lock")
_GROUP = "__grp__"
"""Triton's list of the files that make one kernel: written last."""


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
        for where, below, names in os.walk(folder):
            below[:] = [name for name in below if not _is_passing(name)]
            yield from (Path(where) / name for name in sorted(names) if not name.endswith(_LEFTOVERS))


def _is_passing(folder: str) -> bool:
    """Whether a folder holds nothing to keep: Triton and torch fill ``tmp.…`` and rename it, g++ works in the last."""
    return folder in ("locks", "__pycache__") or folder.startswith("tmp.") or folder.endswith("_CxxBuild")


def write_manifest(root: Path, files: Iterable[Path]) -> Manifest:
    """Sizes and hashes of `files`, by their path relative to `root`; those that vanish meanwhile are left out."""
    facts = ((str(file.relative_to(root)), _fact(file)) for file in files)
    return {name: fact for name, fact in facts if fact is not None}


def against_manifest(root: Path, manifest: Manifest) -> list[Damage]:
    """Files that are missing or are not what the warm-up left."""
    return [Damage(name, reason) for name, fact in manifest.items() if (reason := changed(fact, _fact(root / name)))]


def changed(was: tuple[int, str], now: tuple[int, str] | None) -> str | None:
    """How a file differs from what it was, in words; None where it does not."""
    if now is None:
        return "missing"
    if now[0] < 0:
        return now[1]
    if now[0] != was[0]:
        return "empty" if now[0] == 0 else f"cut or changed: {now[0]} bytes, was {was[0]}"
    return None if now == was else "contents changed"


def by_form(root: Path, files: Iterable[Path]) -> list[Damage]:
    """Files that cannot be whole, judged by what each kind of file must look like.

    Torch names the entries of ``fxgraph/`` and ``aotautograd/`` by a hash of their contents. One is condemned for its
    name alone only where another's of its folder is right (some versions of torch name the latter's otherwise), so a
    torch with other names costs this check and not the cache.
    """
    judged = [_judge(str(file.relative_to(root)), file) for file in files]
    hashed = {one.kind for one in judged if one.named_right}
    found = []
    for one in judged:
        renamed = "contents changed" if one.kind in hashed and one.named_right is False else None
        if reason := one.fault or renamed:
            found.append(Damage(one.path, reason))
    return found


def is_rewritten(path: str) -> bool:
    """Whether torch puts new contents in the place of old ones: measured times, as JSON. It does so with no other."""
    parts = Path(path).parts
    return parts[0] == "inductor" and (parts[-1].endswith(".best_config") or parts[1] == "cache")


@dataclass(frozen=True)
class _Judged:
    """What a file's form tells: a fault, and whether its name is the hash of its contents (None: no rule says so)."""

    path: str
    fault: str | None = None
    named_right: bool | None = None

    @property
    def kind(self) -> tuple[str, ...]:
        """The folder of its kind of entry: ``inductor/fxgraph``, say."""
        return Path(self.path).parts[:2]


def _judge(path: str, file: Path) -> _Judged:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return _Judged(path)  # another process replaced it meanwhile
    except OSError as error:
        return _Judged(path, f"cannot be read: {error.strerror}")
    if data and Path(path).parts[1:2] in (("fxgraph",), ("aotautograd",)):
        right = file.name == _torch_hash(data)
        return _Judged(path, None if right else _broken_pickle(data), right)
    return _Judged(path, _malformed(path, file, data))


def _malformed(path: str, file: Path, data: bytes) -> str | None:
    if not data:
        return None if file.name == "__init__.py" else "empty"
    if file.suffix == ".py":
        # Some generated modules are named by more than their text: a wrong name says nothing, the right one everything.
        return None if file.stem == f"c{_torch_hash(data.strip())}" else _broken_python(data, path)
    if file.suffix == ".json" or is_rewritten(path):
        return _broken_json(data, file)
    if file.suffix in _BINARY:
        return _broken_elf(data)
    return None if data.strip(b"\0") else "nothing but zero bytes"


def _torch_hash(data: bytes) -> str:
    """As ``torch._inductor.codecache.sha256_hash``, unchanged since torch 2.3."""
    return base64.b32encode(hashlib.sha256(data).digest())[:51].decode().lower()


def _fact(file: Path) -> tuple[int, str] | None:
    """(bytes, hash); None where the file is missing, (-1, why) where it cannot be read."""
    try:
        with open(file, "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256")
            return handle.tell(), digest.hexdigest()
    except FileNotFoundError:
        return None
    except OSError as error:
        return -1, f"cannot be read: {error.strerror}"


def _broken_python(data: bytes, name: str) -> str | None:
    try:
        compile(data, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return f"not Python: {error}"
    return None


def _broken_json(data: bytes, file: Path) -> str | None:
    try:
        told = json.loads(data)
    except ValueError as error:
        return f"not JSON: {error}"
    if not file.name.startswith(_GROUP):
        return None
    # Triton reads a kernel by this list, and fails where a part of it is not there.
    parts = told.get("child_paths", ()) if isinstance(told, dict) else ()
    lost = [name for name in parts if not (file.parent / name).exists()]
    return f"{lost[0]} of its kernel is missing" if lost else None


def _broken_pickle(data: bytes) -> str | None:
    """Walked, not loaded: loading runs what it names."""
    end = 0
    try:
        for _, _, place in pickletools.genops(data):
            end = (place or 0) + 1
    except (ValueError, IndexError) as error:
        return f"not a pickle: {error}"
    return None if end == len(data) else f"{len(data) - end} bytes too long"


def _broken_elf(data: bytes) -> str | None:
    """The tables of sections and segments come last in what linkers write: a cut file does not reach their end."""
    if data[:4] != b"\x7fELF":
        return "not an ELF file"
    if len(data) < 64:
        return "cut within its header"
    segments, sections = struct.unpack_from("<QQ", data, 32)
    segment_size, segment_count, section_size, section_count = struct.unpack_from("<HHHH", data, 54)
    end = max(segments + segment_size * segment_count, sections + section_size * section_count)
    return f"cut: {len(data)} bytes of {end}" if len(data) < end else None
