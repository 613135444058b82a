"""The training state on disk: safetensors and JSON, written aside, marked whole last, read only when whole.

A checkpoint is a folder `step-N`. Each rank writes its share and a list of what it wrote (`share-R.safetensors`,
`share-R.json`) into `step-N.partial`; when all have, rank 0 writes the marker (`whole.json`: size and SHA-256 of every
file) and renames the folder. The marker makes a checkpoint whole, the rename only makes it tidy: a `.partial` folder
whose marker verifies counts, and any folder without a marker that verifies is torn, named and ignored.

What is stored does not depend on the number of ranks: replicated tensors are dealt to the ranks by size, and a shard
carries its place, so that any number of ranks can put the state together again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import UserError
from paceline.pipeline.world import LostPeer

_MARKER = "whole.json"
_FORMAT = 1
_PARTIAL = ".partial"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Shard:
    """One rank's piece of a tensor: `values` are elements [start, start + n) of the flattened whole of `shape`."""

    values: Tensor
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Torn:
    """A checkpoint that cannot be used, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"ignored {self.path}: {self.reason}"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, on CPU."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    ignored: tuple[Torn, ...] = ()
    """Newer ones that were torn."""


Agree = Callable[[bool], bool]
"""Tells all ranks of a save whether this one succeeded; returns whether all did. It is a barrier too."""


def save(  # noqa: PLR0913 - every one is named at the call
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor | Shard],
    facts: dict[str, Any],
    *,
    rank: int = 0,
    world: int = 1,
    keep: int = 2,
    agree: Agree | None = None,
) -> Path:
    """Write one checkpoint and remove all but the newest `keep`; returns its folder.

    Every one of `world` ranks calls this with the same plain tensors and with the shards that it has; `agree` is
    needed when there is more than one. `facts` must be JSON. Raises UserError on all ranks when a file cannot be
    written (a full disk, say): earlier checkpoints are untouched then and the partial one is removed.
    """
    assert agree is not None or world == 1, "several ranks need `agree`"
    everyone = agree or (lambda mine: mine)
    partial = folder / f"step-{step}{_PARTIAL}"
    stages = [
        (rank == 0, lambda: _prepare(partial)),
        (True, lambda: _write_share(partial, _share(tensors, rank, world), rank)),
        (rank == 0, lambda: _finish(partial, step, facts, world)),
    ]
    for mine, work in stages:
        fault = _attempt(work) if mine else None
        if not everyone(fault is None):
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise _cannot_save(folder, step, fault)
    if rank == 0:
        _prune(folder, step, keep)
    return _final(partial)


def load_latest(folder: Path, report: Callable[[str], None] | None = None) -> Checkpoint | None:
    """The newest whole checkpoint of `folder`, or None; `report` hears of each torn one that is newer."""
    torn: list[Torn] = []
    for path in _candidates(folder):
        found = _try_read(path)
        if isinstance(found, Checkpoint):
            return Checkpoint(found.path, found.step, found.tensors, found.facts, tuple(torn))
        torn.append(found)
        if report is not None:
            report(str(found))
    return None


def load(path: Path) -> Checkpoint:
    """One checkpoint folder. Raises UserError when it is torn."""
    found = _try_read(path)
    if isinstance(found, Torn):
        raise UserError(f"{path} is not a whole checkpoint: {found.reason}", "resume from another one")
    return found


def latest_step(folder: Path) -> int | None:
    """Step of the newest checkpoint that has a marker, without reading its tensors."""
    marked = [path for path in _candidates(folder) if (path / _MARKER).exists()]
    return _step_of(marked[0]) if marked else None


# --- writing -------------------------------------------------------------------------------------------------------


def _attempt(work: Callable[[], None]) -> OSError | None:
    try:
        work()
    except OSError as error:
        return error
    return None


def _cannot_save(folder: Path, step: int, fault: OSError | None) -> UserError:
    if fault is None:
        what = f"the checkpoint of step {step} was not saved: another rank could not write its share"
        return LostPeer(what, "its own message says why")
    if fault.errno in _FULL:
        what = f"no space for the checkpoint of step {step} in {folder} ({_free(folder)} free)"
        remedy = "free some space and resume; earlier checkpoints are intact"
        return UserError(what, remedy)
    return UserError(f"cannot write the checkpoint of step {step} in {folder}: {fault}", "earlier ones are intact")


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB"
    except OSError:
        return "unknown space"


def _prepare(partial: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _share(tensors: Mapping[str, Tensor | Shard], rank: int, world: int) -> dict[str, Tensor | Shard]:
    """This rank's shards, and the plain tensors dealt to it: largest first, each to the rank with least so far."""
    mine: dict[str, Tensor | Shard] = {name: value for name, value in tensors.items() if isinstance(value, Shard)}
    plain = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    loads = [0] * world
    for name in sorted(plain, key=lambda name: (-plain[name].nbytes, name)):
        owner = loads.index(min(loads))
        loads[owner] += plain[name].nbytes
        if owner == rank:
            mine[name] = plain[name]
    return mine


def _write_share(partial: Path, share: dict[str, Tensor | Shard], rank: int) -> None:
    shards = {
        name: {"start": value.start, "shape": list(value.shape)}
        for name, value in share.items()
        if isinstance(value, Shard)
    }
    values = {name: value.values if isinstance(value, Shard) else value for name, value in share.items()}
    name = f"share-{rank}.safetensors"
    size, digest = _write_tensors(partial / name, values)
    listing = {"file": name, "bytes": size, "sha256": digest, "shards": shards}
    _write_bytes(partial / f"share-{rank}.json", _json(listing))


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> tuple[int, str]:
    """Stream tensors into a safetensors file; returns its size and SHA-256.

    Written here rather than by the library so that the digest costs no second reading, no more than one tensor is on
    the host at a time, and a full disk is an OSError with its number.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in [len(text).to_bytes(8, "little"), text]:
            file.write(piece)
            digest.update(piece)
        for tensor in tensors.values():
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + end, digest.hexdigest()


def _finish(partial: Path, step: int, facts: dict[str, Any], world: int) -> None:
    shares = []
    for rank in range(world):
        path = partial / f"share-{rank}.json"
        if not path.exists():
            # Each rank said that it wrote: the folder is not the same one everywhere.
            raise OSError(f"rank {rank} wrote its share to another disk: the run folder must be shared by all nodes")
        shares.append(json.loads(path.read_text()))
    marker = {"format": _FORMAT, "step": step, "facts": facts, "shares": shares}
    _write_bytes(partial / "whole.json.new", _json(marker))
    os.replace(partial / "whole.json.new", partial / _MARKER)
    _sync_folder(partial)
    final = _final(partial)
    if final.exists():
        _remove(final)
    os.rename(partial, final)
    _sync_folder(final.parent)


def _final(partial: Path) -> Path:
    return partial.with_name(partial.name.removesuffix(_PARTIAL))


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=True).encode()


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Keep the newest `keep` up to `step`. What lies beyond it is of a future that was given up, so it goes too."""
    whole = [path for path in _candidates(folder) if path.suffix != _PARTIAL and _step_of(path) <= step]
    for path in _candidates(folder):
        if path not in whole[:keep]:
            _remove(path)


def _remove(path: Path) -> None:
    # The marker goes first: a removal that is cut short must not look whole.
    (path / _MARKER).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


# --- reading -------------------------------------------------------------------------------------------------------


def _candidates(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first; the renamed one before a partial one of the same step."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and _step_of(path) >= 0]
    return sorted(found, key=lambda path: (-_step_of(path), path.suffix == _PARTIAL))


def _step_of(path: Path) -> int:
    number = path.name.removesuffix(_PARTIAL).removeprefix("step-")
    return int(number) if path.name.startswith("step-") and number.isdecimal() else -1


def _try_read(path: Path) -> Checkpoint | Torn:
    try:
        return _read(path)
    except _Damage as damage:
        return Torn(path, str(damage))


class _Damage(Exception):
    """Why a folder is not a whole checkpoint."""


def _read(path: Path) -> Checkpoint:
    marker = _read_marker(path)
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, list[Shard]] = {}
    for share in marker["shares"]:
        file = path / share["file"]
        _verify(file, share["bytes"], share["sha256"])
        for name, value in _tensors_of(file).items():
            place = share["shards"].get(name)
            if place is None:
                tensors[name] = value
            else:
                pieces.setdefault(name, []).append(Shard(value, place["start"], tuple(place["shape"])))
    for name, shards in pieces.items():
        tensors[name] = _assemble(name, shards)
    return Checkpoint(path, marker["step"], tensors, marker["facts"])


def _read_marker(path: Path) -> dict[str, Any]:
    file = path / _MARKER
    try:
        marker = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise _Damage("it was never finished (no marker)") from None
    except (OSError, ValueError) as error:
        raise _Damage(f"its marker cannot be read ({error})") from None
    if not isinstance(marker, dict) or marker.get("format") != _FORMAT:
        raise _Damage(f"its marker is not of format {_FORMAT}")
    return marker


def _verify(file: Path, size: int, digest: str) -> None:
    try:
        actual = file.stat().st_size
        if actual != size:
            raise _Damage(f"{file.name} has {actual} bytes of {size}")
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                raise _Damage(f"the content of {file.name} has changed since it was written")
    except OSError as error:
        raise _Damage(f"{file.name} cannot be read ({error.strerror})") from None


def _tensors_of(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            # Copied out of the mapped file, which the next checkpoints may remove.
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise _Damage(f"{file.name} cannot be read ({error})") from None


def _assemble(name: str, shards: list[Shard]) -> Tensor:
    shape = shards[0].shape
    ordered = sorted((shard for shard in shards if shard.values.numel()), key=lambda shard: shard.start)
    place = 0
    for shard in ordered:
        if shard.start != place:
            raise _Damage(f"elements {place} to {shard.start} of {name} are missing")
        place += shard.values.numel()
    if place != math.prod(shape):
        raise _Damage(f"{name} has {place} of {math.prod(shape)} elements")
    return torch.cat([shard.values.reshape(-1) for shard in ordered]).reshape(shape)
