"""`paceline cache`: what lies in the compile caches of this machine, and one of them as a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.compiling import archive, fingerprint
from paceline.compiling.cache import CacheFacts, list_caches, prune
from paceline.compiling.fingerprint import Fingerprint
from paceline.compiling.places import chosen_root
from paceline.errors import UserError

_PIPE_WIDTH = 200
"""Columns where the output is no terminal: one line a cache, for grep."""


def run_cache(
    action: str,
    file: str = "",
    *,
    root: str = "",
    key: str = "",
    older_than_days: float = 0.0,
    replace: bool = False,
) -> int:
    """Do one of list, prune, pack, unpack; returns the exit code. Raises UserError."""
    place, here = chosen_root(root), fingerprint.take().of_machine()
    caches = list_caches(place)
    if action == "unpack":
        print(archive.unpack(_file(file), place, here, replace))
    elif not caches and action != "pack":
        print(_none_yet(place))
    elif action == "list":
        _list(place, caches, here)
    elif action == "prune":
        keep = [key] if key else [facts.key for facts in caches if _fits(facts, here)]
        gone = prune(place, keep=keep, older_than_days=older_than_days)
        print(f"removed {len(gone)} of {len(caches)} caches, {sum(facts.bytes for facts in gone) / 2**20:.1f} MiB")
    else:
        target, folder = _file(file), _chosen(place, caches, key, here).folder
        print(f"packed {folder} into {target}: {archive.pack(folder, target) / 2**20:.1f} MiB")
    return 0


def _none_yet(root: Path) -> str:
    return f"no compile cache yet: it would be in {root}; the first compiled run makes it, or paceline warmup run.toml"


def _file(name: str) -> Path:
    if not name:
        raise UserError("no file was named", "for example: paceline cache pack warm.tar.gz")
    return Path(name)


def _fits(facts: CacheFacts, here: Fingerprint) -> bool:
    """Whether runs on this machine use it, whatever their configuration adds to the fingerprint."""
    return facts.fingerprint is not None and facts.fingerprint.of_machine() == here


def _chosen(root: Path, caches: Sequence[CacheFacts], key: str, here: Fingerprint) -> CacheFacts:
    """The cache of that key, or the only one of this machine."""
    if not caches:
        raise UserError(_none_yet(root), "run 'paceline warmup' with your config first")
    known = "; ".join(f"{facts.key} ({_made_for(facts)})" for facts in caches)
    fitting = [facts for facts in caches if (facts.key == key if key else _fits(facts, here))]
    if not fitting:
        wanted = f"cache {key}" if key else "cache that was made for this machine"
        raise UserError(f"no {wanted} under {root}", f"choose one with --key; there is: {known}")
    if len(fitting) > 1:
        raise UserError(f"{len(fitting)} caches under {root} fit this machine", f"choose one with --key: {known}")
    return fitting[0]


def _list(root: Path, caches: Sequence[CacheFacts], here: Fingerprint) -> None:
    table = Table(title=f"compile caches in {root}", title_justify="left")
    for column in ("key", "state", "size", "files", "last used", "made for"):
        table.add_column(column, overflow="fold")
    for facts in caches:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.last_used))
        name = facts.key + (" (this machine)" if _fits(facts, here) else "")
        size = f"{facts.bytes / 2**20:.1f} MiB"
        table.add_row(name, _state(facts), size, str(facts.files), used, _made_for(facts))
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def _state(facts: CacheFacts) -> str:
    return f"{facts.condition}, in use by {facts.holder}" if facts.holder else facts.condition


def _made_for(facts: CacheFacts) -> str:
    made = facts.fingerprint
    if made is None:
        return "unknown"
    device = "CPU" if made.gpu == fingerprint.ABSENT else made.gpu
    flags = [f"{name}={flag}" for name, flag in sorted(made.flags.items())]
    return ", ".join([f"torch {made.torch}", device, f"python {made.python}", *flags])
