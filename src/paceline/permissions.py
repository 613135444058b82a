"""Modes of what we write for others: safetensors and tempfile make theirs for the owner alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def apply_umask(path: Path) -> None:
    """Give a file, or a folder and all in it, the mode that this process's umask leaves. Raises OSError."""
    left = _left_by_umask(path.parent)
    for each in (path, *path.rglob("*")) if path.is_dir() else (path,):
        each.chmod(left if each.is_dir() else left & 0o666)


def _left_by_umask(beside: Path) -> int:
    """The mode of a new folder. (The umask itself can only be read by setting it, for all threads.)"""
    probe = beside / f".umask-{os.getpid()}"
    with contextlib.suppress(FileExistsError):
        probe.mkdir()
    try:
        return probe.stat().st_mode & 0o777
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()
