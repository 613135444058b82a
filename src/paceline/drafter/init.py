"""A new drafter's weights: random, from the target's own layers, or those of a drafter that exists."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.drafter.model import Drafter
from paceline.errors import UserError
from paceline.shapes import DrafterShape

Weights = Callable[[str], Tensor | None]
"""A target's tensor by its name inside the base model ("layers.3.mlp.up_proj.weight", "norm.weight"), or None."""

Read = Callable[[Path], tuple[DrafterShape, dict[str, Tensor]]]
"""Reads an exported drafter's folder."""

STANDARD_DEVIATION = 0.02

_FIRST_NORM = 0.5
"""The final norm's first weight. With the target's own (or with ones) the first logits are as sharp as a trained
model's and all wrong: 14 (or 12) nats to begin with on SmolLM2, against 9, and the lead lasts."""


def build(
    shape: DrafterShape, init: str, seed: int, *, target: Weights | None = None, read: Read | None = None
) -> Drafter:
    """A float32 drafter on the CPU. `init` is `random`, `target` or a drafter's folder.

    The same shape, init and seed give the same weights on any machine. Raises UserError for a folder whose drafter has
    another shape.
    """
    drafter = Drafter(shape)
    _randomise(drafter, seed)
    if init == "target":
        assert target is not None, "init = target needs the target's weights"
        copy_from_target(drafter, target)
    elif init != "random":
        assert read is not None, "a folder needs a reader"
        _continue_from(drafter, Path(init), read)
    return drafter


def _randomise(drafter: Drafter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=STANDARD_DEVIATION, generator=generator)


def source_layers(shape: DrafterShape) -> list[int]:
    """Which target layer each draft layer starts from: evenly spaced over the target's depth, the last one last."""
    if shape.layers == 1:
        return [shape.target_layers - 1]
    return [max(0, round((i + 1) * shape.target_layers / shape.layers) - 1) for i in range(shape.layers)]


@torch.no_grad()
def copy_from_target(drafter: Drafter, target: Weights, sources: list[int] | None = None) -> None:
    """Copy the layer weights and norms that the target has in the drafter's shape, and start gently at both ends.

    What it lacks (q_norm and k_norm, or a tensor of another shape) stays as it was: ones and small random numbers.
    """
    sources = sources or source_layers(drafter.shape)
    for name, tensor in drafter.layers.state_dict().items():
        number, rest = name.split(".", 1)
        found = target(f"layers.{sources[int(number)]}.{rest}")
        if found is not None and found.shape == tensor.shape:
            tensor.copy_(found)
    drafter.norm.weight.fill_(_FIRST_NORM)
    _mean_context(drafter, target, sources)


def _mean_context(drafter: Drafter, target: Weights, sources: list[int]) -> None:
    """The fused context starts as the mean of the captured states, under the mean of the layers' own input norms."""
    shape = drafter.shape
    identity = torch.eye(shape.hidden_size) / len(shape.layer_ids)
    drafter.fc.weight.copy_(identity.repeat(1, len(shape.layer_ids)))
    norms = [target(f"layers.{source}.input_layernorm.weight") for source in sources]
    found = [norm.float() for norm in norms if norm is not None and norm.shape == drafter.hidden_norm.weight.shape]
    if found:
        drafter.hidden_norm.weight.copy_(torch.stack(found).mean(dim=0))


@contextlib.contextmanager
def naming_init(folder: Path) -> Iterator[None]:
    """A UserError about the folder that comes out of the block names the key that chose it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"drafter.init = {str(folder)!r}: {error.what}", error.remedy) from None


def check_continues(folder: Path, theirs: DrafterShape, mine: DrafterShape) -> None:
    """Raise UserError where a folder's drafter is not of the shape that is to be continued."""
    if (theirs.layers, theirs.hidden_size) != (mine.layers, mine.hidden_size):
        raise UserError(
            f"drafter.init = {str(folder)!r} holds a drafter of {theirs.layers} layers and hidden size "
            f"{theirs.hidden_size}; this run's has {mine.layers} and {mine.hidden_size}",
            _OTHER_SHAPE,
        )
    if theirs.layer_ids != mine.layer_ids:
        raise UserError(
            f"drafter.init = {str(folder)!r} reads target layers {list(theirs.layer_ids)}, this run captures "
            f"{list(mine.layer_ids)}",
            f"set target.layer_ids = {list(theirs.layer_ids)}",
        )


_OTHER_SHAPE = "set drafter.layers and the target to those it was trained with, or use init = 'target'"


def check_weights(folder: Path, theirs: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
    """Raise UserError where a folder's tensors are not those of the drafter that is to be continued."""
    wrong = [name for name in mine if name not in theirs or theirs[name].shape != mine[name].shape]
    if wrong or len(theirs) != len(mine):
        first = wrong[0] if wrong else min(theirs.keys() - mine.keys())
        raise UserError(f"drafter.init = {str(folder)!r}: {first} is not of this run's drafter", _OTHER_SHAPE)


def _continue_from(drafter: Drafter, folder: Path, read: Read) -> None:
    with naming_init(folder):
        shape, state = read(folder)
    check_continues(folder, shape, drafter.shape)
    check_weights(folder, state, drafter.state_dict())
    drafter.load_state_dict({name: tensor.float() for name, tensor in state.items()})
