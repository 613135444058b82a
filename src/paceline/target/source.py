"""Where a target model comes from: a folder, one GGUF file, or a hub id."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import TargetConfig
from paceline.errors import UserError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class ModelSource:
    """A resolved model: what transformers' `from_pretrained` must be given."""

    name: str
    location: str
    """Folder (also the folder of a GGUF file), or hub id."""
    gguf_file: Path | None = None
    revision: str = ""

    @property
    def folder(self) -> Path | None:
        """The local folder, None for a hub id."""
        path = Path(self.location)
        return path if path.is_dir() else None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `from_pretrained`; code of a model repository is never run."""
        found: dict[str, Any] = {"pretrained_model_name_or_path": self.location, "trust_remote_code": False}
        if self.gguf_file is not None:
            found["gguf_file"] = self.gguf_file.name
        if self.revision and self.folder is None:
            found["revision"] = self.revision
        return found


def resolve(config: TargetConfig) -> ModelSource:
    """Find the model that `target.model` names. Raises UserError where there is none."""
    name = config.model.strip()
    if not name:
        raise UserError("target.model is empty", "give a model folder, a GGUF file or a hub id such as Qwen/Qwen3-8B")
    path = Path(name).expanduser()
    if os.path.isfile(path):  # false also for a name that cannot be one
        return _file(name, path)
    if os.path.isdir(path):
        return _folder(name, path)
    if not _HUB_ID.fullmatch(name) or name.startswith(".") or path.suffix == ".gguf":
        raise UserError(f"target.model = {name!r}: no such file or folder", "correct the path, or give a hub id")
    return ModelSource(name, name, revision=config.revision)


def _file(name: str, path: Path) -> ModelSource:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise UserError(f"target.model = {name!r} is a file, but not a GGUF file", "give a GGUF file or a model folder")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name):
        raise UserError(f"target.model = {name!r} is one part of a split GGUF", "merge the parts into one file")
    return ModelSource(name, str(path.parent.resolve()), gguf_file=path.resolve())


def _folder(name: str, path: Path) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource(name, str(path.resolve()))
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _file(name, files[0])
    raise UserError(
        f"target.model = {name!r} holds no config.json and {len(files)} GGUF files",
        "give a folder with config.json, weights and tokenizer, or name one GGUF file",
    )


def load_failure(source: ModelSource, part: str, error: Exception) -> UserError:
    """The one line for a model that could not be read: what, where, and the first line of the reason."""
    reason = _first_line(error)
    if source.folder is None:
        remedy = "check the hub id, target.revision and the connection, or download the model and give its folder"
    else:
        remedy = "check that the folder or file is complete and of a kind that the installed transformers knows"
    return UserError(f"cannot read the {part} of target.model = {source.name!r}: {reason}", remedy)


def _first_line(error: Exception) -> str:
    """The error's first line, and the second where the first only announces it."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])[:300]


def user_cache() -> Path:
    """The project's folder in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "paceline"
