"""How this torch asks whether FX is tracing: the check that a launch with threads dies in."""

from __future__ import annotations

from typing import Any

from paceline.doctor.findings import Finding, info, ok, warning

SUBJECT = "FX tracing"


def check(facts: dict[str, Any]) -> list[Finding]:
    fx = facts["fx"]
    return [_implementation(fx), *_setting(facts)] if fx else []


def _implementation(fx: dict[str, Any]) -> Finding:
    reader = f"asked by {fx['reader'] or 'an unknown reader'} at every call of a compiled function (--source shows it)"
    if fx["kind"] == "per thread":
        return ok(SUBJECT, "the flag", f"per thread, {reader}")
    if fx["kind"] == "unknown":
        why = "this version of torch keeps it in a way that is not known here"
        return info(SUBJECT, "the flag", f"not recognised, {reader}", why, "paceline doctor --race-check tries it")
    hidden = ", partly hidden by another global while Dynamo compiles" if fx["compiling_flag_is_global"] else ""
    return info(
        SUBJECT,
        "the flag",
        f"one for the whole process, {reader}{hidden}",
        "a thread that traces or compiles makes compiled calls of every other thread fail; overlapping traces and "
        "forks leave it set for good",
        "one process for each device, started by spawn, one thread of it calling compiled code (Paceline does so)",
    )


def _setting(facts: dict[str, Any]) -> list[Finding]:
    settings = (facts["torch"].get("dynamo") or {}).get("settings") or {}
    if settings.get("error_on_nested_fx_trace", True):
        return []
    return [
        warning(
            SUBJECT,
            "error_on_nested_fx_trace",
            "off",
            "the race is not gone, only silent: what it hits runs eager, and eager flex_attention builds all scores",
            "leave it on; remove the threads instead",
        )
    ]


def source(facts: dict[str, Any]) -> list[str]:
    """The lines of the installed torch that make up the check, for ``--source``."""
    lines: list[str] = []
    for place in (facts["fx"] or {}).get("lines", []):
        lines += [f"{place['file']}:{place['line']}", *(f"    {line}" for line in place["text"].splitlines())]
    return lines
