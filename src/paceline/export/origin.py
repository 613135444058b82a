"""Which target a drafter was made for, and whether another one is the same."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import try_to_load_from_cache

from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.export import files
from paceline.target.source import ModelSource, resolve


@dataclass(frozen=True)
class Origin:
    """A target, as far as it can be told from another."""

    name: str = ""
    revision: str = ""
    """A hub commit (a branch where the commit is not known), or a fingerprint of all files of a local model."""
    weights: str = ""
    """A fingerprint of the files of weights alone: equal for the same model from the hub and from a folder."""


def origin_of(config: TargetConfig) -> Origin:
    """Reads a few megabytes of each file of weights; of a hub model, what lies in the cache. Raises UserError."""
    source = resolve(config)
    try:
        return Origin(config.model, _revision(source), _weights(source))
    except OSError as error:
        raise UserError(f"the files of target.model = {config.model!r} cannot be read: {error}", _REMEDY) from None


_REMEDY = "check that the model is complete and may be read"


Verdict = tuple[Literal["ok", "note", "skip"], str]


def compare(noted: Origin, given: Origin) -> Verdict:
    """Whether the target that is given is the one that was noted, in a word and in words."""
    if noted.weights and given.weights:
        return _compare_weights(noted, given)
    if not (noted.weights or noted.revision):
        return "skip", "not made: the drafter's folder does not record which weights it was trained with"
    if _kind(noted.revision) is None or _kind(noted.revision) != _kind(given.revision):
        told = noted.revision or noted.weights
        return "skip", f"not made: {told!r} is recorded of {noted.name}, and that cannot be told of {given.name}"
    return _compare_revisions(noted, given)


def _compare_weights(noted: Origin, given: Origin) -> Verdict:
    if noted.weights == given.weights:
        return "ok", f"those that it was trained with, fingerprint {given.weights}"
    return "note", _differ(f"{noted.name} (fingerprint {noted.weights})", f"{given.name} has {given.weights}")


def _compare_revisions(noted: Origin, given: Origin) -> Verdict:
    """A commit tells of the weights; a fingerprint of all files (before weights had their own) only where equal."""
    kind = _kind(noted.revision)
    if noted.revision == given.revision:
        return "ok", f"of the model that it was trained with, {kind} {given.revision}"
    if kind == "commit":
        return "note", _differ(f"{noted.name} (commit {noted.revision})", f"{given.name} has {given.revision}")
    told = f"trained with the files of {noted.name} (fingerprint {noted.revision})"
    return "note", f"{told}, those of {given.name} have {given.revision}: the weights differ, or what lies beside them"


def _differ(trained: str, given: str) -> str:
    return f"trained with {trained}, and {given}: expect fewer accepted tokens the more the two differ"


def _kind(revision: str) -> str | None:
    """What may be compared: a branch's name moves, so it tells nothing."""
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return "commit"
    return "fingerprint" if re.fullmatch(r"[0-9a-f]{16}", revision) else None


def _revision(source: ModelSource) -> str:
    local = source.gguf_file or source.folder
    if local is not None:
        return files.fingerprint(local)
    snapshot = _snapshot(source)
    return snapshot.name if snapshot is not None and _kind(snapshot.name) == "commit" else source.revision


def _weights(source: ModelSource) -> str:
    place = source.gguf_file or source.folder or _snapshot(source)
    found = _weight_files(place) if place is not None else []
    return files.sampled_digest(found) if found and all(path.is_file() for path in found) else ""


def _snapshot(source: ModelSource) -> Path | None:
    """Where the hub's cache holds a model; nothing is fetched."""
    try:
        found = try_to_load_from_cache(source.location, "config.json", revision=source.revision or None)
    except ValueError:  # not an id that the hub could have
        return None
    return Path(found).parent if isinstance(found, str) else None


def _weight_files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    index = place / "model.safetensors.index.json"
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [place / str(name) for name in sorted(set(names))]
    except FileNotFoundError:
        return [place / "model.safetensors"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # said when the weights are loaded
        return []
