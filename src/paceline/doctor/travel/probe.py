"""Gathers what decides whether a launch starts here: versions, installs, GPUs, cache, limits, torch's own source.

Facts only; they are judged where the question was asked.
"""

from __future__ import annotations

import ast
import glob
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import pickletools
import platform
import re
import resource
import shutil
import site
import socket
import sys
import sysconfig
import tempfile
import time
from typing import Any

from paceline.doctor.travel.common import attempt, kept_environment, kilobytes, masked, mount_of, read
from paceline.doctor.travel.fx_source import fx_source
from paceline.doctor.travel.gpus import gpus, tools
from paceline.doctor.travel.luggage import NoAnswer, run_child

PACKAGES = (
    "torch",
    "triton",
    "pytorch-triton",
    "transformers",
    "numpy",
    "safetensors",
    "paceline",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-ml-py",
    "py-spy",
    "vllm",
    "flash-attn",
    "deepspeed",
)
_ENTRIES = re.compile(r"/(fxgraph|aotautograd)/")
"""Where torch keeps the graphs that it looks up: pickles."""
_CACHE_SECONDS = 4.0
_DRAFTS = ("tmp.", ".unpack-")
"""How the folders begin that Triton, torch and Paceline fill before they rename them: no harm in what is half there."""


def main(argument: dict[str, Any]) -> dict[str, Any]:
    """`argument`: ``timeout``, the seconds that the part which imports torch may take."""
    environment = kept_environment(os.environ)  # before anything imports Inductor, which writes into it
    return {
        "host": socket.gethostname(),
        "time": time.time(),
        "python": python_facts(),
        "environment": environment,
        "installs": installs([entry or os.getcwd() for entry in sys.path]),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "requires": {name: requirements(name) for name in ("torch", "paceline")},
        "fx": fx_source(),
        "tools": tools(),
        "gpus": gpus(),
        "limits": limits(),
        "places": places(),
        "caches": [{"owner": owner, **cache_facts(path)} for owner, path in cache_places()],
        "cpu": cpu_facts(),
        "memory": memory_facts(),
        "ports": port_facts(),
        "torch": torch_facts(float(argument["timeout"])),
    }


def torch_facts(timeout: float) -> dict[str, Any]:
    """What only torch itself can tell, from a process of its own, so that a torch that crashes is a fact too."""
    if importlib.util.find_spec("torch") is None:
        return {"absent": True}
    try:
        return run_child("torch_part", {}, timeout)
    except NoAnswer as silence:
        return {"code": silence.returncode, "fault": masked(silence.last_words()) or "no answer", "timeout": timeout}


# -- Python and what is installed ------------------------------------------------------------------------------------


def python_facts() -> dict[str, Any]:
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "path": [entry for entry in sys.path if entry],
        "user_site": site.getusersitepackages() if site.ENABLE_USER_SITE else None,
        "header": header if os.path.exists(header) else None,
        "start_method": multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "user": attempt(lambda: str(os.getuid()), AttributeError),
    }


def installs(path: list[str]) -> dict[str, list[dict[str, str]]]:
    """Every copy of torch, triton and transformers on the path, in the order in which Python would find them."""
    found: dict[str, list[dict[str, str]]] = {}
    for name in ("torch", "triton", "transformers"):
        copies = {os.path.realpath(entry): entry for entry in reversed(path) if _holds(entry, name)}
        found[name] = [{"place": entry, "version": _version_in(entry, name)} for entry in path if _first(copies, entry)]
    return found


def _first(copies: dict[str, str], entry: str) -> bool:
    return copies.get(os.path.realpath(entry)) == entry and copies.pop(os.path.realpath(entry)) == entry


def _holds(entry: str, name: str) -> bool:
    return os.path.isfile(os.path.join(entry, name, "__init__.py")) or os.path.isfile(os.path.join(entry, name + ".py"))


def _version_in(entry: str, name: str) -> str:
    """The versions that the metadata beside a package claim: more than one after a broken upgrade."""
    claims = glob.glob(os.path.join(glob.escape(entry), f"{name}-*.dist-info"))
    return (
        " and ".join(sorted(os.path.basename(claim)[len(name) + 1 : -len(".dist-info")] for claim in claims))
        or "no metadata"
    )


def _version(name: str) -> str | None:
    return attempt(lambda: importlib.metadata.version(name), importlib.metadata.PackageNotFoundError)


def requirements(name: str) -> list[str]:
    return attempt(lambda: importlib.metadata.requires(name), importlib.metadata.PackageNotFoundError) or []


# -- the host --------------------------------------------------------------------------------------------------------


def limits() -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return {"open_files": [soft, hard], "stack": stack, "core": resource.getrlimit(resource.RLIMIT_CORE)[0]}


def places() -> dict[str, dict[str, Any]]:
    """Free space and kind of the file systems that a launch writes to."""
    wanted = {"shared memory": "/dev/shm", "temporary files": tempfile.gettempdir(), "this folder": os.getcwd()}
    mounts = read("/proc/self/mounts")
    return {name: _place(path, mounts) for name, path in wanted.items() if os.path.isdir(path)}


def _place(path: str, mounts: str) -> dict[str, Any]:
    usage = shutil.disk_usage(path)
    mount = mount_of(path, mounts)
    return {
        "path": path,
        "total": usage.total,
        "free": usage.free,
        "kind": mount["kind"],
        "noexec": "noexec" in mount["options"].split(","),
        "writable": os.access(path, os.W_OK),
    }


def cache_places() -> list[tuple[str, str]]:
    """Whose caches of compiled code may lie here, and where: Paceline's own, a bare torch's, and Triton's if it is."""
    user = attempt(_user_name, (KeyError, OSError)) or "unknown"
    default = os.path.join(tempfile.gettempdir(), "torchinductor_" + user)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".triton", "cache")
    found = [("paceline", os.path.join(base, "paceline", "compile"))]
    found.append(("torch", os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default))
    return found + ([("triton", triton)] if os.path.isdir(triton) else [])


def _user_name() -> str:
    import getpass

    return getpass.getuser()


def cache_facts(path: str) -> dict[str, Any]:
    """Size and damage of one cache folder, as far as a few seconds reach."""
    existing = path
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing) or os.sep
    facts = {"path": path, "exists": existing == path, **_place(existing, read("/proc/self/mounts")), "place": path}
    files, size, damaged, whole = 0, 0, [], True
    end = time.monotonic() + _CACHE_SECONDS
    for folder, below, names in os.walk(path):
        below[:] = [name for name in below if not name.startswith(_DRAFTS)]
        for name in names:
            file = os.path.join(folder, name)
            files, size = files + 1, size + (attempt(lambda f=file: os.path.getsize(f)) or 0)
            if time.monotonic() > end:
                whole = False
            elif reason := damage(file):
                damaged.append({"file": os.path.relpath(file, path), "reason": reason})
    return {**facts, "path": path, "files": files, "bytes": size, "damaged": damaged, "all_looked_at": whole}


def damage(file: str) -> str | None:
    """Why a file of generated code, or an entry that torch looks up, cannot be whole; None where nothing is seen."""
    kind = os.path.splitext(file)[1]
    entry = _ENTRIES.search(file) and not os.path.basename(file).startswith(".")
    if (kind not in (".py", ".so", ".json", ".cubin") and not entry) or "__pycache__" in file:
        return None
    data = attempt(lambda: _bytes(file))
    if data is None:
        return None
    if not data:
        return None if os.path.basename(file) == "__init__.py" else "empty"
    if kind in (".so", ".cubin"):
        return _broken_elf(data)
    name, reader = ("a pickle", _walk) if entry else ("Python", ast.parse) if kind == ".py" else ("JSON", json.loads)
    return None if attempt(lambda: (reader(data),), (SyntaxError, ValueError)) else f"not {name}: cut or garbled"


def _walk(data: bytes) -> None:
    """Through a pickle, without loading it: loading runs what it names."""
    for _ in pickletools.genops(data):
        pass


def _bytes(file: str) -> bytes:
    with open(file, "rb") as opened:
        return opened.read()


def _broken_elf(data: bytes) -> str | None:
    """Linkers write the table of sections last, so a cut file does not reach its end."""
    if data[:4] != b"\x7fELF" or len(data) < 64:
        return "not an object file: cut or garbled"
    table = int.from_bytes(data[40:48], "little")
    end = table + int.from_bytes(data[58:60], "little") * int.from_bytes(data[60:62], "little")
    return "cut short" if len(data) < end else None


def cpu_facts() -> dict[str, Any]:
    quota = read("/sys/fs/cgroup/cpu.max").split()
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    limited = len(quota) == 2 and quota[0] != "max"
    return {"count": os.cpu_count(), "allowed": allowed, "quota": int(quota[0]) / int(quota[1]) if limited else None}


def memory_facts() -> dict[str, Any]:
    lines = dict(line.split(":", 1) for line in read("/proc/meminfo").splitlines() if ":" in line)
    limit, used = read("/sys/fs/cgroup/memory.max").strip(), read("/sys/fs/cgroup/memory.current").strip()
    return {
        "total": kilobytes(lines.get("MemTotal", "")),
        "available": kilobytes(lines.get("MemAvailable", "")),
        "limit": int(limit) if limit.isdigit() else None,
        "used_of_limit": int(used) if used.isdigit() else None,
    }


def port_facts() -> dict[str, Any]:
    """Whether the port on which ranks would meet is free here, and whether this host can find itself by name."""
    text = os.environ.get("MASTER_PORT", "29500")
    port = int(text) if text.isdigit() else None
    interfaces = [name for _, name in attempt(socket.if_nameindex) or []]
    return {
        "port": text,
        "chosen": "MASTER_PORT" in os.environ,
        "free": _is_free(port) if port is not None and 0 < port < 65536 else None,
        "own_name": attempt(lambda: socket.gethostbyname(socket.gethostname())),
        "interfaces": interfaces,
    }


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return attempt(lambda: trial.bind(("", port)) is None) is True
