"""Compile caches: where they lie, how large, on what, and which of their files are broken."""

from __future__ import annotations

from typing import Any

from paceline.compiling.places import NETWORK_FILESYSTEMS
from paceline.doctor.checks.numbers import size
from paceline.doctor.findings import Finding, error, info, ok, warning

SUBJECT = "compile cache"
_LITTLE, _NOTHING = 2 << 30, 200 << 20


def check(facts: dict[str, Any]) -> list[Finding]:
    return [finding for cache in facts["caches"] for finding in _cache(cache)]


def _cache(cache: dict[str, Any]) -> list[Finding]:
    faults = [*_damage(cache), *_place(cache)]
    value = f"{cache['path']}: {cache['files']} files, {size(cache['bytes'])}"
    cold = not cache["files"]
    if cold:
        why = "the first start compiles everything; where threads call compiled code, that is when it fails"
        first = info(SUBJECT, "empty", cache["path"], why)
    else:
        rest = "" if cache["all_looked_at"] else " (too many to look into each)"
        first = ok(SUBJECT, "in use", value + rest)
    return [first, *faults]


def _damage(cache: dict[str, Any]) -> list[Finding]:
    damaged = cache["damaged"]
    if not damaged:
        return []
    shown = "; ".join(f"{one['file']} ({one['reason']})" for one in damaged[:3])
    more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
    return [
        error(
            SUBJECT,
            "damaged files",
            f"in {cache['path']}: {shown}{more}",
            "broken generated code fails at every start until somebody deletes it",
            f"with no launch running: rm -r {cache['path']} (Paceline's own cache repairs itself)",
        )
    ]


def _place(cache: dict[str, Any]) -> list[Finding]:
    found: list[Finding] = []
    path = cache["path"]
    if cache["kind"] in NETWORK_FILESYSTEMS:
        why = "files vanish under readers and locks hold nobody there: compilations fail at random"
        remedy = "TORCHINDUCTOR_CACHE_DIR on a local disk"
        found.append(warning(SUBJECT, "on a network file system", f"{path} ({cache['kind']})", why, remedy))
    if cache["noexec"]:
        why = "compiled code is loaded from there, which this mount forbids"
        found.append(error(SUBJECT, "mounted noexec", path, why, "TORCHINDUCTOR_CACHE_DIR elsewhere"))
    if not cache["writable"]:
        why = "nothing that is compiled can be kept, and most compilations fail"
        found.append(error(SUBJECT, "not writable", path, why, "TORCHINDUCTOR_CACHE_DIR elsewhere"))
    if cache["free"] < _LITTLE:
        level = error if cache["free"] < _NOTHING else warning
        why = "a full disk leaves half-written files, which break later starts"
        found.append(level(SUBJECT, "little space", f"{path}: {size(cache['free'])} free", why, "make room there"))
    return found
