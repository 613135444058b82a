"""The contract of an exported drafter with the engines that will load it and with the target that it drafts for.

Every check says what it looked at. A check that fails would show in serving as a low acceptance length and nothing
else, so `paceline verify` is run before a drafter is deployed.

Letters: S context tokens, B block size, H hidden size, F = K·H, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.batches import FrozenEnds, TokenBatch
from paceline.config import TargetConfig
from paceline.drafter.blocks import dense_attend
from paceline.drafter.model import Drafter
from paceline.errors import UserError
from paceline.evaluation.capture import Capture
from paceline.evaluation.checks import (
    Check,
    Status,
    check_contents,
    check_mask,
    check_spacing,
    check_template,
    check_values,
    check_weights,
)
from paceline.evaluation.reference import reference_hidden
from paceline.export import engines, files, folder
from paceline.export.contents import contents_of
from paceline.export.facts import Facts, read_facts
from paceline.export.layout import config_json, tensor_shapes
from paceline.export.origin import origin_of
from paceline.shapes import DrafterShape, TargetShape
from paceline.target.describe import load_tokenizer, read_shape
from paceline.target.transformers_body import TransformersTarget

POSITIONS = (0, 100, 5_000)

OF_THE_TARGET = (
    "drafter and target",
    "target's weights",
    "chat template",
    "features by exported ids",
    "target's self-check",
)
"""The checks that need the target."""


def verify(
    export_folder: str | Path,
    target: TargetConfig | None = None,
    *,
    trained: Mapping[str, Tensor] | None = None,
    device: str = "cpu",
) -> list[Check]:
    """Check an exported folder by itself, and against its target when one is given.

    trained: the tensors of the drafter that was exported, where they are at hand. Raises UserError only for a folder
    or a target that cannot be opened at all, or that do not belong together.
    """
    place = Path(export_folder)
    shape, tensors = folder.read(place)
    _, config = folder.read_shape(place)
    facts, contents = read_facts(place), contents_of(shape, tensors)
    checks = [*check_files(place, shape, tensors), *check_values(tensors, contents), check_contents(facts, contents)]
    checks += [*check_spacing(shape), *check_engines(config, shape, tensors)]
    if target is None:
        missing = [Check(name, "skip", "not made: no target was given") for name in OF_THE_TARGET]
        return [*checks, *check_numbers(shape, tensors, None, trained), check_mask(shape, None, None), *missing]
    target_shape = read_shape(target)
    folder.check_fits(shape, target_shape, str(place))
    tokenizer = load_tokenizer_or_none(target)
    checks.append(Check("drafter and target", "ok", f"{place.name} fits {target_shape.name}: {_sizes(target_shape)}"))
    body = TransformersTarget.load(target, device, shape.layer_ids)
    noted = facts or Facts()
    checks += [
        check_weights(noted, origin_of(target)),
        check_mask(shape, target_shape, tokenizer),
        check_template(noted, tokenizer),
    ]
    checks += check_numbers(shape, tensors, body.ends, trained)
    checks += check_features(body.model, shape)
    checks.append(check_target(body))
    return checks


def _sizes(shape: TargetShape) -> str:
    return f"hidden size {shape.hidden_size}, {shape.layers} layers, vocabulary {shape.vocabulary} with padding"


def summary(checks: Sequence[Check]) -> str:
    """How many checks passed, have something to note, failed, and were not made."""
    words = {"ok": "passed", "note": "with a note", "fail": "failed", "skip": "not made"}
    counts = [(sum(check.status == status for check in checks), word) for status, word in words.items()]
    (passed, word), *others = counts
    checked = "check" if passed == 1 else "checks"
    return ", ".join([f"{passed} {checked} {word}", *(f"{count} {word}" for count, word in others if count)])


def failed(checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if check.status == "fail"]


def check_target(body: TransformersTarget) -> Check:
    """The target's own self-check, on random documents packed in one row."""
    lengths = (9, 17, 6)
    tokens = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    nothing = torch.zeros(1, dtype=torch.long)
    batch = TokenBatch(
        index=0,
        ids_S=torch.randint(0, body.shape.vocabulary, (tokens,), generator=generator),
        positions_S=torch.cat([torch.arange(length) for length in lengths]),
        documents_S=torch.cat([torch.full((length,), n, dtype=torch.int32) for n, length in enumerate(lengths)]),
        supervised_S=torch.zeros(tokens, dtype=torch.bool),
        anchors_A=nothing,
        starts_A=nothing,
        labels_AB=nothing[:, None],
        weights_AB=torch.zeros(1, 1),
        bounds=(0, 9, 26, 32),
    )
    try:
        body.self_check(batch.to(body.device))
    except UserError as error:
        return Check("target's self-check", "fail", error.what)
    return Check("target's self-check", "ok", "packed features and the rest of the model give its own next tokens")


def check_files(place: Path, shape: DrafterShape, tensors: Mapping[str, Tensor]) -> list[Check]:
    """Names, shapes and finite values were enforced by reading; say so, and look at the dtypes."""
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    config = files.read_json(place / "config.json")
    said = config.get("dtype") or config.get("torch_dtype")
    count = len(tensor_shapes(shape))
    same = dtypes == [said]
    return [
        Check("tensors", "ok", f"{len(tensors)} of {count} names and shapes, all values finite"),
        Check("dtypes", "ok" if same else "fail", f"weights in {', '.join(dtypes)}, config says {said}"),
    ]


def check_engines(config: Mapping[str, Any], shape: DrafterShape, tensors: Mapping[str, Tensor]) -> list[Check]:
    """What each engine's loader would read, against the drafter that was trained."""
    other_layout = "speculators_model_type" in config
    if other_layout:
        # vLLM turns this layout into the other one before its drafter's code reads it.
        config = config_json(shape, str(config.get("dtype", "bfloat16")))
    checks = []
    for read in engines.READERS:
        view = read(config)
        if other_layout and read is not engines.vllm_reads:
            told = f"{view.engine} does not read the speculators layout; export --layout dflash for it"
            checks.append(Check(f"read by {view.engine}", "skip", told))
            continue
        found = engines.differences(view, shape)
        scale = [item for item in found if item.startswith("embedding scale")]
        wrong = [item for item in found if item not in scale]
        status: Status = "fail" if wrong else "note" if scale else "ok"
        told = f"{view.draft_tokens} draft tokens, layers {list(view.layer_ids or ())}"
        if scale:
            found.append("it has no field for the target's scaled embeddings, so expect fewer accepted tokens there")
        checks.append(Check(f"read by {view.engine}", status, "; ".join(found) or told))
    unfilled, unknown = engines.unfilled_and_unknown(tensors, shape.layers)
    detail = f"unfilled {unfilled[:3]}, unknown {unknown[:3]}" if unfilled or unknown else "every parameter is filled"
    checks.append(Check("names in vLLM and SGLang", "fail" if unfilled or unknown else "ok", detail))
    if shape.target_layers and shape.target_layers - 1 in shape.layer_ids:
        checks.append(
            Check(
                "last layer",
                "note",
                f"layer {shape.target_layers - 1} is the target's last: readers on transformers' hidden_states take it "
                "after the final norm, vLLM and Paceline before",
            )
        )
    return checks


def load_tokenizer_or_none(target: TargetConfig) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(target)
    except UserError:  # a folder without tokenizer files: said by check_template
        return None


def load_drafter(shape: DrafterShape, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Drafter:
    """A Drafter with these weights, for decoding and checks."""
    drafter = Drafter(shape)
    drafter.load_state_dict(dict(tensors))
    return drafter.to(dtype).eval().requires_grad_(False)


def check_numbers(
    shape: DrafterShape,
    tensors: Mapping[str, Tensor],
    ends: FrozenEnds | None,
    trained: Mapping[str, Tensor] | None,
) -> list[Check]:
    """Logits of the reloaded drafter at positions 0, 100, 5,000 and beyond its trained length, three ways.

    Against the reference that is built from config.json as an engine builds it, and against the trained drafter where
    it is given. Random features and a random block (seeded) stand for text; without the target's head, states stand
    for logits. Everything in float32.
    """
    config = config_json(shape, "float32")
    ours = load_drafter(shape, tensors)
    others: list[tuple[str, Callable[[Tensor, Tensor, int], Tensor], float]] = [
        ("as an engine computes it", lambda f, b, at: reference_hidden(config, tensors, f, b, at), 2e-3)
    ]
    if trained is not None:
        first = load_drafter(shape, {name: tensor.float() for name, tensor in trained.items()})
        same = all(tensor.dtype == trained[name].dtype for name, tensor in tensors.items())
        others.append(
            ("trained and reloaded", lambda f, b, at: drafter_hidden(first, f, b, at), 1e-5 if same else 5e-2)
        )
    checks = []
    for name, other, tolerance in others:
        worst, where = 0.0, 0
        for position in (*POSITIONS, shape.max_positions + 7):
            features, block = _random_inputs(shape, position)
            got = _logits(drafter_hidden(ours, features, block, position), ends)
            wanted = _logits(other(features, block, position), ends)
            gap = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9))
            worst, where = max((worst, where), (gap, position))
        status: Status = "ok" if worst <= tolerance else "fail"
        places = ", ".join(str(p) for p in (*POSITIONS, shape.max_positions + 7))
        checks.append(
            Check(f"logits, {name}", status, f"largest relative gap {worst:.1e} at {where} of positions {places}")
        )
    return checks


def _random_inputs(shape: DrafterShape, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(7, shape.features, generator=generator)
    return features, torch.randn(shape.block_size, shape.hidden_size, generator=generator)


@torch.no_grad()
def drafter_hidden(drafter: Drafter, features_SF: Tensor, block_BH: Tensor, first: int) -> Tensor:
    """States [B, H] of one block after a context whose positions start at `first`."""
    tokens, size = len(features_SF), len(block_BH)
    positions = torch.arange(first, first + tokens + size)[None]
    context = drafter.context_kv(features_SF[None], positions[:, :tokens])
    mask = torch.ones(size, tokens + size, dtype=torch.bool)
    return drafter.blocks(block_BH[None], positions[:, tokens:], context, dense_attend(mask))[0]


def _logits(hidden: Tensor, ends: FrozenEnds | None) -> Tensor:
    if ends is None:
        return hidden
    head = ends.head_VH.cpu()[:4096].float()
    return hidden @ head.T


@torch.no_grad()
def check_features(model: PreTrainedModel, shape: DrafterShape, tokens: int = 24) -> list[Check]:
    """Features by the exported ids, as engines on transformers take them, equal hooks on the target's layers; those of
    neighbouring ids differ (so an id that is off by one cannot pass)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocabulary, (1, tokens), generator=generator).to(next(model.parameters()).device)
    with Capture(model, shape.layer_ids) as capture:
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        hooked = capture.features().chunk(len(shape.layer_ids), dim=-1)
    wrong, blind = [], []
    for layer, feature in zip(shape.layer_ids, hooked, strict=True):
        if layer + 1 < len(states) - 1 and not torch.equal(states[layer + 1], feature):
            wrong.append(layer)
        near = [index for index in (layer, layer + 2) if index < len(states)]
        blind += [layer for index in near if torch.equal(states[index], feature)]
    ok = not wrong and not blind
    detail = f"ids {list(shape.layer_ids)} on {tokens} tokens; ids one off differ"
    return [
        Check("features by exported ids", "ok" if ok else "fail", detail if ok else f"wrong {wrong}, blind {blind}")
    ]
