"""A frozen target sharded over a group of ranks, by the plan that its transformers class publishes.

The library's own loader shards over the whole world only (its mesh must hold every process, in 5.17 as in 5.24), and a
target's ranks are a part of the world; so its plan is carried out here, for a forward without gradients: column-wise
layers keep their rows of the weight, row-wise ones their columns and add up their results. Embedding and head stay
whole on every rank. E experts, I intermediate size, H hidden size.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from paceline.errors import UserError

_COLUMNS, _ROWS = "colwise", "rowwise"
_PACKED, _SUMMED = "packed_colwise", "moe_tp_experts"
_WHOLE = ("replicated_with_grad_allreduce",)


class Adder:
    """Adds up what the ranks of one target have of a layer's result, in place.

    Compiled layers call it from outside of their graphs: a group's name in them would make every target's its own.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._silent = False

    @torch.compiler.disable
    def add_up(self, output: Tensor) -> Tensor:
        if not self._silent:
            torch.distributed.all_reduce(output, group=self._group)
        return output

    def after(self, module: nn.Module) -> None:
        module.register_forward_hook(lambda _module, _inputs, output: self.add_up(output))

    @contextlib.contextmanager
    def silence(self) -> Generator[None]:
        """Nothing is added up, and no rank waits for another: numbers are wrong, and everything else is as it is."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False


def shard(decoder: nn.Module, config: Any, mesh: Any, name: str) -> Adder:
    """Keep this rank's part of every layer. `mesh` is one-dimensional; `name` is the target's, for messages.

    Returns what adds the ranks' results up. Raises UserError where the model has no plan of a known kind, or heads and
    sizes are not divisible.
    """
    adder, rank, size = Adder(mesh.get_group()), mesh.get_local_rank(), mesh.size()
    plan = _plan(config, name)
    _check_heads(config.to_dict(), size, name)
    taken = 0
    for path, module in list(decoder.named_modules()):
        style = _style(plan, path)
        if isinstance(module, nn.Linear) and style in (_COLUMNS, _ROWS):
            _shard_linear(module, style, (rank, size), adder, f"{name}: {path}")
            taken += 1
        elif style == _SUMMED:
            for part, parameter in list(module.named_parameters(recurse=False)):
                _shard_experts(module, part, parameter, _style(plan, f"{path}.{part}"), (rank, size), f"{name}: {path}")
            adder.after(module)
            taken += 1
    if not taken:
        raise UserError(f"target {name}: transformers' plan for its kind names no layer", _REMEDY)
    return adder


_REMEDY = "set target.tensor_parallel = 1, target.weights = 'float8', or choose another target"


def _plan(config: Any, name: str) -> list[tuple[re.Pattern[str], str]]:
    rules = config.base_model_tp_plan or {}
    layers = {path: style for path, style in rules.items() if path.startswith("layers.")}
    odd = sorted(set(layers.values()) - {_COLUMNS, _ROWS, _PACKED, _SUMMED, *_WHOLE})
    if odd or not layers:
        what = f"styles {', '.join(odd)}" if odd else "no plan for its layers"
        raise UserError(f"target {name} cannot be sharded: transformers gives it {what}", _REMEDY)
    return [(re.compile(re.escape(path).replace(r"\*", r"\d+")), style) for path, style in layers.items()]


def _style(plan: list[tuple[re.Pattern[str], str]], path: str) -> str:
    return next((style for pattern, style in plan if pattern.fullmatch(path)), "")


def _check_heads(facts: dict[str, Any], size: int, name: str) -> None:
    kv_heads = int(facts.get("num_key_value_heads") or facts["num_attention_heads"])
    if kv_heads % size:
        raise UserError(
            f"target.tensor_parallel = {size} does not divide the {kv_heads} key-value heads of target {name}",
            "choose a divisor",
        )


def _shard_linear(module: nn.Linear, style: str, place: tuple[int, int], adder: Adder, where: str) -> None:
    rank, size = place
    dim = 0 if style == _COLUMNS else 1
    module.weight = _frozen(_part(module.weight, dim, rank, size, where))
    if style == _COLUMNS:
        module.out_features //= size
        if module.bias is not None:
            module.bias = _frozen(_part(module.bias, 0, rank, size, where))
        return
    module.in_features //= size
    if module.bias is not None and rank:
        module.bias = _frozen(torch.zeros_like(module.bias))  # it is added once, by the first rank
    adder.after(module)


def _shard_experts(
    module: nn.Module, part: str, parameter: nn.Parameter, style: str, place: tuple[int, int], where: str
) -> None:
    """Stacked experts: [E, 2I, H] of gate and up, each half cut; [E, H, I] of down."""
    rank, size = place
    if style == _PACKED:
        halves = [_part(half, 1, rank, size, where) for half in parameter.chunk(2, dim=1)]
        module.register_parameter(part, _frozen(torch.cat(halves, dim=1)))
    elif style == _ROWS:
        module.register_parameter(part, _frozen(_part(parameter, 2, rank, size, where)))
    else:
        raise UserError(f"target {where}.{part} has no known place in transformers' plan", _REMEDY)


def _part(tensor: Tensor, dim: int, rank: int, size: int, where: str) -> Tensor:
    if tensor.shape[dim] % size:
        raise UserError(
            f"target {where}: {tensor.shape[dim]} is not divisible by target.tensor_parallel = {size}",
            "choose a divisor",
        )
    return tensor.detach().chunk(size, dim=dim)[rank].clone()


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
