"""Versions and sizes as people write them."""

from __future__ import annotations

import re

Version = tuple[int, ...]


def version(text: str | None) -> Version:
    """The leading numbers of a version: "2.11.0+cu128" -> (2, 11, 0); () where there is none."""
    found = re.match(r"\d+(?:\.\d+)*", text or "")
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def release(text: str | None) -> Version:
    """The CUDA release in what nvcc or ptxas say of themselves: "... release 13.0, V13.0.88" -> (13, 0)."""
    found = re.search(r"release (\d+)\.(\d+)", text or "")
    return (int(found.group(1)), int(found.group(2))) if found else ()


def dotted(numbers: Version) -> str:
    return ".".join(map(str, numbers))


def size(count: float | None) -> str:
    """Bytes with a binary unit."""
    if count is None:
        return "?"
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] in ("B", "KiB") or value >= 100 else f"{value:.1f} {units[0]}"
