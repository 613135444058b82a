"""A file lock that names its holder, waits no longer than it was told, and dies with its process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.compiling.places import unwritable
from paceline.errors import UserError

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Holder:
    """Who holds, or held, the lock."""

    pid: int
    host: str
    who: str
    since: float

    def __str__(self) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"{self.who} (pid {self.pid} on {self.host}, since {clock})"


def holder(file: Path) -> Holder | None:
    """Who wrote the lock file last and has not let go, if that can be read. Alive or killed: the file cannot tell."""
    try:
        return Holder(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


@contextlib.contextmanager
def locked(file: Path, who: str, seconds: float) -> Iterator[Holder | None]:
    """Hold `file` exclusively; the kernel lets go of it however this process ends.

    Args:
        who: what others are told about the holder, such as "rank 0".
        seconds: how long to wait for another holder.

    Yields:
        The holder before, if it was killed while it held the lock; else None.

    Raises:
        UserError: another process still holds it after `seconds`, and is named; or the file cannot be written.
    """
    handle = _acquire(file, seconds)
    try:
        killed = holder(file)
        me = Holder(pid=os.getpid(), host=socket.gethostname(), who=who, since=time.time())
        with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
            _write(handle, json.dumps(asdict(me)))
        try:
            yield killed
        finally:
            _write(handle, "")
    finally:
        os.close(handle)


def is_held(file: Path) -> bool:
    """Whether some process holds the lock now."""
    try:
        handle = _open_to_look(file)
    except OSError:
        return False
    try:
        return not _try(handle)
    finally:
        os.close(handle)


def _open_to_look(file: Path) -> int:
    """For writing where that is allowed: some network file systems lock nothing else."""
    try:
        return os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)


def _try(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _acquire(file: Path, seconds: float) -> int:
    """The locked file, opened; it is opened anew at each try, for another may have removed it meanwhile."""
    deadline = time.monotonic() + seconds
    while (handle := _open_locked(file)) is None:
        if time.monotonic() >= deadline:
            who = holder(file) or "another process"
            raise UserError(
                f"waited {seconds:.0f} s for the compile cache's lock {file}, held by {who}",
                "see what that process does (paceline doctor --pid), or raise compiling.warmup_seconds",
            )
        time.sleep(_POLL_SECONDS)
    return handle


def _open_locked(file: Path) -> int | None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(file, error) from None
    if _try(handle) and _is_still(file, handle):
        return handle
    os.close(handle)
    return None


def _is_still(file: Path, handle: int) -> bool:
    """Whether `file` names what was locked: a lock on a file that was removed keeps nobody out."""
    try:
        return os.path.samestat(file.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _write(handle: int, text: str) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)
