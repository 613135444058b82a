"""Compile caches: whose they are, where they lie, how large, on what, and which of their files are broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.compiling.places import NETWORK_FILESYSTEMS
from paceline.doctor.checks.numbers import size
from paceline.doctor.findings import Finding, error, info, ok, warning

SUBJECT = "compile cache"
_LOOKED_UP = {"fxgraph", "aotautograd"}
"""Folders of entries whose damage torch notices; that of all other files is fatal."""
_LITTLE, _NOTHING = 2 << 30, 200 << 20


@dataclass(frozen=True)
class _Owner:
    """Who compiles into a cache."""

    name: str
    users: str
    """Which programs use it, to be told beside it: a reader sees several caches, and wants to know which is which."""
    elsewhere: str
    """What puts it into another folder."""


_OTHERS = "for programs other than Paceline, whose runs do not touch it"
_OWNERS = {
    "paceline": _Owner("Paceline's own", "for its runs, unless compiling.cache names another place", "compiling.cache"),
    "torch": _Owner("torch's default", _OTHERS, "TORCHINDUCTOR_CACHE_DIR"),
    "triton": _Owner("Triton's default", _OTHERS, "TRITON_CACHE_DIR"),
}


def check(facts: dict[str, Any]) -> list[Finding]:
    here = [cache for cache in facts["caches"] if cache["exists"] or cache["owner"] != "paceline" or _installed(facts)]
    return [finding for cache in here for finding in _cache(cache, _OWNERS[cache["owner"]], facts["environment"])]


def _installed(facts: dict[str, Any]) -> bool:
    return facts["packages"].get("paceline") is not None


def _cache(cache: dict[str, Any], owner: _Owner, environment: dict[str, str]) -> list[Finding]:
    chosen = f", as {owner.elsewhere} says" if owner.elsewhere in environment else ""
    where = f"in {cache['path']}{chosen} ({owner.users})"
    faults = [*_damage(cache, owner), *_place(cache, owner)]
    if not cache["files"]:
        why = "the first start compiles everything"
        if cache["owner"] != "paceline":
            why += "; where threads call compiled code, that is when it fails"
        return [info(SUBJECT, owner.name, f"nothing compiled yet {where}", why), *faults]
    rest = "" if cache["all_looked_at"] else "; too many to look into each"
    return [ok(SUBJECT, owner.name, f"{cache['files']} files, {size(cache['bytes'])}, {where}{rest}"), *faults]


def _damage(cache: dict[str, Any], owner: _Owner) -> list[Finding]:
    if cache["owner"] == "paceline":
        why = "the next run removes them and compiles them anew"
        return [info(SUBJECT, *_damaged(cache, owner, cache["damaged"]), why)] if cache["damaged"] else []
    entries = [one for one in cache["damaged"] if _LOOKED_UP.intersection(one["file"].split("/"))]
    code = [one for one in cache["damaged"] if one not in entries]
    remedy = f"with no launch running: rm -r {cache['path']}"
    found = []
    if code:
        why = "broken generated code fails at every start until somebody deletes it"
        found.append(error(SUBJECT, *_damaged(cache, owner, code), why, remedy))
    if entries:
        why = "at every start torch warns that it is unable to load a compiled graph, and compiles that one anew"
        found.append(warning(SUBJECT, *_damaged(cache, owner, entries), why, remedy))
    return found


def _damaged(cache: dict[str, Any], owner: _Owner, damaged: list[dict[str, str]]) -> tuple[str, str]:
    shown = "; ".join(f"{one['file']} ({one['reason']})" for one in damaged[:3])
    more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
    return f"damaged files in {owner.name}", f"{cache['path']}: {shown}{more}"


def _place(cache: dict[str, Any], owner: _Owner) -> list[Finding]:
    found: list[Finding] = []
    path = f"{owner.name}: {cache['path']}"
    if cache["kind"] in NETWORK_FILESYSTEMS:
        why = "files vanish under readers and locks hold nobody there: compilations fail at random"
        remedy = f"{owner.elsewhere} on a local disk"
        found.append(warning(SUBJECT, "on a network file system", f"{path} ({cache['kind']})", why, remedy))
    if cache["noexec"]:
        why = "compiled code is loaded from there, which this mount forbids"
        found.append(error(SUBJECT, "mounted noexec", path, why, f"{owner.elsewhere} elsewhere"))
    if not cache["writable"]:
        why = "nothing that is compiled can be kept, and most compilations fail"
        found.append(error(SUBJECT, "not writable", path, why, f"{owner.elsewhere} elsewhere"))
    if cache["free"] < _LITTLE:
        level = error if cache["free"] < _NOTHING else warning
        why = "a full disk leaves half-written files, which break later starts"
        found.append(level(SUBJECT, "little space", f"{path}: {size(cache['free'])} free", why, "make room there"))
    return found
