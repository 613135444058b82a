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
        UserError: another process still holds it after `seconds`; names that process.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _acquire(handle, file, seconds)
        killed = holder(file)
        me = Holder(pid=os.getpid(), host=socket.gethostname(), who=who, since=time.time())
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
        handle = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try(handle)
    finally:
        os.close(handle)


def _try(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _acquire(handle: int, file: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not _try(handle):
        if time.monotonic() >= deadline:
            who = holder(file) or "another process"
            raise UserError(
                f"waited {seconds:.0f} s for the compile cache's lock {file}, held by {who}",
                "see what that process does (paceline doctor --pid), or raise compiling.warmup_seconds",
            )
        time.sleep(_POLL_SECONDS)


def _write(handle: int, text: str) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)
