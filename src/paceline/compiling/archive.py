"""A warm cache as one file, to bring it to another host.

Compiled code is CODE: whoever unpacks a cache runs what its maker put in. Take one only from a host you trust.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from paceline.compiling import damage
from paceline.compiling.fingerprint import FILE_NAME, Fingerprint
from paceline.compiling.lock import locked
from paceline.compiling.places import unwritable
from paceline.errors import UserError
from paceline.permissions import apply_umask

MANIFEST = "manifest.json"
DRAFT = ".unpack-"
"""How a folder begins that is being unpacked, or was when its process was killed."""
TRUST = "a packed cache is code that will run here: unpack it only if you trust the host that made it"


@dataclass(frozen=True)
class Unpacked:
    """What `unpack` laid down. `differences` is empty when this machine can use it."""

    folder: Path
    fingerprint: Fingerprint
    differences: list[str]

    def __str__(self) -> str:
        if not self.differences:
            return f"unpacked {self.folder}; it matches this machine. Note: {TRUST}"
        return f"unpacked {self.folder}, but it does not match this machine and will not be used here: " + "; ".join(
            self.differences
        )


def read_manifest(folder: Path) -> damage.Manifest | None:
    """What the finished warm-up left, or None where none finished (or its record is damaged)."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return {str(name): (int(size), str(digest)) for name, (size, digest) in files.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def pack(folder: Path, file: Path) -> int:
    """Write the cache in `folder` as one file, fingerprint and manifest inside; returns its bytes.

    Raises:
        UserError: no warm-up finished there, a file is damaged, or `file` cannot be written.
    """
    manifest = read_manifest(folder)
    if manifest is None or Fingerprint.load(folder / FILE_NAME) is None:
        raise UserError(f"no finished compile cache in {folder}", "run 'paceline warmup' with your config first")
    if broken := damage.against_manifest(folder, manifest):
        raise UserError(f"the compile cache is damaged: {broken[0]}", "run 'paceline warmup' again, which repairs it")
    half = file.with_name(f"{file.name}.{os.getpid()}.half")
    try:
        with tarfile.open(half, "w:gz", compresslevel=3) as tar:
            for name in (FILE_NAME, MANIFEST, *sorted(manifest)):
                tar.add(folder / name, arcname=name, recursive=False)
        half.replace(file)
        return file.stat().st_size
    except OSError as error:
        raise UserError(
            f"cannot pack {folder} into {file}: {error.strerror}",
            "name a file in a folder that is there, may be written and has room",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            half.unlink()


def unpack(file: Path, root: Path, here: Fingerprint, replace: bool = False) -> Unpacked:
    """Lay a packed cache down under `root`, in the folder of its own fingerprint. Only from a host you trust: `TRUST`.

    Args:
        here: this machine's fingerprint, to say whether it fits. What a run's configuration decides is not compared.
        replace: overwrite a cache of the same fingerprint.

    Raises:
        UserError: not a packed cache, a damaged one, one that writes outside its folder, or one that is there already
            or in use; or `root` cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=DRAFT, dir=root))
    except OSError as error:
        raise unwritable(root, error) from None
    try:
        _extract(file, draft)
        packed = _verified(file, draft)
        folder = root / packed.key
        _put(draft, folder, replace)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Unpacked(folder, packed, here.of_machine().differences(packed.of_machine()))


def _put(draft: Path, folder: Path, replace: bool) -> None:
    """Under the cache's lock, so that no warm-up is at work in what is replaced."""
    with locked(folder.with_name(f"{folder.name}.lock"), "paceline cache unpack", 0.0):
        if folder.exists() and not replace:
            raise UserError(f"{folder} is there already", "add --replace, or prune it first")
        try:
            if folder.exists():
                shutil.rmtree(folder)
            apply_umask(draft)
            draft.replace(folder)
        except OSError as error:
            raise unwritable(folder, error) from None


def _extract(file: Path, draft: Path) -> None:
    try:
        with tarfile.open(file, "r:gz") as tar:
            members = tar.getmembers()
            _refuse_escapes(file, members)
            tar.extractall(draft, members=members, filter="data")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise unwritable(draft.parent, error) from None
        raise UserError(
            f"cannot unpack {file}: {error.strerror or error}", "give a file that 'paceline cache pack' wrote"
        ) from None
    except (EOFError, tarfile.TarError, ValueError, zlib.error) as error:
        raise UserError(f"cannot unpack {file}: {error}", "give a file that 'paceline cache pack' wrote") from None


def _refuse_escapes(file: Path, members: Iterable[tarfile.TarInfo]) -> None:
    for member in members:
        path = PurePosixPath(member.name)
        if not member.isfile() or path.is_absolute() or ".." in path.parts:
            raise UserError(
                f"{file} holds {member.name!r}, which is not a plain file inside its folder",
                "do not use this file: no packed cache of ours has such an entry",
            )


def _verified(file: Path, draft: Path) -> Fingerprint:
    fingerprint, manifest = Fingerprint.load(draft / FILE_NAME), read_manifest(draft)
    if fingerprint is None or manifest is None:
        raise UserError(f"{file} holds no fingerprint or no manifest", "give a file that 'paceline cache pack' wrote")
    found = {str(path.relative_to(draft)) for path in draft.rglob("*") if path.is_file()}
    unlisted = found - manifest.keys() - {FILE_NAME, MANIFEST}
    broken = [*damage.against_manifest(draft, manifest), *(damage.Damage(name, "not listed") for name in unlisted)]
    if broken:
        raise UserError(f"{file} is damaged: {broken[0]}", "copy it again from the host that made it")
    return fingerprint
