"""What makes a compile cache valid: torch, Triton, CUDA, driver, GPU, Python, our compiled code, flags.

Nothing here imports Inductor or makes a CUDA context: asking Inductor for its cache folder writes
``TORCHINDUCTOR_CACHE_DIR`` into the environment, and a launcher that reads the fingerprint must not occupy a GPU.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pynvml
import torch

from paceline.errors import UserError

COMPILED_MODULES = ("paceline.drafter", "paceline.target", "paceline.training")
"""The packages whose source decides what is compiled."""

FILE_NAME = "fingerprint.json"
ABSENT = "none"

_FLAG_PREFIXES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_", "TORCH_COMPILE")
_NOT_FLAGS = {
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_WORKER_START",
    "TORCHDYNAMO_VERBOSE",
}


@dataclass(frozen=True)
class Fingerprint:
    """Two processes with equal fingerprints can share compiled code. Every field is a plain word or version."""

    torch: str
    triton: str
    cuda: str
    driver: str
    gpu: str
    cpu: str
    python: str
    code: str
    flags: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Twelve hex digits that name the cache folder."""
        return hashlib.sha256(self._json().encode()).hexdigest()[:12]

    def differences(self, other: Fingerprint) -> list[str]:
        """What changed from this one to `other`, in words: "torch 2.11.0+cu128 -> 2.11.0+cu130"."""
        mine, theirs = asdict(self), asdict(other)
        plain = [name for name in mine if name not in ("code", "flags") and mine[name] != theirs[name]]
        words = [f"{name} {mine[name]} -> {theirs[name]}" for name in plain]
        if self.code != other.code:
            words.append("source of the compiled modules changed")
        for flag in sorted(self.flags.keys() | other.flags.keys()):
            before, after = self.flags.get(flag, "unset"), other.flags.get(flag, "unset")
            if before != after:
                words.append(f"{flag} {before} -> {after}")
        return words

    def of_machine(self) -> Fingerprint:
        """Without the flags that a run's configuration adds: the same for all runs on one machine and environment."""
        return replace(self, flags={name: flag for name, flag in self.flags.items() if name.startswith(_FLAG_PREFIXES)})

    def save(self, file: Path) -> None:
        """Write as JSON, all or nothing."""
        file.parent.mkdir(parents=True, exist_ok=True)
        half = file.with_name(f"{file.name}.{os.getpid()}.half")
        half.write_text(self._json() + "\n")
        half.replace(file)

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """From the JSON that `save` writes.

        Raises:
            ValueError: it is not a fingerprint.
        """
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"not a fingerprint: {error}") from None

    @classmethod
    def load(cls, file: Path) -> Fingerprint | None:
        """The saved one, or None where there is none or it cannot be read (then the cache is built anew)."""
        try:
            return cls.parse(file.read_text())
        except (OSError, ValueError):
            return None

    def _json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, indent=1)


def take(
    files: Sequence[Path] = (), modules: Sequence[str] = COMPILED_MODULES, flags: Mapping[str, str] | None = None
) -> Fingerprint:
    """The fingerprint of this process on this machine.

    Args:
        files: further source files that decide what is compiled.
        modules: packages or modules of the same kind, by name; those that are not there are left out.
        flags: settings beyond the environment's that change compiled code (precision, mode of compilation).
    """
    gpu, driver = _gpu_and_driver()
    return Fingerprint(
        torch=torch.__version__,
        triton=_version("triton"),
        cuda=torch.version.cuda or ABSENT,
        driver=driver,
        gpu=gpu,
        cpu=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        python=platform.python_version(),
        code=_hash_sources([*files, *_module_files(modules)]),
        flags=_environment_flags() | dict(flags or {}),
    )


def remember(run_folder: Path, fingerprint: Fingerprint) -> None:
    """Keep it in the run's folder, for the next start to compare with."""
    fingerprint.save(run_folder / FILE_NAME)


def previous(run_folder: Path) -> Fingerprint | None:
    """The fingerprint of this run's last start, if there was one."""
    return Fingerprint.load(run_folder / FILE_NAME)


def announce_change(old: Fingerprint | None, new: Fingerprint, expect_seconds: float | None = None) -> str | None:
    """One line on what changed since the last start and what it costs; None when nothing did."""
    changes = old.differences(new) if old else []
    if not changes:
        return None
    cost = f", expect {expect_seconds:.0f} s" if expect_seconds else ""
    return f"{'; '.join(changes)}: compiling anew{cost}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def _environment_flags() -> dict[str, str]:
    names = sorted(name for name in os.environ if name.startswith(_FLAG_PREFIXES) and name not in _NOT_FLAGS)
    return {name: os.environ[name] for name in names}


def _gpu_and_driver() -> tuple[str, str]:
    """("NVIDIA H200 sm_90", "570.86.15") of the first GPU that this process may use, asked of the driver alone."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ABSENT, ABSENT
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handle = _first_visible()
        if handle is None:
            return ABSENT, driver
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        return f"{pynvml.nvmlDeviceGetName(handle)} sm_{major}{minor}", driver
    except pynvml.NVMLError:
        return ABSENT, ABSENT
    finally:
        pynvml.nvmlShutdown()


def _first_visible() -> object | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return pynvml.nvmlDeviceGetHandleByIndex(0) if pynvml.nvmlDeviceGetCount() else None
    first = visible.split(",")[0].strip()
    if first.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(first))
    return pynvml.nvmlDeviceGetHandleByUUID(first) if first.startswith(("GPU-", "MIG-")) else None


def _module_files(modules: Iterable[str]) -> list[Path]:
    """The source files of modules and packages, found without importing them (but for their parent)."""
    files: list[Path] = []
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        folders = list(spec.submodule_search_locations or [])
        files += [file for folder in folders for file in Path(folder).rglob("*.py")]
        if not folders and spec.origin:
            files.append(Path(spec.origin))
    return files


def _hash_sources(files: Iterable[Path]) -> str:
    """Contents and names count, places do not: another checkout of the same source is the same code."""
    digest = hashlib.sha256()
    for name, file in sorted((f"{file.parent.name}/{file.name}", file) for file in files):
        try:
            source = file.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read the source file {file}: {error.strerror}", "check its permissions") from None
        digest.update(f"{name} {len(source)}\n".encode() + source)
    return digest.hexdigest()[:12]
