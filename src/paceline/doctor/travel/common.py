"""What several travellers need: which of the environment may leave a machine, and small readers of /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

_INTERESTING = re.compile(
    r"^(TORCH|PYTORCH|TRITON|CUDA|NCCL|GLOO|NVIDIA_VISIBLE|NVIDIA_DRIVER|OMP_|MKL_|KMP_|PYTHON|PACELINE_|INDUCTOR|"
    r"ROCR_|HIP_|LD_LIBRARY_PATH$|LD_PRELOAD$|PATH$|VIRTUAL_ENV$|CONDA_PREFIX$|CC$|CXX$|TMPDIR$|HOME$|USER$|"
    r"MASTER_|RANK$|LOCAL_RANK$|WORLD_SIZE$|LOCAL_WORLD_SIZE$|GROUP_RANK$|SLURM_JOB_ID$|SLURM_PROCID$|XDG_CACHE_HOME$|"
    r"HF_HOME$|HF_HUB_OFFLINE$|TRANSFORMERS_OFFLINE$|FORCE_COLOR$)"
)
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH|SIGNATURE|PRIVATE|COOKIE|DSN", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(\w[\w+.-]*://)[^/\s@]+@")
_SECRET_PAIR = re.compile(r"((?:key|token|secret|passw\w*|auth|credential)[\w-]*[=:])\S+", re.IGNORECASE)
_LONGEST_WORD = 200
_SECRET_OPTION = re.compile(r"^--?[\w-]*(key|token(?!s)|secret|passw|auth|cred)[\w-]*$", re.IGNORECASE)


def kept_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide how torch starts. Never one whose name smells of a secret."""
    return {
        name: masked(value)
        for name, value in sorted(environment.items())
        if _INTERESTING.match(name) and not _SECRET_NAME.search(name)
    }


def masked(text: str) -> str:
    """`text` without passwords in URLs and ``token=…`` pairs."""
    return _SECRET_PAIR.sub(r"\1***", _URL_LOGIN.sub(r"\1***@", text))


def masked_command(words: list[str]) -> list[str]:
    """A command line whose secret options and pairs are masked; of a word that is a program, the first line."""
    after_secret = [False, *(bool(_SECRET_OPTION.match(word)) for word in words)]
    return ["***" if after_secret[i] else _shortened(masked(word)) for i, word in enumerate(words)]


def _shortened(word: str) -> str:
    lines = word.strip().splitlines() or [""]
    return lines[0][:_LONGEST_WORD] + (" …" if len(lines) > 1 or len(lines[0]) > _LONGEST_WORD else "")


def read(path: str) -> str:
    """A small file's text, or "" where it is not there or may not be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def status_of(pid: int) -> dict[str, str]:
    """The lines of ``/proc/PID/status``; empty where there is no such process."""
    pairs = (line.partition(":") for line in read(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def kilobytes(text: str) -> int | None:
    """Bytes from a line of /proc such as "1234 kB"."""
    words = text.split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else None


def attempt(reader: Callable[[], Any], faults: Any = OSError) -> Any:
    """The reader's answer, or None if it met one of `faults`, an exception class or several."""
    try:
        return reader()
    except faults:
        return None


def mount_of(path: str, mounts: str) -> dict[str, str]:
    """Kind and options of the file system under `path`, from the text of ``/proc/self/mounts``."""
    real = os.path.realpath(path)
    best = {"point": "", "kind": "unknown", "options": ""}
    for words in (line.split() for line in mounts.splitlines()):
        if len(words) < 4:
            continue
        point = words[1].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best["point"]):
            best = {"point": point, "kind": words[2], "options": words[3]}
    return best
