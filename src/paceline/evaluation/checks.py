"""What is recorded or plain to see of an exported drafter: its values, whether they are still those that were
exported, and whether the target's mask token, chat template and weights are those that it was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paceline.export.contents import Contents, changes
from paceline.export.facts import FACTS, Facts, template_hash
from paceline.export.origin import Origin, compare
from paceline.shapes import DrafterShape, TargetShape
from paceline.target.describe import choose_layers, mask_note

Status = Literal["ok", "note", "skip", "fail"]


@dataclass(frozen=True)
class Check:
    """One thing looked at: a `note` is what the user should know and may be meant, a `skip` a check not made."""

    name: str
    status: Status
    detail: str = ""


def check_values(tensors: Mapping[str, Tensor], contents: Contents) -> list[Check]:
    """Values that no training gives, whatever is recorded: zeros, one value everywhere, one tensor twice."""
    ends = {name: tuple(map(float, tensor.aminmax())) for name, tensor in tensors.items()}
    constant = [name for name, (low, high) in ends.items() if low == high]
    zero = [name for name in constant if ends[name] == (0, 0)]
    varied = [name for name, tensor in tensors.items() if name not in constant and tensor.ndim > 1]
    # A norm that is one everywhere is what an untrained drafter has, and in bfloat16 one that was trained little.
    norms = [name for name in constant if name not in zero and tensors[name].ndim == 1]
    faults = [
        *_listed("all zero: ", zero),
        *_listed("one value everywhere: ", [name for name in constant if name not in (*zero, *norms)]),
    ]
    notes = [
        *_listed("one value everywhere, as before training: ", norms),
        *_listed("", [words for name in varied if (words := _zeros(name, tensors[name]))]),
        *_listed("", _repeated(varied, contents)),
    ]
    checks = [Check("values", "fail", "; ".join(faults))] if faults else []
    checks += [Check("values", "note", "; ".join(notes))] if notes else []
    return checks or [Check("values", "ok", "no tensor is constant, none is there twice, no row is zero")]


def _zeros(name: str, tensor: Tensor) -> str:
    """Trained weights are hardly ever zero to the last bit: a part that is was never written, or cut off."""
    empty = tensor == 0
    if rows := int(empty.all(dim=1).sum()):
        return f"{rows} of the {len(tensor)} rows of {name} are zero"
    share = int(empty.sum()) / empty.numel()
    return f"{share:.0%} of {name} is zero" if share > 0.01 else ""


def _repeated(names: Sequence[str], contents: Contents) -> list[str]:
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(contents.tensors[name], name)
    return [f"{name} equals {first[value]}" for name in names if first[value := contents.tensors[name]] != name]


def _listed(words: str, names: Sequence[str]) -> list[str]:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{words}{', '.join(names[:3])}{rest}"] if names else []


def check_contents(facts: Facts | None, now: Contents) -> Check:
    """Every weight, and what of the configuration gives the weights their meaning, are what was exported."""
    if facts is None:
        told = f"not made: no {FACTS}, so weights that were swapped or layer ids that are all one off cannot be seen"
        return Check("contents", "skip", told)
    if facts.contents is None:
        return Check("contents", "skip", "not made: it was exported by a Paceline that did not record them")
    if found := changes(facts.contents, now):
        return Check("contents", "fail", f"changed since export: {'; '.join(found)}")
    told = f"unchanged since export: {len(now.tensors)} tensors and the configuration, SHA-256 {now.sha256[:16]}…"
    return Check("contents", "ok", told)


def check_spacing(shape: DrafterShape) -> list[Check]:
    """Whether the layer ids are the method's, each one off: layouts differ in what they count from."""
    if not shape.target_layers or len(shape.layer_ids) < 2:
        return []
    usual = choose_layers(shape.target_layers, len(shape.layer_ids))
    off = {one - other for one, other in zip(shape.layer_ids, usual, strict=False)}
    if len(usual) != len(shape.layer_ids) or off not in ({1}, {-1}):
        return []
    more = "more" if off == {1} else "less"
    told = (
        f"{list(shape.layer_ids)} are each one {more} than the method's {list(usual)} of {shape.target_layers} layers"
    )
    return [Check("layer ids", "note", f"{told}: make sure that they were not counted from the embedding")]


def check_weights(noted: Facts, given: Origin) -> Check:
    """The target's weights are those that the drafter was trained with. A quantised target, say, is no fault."""
    return Check("target's weights", *compare(noted.target, given))


def check_mask(shape: DrafterShape, target: TargetShape | None, tokenizer: PreTrainedTokenizerBase | None) -> Check:
    """The mask token means nothing to the target, and no text holds it."""
    mask = shape.mask_token_id
    ends = shape.eos_token_ids if target is None else target.eos_ids
    found = "an end-of-sequence token" if mask in ends else ""
    if target is not None and tokenizer is not None:
        found = mask_note(mask, target, tokenizer)
        if not found:
            return Check("mask token", "ok", f"{mask} is reserved or unused by the target")
    if found:
        told = f"{mask} is {found}: where text holds it, a known token looks like one that is to be drafted"
        return Check("mask token", "note", told)
    missing = "no target was given" if target is None else "the target has no tokenizer that can be read"
    return Check("mask token", "skip", f"not made: {missing}")


def check_template(noted: Facts, tokenizer: PreTrainedTokenizerBase | None) -> Check:
    """The chat template that the drafter was trained with is the target's."""
    if not noted.template_hash:
        return Check("chat template", "skip", "not made: the drafter's folder does not record one")
    if tokenizer is None:
        return Check("chat template", "skip", "not made: the target has no tokenizer that can be read")
    now, then = template_hash(tokenizer), noted.template_hash
    if now == then:
        return Check("chat template", "ok", f"hash {then}")
    detail = f"trained with {then}, the target has {now or 'none'}: the drafter saw other prompts than it will serve"
    return Check("chat template", "fail", detail)
