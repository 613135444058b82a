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
import errno
import glob
import json
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.compiling import damage
from paceline.compiling.archive import DRAFT, MANIFEST, TRUST, Unpacked, pack, read_manifest, unpack
from paceline.compiling.damage import Damage
from paceline.compiling.fingerprint import FILE_NAME, Fingerprint
from paceline.compiling.lock import Holder, holder, is_held, locked
from paceline.compiling.places import chosen_root, default_root, filesystem, is_network_filesystem, unwritable
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
_DRAFT_SECONDS = 86_400
_NO_ROOM = 1 << 20
"""Bytes; less than one small kernel and its library take."""


@dataclass(frozen=True)
class Repair:
    """What `CompileCache.repair` found and did; `message` says it in one line."""

    condition: Condition
    damages: list[Damage]
    message: str


@dataclass(frozen=True)
class _Was:
    """A file as the warm-up found it. Torch and Triton replace files (another inode) and never write into one."""

    inode: int
    fact: tuple[int, str]


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
        self._before: dict[str, _Was] = {}

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
            if Fingerprint.load(self.folder / FILE_NAME) != self.fingerprint:
                self.fingerprint.save(self.folder / FILE_NAME)
        except OSError as error:
            raise unwritable(self.folder, error) from None
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

        Raises:
            UserError: a damaged file cannot be removed.
        """
        manifest = read_manifest(self.folder) or {}
        try:
            repair = self._repair(killed)
        except OSError as error:
            raise unwritable(self.folder, error) from None
        self._remember(manifest)
        return repair

    def finish(self, parts: Collection[str], seconds: float | None = None) -> str | None:
        """Record that a warm-up ended, and what it left. Hold the lock.

        Only what is whole is recorded: a file that was there before and is not what `repair` found, or a new one that
        cannot be whole, was damaged while the warm-up ran. It is removed, or torch would complain of it at each start.

        Args:
            parts: what the warm-up ran.
            seconds: what it took; None, where it compiled nothing, keeps what was recorded.

        Returns:
            One line on what was removed, or on why nothing could be recorded; None where all is well.
        """
        files = damage.write_manifest(self.folder, self._files())
        damages = self._damaged_meanwhile(files)
        try:
            self._remove_units(damages)
            left = {name: fact for name, fact in files.items() if (self.folder / name).exists()}
            # What was removed has to be compiled once more, by whoever comes next, before any part counts as warm.
            self._record(() if damages else {*parts, *self._record_parts()}, seconds, left)
        except OSError as error:
            return f"compile cache {self.folder}: the warm-up cannot be recorded: {error.strerror}"
        if not damages:
            return self.no_room() if seconds is not None else None
        words = f"removed {_count(len(damages), 'entry', 'entries')} ({_first(damages, most=1)})"
        why = "something else cut, changed or deleted them while the warm-up ran"
        return f"compile cache {self.folder}: {words}: {why}; what is missing is compiled anew at the next start"

    def blame(self, error: Exception) -> UserError | None:
        """What to raise where `error`, of a warm-up, came from what happened to this cache meanwhile; else None."""
        if self._room() <= _NO_ROOM or os.strerror(errno.ENOSPC) in str(error):
            words = f"{os.strerror(errno.ENOSPC)} ({self._room() / 2**20:.1f} MiB free)"
            return unwritable(self.folder, OSError(errno.ENOSPC, words))
        lost = self._changed_meanwhile(damage.write_manifest(self.folder, self._files()))
        gone = not (self.folder / _STAMP).exists()
        if not (gone or lost):
            return None
        how = "deleted" if gone else f"changed ({_first(lost, most=1)})"
        return UserError(
            f"the compile cache {self.folder} was {how} by something else during the warm-up, and torch failed on it",
            "find what else writes there, and start again: the next start repairs it",
        )

    def holds(self, parts: Collection[str]) -> bool:
        """Whether a finished warm-up ran all of these parts."""
        return self.condition() == "finished" and set(parts) <= self._record_parts()

    def _repair(self, killed: Holder | None) -> Repair:
        condition, damages = self.condition(), self.check()
        if condition == "cold":
            return Repair("cold", [], f"compile cache {self.folder} is empty: compiling")
        if condition == "unfinished":
            return self._repair_unfinished(damages, killed)
        if not damages:
            return Repair(condition, [], f"compile cache {self.folder} is whole")
        self._remove_units(damages)
        (self.folder / MANIFEST).unlink(missing_ok=True)
        words = (
            f"removed {_count(len(damages), 'damaged entry', 'damaged entries')} ({_first(damages)}), compiling anew"
        )
        return Repair(condition, damages, f"compile cache {self.folder}: {words}")

    def _repair_unfinished(self, damages: list[Damage], killed: Holder | None) -> Repair:
        who = f"{killed} was killed in it" if killed else "it was stopped"
        start = f"compile cache {self.folder}: the last warm-up did not finish ({who})"
        files = list(self._files())
        if not damages:
            return Repair("unfinished", [], f"{start}; its {_count(len(files), 'file')} look whole and are kept")
        for folder in self.compiled:
            shutil.rmtree(folder)
            folder.mkdir(parents=True)
        removed = f"removed its {_count(len(files), 'file')}, for {_first(damages)}; compiling anew"
        return Repair("unfinished", damages, f"{start}; {removed}")

    def _room(self) -> int:
        place = next(place for place in (self.folder, *self.folder.absolute().parents) if place.exists())
        return shutil.disk_usage(place).free

    def no_room(self) -> str | None:
        """Torch goes on where it cannot keep what it compiled, with a warning of its own."""
        if self._room() > _NO_ROOM:
            return None
        left = f"{self._room() / 2**20:.1f} MiB free"
        return f"compile cache {self.folder}: its disk is full ({left}): what was compiled may not have been kept"

    def _remember(self, manifest: damage.Manifest) -> None:
        """Take down what lies there; what `check` has compared with `manifest` is not read again."""
        listed = [file for file in self._files() if str(file.relative_to(self.folder)) in manifest]
        facts = {str(file.relative_to(self.folder)): manifest[str(file.relative_to(self.folder))] for file in listed}
        facts |= damage.write_manifest(self.folder, (file for file in self._files() if file not in listed))
        self._before = {}
        for name, fact in facts.items():
            with contextlib.suppress(FileNotFoundError):
                self._before[name] = _Was((self.folder / name).stat().st_ino, fact)

    def _damaged_meanwhile(self, now: damage.Manifest) -> list[Damage]:
        """What `repair` found whole and is so no more, and what came since and cannot be whole."""
        written = {name for name, fact in now.items() if name not in self._before or self._is_rewritten(name, fact)}
        return self._changed_meanwhile(now) + damage.by_form(
            self.folder, [self.folder / name for name in sorted(written)]
        )

    def _changed_meanwhile(self, now: damage.Manifest) -> list[Damage]:
        return [
            Damage(name, reason)
            for name, was in self._before.items()
            if (reason := damage.changed(was.fact, now.get(name))) and not self._is_rewritten(name, now.get(name))
        ]

    def _is_rewritten(self, name: str, now: tuple[int, str] | None) -> bool:
        """Whether a file is another one, put in the place of the one that was there as compilers do it."""
        was = self._before[name]
        if now is None or now == was.fact:
            return False
        with contextlib.suppress(FileNotFoundError):
            return damage.is_rewritten(name) or (self.folder / name).stat().st_ino != was.inode
        return False

    def _remove_units(self, damages: Iterable[Damage]) -> None:
        for path in {path for found in damages for path in _unit(self.folder, found.path)}:
            _remove(path)

    def _record(self, parts: Collection[str], seconds: float | None, files: damage.Manifest) -> None:
        if seconds is None and read_manifest(self.folder) == files and set(parts) == self._record_parts():
            return
        kept = _recorded_seconds(self.folder) or 0.0
        record = {
            "parts": sorted(parts),
            "seconds": kept if seconds is None else round(seconds, 2),
            "written": time.time(),
            "files": files,
        }
        half = self.folder / f"{MANIFEST}.half"
        try:
            half.write_text(json.dumps(record))
            half.replace(self.folder / MANIFEST)
        finally:
            half.unlink(missing_ok=True)

    def _files(self) -> Iterator[Path]:
        return damage.cache_files(self.compiled)

    def _record_parts(self) -> set[str]:
        try:
            return set(json.loads((self.folder / MANIFEST).read_text())["parts"])
        except (OSError, ValueError, KeyError, TypeError):
            return set()


def list_caches(root: Path) -> list[CacheFacts]:
    """Every cache under `root`, the last used first.

    Raises:
        UserError: `root` lies where this user may not look.
    """
    marks = (path for mark in (FILE_NAME, "inductor") for path in _found(root, f"*/{mark}"))
    folders = {path.parent for path in marks if not path.parent.name.startswith(DRAFT)}
    return sorted(map(_facts, folders), key=lambda facts: facts.last_used, reverse=True)


def _found(root: Path, pattern: str) -> list[Path]:
    try:
        return list(root.glob(pattern))
    except PermissionError as error:
        raise UserError(
            f"cannot read the compile caches in {root}: {error.strerror}", "name a folder that you may read with --root"
        ) from None


def prune(root: Path, *, keep: Iterable[str] = (), older_than_days: float = 0.0) -> list[CacheFacts]:
    """Remove caches that were not used for so many days, but for the keys in `keep` and those in use by a warm-up.

    Returns:
        What was removed.

    Raises:
        UserError: one cannot be removed.
    """
    _remove_drafts(root)
    limit = time.time() - older_than_days * 86_400
    kept = set(keep)
    doomed = [facts for facts in list_caches(root) if facts.key not in kept and facts.last_used <= limit]
    return [facts for facts in doomed if facts.holder is None and _removed(facts.folder)]


def _remove_drafts(root: Path) -> None:
    """What unpacking left where it was killed; the draft of one at work is younger."""
    for draft in _found(root, f"{DRAFT}*"):
        if draft.stat().st_mtime < time.time() - _DRAFT_SECONDS:
            shutil.rmtree(draft, ignore_errors=True)


def _removed(folder: Path) -> bool:
    """Remove a cache under its lock; False where a warm-up has taken it meanwhile. Raises UserError."""
    file = _lock_file(folder)
    try:
        with locked(file, "paceline cache prune", 0.0):
            shutil.rmtree(folder)
            file.unlink()
    except FileNotFoundError:
        pass  # another prune was faster
    except OSError as error:
        raise unwritable(folder, error) from None
    except UserError:
        if is_held(file):
            return False
        raise
    return True


def last_warmup_seconds(root: Path) -> float | None:
    """What the most recent finished warm-up under `root` took, to say what the next one may take."""
    seconds = (_recorded_seconds(facts.folder) for facts in list_caches(root))
    return next((one for one in seconds if one), None)


def _recorded_seconds(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return float(json.loads((folder / MANIFEST).read_text())["seconds"])
    return None


def _facts(folder: Path) -> CacheFacts:
    sizes = list(_sizes(folder))
    lock_file = _lock_file(folder)
    return CacheFacts(
        folder=folder,
        fingerprint=Fingerprint.load(folder / FILE_NAME),
        condition=_condition(folder),
        bytes=sum(sizes),
        files=len(sizes),
        last_used=_last_used(folder),
        holder=(holder(lock_file) or _UNNAMED) if is_held(lock_file) else None,
    )


def _sizes(folder: Path) -> Iterator[int]:
    """Of every file; a launch may be at work there, so what vanishes meanwhile is left out."""
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.stat(os.path.join(where, name)).st_size


def _last_used(folder: Path) -> float:
    for place in (folder / _STAMP, folder):
        with contextlib.suppress(OSError):
            return place.stat().st_mtime
    return 0.0


_UNNAMED = Holder(pid=0, host="?", who="a process that has not said its name", since=0.0)


def _condition(folder: Path) -> Condition:
    if read_manifest(folder) is not None:
        return "finished"
    compiled = damage.cache_files((folder / "inductor", folder / "triton"))
    return "cold" if next(compiled, None) is None else "unfinished"


def _lock_file(folder: Path) -> Path:
    """Beside the folder, so that the folder can be removed while the lock is held."""
    return folder.with_name(f"{folder.name}.lock")


def _unit(folder: Path, path: str) -> list[Path]:
    """What must go when a file is damaged.

    Triton's files belong together in their folder. Of Inductor's, those of one name do: a library that is missing is
    built again from the source beside it, which nobody would write again if that were the one that is cut.
    """
    parts, file = Path(path).parts, folder / path
    if parts[0] == "triton" and len(parts) > 2:
        return [folder.joinpath(*parts[:2])]
    return [file, *file.parent.glob(f"{glob.escape(file.name.partition('.')[0])}.*")]


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _first(damages: list[Damage], most: int = 3) -> str:
    rest = f", and {len(damages) - most} more" if len(damages) > most else ""
    return ", ".join(map(str, damages[:most])) + rest
