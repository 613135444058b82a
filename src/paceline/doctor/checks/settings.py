"""Dynamo's, Inductor's and NCCL's settings that decide whether a launch compiles, falls back, or hangs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.doctor.findings import Finding, Level, info, ok, warning

SUBJECT = "settings"
_TRUE = {"1", "true", "yes", "on", "y"}


@dataclass(frozen=True)
class _Variable:
    """A variable of the environment that is a finding when it holds one of `values` (any, if none is named)."""

    name: str
    values: frozenset[str]
    level: Level
    why: str
    remedy: str = ""


def _on(name: str, level: Level, why: str) -> _Variable:
    return _Variable(name, frozenset(_TRUE), level, why, f"unset {name}")


def _off(name: str, level: Level, why: str) -> _Variable:
    return _Variable(name, frozenset({"0", "false", "no", "off"}), level, why, f"unset {name}")


_VARIABLES = (
    _on("TORCHDYNAMO_DISABLE", Level.ERROR, "nothing is compiled: flex_attention runs eager and builds all scores"),
    _on("TORCH_COMPILE_DISABLE", Level.ERROR, "nothing is compiled: flex_attention runs eager and builds all scores"),
    _on("TORCHDYNAMO_SUPPRESS_ERRORS", Level.WARNING, "what cannot be compiled runs eager without a word"),
    _on("TORCHINDUCTOR_FORCE_DISABLE_CACHES", Level.WARNING, "each process compiles everything at every start"),
    _off("TORCHINDUCTOR_FX_GRAPH_CACHE", Level.WARNING, "each process compiles everything at every start"),
    _off("TORCHINDUCTOR_AUTOGRAD_CACHE", Level.WARNING, "each process traces everything at every start"),
    _on("CUDA_LAUNCH_BLOCKING", Level.WARNING, "every kernel is waited for: several times slower"),
    _on("NCCL_P2P_DISABLE", Level.WARNING, "GPUs of this host talk through its memory"),
    _on("NCCL_SHM_DISABLE", Level.WARNING, "GPUs of this host talk through the network"),
    _on("NCCL_IB_DISABLE", Level.INFO, "hosts talk through TCP"),
    _off("TORCH_NCCL_ASYNC_ERROR_HANDLING", Level.WARNING, "a rank that died is noticed by nobody: the others hang"),
    _off("TORCH_NCCL_ENABLE_MONITORING", Level.WARNING, "nobody watches the watchdog: a hang inside it lasts for ever"),
    _on("TORCH_NCCL_BLOCKING_WAIT", Level.INFO, "every collective blocks the thread that calls it"),
    _Variable("NCCL_DEBUG", frozenset({"trace"}), Level.INFO, "logs each call, which costs time", "use INFO"),
    _Variable("LD_PRELOAD", frozenset(), Level.INFO, "libraries stand before torch's own"),
    _Variable("PYTORCH_CUDA_ALLOC_CONF", frozenset(), Level.INFO, "the allocator is not as torch sets it"),
    _Variable("TORCHINDUCTOR_CACHE_DIR", frozenset(), Level.INFO, "compiled code is kept there"),
)
_TIMEOUTS = ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "NCCL_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
_SHORTEST = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": 120}


def check(facts: dict[str, Any]) -> list[Finding]:
    return [
        *environment(facts["environment"]),
        *_dynamo(facts["torch"].get("dynamo") or {}),
        *_inductor(facts["torch"].get("inductor") or {}),
        *_timeouts(facts["environment"]),
    ]


def environment(variables: Mapping[str, str]) -> list[Finding]:
    """Variables that change how a launch runs. Also for the environment of a running process."""
    found: list[Finding] = []
    for known in _VARIABLES:
        value = variables.get(known.name)
        if value and (not known.values or value.lower() in known.values):
            found.append(Finding(known.level, SUBJECT, known.name, value, known.why, known.remedy))
    return found


def _dynamo(dynamo: dict[str, Any]) -> list[Finding]:
    if "settings" not in dynamo:
        return []
    limit = dynamo["settings"].get("recompile_limit")
    value = f"{limit} for each function's code, over all threads and devices"
    return [ok(SUBJECT, "recompile limit", value), _threads(dynamo)]


def _threads(dynamo: dict[str, Any]) -> Finding:
    what = "Dynamo's settings in other threads"
    if dynamo["holds_in_threads"]:
        return ok(SUBJECT, what, "as the main thread set them")
    return info(
        SUBJECT,
        what,
        f"defaults again: set to {dynamo['set']} in the main thread, a worker thread reads {dynamo['thread_saw']}",
        "from torch 2.12 on a setting holds in the thread that made it alone",
        "set it inside the thread, or run the thread under contextvars.copy_context()",
    )


def _inductor(inductor: dict[str, Any]) -> list[Finding]:
    if "fx_graph_cache" not in inductor:
        return []
    on = inductor["fx_graph_cache"] and inductor["autograd_cache"] and not inductor["force_disable_caches"]
    if on:
        return [ok(SUBJECT, "Inductor's caches", f"on; {inductor['compile_threads']} compile workers")]
    why = "each process compiles everything at every start, and every cold start is a window for FX races"
    return [warning(SUBJECT, "Inductor's caches", "off", why, "take the setting back that turned them off")]


def _timeouts(variables: Mapping[str, str]) -> list[Finding]:
    found: list[Finding] = []
    for name in (name for name in _TIMEOUTS if name in variables):
        value, least = variables[name], _SHORTEST.get(name, 0)
        if value.isdigit() and int(value) < least:
            why = "the watchdog kills a rank that compiles or saves for longer than that"
            found.append(warning(SUBJECT, name, value, why, f"{least} or more, or unset it"))
        else:
            found.append(info(SUBJECT, name, value))
    return found
