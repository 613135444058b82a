"""Versions, and how they fit: torch, Triton, the CUDA toolkit, the driver, ptxas, NCCL, transformers."""

from __future__ import annotations

import re
from typing import Any

from paceline.doctor.checks.numbers import dotted, release, version
from paceline.doctor.findings import Finding, error, info, ok, warning

SUBJECT = "versions"
LOWEST_TORCH = (2, 11)
LOWEST_TRANSFORMERS = (5, 17)


def check(facts: dict[str, Any]) -> list[Finding]:
    torch = facts["torch"]
    if torch.get("absent"):
        return [_no_torch(facts)]
    if "version" not in torch:
        return [_broken_torch(facts)]
    return [
        _torch(torch),
        *_pinned(facts, "triton"),
        *_cuda(facts),
        *_ptxas(facts),
        *_nccl(facts),
        *_transformers(facts),
    ]


def _no_torch(facts: dict[str, Any]) -> Finding:
    return error(
        SUBJECT,
        "torch",
        f"not installed for {facts['python']['executable']}",
        "nothing can be trained with this Python",
        "name the environment that has it: --python venv/bin/python",
    )


def _broken_torch(facts: dict[str, Any]) -> Finding:
    torch = facts["torch"]
    late = torch.get("code") is None
    return error(
        SUBJECT,
        "torch cannot be imported",
        f"no answer within {torch.get('timeout')} s" if late else torch["fault"],
        "its files, its CUDA libraries or the machine's own libraries do not fit together"
        if not late
        else "the file system that it lies on may be slow, or a driver hangs",
        "try: python -c 'import torch'; reinstall torch into an empty environment",
    )


def _torch(torch: dict[str, Any]) -> Finding:
    built = f"CUDA {torch['cuda_build']}" if torch["cuda_build"] else "the CPU alone"
    value = f"{torch['version']}, built for {built} (imported in {torch['import_seconds']} s)"
    if version(torch["version"]) >= LOWEST_TORCH:
        return ok(SUBJECT, "torch", value)
    return warning(
        SUBJECT,
        "torch",
        value,
        f"Paceline needs {dotted(LOWEST_TORCH)} or later",
        f"pip install 'torch>={dotted(LOWEST_TORCH)}'",
    )


def _pinned(facts: dict[str, Any], name: str) -> list[Finding]:
    """A package that torch pins exactly: what is installed must be that one."""
    wanted = next((w for line in facts["requires"]["torch"] if (w := _exact(line, name))), None)
    there = facts["packages"].get(name)
    if wanted is None:
        return [info(SUBJECT, name, f"{there}, not asked for by this torch")] if there else []
    if there and version(there) == version(wanted):
        return [ok(SUBJECT, name, f"{there}, as torch asks")]
    return [
        error(
            SUBJECT,
            name,
            f"{there or 'none'}; this torch asks for {wanted}",
            "Inductor calls Triton's internals, so any other version fails while it compiles",
            f"pip install {name}=={wanted}",
        )
    ]


def _exact(line: str, name: str) -> str | None:
    """The version of ``name==version; conditions``, or None if the line is about something else."""
    found = re.match(rf"{re.escape(name)}\s*\(?==\s*([\w.+]+)", line)
    return found.group(1) if found else None


def _cuda(facts: dict[str, Any]) -> list[Finding]:
    """The driver must reach torch's CUDA; the toolkit matters only to what is built on the spot."""
    built = version(facts["torch"]["cuda_build"])
    if not built:
        return []
    return [*_driver(facts, built[:2]), *_toolkit(facts["tools"], built[:2])]


def _driver(facts: dict[str, Any], built: tuple[int, ...]) -> list[Finding]:
    gpus = facts["gpus"]
    reaches = version(gpus.get("cuda"))[:2]
    if not reaches:
        return []
    value = f"{gpus['driver']}, good for CUDA {dotted(reaches)}; torch is built for {dotted(built)}"
    if reaches >= built:
        return [ok(SUBJECT, "driver", value)]
    if reaches[0] == built[0]:
        why = "within one major version most works, but PTX from a newer compiler is refused ('unsupported toolchain')"
        return [warning(SUBJECT, "driver", value, why, "update the driver, or install torch for an older CUDA")]
    why = "torch will not find the GPU at all: 'the NVIDIA driver on your system is too old'"
    return [error(SUBJECT, "driver", value, why, "update the driver, or install torch for an older CUDA")]


def _toolkit(tools: dict[str, Any], built: tuple[int, ...]) -> list[Finding]:
    nvcc = release((tools["nvcc"] or {}).get("version"))
    if not nvcc:
        return [ok(SUBJECT, "CUDA toolkit", "none (torch and Triton bring what they need)")]
    value = f"nvcc {dotted(nvcc)} at {tools['nvcc']['place']}; torch is built for CUDA {dotted(built)}"
    if nvcc == built:
        return [ok(SUBJECT, "CUDA toolkit", value)]
    why = "torch.compile does not use it (Triton brings its own ptxas); extensions that are built here do"
    remedy = "set CUDA_HOME to a toolkit of torch's version before you build extensions"
    if nvcc[0] == built[0]:
        return [info(SUBJECT, "CUDA toolkit", value, why, remedy)]
    return [warning(SUBJECT, "CUDA toolkit", value, why, remedy)]


def _ptxas(facts: dict[str, Any]) -> list[Finding]:
    own = release((facts["torch"].get("triton") or {}).get("ptxas"))
    forced = facts["environment"].get("TRITON_PTXAS_PATH")
    if not forced:
        return [ok(SUBJECT, "ptxas", f"{dotted(own)}, Triton's own")] if own else []
    there = facts["tools"]["TRITON_PTXAS_PATH"]
    if there is None:
        why = "Triton calls it for every kernel, so every compilation fails"
        return [error(SUBJECT, "ptxas", f"TRITON_PTXAS_PATH={forced} is no program", why, "unset TRITON_PTXAS_PATH")]
    told = release(there["version"])
    value = f"{dotted(told)} by TRITON_PTXAS_PATH; Triton's own is {dotted(own) or 'absent'}"
    if told and own and told < own:
        why = "an older ptxas refuses the PTX that Triton writes, or does not know the GPU"
        return [warning(SUBJECT, "ptxas", value, why, "unset TRITON_PTXAS_PATH")]
    return [info(SUBJECT, "ptxas", value)]


def _nccl(facts: dict[str, Any]) -> list[Finding]:
    used = (facts["torch"].get("cuda") or {}).get("nccl")
    found: list[Finding] = []
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        wanted = next((w for line in facts["requires"]["torch"] if (w := _exact(line, name))), None)
        there = facts["packages"].get(name)
        if wanted and there != wanted:
            why = "ranks with different NCCL versions cannot talk, and symbols may be missing"
            found.append(
                warning(
                    SUBJECT, "NCCL", f"{name} {there}; torch asks for {wanted}", why, f"pip install {name}=={wanted}"
                )
            )
        elif wanted and used and version(used) != version(there)[:3]:
            why = "another libnccl is found before torch's own (LD_LIBRARY_PATH, LD_PRELOAD)"
            found.append(
                warning(
                    SUBJECT,
                    "NCCL",
                    f"{used} is loaded, {there} is installed",
                    why,
                    "unset LD_LIBRARY_PATH for the launch",
                )
            )
    return found or ([ok(SUBJECT, "NCCL", used)] if used else [])


def _transformers(facts: dict[str, Any]) -> list[Finding]:
    there = facts["packages"].get("transformers")
    if there is None:
        return [info(SUBJECT, "transformers", "not installed", "Paceline loads target models with it")]
    if version(there)[:2] >= LOWEST_TRANSFORMERS:
        return [ok(SUBJECT, "transformers", there)]
    why = f"Paceline needs {dotted(LOWEST_TRANSFORMERS)} or later"
    return [
        warning(SUBJECT, "transformers", there, why, f"pip install 'transformers>={dotted(LOWEST_TRANSFORMERS)},<6'")
    ]
