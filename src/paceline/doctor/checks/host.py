"""The host: compilers and headers, shared memory, open files, processors, memory, ports."""

from __future__ import annotations

from typing import Any

from paceline.doctor.checks.numbers import size
from paceline.doctor.findings import Finding, error, info, ok, warning

SUBJECT = "host"
_FEW_FILES, _TOO_FEW_FILES = 4096, 1024
_SMALL_SHM = 1 << 30


def check(facts: dict[str, Any]) -> list[Finding]:
    return [
        *_compilers(facts),
        *_shared_memory(facts),
        *_open_files(facts["limits"]),
        *_processors(facts),
        *_memory(facts["memory"]),
        *_temporary(facts["places"].get("temporary files")),
        *_ports(facts["ports"], facts["environment"]),
    ]


def _compilers(facts: dict[str, Any]) -> list[Finding]:
    """Triton builds its launchers with a C compiler, Inductor its CPU code with a C++ compiler: both want Python.h."""
    tools, on_gpu = facts["tools"], bool(facts["torch"].get("cuda_build"))
    compiler = tools["c++"] or tools["clang"] or (tools["cc"] if on_gpu else None)
    found: list[Finding] = []
    if compiler is None:
        what = "Triton's launchers" if on_gpu else "CPU code"
        why = f"torch.compile builds {what} with it: every compilation fails"
        found.append(error(SUBJECT, "no C++ compiler", "neither g++ nor clang", why, "apt-get install g++"))
    else:
        found.append(ok(SUBJECT, "C++ compiler", f"{compiler['version']} at {compiler['place']}"))
    if facts["python"]["header"] is None:
        why = "what torch.compile builds includes it: 'fatal error: Python.h: No such file or directory'"
        remedy = (
            "install this Python's headers (apt-get install python3-dev), or use a Python that brings them (uv's does)"
        )
        found.append(error(SUBJECT, "no Python.h", f"for Python {facts['python']['version']}", why, remedy))
    return found


def _shared_memory(facts: dict[str, Any]) -> list[Finding]:
    place = facts["places"].get("shared memory")
    if place is None:
        return [warning(SUBJECT, "no /dev/shm", "", "ranks of one host talk through it", "mount a tmpfs there")]
    value = f"{size(place['free'])} of {size(place['total'])} free in /dev/shm"
    if place["free"] >= _SMALL_SHM:
        return [ok(SUBJECT, "shared memory", value)]
    several = len(facts["gpus"]["devices"]) > 1
    why = "NCCL and data loading pass data through it: 'Bus error' or 'No space left on device' when it is full"
    level = error if several and place["free"] < _SMALL_SHM // 8 else warning
    return [level(SUBJECT, "little shared memory", value, why, "docker run --shm-size=16g (or --ipc=host); empty it")]


def _open_files(limits: dict[str, Any]) -> list[Finding]:
    soft, hard = limits["open_files"]
    value = f"{soft} (may be raised to {hard})"
    if soft >= _FEW_FILES or soft < 0:
        return [ok(SUBJECT, "open files", value)]
    why = "each rank holds sockets to the others and files of data and cache: 'Too many open files'"
    remedy = f"ulimit -n {hard}"
    if soft < _TOO_FEW_FILES:
        return [warning(SUBJECT, "open files", value, why, remedy)]
    return [info(SUBJECT, "open files", value, why, remedy)]


def _processors(facts: dict[str, Any]) -> list[Finding]:
    cpu, wanted = facts["cpu"], facts["environment"].get("OMP_NUM_THREADS")
    allowed = cpu["allowed"] or 1
    quota = f", {cpu['quota']:g} by the container's quota" if cpu["quota"] else ""
    value = f"{allowed} of {cpu['count']} usable{quota}" + (f"; OMP_NUM_THREADS={wanted}" if wanted else "")
    devices = len(facts["gpus"]["devices"])
    if wanted and wanted.isdigit() and int(wanted) > allowed:
        why = "more threads than processors take turns on them: many times slower"
        return [warning(SUBJECT, "processors", value, why, f"OMP_NUM_THREADS={allowed} or less")]
    if devices > allowed or (allowed == 1 and (cpu["count"] or 1) > 1):
        why = "each worker needs a processor of its own, and compiling needs more"
        return [warning(SUBJECT, "processors", value, why, "widen the affinity (taskset, the container's cpuset)")]
    if cpu["quota"] and cpu["quota"] < allowed:
        why = "programs count processors, not the quota, and start too many threads"
        return [info(SUBJECT, "processors", value, why, f"OMP_NUM_THREADS={max(1, int(cpu['quota']))}")]
    return [ok(SUBJECT, "processors", value)]


def _memory(memory: dict[str, Any]) -> list[Finding]:
    if not memory["total"]:
        return []
    total = min(memory["total"], memory["limit"] or memory["total"])
    limited = total < memory["total"]
    free = total - (memory["used_of_limit"] or 0) if limited else memory["available"]
    value = f"{size(free)} of {size(total)} free" + (" (the container's limit)" if limited else "")
    if free and free > 4 << 30:
        return [ok(SUBJECT, "memory", value)]
    why = "the OOM killer ends a worker without a message while it loads a model or compiles"
    return [warning(SUBJECT, "memory", value, why, "end what holds it, or raise the container's limit")]


def _temporary(place: dict[str, Any] | None) -> list[Finding]:
    if place is None:
        return []
    value = f"{place['path']}: {size(place['free'])} free ({place['kind']})"
    if place["free"] > 1 << 30 and place["writable"]:
        return [ok(SUBJECT, "temporary files", value)]
    why = "compilers and Triton write there first: compilations fail"
    return [warning(SUBJECT, "temporary files", value, why, "make room, or set TMPDIR")]


def _ports(ports: dict[str, Any], environment: dict[str, str]) -> list[Finding]:
    found: list[Finding] = []
    name = f"port {ports['port']}"
    if ports["free"] is False and ports["chosen"]:
        why = "ranks meet on MASTER_PORT: 'Address already in use', unless it is a run of yours that holds it"
        found.append(warning(SUBJECT, name, "in use", why, f"ss -ltnp 'sport = :{ports['port']}' says by whom"))
    elif ports["free"] is False:
        found.append(info(SUBJECT, name, "in use", "it is torchrun's usual one; a second launch needs another"))
    elif ports["free"]:
        found.append(ok(SUBJECT, name, "free"))
    elif ports["chosen"]:
        found.append(error(SUBJECT, "MASTER_PORT", ports["port"], "it is no port", "a number from 1024 to 65535"))
    if ports["own_name"] is None:
        why = "gloo and torchrun look it up, and wait for it or fail"
        found.append(warning(SUBJECT, "own name", "cannot be resolved", why, "add the host's name to /etc/hosts"))
    return [*found, *_interface(ports, environment)]


def _interface(ports: dict[str, Any], environment: dict[str, str]) -> list[Finding]:
    found: list[Finding] = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        names = [name for name in environment.get(variable, "").lstrip("=").split(",") if name and name[0] != "^"]
        if names and not any(there.startswith(name) for name in names for there in ports["interfaces"]):
            why = "no network interface here has such a name: ranks cannot meet"
            value = f"{environment[variable]}; there are {', '.join(ports['interfaces'])}"
            found.append(error(SUBJECT, variable, value, why, f"unset {variable}, or name one that is there"))
    return found
