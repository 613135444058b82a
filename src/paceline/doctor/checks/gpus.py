"""GPUs: whether torch sees them, what is free, who holds it, and which cannot reach each other."""

from __future__ import annotations

from typing import Any

from paceline.doctor.checks.numbers import size
from paceline.doctor.findings import Finding, error, info, ok, warning

SUBJECT = "GPUs"
_MOSTLY_FREE = 0.9


def check(facts: dict[str, Any]) -> list[Finding]:
    gpus = facts["gpus"]
    if not gpus["devices"]:
        return [_none(facts)]
    return [*_seen_by_torch(facts), *(_device(device) for device in gpus["devices"]), *_peers(gpus), *_arches(facts)]


def _none(facts: dict[str, Any]) -> Finding:
    fault = facts["gpus"].get("fault")
    wanted = facts["torch"].get("cuda_build")
    if fault and wanted:
        return warning(
            SUBJECT,
            "none found",
            fault,
            "this torch is built for CUDA, but no NVIDIA driver answers here",
            "in a container: start it with --gpus all and the NVIDIA runtime; else install or reload the driver",
        )
    return info(SUBJECT, "none found", fault or "no NVIDIA driver", "on a CPU, drafters train with dense attention")


def _seen_by_torch(facts: dict[str, Any]) -> list[Finding]:
    cuda, there = facts["torch"].get("cuda"), len(facts["gpus"]["devices"])
    if not cuda or "fault" in cuda:
        return []
    if not cuda["available"]:
        return [
            error(
                SUBJECT,
                "torch sees no GPU",
                f"{there} there; torch says: {cuda['why']}",
                "training would run on the CPU",
                _blind_remedy(facts),
            )
        ]
    if cuda["count"] == there:
        return [ok(SUBJECT, "seen by torch", f"{there} of {there}")]
    value = (
        f"{cuda['count']} of {there} (CUDA_VISIBLE_DEVICES={facts['environment'].get('CUDA_VISIBLE_DEVICES', '')!r})"
    )
    return [info(SUBJECT, "seen by torch", value)]


def _blind_remedy(facts: dict[str, Any]) -> str:
    visible = facts["environment"].get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"unset CUDA_VISIBLE_DEVICES (it is {visible!r})"
    if not facts["torch"]["cuda_build"]:
        return "install a torch that is built for CUDA, from the index of your CUDA version"
    return "see the driver's finding under versions; nvidia-smi must work for this user too"


def _device(device: dict[str, Any]) -> Finding:
    name = f"GPU {device['index']}"
    value = f"{device['name']}, {size(device['free'])} of {size(device['total'])} free"
    holders = "; ".join(
        f"pid {held['pid']} holds {size(held['bytes'])} ({held['command']})" for held in device["holders"]
    )
    if device["mode"] == 2:
        return error(SUBJECT, name, value, "its compute mode prohibits every use", "nvidia-smi -c DEFAULT")
    if device["free"] >= _MOSTLY_FREE * device["total"]:
        return ok(SUBJECT, name, value)
    why = holders or "its memory is held, by a process that cannot be seen from here (another container or user)"
    return warning(SUBJECT, name, value, why, "end what holds it, or leave this GPU out with CUDA_VISIBLE_DEVICES")


def _peers(gpus: dict[str, Any]) -> list[Finding]:
    pairs = gpus.get("no_peer") or []
    if not pairs:
        return [ok(SUBJECT, "peer access", "between all")] if len(gpus["devices"]) > 1 else []
    shown = ", ".join(f"{a}-{b}" for a, b in pairs[:8]) + (" …" if len(pairs) > 8 else "")
    return [
        info(
            SUBJECT,
            "no peer access",
            shown,
            "what these send each other goes through the host's memory, which is slower and needs /dev/shm",
        )
    ]


def _arches(facts: dict[str, Any]) -> list[Finding]:
    cuda = facts["torch"].get("cuda") or {}
    built = cuda.get("built_for") or []
    majors = {arch.partition("_")[2].rstrip("abcdef")[:-1] for arch in built}
    foreign = [d for d in cuda.get("devices") or [] if built and str(d["capability"][0]) not in majors]
    return [
        error(
            SUBJECT,
            device["name"],
            f"compute capability {'.'.join(map(str, device['capability']))}; torch is built for {' '.join(built)}",
            "this torch has no kernels for it",
            "install a torch that is built for this kind of GPU",
        )
        for device in foreign
    ]
