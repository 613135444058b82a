"""Folders written whole or not at all, and safetensors read without trusting them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import UserError
from paceline.fields import Fields
from paceline.permissions import apply_umask


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder aside and rename it into place, so that a kill at any instant leaves the old one or the new one.

    Where `folder` is a link, what it leads to is replaced. Raises UserError where it cannot be written.
    """
    folder = folder.resolve()
    aside = _aside(folder, "writing", os.getpid())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(folder)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        fill(aside)
        apply_umask(aside)
        _sync(aside)
        _swap(folder, aside)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error}", "free space there or choose another folder") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _aside(folder: Path, word: str, pid: int) -> Path:
    return folder.parent / f".{folder.name}.{word}-{pid}"


def _swap(folder: Path, aside: Path) -> None:
    old = _aside(folder, "old", os.getpid())
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _clear_leftovers(folder: Path) -> None:
    """Remove what killed writers left, and put back a folder whose writer died between two renames."""
    for old in folder.parent.glob(f".{folder.name}.old-*"):
        if not _alive(old):
            shutil.rmtree(old) if folder.exists() else old.rename(folder)
    for aside in folder.parent.glob(f".{folder.name}.writing-*"):
        if not _alive(aside):
            shutil.rmtree(aside)


def _alive(path: Path) -> bool:
    pid = path.name.rpartition("-")[2]
    if not pid.isdigit():
        return True  # not one of ours: leave it alone
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


_AGAIN = "take the folder again from where it came"


def read_json(path: Path, remedy: str = _AGAIN) -> dict[str, Any]:
    """A JSON object. Raises UserError with the remedy for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}", "give a drafter's folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}", remedy) from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object", remedy)
    return value


def write_json(path: Path, value: Any) -> None:
    """Numbers that are not finite become null: JSON has none."""
    path.write_text(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from one safetensors file or from several with an index; pickles are never read."""
    paths = _weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            tensors |= load_file(path)
        except FileNotFoundError:
            raise UserError(f"{folder} lacks {path.name}, which its index names", "download it again") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged: {error}", _AGAIN) from None
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists() and single.exists():
        raise UserError(
            f"{folder} has both {single.name} and {index.name}", "readers differ in which they take; remove one of them"
        )
    if index.exists():
        return [folder / name for name in _indexed(index)]
    if single.exists():
        return [single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise UserError(f"{folder} has weights as pickles only", "convert them to safetensors; pickles can run code")
    raise UserError(f"{folder} has no model.safetensors", "give a drafter's folder")


def _indexed(index: Path) -> list[str]:
    """The files that an index names, all of its own folder."""
    names = set(map(str, Fields(read_json(index), str(index), _AGAIN).object("weight_map").values()))
    if not names or any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
        raise UserError(f"{index} does not name safetensors files of its folder", "download the folder again")
    return sorted(names)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_SAMPLE = 1 << 20


def fingerprint(path: Path) -> str:
    """A short hash that tells one model from another: small files whole, of large ones the size and both ends.

    `path` is a folder or a single file. Cheap on a model of any size, and equal wherever the same files lie.
    """
    total = hashlib.sha256()
    suffixes = {".json", ".safetensors", ".jinja", ".gguf", ".model"}
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file() and p.suffix in suffixes)
    for item in files:
        size = item.stat().st_size
        total.update(f"{item.name}:{size}:".encode())
        with item.open("rb") as file:
            total.update(file.read(_SAMPLE))
            if size > _SAMPLE:
                file.seek(max(_SAMPLE, size - _SAMPLE))
                total.update(file.read(_SAMPLE))
    return total.hexdigest()[:16]


_PIECE, _PIECES = 1 << 16, 64


def sampled_digest(paths: Sequence[Path]) -> str:
    """A short hash of files whatever their names: their sizes and pieces from all over them, small files whole.

    Four megabytes of each are read. Weights that were trained further differ in nearly every piece.
    """
    total = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        total.update(f"{size}:".encode())
        starts = range(0, size, _PIECE)
        if len(starts) > _PIECES:
            starts = [number * (size - _PIECE) // (_PIECES - 1) for number in range(_PIECES)]
        with path.open("rb") as file:
            for start in starts:
                file.seek(start)
                total.update(file.read(_PIECE))
    return total.hexdigest()[:16]
