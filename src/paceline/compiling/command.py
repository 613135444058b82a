"""`paceline cache`: what lies in the compile caches of this machine, and one of them as a file."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.compiling import archive, fingerprint
from paceline.compiling.cache import CacheFacts, list_caches, prune
from paceline.compiling.places import chosen_root
from paceline.errors import UserError


def run_cache(action: str, file: str = "", *, root: str = "", key: str = "", older_than_days: float = 0.0) -> int:
    """Do one of list, prune, pack, unpack; returns the exit code. Raises UserError."""
    place = chosen_root(root)
    if action == "list":
        _list(place)
    elif action == "prune":
        gone = prune(place, keep=[key or fingerprint.take().key], older_than_days=older_than_days)
        print(f"removed {len(gone)} caches, {sum(facts.bytes for facts in gone) / 2**20:.1f} MiB")
    elif action == "pack":
        folder = _chosen(place, key).folder
        print(f"packed {folder} into {file}: {archive.pack(folder, _file(file)) / 2**20:.1f} MiB")
    else:
        print(archive.unpack(_file(file), place, fingerprint.take()))
    return 0


def _file(name: str) -> Path:
    if not name:
        raise UserError("no file was named", "for example: paceline cache pack warm.tar")
    return Path(name)


def _chosen(root: Path, key: str) -> CacheFacts:
    caches = list_caches(root)
    wanted = key or fingerprint.take().key
    for facts in caches:
        if facts.key == wanted:
            return facts
    known = ", ".join(facts.key for facts in caches) or "none"
    raise UserError(f"no cache {wanted} under {root}", f"choose one with --key; there is: {known}")


def _list(root: Path) -> None:
    here = fingerprint.take().key
    table = Table(title=f"compile caches in {root}")
    for column in ("key", "state", "size", "files", "last used", "made for"):
        table.add_column(column, overflow="fold")
    for facts in list_caches(root):
        made_for = facts.fingerprint
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.last_used))
        words = f"torch {made_for.torch}, {made_for.gpu}, python {made_for.python}" if made_for else "unknown"
        name = facts.key + (" (this machine)" if facts.key == here else "")
        table.add_row(name, str(facts.condition), f"{facts.bytes / 2**20:.1f} MiB", str(facts.files), used, words)
    Console().print(table)
