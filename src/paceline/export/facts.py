"""paceline.json: what we know of a drafter beside the whitelisted config.json; engines ignore it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paceline import __version__
from paceline.errors import UserError
from paceline.export import files
from paceline.export.card import CardFacts, TauRow
from paceline.export.contents import Contents, contents_of
from paceline.export.origin import Origin
from paceline.fields import Fields
from paceline.shapes import DrafterShape, TargetShape

FACTS = "paceline.json"

_REMEDY = "take the folder again from where it came, or remove the file and do without what it records"


@dataclass(frozen=True)
class Facts:
    """What `write` noted; empty where the Paceline that wrote it noted less."""

    target: Origin = field(default_factory=Origin)
    template_hash: str = ""
    contents: Contents | None = None
    card: CardFacts | None = None


def facts_json(
    shape: DrafterShape,
    tensors: Mapping[str, Tensor],
    target: TargetShape,
    card: CardFacts,
    template: str,
) -> dict[str, Any]:
    """What is written for a drafter of these (exported) tensors; `template` is the hash of its chat template."""
    return {
        "paceline": __version__,
        "target": {
            "name": card.target,
            "revision": card.target_revision,
            "weights": card.target_weights,
            "model_type": target.model_type,
            "hidden_size": target.hidden_size,
            "layers": target.layers,
            "vocabulary": target.vocabulary,
        },
        "target_layers": shape.target_layers,
        "template_hash": template,
        "card": dataclasses.asdict(card),
        "contents": dataclasses.asdict(contents_of(shape, tensors)),
    }


def template_hash(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """SHA-256 (16 digits) of the chat template; empty without one."""
    template = tokenizer.chat_template if tokenizer is not None else None
    if not template:
        return ""
    text = template if isinstance(template, str) else repr(sorted(template.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_facts(folder: Path) -> Facts | None:
    """What `write` noted, or None for a folder that another program wrote. Raises UserError for a damaged file."""
    path = Path(folder) / FACTS
    if not path.exists():
        return None
    said = Fields(files.read_json(path, _REMEDY), str(path), _REMEDY)
    said.need("paceline")
    said.need("target")
    target = Fields(said.object("target"), str(path), _REMEDY)
    return Facts(
        Origin(target.text("name"), target.text("revision"), target.text("weights")),
        said.text("template_hash"),
        _contents(said),
        _card(said),
    )


def _contents(said: Fields) -> Contents | None:
    if not said.has("contents"):
        return None
    noted = Fields(said.object("contents"), said.where, said.remedy)
    tensors = Fields(noted.object("tensors"), said.where, said.remedy)
    contents = Contents(
        noted.text("sha256"), noted.object("shape"), {name: tensors.text(name) for name in tensors.values}
    )
    if not contents.whole:
        raise UserError(f"{said.where} is damaged: its record of the drafter's contents does not add up", said.remedy)
    return contents


def _card(said: Fields) -> CardFacts | None:
    """Keys of a later version are left out."""
    if not said.has("card"):
        return None
    card = Fields(said.object("card"), said.where, said.remedy)
    known = {item.name for item in dataclasses.fields(CardFacts)}
    lists = ("data", "notes")
    values: dict[str, Any] = {key: card.text(key) for key in known - {*lists, "results"}}
    values |= {key: tuple(card.items(key, str)) for key in lists}
    return CardFacts(**values, results=tuple(_row(row, said) for row in card.items("results", dict)))


def _row(row: dict[str, Any], said: Fields) -> TauRow:
    values = Fields(row, said.where, said.remedy)
    figures = {key: values.figure(key) for key in ("tau", "accepted", "low", "high")}
    return TauRow(kind=values.text("kind"), steps=values.whole("steps", 0, default=0), **figures)
