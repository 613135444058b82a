"""What can be told of a process that is not ours: /proc, and py-spy's stacks, several times."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from typing import Any

from paceline.doctor.travel.common import attempt, kept_environment, kilobytes, masked_command, read, status_of

SAMPLES = 3
_PAUSE = 0.25
_INTERPRETER = re.compile(r"/(lib)?python(\d[^/]*)?$")
_MOST_BELOW = 4
_KEPT_LOCAL = "old_is_fx_tracing_flag"
"""The only local variable whose presence is kept (never a value): it marks a thread inside FX's tracer."""


def main(argument: dict[str, Any]) -> dict[str, Any]:
    """`argument`: ``pid``; ``timeout``, seconds for each of py-spy's looks."""
    pid = int(argument["pid"])
    status = status_of(pid)
    if not status:
        return {"absent": True, "pid": pid, "host": socket.gethostname()}
    seen = _look(pid, status, float(argument["timeout"]))
    return seen if status_of(pid) else {"absent": True, "ended": True, "pid": pid, "host": socket.gethostname()}


def _look(pid: int, status: dict[str, str], timeout: float) -> dict[str, Any]:
    return {
        "pid": pid,
        "host": socket.gethostname(),
        "name": status.get("Name"),
        "state": status.get("State"),
        "command": masked_command(_zero_separated(f"/proc/{pid}/cmdline")),
        "executable": _link(f"/proc/{pid}/exe"),
        "kernel": "VmSize" not in status and status.get("State", "Z")[0] not in "ZX",
        "python": _is_python(pid),
        "python_below": _python_below(pid),
        "cwd": _link(f"/proc/{pid}/cwd"),
        "uid": status.get("Uid", "").split()[:1],
        "environment": _environment(pid),
        "memory": _memory(pid, status),
        "tasks": _tasks(pid),
        "files": _files(pid),
        "forked": _forked_children(pid),
        "torch": _torch_in_use(pid),
        **_stacks(pid, timeout),
        "rights": _rights(),
    }


def _maps(pid: int) -> list[str] | None:
    """The files that a process has mapped; None where this user may not see them."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip().replace(" (deleted)", "") for line in file]
    except OSError:
        return None
    return sorted({line[line.index("/") :] for line in lines if "/" in line})


def _is_python(pid: int) -> bool | None:
    """Whether an interpreter is mapped: the program itself, or libpython in another one. None: it cannot be seen."""
    maps = _maps(pid)
    return None if maps is None else any(_INTERPRETER.search(path) for path in maps)


def _python_below(pid: int) -> list[dict[str, Any]]:
    """The nearest Python processes among a process's descendants: what its user may have meant."""
    found: list[dict[str, Any]] = []
    waiting, mine = _children(pid), _ancestors(os.getpid())
    while waiting and len(found) < _MOST_BELOW:
        child = waiting.pop(0)
        if child not in mine and _is_python(child):
            command = masked_command(_zero_separated(f"/proc/{child}/cmdline"))
            found.append({"pid": child, "command": " ".join(command)[:80]})
        else:
            waiting += _children(child)
    return found


def _ancestors(pid: int) -> list[int]:
    """A process, its parent, and so on: those that ask."""
    found: list[int] = []
    while pid and pid not in found:
        found.append(pid)
        pid = int(status_of(pid).get("PPid", "0"))
    return found


def _children(pid: int) -> list[int]:
    return [int(child) for task in _task_ids(pid) for child in read(f"/proc/{pid}/task/{task}/children").split()]


def _zero_separated(path: str) -> list[str]:
    return [word for word in read(path).split("\0") if word]


def _link(path: str) -> str | None:
    return attempt(lambda: os.readlink(path))


def _environment(pid: int) -> dict[str, str] | None:
    if not os.access(f"/proc/{pid}/environ", os.R_OK):
        return None
    pairs = (word.partition("=") for word in _zero_separated(f"/proc/{pid}/environ"))
    return kept_environment({name: value for name, _, value in pairs})


def _memory(pid: int, status: dict[str, str]) -> dict[str, Any]:
    """Resident bytes, and the limit of the process's cgroup with how often it killed."""
    group = next((line[3:] for line in read(f"/proc/{pid}/cgroup").splitlines() if line.startswith("0::")), "")
    folder = "/sys/fs/cgroup" + (group if os.path.isdir("/sys/fs/cgroup" + group) else "")
    events = dict(line.split(" ", 1) for line in read(folder + "/memory.events").splitlines() if " " in line)
    limit, used = read(folder + "/memory.max").strip(), read(folder + "/memory.current").strip()
    return {
        "resident": kilobytes(status.get("VmRSS", "")),
        "peak": kilobytes(status.get("VmHWM", "")),
        "limit": int(limit) if limit.isdigit() else None,
        "used_of_limit": int(used) if used.isdigit() else None,
        "killed": int(events.get("oom_kill", "0")),
    }


def _tasks(pid: int) -> list[dict[str, Any]]:
    """Threads as the kernel sees them: name, state, and the call that a sleeping one sleeps in."""
    found = []
    for task in attempt(lambda: os.listdir(f"/proc/{pid}/task")) or []:
        folder = f"/proc/{pid}/task/{task}"
        state = read(f"{folder}/stat").rpartition(")")[2].split()
        found.append(
            {
                "id": int(task),
                "name": read(f"{folder}/comm").strip(),
                "state": state[0] if state else "?",
                "wchan": read(f"{folder}/wchan").strip(),
            }
        )
    return found


def _files(pid: int) -> dict[str, Any]:
    """Open files by kind, the ones that matter by name, and TCP sockets with their ends."""
    names = attempt(lambda: os.listdir(f"/proc/{pid}/fd"))
    if names is None:
        return {"refused": True}
    targets = [target for name in names if (target := _link(f"/proc/{pid}/fd/{name}"))]
    if names and not targets:
        return {"refused": True}
    inodes = {target[8:-1] for target in targets if target.startswith("socket:[")}
    limit = re.search(r"Max open files\s+(\S+)", read(f"/proc/{pid}/limits"))
    return {
        "count": len(targets),
        "limit": int(limit.group(1)) if limit and limit.group(1).isdigit() else None,
        "kinds": dict(Counter(_kind(target) for target in targets)),
        "devices": sorted({target for target in targets if target.startswith("/dev/nvidia")}),
        "caches": sorted({t for t in targets if "torchinductor" in t or "/.triton/" in t or "/paceline/compile" in t}),
        "deleted": sorted({target for target in targets if target.endswith(" (deleted)")})[:10],
        "tcp": _tcp(pid, inodes),
    }


def _kind(target: str) -> str:
    return (
        target.partition(":")[0] if not target.startswith("/") else "device" if target.startswith("/dev/") else "file"
    )


_TCP_STATES = {"01": "established", "02": "connecting", "08": "closed by the other end", "0A": "listening"}


def _tcp(pid: int, inodes: set[str]) -> list[dict[str, str]]:
    found = []
    for table in ("tcp", "tcp6"):
        for words in (line.split() for line in read(f"/proc/{pid}/net/{table}").splitlines()[1:]):
            if len(words) > 9 and words[9] in inodes:
                here, there, state = _address(words[1]), _address(words[2]), _TCP_STATES.get(words[3], words[3])
                found.append({"state": state, "here": here, "there": there})
    return found


def _address(text: str) -> str:
    host, _, port = text.partition(":")
    if len(host) == 8:
        return ".".join(str(int(host[i : i + 2], 16)) for i in (6, 4, 2, 0)) + f":{int(port, 16)}"
    loopback = host.upper() == "00000000000000000000000001000000"
    return f"{'[::1]' if loopback else '[ipv6]'}:{int(port, 16)}"


def _forked_children(pid: int) -> list[int]:
    """Children that never exec'ed: they run the parent's own command line, from the parent's own memory image."""
    own = read(f"/proc/{pid}/cmdline")
    return [child for child in _children(pid) if own and read(f"/proc/{child}/cmdline") == own]


def _task_ids(pid: int) -> list[str]:
    return attempt(lambda: os.listdir(f"/proc/{pid}/task")) or []


def _torch_in_use(pid: int) -> dict[str, Any]:
    """The torch whose library this process has mapped, and torch's version there; several are a fault."""
    maps = _maps(pid)
    if maps is None:
        return {"refused": True, "folders": [], "versions": []}
    libraries = [path for path in maps if path.endswith("/libtorch_cpu.so")]
    folders = sorted(os.path.dirname(os.path.dirname(library)) for library in libraries)
    versions = [re.search(r"__version__ = '([^']+)'", read(f"{folder}/version.py")) for folder in folders]
    return {"folders": folders, "versions": [found.group(1) for found in versions if found]}


# -- stacks ----------------------------------------------------------------------------------------------------------


def _stacks(pid: int, timeout: float) -> dict[str, Any]:
    spy = _py_spy()
    if spy is None:
        return {"samples": [], "spy_fault": "py-spy is not installed there", "spy_kind": "absent"}
    samples: list[Any] = []
    for turn in range(SAMPLES):
        time.sleep(_PAUSE if turn else 0)  # so that a thread which moves is seen to move
        try:
            samples.append(_sample(spy, pid, timeout))
        except (subprocess.SubprocessError, ValueError) as fault:
            words = fault.stderr if isinstance(fault, subprocess.CalledProcessError) else str(fault)
            return {"samples": samples, "spy_fault": _first_line(words), "spy_kind": _spy_kind(words)}
    return {"samples": samples, "spy_fault": None, "spy_kind": None}


def _py_spy() -> str | None:
    beside = [
        os.path.join(folder, "py-spy") for folder in (os.path.dirname(sys.executable), sysconfig.get_path("scripts"))
    ]
    return next((place for place in beside if os.access(place, os.X_OK)), shutil.which("py-spy"))


def _sample(spy: str, pid: int, timeout: float) -> list[dict[str, Any]]:
    command = [spy, "dump", "--pid", str(pid), "--json", "--locals"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    return [without_values(thread) for thread in json.loads(done.stdout)]


def without_values(thread: dict[str, Any]) -> dict[str, Any]:
    """A thread of py-spy's dump without its variables' values: those stay where they are."""
    return {
        "name": thread.get("thread_name"),
        "thread_id": thread.get("thread_id"),
        "os_thread_id": thread.get("os_thread_id"),
        "active": thread.get("active"),
        "owns_gil": thread.get("owns_gil"),
        "frames": [_frame(frame) for frame in thread["frames"]],
    }


def _frame(frame: dict[str, Any]) -> dict[str, Any]:
    held = [local["name"] for local in frame.get("locals") or [] if local["name"] == _KEPT_LOCAL]
    return {
        "name": frame["name"],
        "file": frame.get("short_filename") or frame["filename"],
        "line": frame["line"],
        **({"locals": held} if held else {}),
    }


def _first_line(words: str) -> str:
    return next((line.strip() for line in words.splitlines() if line.strip()), "no reason given")


def _spy_kind(words: str) -> str:
    lowered = words.lower()
    if "permission" in lowered or "not permitted" in lowered:
        return "refused"
    if "timed out" in lowered:
        return "timed out"
    return "not python" if "failed to find python" in lowered or "python version" in lowered else "other"


def _rights() -> dict[str, Any]:
    """What decides whether this process may look into another."""
    capabilities = status_of(os.getpid()).get("CapEff", "0")
    scope = read("/proc/sys/kernel/yama/ptrace_scope").strip()
    return {
        "uid": os.geteuid(),
        "may_trace": bool(int(capabilities, 16) >> 19 & 1),
        "ptrace_scope": int(scope) if scope.isdigit() else None,
        "container": os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv") or "container" in os.environ,
    }
