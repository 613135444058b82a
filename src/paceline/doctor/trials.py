"""Judges what ``--compile-check`` and ``--race-check`` brought back."""

from __future__ import annotations

from typing import Any

from paceline.doctor.findings import Finding, error, info, ok, warning

COMPILE, RACE = "compile check", "race check"
_TOLERANCE = 2e-2
"""On CUDA flex_attention multiplies in TF32; a wrong kernel is wrong by far more."""
_SPAWN = "one process for each device, started by spawn; one thread of it calls compiled code (Paceline does so)"


def compile_findings(facts: dict[str, Any]) -> list[Finding]:
    return [finding for start in ("cold", "warm") for finding in _start(start, facts[start])] + _speed(facts)


def _start(start: str, facts: dict[str, Any]) -> list[Finding]:
    if "fault" in facts:
        why = "torch.compile does not work on this machine, in a fresh process with an empty cache"
        remedy = "see the findings on compilers, versions and GPUs (paceline doctor)"
        return [error(COMPILE, start, facts["fault"], why, remedy)]
    seconds = facts["seconds"]
    what = "flex_attention forward and backward" if facts["backward"] else "flex_attention forward"
    value = (
        f"{what} on {facts['device']}: first call {seconds['first call']:.1f} s, "
        f"second {seconds['second call']:.3f} s; torch imported in {seconds['import torch']:.1f} s; "
        f"{facts['traces']} traces, {facts['hits']} cache hits, {facts['misses']} misses"
    )
    found = [ok(COMPILE, start, value)]
    if not facts["largest_error"] <= _TOLERANCE:  # also when it is NaN
        why = "the compiled attention disagrees with plain softmax"
        found.append(
            error(COMPILE, "wrong result", f"largest error {facts['largest_error']:.3g}", why, "another torch")
        )
    return found


def _speed(facts: dict[str, Any]) -> list[Finding]:
    cold, warm = facts["cold"], facts["warm"]
    if "fault" in cold or "fault" in warm or not warm["misses"]:  # Dynamo itself traces a score_mod, warm or not
        return []
    why = "the second process compiled anew although the first one's cache lay there"
    return [warning(COMPILE, "the cache is not used", f"{warm['misses']} misses when warm", why, "see 'settings'")]


_HAZARDS = {
    "call during a trace": (
        "a compiled call fails while another thread traces",
        "threads of one process that drive several devices: each cold start, each new shape can end them",
    ),
    "overlapping traces": (
        "the flag stays set after two traces that overlapped",
        "every later call of a compiled function in that process fails",
    ),
    "trace over an eager operator": (
        "the flag stays set after a trace over an eager operator",
        "eager flex_attention or cond beside a compilation spoils the process for good",
    ),
    "fork during a trace": (
        "a child forked during a trace has the flag set for good",
        "DataLoader workers and Pool fork: if one is started while anything compiles, its compiled calls fail",
    ),
}


def race_findings(facts: dict[str, Any]) -> list[Finding]:
    found = [_hazard(name, seen, facts["torch"]) for name, seen in facts["hazards"].items()]
    if not any(seen.get("hit") for seen in facts["hazards"].values()):
        why = "other globals of a trace may still collide in threads"
        found.append(info(RACE, "torch " + facts["torch"], "none of these hazards", why, _SPAWN))
    return found


def _hazard(name: str, seen: dict[str, Any], torch: str) -> Finding:
    what, why = _HAZARDS[name]
    if "fault" in seen:
        return info(RACE, what, f"could not be tried: {seen['fault']}")
    if not seen["hit"]:
        return ok(RACE, what, f"not in torch {torch}")
    return warning(RACE, what, f"yes, in torch {torch}: {seen['seen']}", why, _SPAWN)
