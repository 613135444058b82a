"""`paceline export`: a drafter's folder in any layout that we read, to any layout that we write."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.export import folder
from paceline.export.card import CardFacts, serving_commands, target_words
from paceline.export.contents import changes, contents_of
from paceline.export.facts import FACTS, Facts, read_facts
from paceline.export.flags import named_by_flags
from paceline.export.origin import Origin, compare, origin_of
from paceline.shapes import DrafterShape
from paceline.target.describe import load_tokenizer, read_shape
from paceline.target.source import resolve

_OF_A_RUN = ("best", "last", "export", "drafter")
"""Where a run's folder is searched for a drafter, in this order."""


@dataclass(frozen=True)
class ExportOptions:
    """Write a drafter for an engine."""

    drafter: str
    """A drafter's folder, or a run's folder: the first of its best, last, export and drafter that holds one."""
    out: str
    """The folder to write; a drafter that Paceline wrote there before is replaced."""
    target: str = ""
    """The target's folder, GGUF file or hub id; empty takes the one that the drafter's folder names."""
    revision: str = ""
    layout: str = "dflash"
    """`dflash` for vLLM, SGLang, transformers and llama.cpp's converter; `speculators` for vLLM's own."""
    dtype: str = "bfloat16"


def run_export(options: ExportOptions) -> int:
    """Read, write, reload and compare; returns 0."""
    with named_by_flags(ExportOptions):
        return _export(options)


def _export(options: ExportOptions) -> int:
    layout = _layout(options.layout)
    source = find_drafter(Path(options.drafter))
    say_choice(options.drafter, source)
    shape, tensors = folder.read(source)
    facts = read_facts(source) or Facts()
    _refuse_changed(source, facts, shape, tensors)
    config = TargetConfig(model=options.target or noted_target(source, facts), revision=options.revision)
    name = config.model
    target = read_shape(config)
    shape = dataclasses.replace(
        shape, target_layers=shape.target_layers or target.layers, eos_token_ids=shape.eos_token_ids or target.eos_ids
    )
    folder.check_fits(shape, target, str(source))
    replaces = _replaces(Path(options.out))
    card = _card(facts, origin_of(config))
    out = folder.write(
        Path(options.out),
        tensors,
        shape,
        target,
        dtype=options.dtype,
        layout=layout,
        tokenizer=load_tokenizer(config),
        card=card,
        template=facts.template_hash,
    )
    if replaces:
        print(f"replaced {out}")
    gap = folder.compare(out, tensors, shape)
    print(f"{out}: {len(tensors)} tensors in {options.dtype}, reloaded; largest relative difference {gap:.1e}")
    for engine, command in serving_commands(shape, name, str(out), options.layout):
        print(f"{engine}:\n{command}")
    if explanation := target_words(name).explanation:
        print(explanation)
    return 0


def noted_target(drafter: Path, facts: Facts) -> str:
    """The target that a drafter's folder names. Raises UserError where it names none, or one that is not here."""
    name = facts.target.name
    if not name:
        raise UserError(f"{drafter} does not say which target it was made for", "name it with --target")
    try:
        resolve(TargetConfig(model=name))
    except UserError:
        raise UserError(
            f"{drafter} was made for the target {name!r}, which is not here", "say with --target where it is"
        ) from None
    return name


def _replaces(out: Path) -> bool:
    """Whether a drafter lies there already. Raises UserError where anything else would go with it."""
    if not os.path.isfile(out / FACTS):
        return False
    if found := folder.strangers(out):
        raise UserError(
            f"{out} holds {', '.join(found[:3])} beside a drafter, and would be replaced as a whole",
            "choose another folder, or move them away",
        )
    return True


def _refuse_changed(source: Path, facts: Facts, shape: DrafterShape, tensors: Mapping[str, Tensor]) -> None:
    """A changed drafter that is written again would pass for one that is as it was trained."""
    found = changes(facts.contents, contents_of(shape, tensors)) if facts.contents is not None else []
    if found:
        raise UserError(
            f"{source} was changed since it was exported: {'; '.join(found)}",
            f"take it again from where it came; or remove its {FACTS}, name --target, and export it as it is now",
        )


def _card(facts: Facts, given: Origin) -> CardFacts:
    """The card that came with the drafter, for the target that is given; another than it was trained with is said."""
    status, words = compare(facts.target, given)
    card = facts.card or CardFacts(target=given.name)
    if status == "note":
        print(f"warning: the target's weights: {words}", file=sys.stderr)
        trained = target_words(facts.target.name).name
        note = f"trained with `{trained}`, weights {facts.target.weights or facts.target.revision}; exported for others"
        card = dataclasses.replace(card, notes=(*card.notes, note))
    same = facts.target if status == "ok" or given.name == facts.target.name else Origin()
    return dataclasses.replace(
        card,
        target=given.name,
        target_revision=given.revision or same.revision,
        target_weights=given.weights or same.weights,
    )


def _layout(name: str) -> folder.Layout:
    if name not in ("dflash", "speculators"):
        raise UserError(f"layout = {name!r} is not one of dflash, speculators", "choose one of them")
    return name  # type: ignore[return-value]


def find_drafter(place: Path) -> Path:
    """The folder itself if it holds a drafter, or the first of a run's folders that does. Raises UserError."""
    for candidate in (place, *(place / name for name in _OF_A_RUN)):
        if os.path.isfile(candidate / "config.json"):  # false also for a name that cannot be one
            return candidate
    raise UserError(f"{place} holds no exported drafter", "give a folder with config.json and model.safetensors")


def say_choice(asked: str, found: Path) -> None:
    """On standard error, which drafter of a run's folder was taken."""
    if Path(asked) != found:
        print(f"taking {found}, the first of {', '.join(_OF_A_RUN)} that holds a drafter", file=sys.stderr)
