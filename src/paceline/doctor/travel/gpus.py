"""GPUs, and the compilers beside them."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from typing import Any

from paceline.doctor.travel.common import attempt, masked, read

_TOOL_TIMEOUT = 10


def tools() -> dict[str, Any]:
    """Compilers by name: place and what they call their version; None where there is none."""
    compilers = {"cc": os.environ.get("CC") or "gcc", "c++": os.environ.get("CXX") or "g++"}
    found = {name: _tool(command, "--version", first=True) for name, command in compilers.items()}
    found["clang"] = _tool("clang", "--version", first=True)
    found["nvcc"] = _tool("nvcc", "--version")
    found["ptxas"] = _tool("ptxas", "--version")
    chosen = os.environ.get("TRITON_PTXAS_PATH")
    found["TRITON_PTXAS_PATH"] = _tool(chosen, "--version") if chosen else None
    return found


def _tool(command: str, *words: str, first: bool = False) -> dict[str, str] | None:
    place = shutil.which(command)
    if place is None:
        return None
    lines = _output([place, *words]).strip().splitlines() or [""]
    return {"place": place, "version": lines[0] if first else next((x for x in lines if "release" in x), lines[-1])}


def _output(words: list[str]) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_TOOL_TIMEOUT, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def gpus() -> dict[str, Any]:
    """Through NVML where its Python binding is there, else through nvidia-smi."""
    try:
        import pynvml
    except ImportError:
        return _gpus_by_smi()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as fault:
        return {"source": "NVML", "devices": [], "fault": str(fault)}
    return _gpus_by_nvml(pynvml)


def _gpus_by_nvml(nvml: Any) -> dict[str, Any]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    return {
        "source": "NVML",
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "devices": [_device(nvml, index, handle) for index, handle in enumerate(handles)],
        "no_peer": [
            [a, b]
            for a, one in enumerate(handles)
            for b, other in enumerate(handles)
            if a < b and attempt(lambda x=one, y=other: nvml.nvmlDeviceGetP2PStatus(x, y, 0), nvml.NVMLError) != 0
        ],
    }


def _device(nvml: Any, index: int, handle: Any) -> dict[str, Any]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    holders = attempt(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), nvml.NVMLError) or []
    capability = attempt(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle), nvml.NVMLError)
    return {
        "index": index,
        "name": nvml.nvmlDeviceGetName(handle),
        "capability": list(capability) if capability else None,
        "total": memory.total,
        "free": memory.free,
        "mode": attempt(lambda: nvml.nvmlDeviceGetComputeMode(handle), nvml.NVMLError),
        "holders": [{"pid": held.pid, "bytes": held.usedGpuMemory, "command": _command(held.pid)} for held in holders],
    }


def _command(pid: int) -> str:
    words = read(f"/proc/{pid}/cmdline").split("\0")
    return masked(" ".join(words).strip())[:120] or "a process of another container"


_SMI_FIELDS = "index,name,compute_cap,memory.total,memory.free,driver_version"


def _gpus_by_smi() -> dict[str, Any]:
    if shutil.which("nvidia-smi") is None:
        return {"source": "none", "devices": []}
    table = _output(["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"])
    rows = [[word.strip() for word in row] for row in csv.reader(table.splitlines()) if len(row) == 6]
    banner = _output(["nvidia-smi"])
    cuda = banner.partition("CUDA Version:")[2].split()
    return {
        "source": "nvidia-smi",
        "driver": rows[0][5] if rows else None,
        "cuda": cuda[0] if cuda else None,
        "devices": [_smi_device(row) for row in rows],
        "no_peer": [],
        **({} if rows else {"fault": table.strip() or "nvidia-smi named no device"}),
    }


def _smi_device(row: list[str]) -> dict[str, Any]:
    return {
        "index": int(row[0]),
        "name": row[1],
        "capability": [int(part) for part in row[2].split(".") if part.isdigit()],
        "total": int(row[3]) << 20,
        "free": int(row[4]) << 20,
        "mode": None,
        "holders": [],
    }
