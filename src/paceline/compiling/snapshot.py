"""Takes a copy of what a warm-up will change, and puts it back bit for bit, in place.

In place, because compiled code guards on the identity of parameters and may hold their addresses.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy
import torch
from torch import Tensor, nn

Restore = Callable[[], None]


@runtime_checkable
class HasState(Protocol):
    """Anything with tensors of its own, such as Paceline's optimiser."""

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, tensors: dict[str, Tensor]) -> None: ...


Restorable = nn.Module | torch.optim.Optimizer | Tensor | torch.Generator | HasState


def snapshot(things: Sequence[Restorable]) -> Restore:
    """Copy all of `things` and the global random states; the result puts them back. Copies lie in host memory."""
    restores = [_one(thing) for thing in things]
    restores.append(_random_states())

    def restore() -> None:
        for undo in restores:
            undo()

    return restore


def _one(thing: Restorable) -> Restore:
    if isinstance(thing, nn.Module):
        return _module(thing)
    if isinstance(thing, torch.optim.Optimizer):
        return _optimizer(thing)
    if isinstance(thing, Tensor):
        return _tensor(thing)
    if isinstance(thing, torch.Generator):
        return _generator(thing)
    if isinstance(thing, HasState):
        return _stateful(thing)
    raise TypeError(f"cannot restore {type(thing).__name__} after a warm-up: give it state() and load_state()")


def _module(module: nn.Module) -> Restore:
    restores = [_tensor(tensor) for tensor in [*module.parameters(), *module.buffers()]]
    modes = [(part, part.training) for part in module.modules()]

    def restore() -> None:
        for undo in restores:
            undo()
        for part, training in modes:
            part.training = training

    return restore


def _tensor(tensor: Tensor) -> Restore:
    values = _host_copy(tensor)
    gradient = tensor.grad if tensor.is_leaf else None
    gradient_values = None if gradient is None else _host_copy(gradient)

    def restore() -> None:
        with torch.no_grad():
            tensor.copy_(values)
            if gradient is not None and gradient_values is not None:
                gradient.copy_(gradient_values)
        if tensor.is_leaf:
            tensor.grad = gradient

    return restore


def _optimizer(optimizer: torch.optim.Optimizer) -> Restore:
    """State that was there is put back in place; state that the warm-up made is dropped; rates are put back."""
    kept = {parameter: _state_restores(state) for parameter, state in optimizer.state.items()}
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    groups = copy.deepcopy(groups)

    def restore() -> None:
        for parameter in [parameter for parameter in optimizer.state if parameter not in kept]:
            del optimizer.state[parameter]
        for undos in kept.values():
            for undo in undos:
                undo()
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)

    return restore


def _state_restores(state: dict) -> list[Restore]:
    plain = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    tensors = [_tensor(value) for value in state.values() if isinstance(value, Tensor)]
    return [*tensors, lambda: state.update(plain)]


def _stateful(thing: HasState) -> Restore:
    saved = {name: _host_copy(tensor) for name, tensor in thing.state().items()}
    return lambda: thing.load_state(saved)


def _generator(generator: torch.Generator) -> Restore:
    saved = generator.get_state()

    def restore() -> None:
        generator.set_state(saved)

    return restore


def _random_states() -> Restore:
    python, host, torchs = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore() -> None:
        random.setstate(python)
        numpy.random.set_state(host)
        torch.set_rng_state(torchs)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return restore


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
