"""The compile cache: one folder per fingerprint, locked while it is written, checked and repaired at every start.

    ROOT/KEY.lock              who writes now
    ROOT/KEY/fingerprint.json  what the key stands for
    ROOT/KEY/inductor          TORCHINDUCTOR_CACHE_DIR
    ROOT/KEY/triton            TRITON_CACHE_DIR
    ROOT/KEY/manifest.json     what the last finished warm-up left: sizes, hashes, the parts it ran, its seconds

Give each process ONE visible GPU: the keys of the entries contain the device's index.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.compiling import damage
from paceline.compiling.archive import MANIFEST, TRUST, Unpacked, pack, read_manifest, unpack
from paceline.compiling.damage import Damage
from paceline.compiling.fingerprint import FILE_NAME, Fingerprint
from paceline.compiling.lock import Holder, holder, is_held, locked
from paceline.compiling.places import chosen_root, default_root, filesystem, is_network_filesystem
from paceline.errors import UserError

__all__ = [
    "TRUST",
    "CacheFacts",
    "CompileCache",
    "Condition",
    "Damage",
    "Holder",
    "Repair",
    "Unpacked",
    "chosen_root",
    "default_root",
    "filesystem",
    "is_network_filesystem",
    "list_caches",
    "pack",
    "prune",
    "unpack",
]

Condition = Literal["cold", "unfinished", "finished"]
_STAMP = "used"


@dataclass(frozen=True)
class Repair:
    """What `CompileCache.repair` found and did; `message` says it in one line."""

    condition: Condition
    damages: list[Damage]
    message: str


@dataclass(frozen=True)
class CacheFacts:
    """One cache under a root, as `list_caches` sees it."""

    folder: Path
    fingerprint: Fingerprint | None
    condition: Condition
    bytes: int
    files: int
    last_used: float
    """Seconds since the epoch."""
    holder: Holder | None
    """Who holds its lock now."""

    @property
    def key(self) -> str:
        return self.folder.name


class CompileCache:
    """The cache of one fingerprint under `root`.

    Raises:
        UserError: `root` cannot be written.
    """

    def __init__(self, root: Path, fingerprint: Fingerprint) -> None:
        self.root = root
        self.fingerprint = fingerprint
        self.folder = root / fingerprint.key
        self.lock_file = _lock_file(self.folder)

    @property
    def compiled(self) -> tuple[Path, Path]:
        """The two folders that compilers write: Inductor's and Triton's."""
        return self.folder / "inductor", self.folder / "triton"

    def activate(self) -> None:
        """Point Inductor and Triton at this cache. Call it at the start of the process, before anything compiles."""
        inductor, triton = self.compiled
        try:
            inductor.mkdir(parents=True, exist_ok=True)
            triton.mkdir(exist_ok=True)
            (self.folder / _STAMP).touch()
            self.fingerprint.save(self.folder / FILE_NAME)
        except OSError as error:
            raise UserError(
                f"cannot write the compile cache {self.folder}: {error.strerror}",
                "set compiling.cache to a folder on a local disk that you may write",
            ) from None
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(inductor)
        os.environ["TRITON_CACHE_DIR"] = str(triton)

    def lock(self, who: str, seconds: float = 1800.0) -> contextlib.AbstractContextManager[Holder | None]:
        """Be the only one who compiles into this cache; see `paceline.compiling.lock.locked`."""
        return locked(self.lock_file, who, seconds)

    def holder(self) -> Holder | None:
        """Who holds the lock now, if anyone does."""
        return holder(self.lock_file) if is_held(self.lock_file) else None

    def condition(self) -> Condition:
        """Finished: a warm-up ended here. Unfinished: something was compiled, but none ended. Cold: nothing yet."""
        return _condition(self.folder)

    def check(self) -> list[Damage]:
        """Files that cannot be trusted. By the manifest's hashes, and by their form where it does not list them."""
        manifest = read_manifest(self.folder) or {}
        unlisted = (file for file in self._files() if str(file.relative_to(self.folder)) not in manifest)
        return damage.against_manifest(self.folder, manifest) + damage.by_form(self.folder, unlisted)

    def repair(self, killed: Holder | None = None) -> Repair:
        """Remove what `check` finds, so that it is compiled anew. Hold the lock.

        A damaged entry of a finished cache is removed alone. An unfinished one with any doubt in it is emptied.

        Args:
            killed: the holder of the lock that was killed in its warm-up, to be named.
        """
        condition, damages = self.condition(), self.check()
        if condition == "cold":
            return Repair("cold", [], f"compile cache {self.folder} is empty: compiling")
        if condition == "unfinished":
            return self._repair_unfinished(damages, killed)
        if not damages:
            return Repair(condition, [], f"compile cache {self.folder} is whole")
        for unit in {_unit(found.path) for found in damages}:
            _remove(self.folder / unit)
        (self.folder / MANIFEST).unlink(missing_ok=True)
        words = (
            f"removed {_count(len(damages), 'damaged entry', 'damaged entries')} ({_first(damages)}), compiling anew"
        )
        return Repair(condition, damages, f"compile cache {self.folder}: {words}")

    def finish(self, parts: Collection[str], seconds: float) -> None:
        """Record that a warm-up ended: `parts` name what it ran, `seconds` what it took. Hold the lock."""
        record = {
            "parts": sorted({*parts, *self._record_parts()}),
            "seconds": round(seconds, 2),
            "written": time.time(),
            "files": damage.write_manifest(self.folder, self._files()),
        }
        half = self.folder / f"{MANIFEST}.half"
        half.write_text(json.dumps(record))
        half.replace(self.folder / MANIFEST)

    def holds(self, parts: Collection[str]) -> bool:
        """Whether a finished warm-up ran all of these parts."""
        return self.condition() == "finished" and set(parts) <= self._record_parts()

    def _repair_unfinished(self, damages: list[Damage], killed: Holder | None) -> Repair:
        who = f"{killed} was killed in it" if killed else "it was stopped"
        start = f"compile cache {self.folder}: the last warm-up did not finish ({who})"
        files = list(self._files())
        if not damages:
            return Repair("unfinished", [], f"{start}; its {_count(len(files), 'file')} look whole and are kept")
        for folder in self.compiled:
            _remove(folder)
            folder.mkdir(parents=True)
        removed = f"removed its {_count(len(files), 'file')}, for {_first(damages)}; compiling anew"
        return Repair("unfinished", damages, f"{start}; {removed}")

    def _files(self) -> Iterator[Path]:
        return damage.cache_files(self.compiled)

    def _record_parts(self) -> set[str]:
        try:
            return set(json.loads((self.folder / MANIFEST).read_text())["parts"])
        except (OSError, ValueError, KeyError, TypeError):
            return set()


def list_caches(root: Path) -> list[CacheFacts]:
    """Every cache under `root`, the last used first."""
    folders = [path.parent for path in root.glob(f"*/{FILE_NAME}")] if root.is_dir() else []
    return sorted(map(_facts, folders), key=lambda facts: facts.last_used, reverse=True)


def prune(root: Path, *, keep: Iterable[str] = (), older_than_days: float = 0.0) -> list[CacheFacts]:
    """Remove caches that were not used for so many days, but for the keys in `keep` and those in use by a warm-up.

    Returns:
        What was removed.
    """
    limit = time.time() - older_than_days * 86_400
    kept = set(keep)
    doomed = [
        facts
        for facts in list_caches(root)
        if facts.key not in kept and facts.last_used <= limit and facts.holder is None
    ]
    for facts in doomed:
        shutil.rmtree(facts.folder, ignore_errors=True)
        _lock_file(facts.folder).unlink(missing_ok=True)
    return doomed


def last_warmup_seconds(root: Path) -> float | None:
    """What the most recent finished warm-up under `root` took, to say what the next one may take."""
    for facts in list_caches(root):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return float(json.loads((facts.folder / MANIFEST).read_text())["seconds"])
    return None


def _facts(folder: Path) -> CacheFacts:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    stamp = folder / _STAMP
    lock_file = _lock_file(folder)
    return CacheFacts(
        folder=folder,
        fingerprint=Fingerprint.load(folder / FILE_NAME),
        condition=_condition(folder),
        bytes=sum(sizes),
        files=len(sizes),
        last_used=(stamp if stamp.exists() else folder).stat().st_mtime,
        holder=(holder(lock_file) or _UNNAMED) if is_held(lock_file) else None,
    )


_UNNAMED = Holder(pid=0, host="?", who="a process that has not said its name", since=0.0)


def _condition(folder: Path) -> Condition:
    if read_manifest(folder) is not None:
        return "finished"
    compiled = damage.cache_files((folder / "inductor", folder / "triton"))
    return "cold" if next(compiled, None) is None else "unfinished"


def _lock_file(folder: Path) -> Path:
    """Beside the folder, so that the folder can be removed while the lock is held."""
    return folder.with_name(f"{folder.name}.lock")


def _unit(path: str) -> Path:
    """What must go when a file is damaged: Triton's files belong together in their folder, Inductor's stand alone."""
    parts = Path(path).parts
    return Path(*parts[:2]) if parts[0] == "triton" and len(parts) > 2 else Path(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _first(damages: list[Damage], most: int = 3) -> str:
    rest = f", and {len(damages) - most} more" if len(damages) > most else ""
    return ", ".join(map(str, damages[:most])) + rest
