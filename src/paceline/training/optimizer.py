"""AdamW with float32 masters over flat buffers: reduce, divide, clip, skip and update without asking the host.

Gradients arrive as unnormalised sums. A step reduces them and the weight sum over the drafter ranks, divides, clips by
the global norm (after the division), and updates; a step whose gradient is not finite, or whose weight sum is zero,
changes nothing. All of that is decided on the device: the host learns of it from the report, when it likes.

All parameters live in one flat buffer of the compute dtype, each padded to whole cache lines, and so do the float32
masters (the same buffer when the compute dtype is float32) and both moments. So few large kernels and all-reduces serve
all, and a contiguous range of the flat buffer can be a rank's shard.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.config import TrainingConfig

Reduce = Callable[[Tensor], None]
"""Sums a tensor over the drafter ranks, in place."""

EPSILON = 1e-8
_ALIGNMENT = 64


@dataclass(frozen=True)
class StepReport:
    """What a step did; the tensors are scalars on the device, not yet looked at."""

    grad_norm: Tensor
    """float32: norm of the divided gradient before clipping (not finite when skipped for that)."""
    skipped: Tensor
    """bool"""
    learning_rate: float


def learning_rate(step: int, total: int, config: TrainingConfig) -> float:
    """The rate of optimiser step `step` (0-based) of `total`: a linear rise, then the schedule's fall towards 0."""
    rise = math.ceil(config.warmup * total)
    if step < rise:
        return config.learning_rate * (step + 1) / rise
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "wsd":
        fall = math.ceil(config.decay * total)
        return config.learning_rate * min(1.0, (total - step) / max(1, fall))
    progress = (step - rise) / max(1, total - rise)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


@dataclass(frozen=True)
class AdamW:
    """The numbers of one update of one parameter."""

    rate: float
    decay: float
    beta1: float
    beta2: float
    epsilon: float = EPSILON


@dataclass(frozen=True)
class _Place:
    """Where a parameter lies in the flat buffers."""

    name: str
    parameter: nn.Parameter
    offset: int
    decays: bool

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.parameter.numel()].view(self.parameter.shape)


class Optimizer:
    """AdamW (decoupled decay, on matrices only) for a module whose parameters have one dtype and device.

    It moves the parameters into its flat buffer: build it after the module is on its device in its compute dtype and
    holds its weights. Pass float32 weights as `masters` (by parameter name) when the compute dtype is narrower, or the
    masters start as what that dtype kept.
    """

    def __init__(
        self, module: nn.Module, config: TrainingConfig, total_steps: int, masters: dict[str, Tensor] | None = None
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.steps_done = 0
        self._places, length = _lay_out(module)
        first = self._places[0].parameter
        self._values = torch.zeros(length, dtype=first.dtype, device=first.device)
        self._masters = (
            self._values if first.dtype == torch.float32 else torch.zeros_like(self._values, dtype=torch.float32)
        )
        self._moment1 = torch.zeros_like(self._masters)
        self._moment2 = torch.zeros_like(self._masters)
        self._sums = torch.zeros_like(self._masters) if config.global_batch > 1 else None
        self._applied = torch.zeros((), dtype=torch.float32, device=first.device)
        self._adopt(masters or {})

    @torch.no_grad()
    def accumulate(self) -> None:
        """After each backward: add the parameters' gradients to the step's sums, and drop them."""
        if self._sums is None:
            return
        for place in self._places:
            if place.parameter.grad is not None:
                place.view(self._sums).add_(place.parameter.grad)
                place.parameter.grad = None

    @torch.no_grad()
    def step(self, weight_sum: Tensor, reduce: Reduce | None = None) -> StepReport:
        """Apply one optimiser step and clear the gradients.

        weight_sum: float32 scalar on the device, this rank's sum over the step's batches. `reduce` is called on the
        flat gradient and on the weight sum.
        """
        rate = learning_rate(self.steps_done, self.total_steps, self.config)
        gradients = self._gradients(flat=reduce is not None)
        total = weight_sum.detach().to(torch.float32).clone()
        if reduce is not None:
            reduce(self._flat_gradient(gradients))
            reduce(total)
        norm = _norm(gradients) / total
        clip = (self.config.clip / (norm + 1e-6)).clamp(max=1.0)
        good = norm.isfinite() & (total > 0)
        self._applied += good
        self._update(gradients, clip / total, good, rate)
        self._clear()
        self.steps_done += 1
        return StepReport(grad_norm=norm, skipped=~good, learning_rate=rate)

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, by name; views of the live buffers."""
        tensors = {"applied": self._applied, "steps_done": torch.tensor(self.steps_done)}
        for kind, flat in self._kinds().items():
            tensors |= {f"{kind}.{place.name}": place.view(flat) for place in self._places}
        return tensors

    def masters(self) -> dict[str, Tensor]:
        """The float32 weights by parameter name; views of the live buffer."""
        return {place.name: place.view(self._masters) for place in self._places}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state` gave; the module's parameters follow. Raises KeyError for a missing name."""
        self._applied.copy_(tensors["applied"])
        self.steps_done = int(tensors["steps_done"])
        for kind, flat in self._kinds().items():
            for place in self._places:
                place.view(flat).copy_(tensors[f"{kind}.{place.name}"])
        self._publish()

    def _kinds(self) -> dict[str, Tensor]:
        return {"master": self._masters, "moment1": self._moment1, "moment2": self._moment2}

    def _adopt(self, masters: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for place in self._places:
                place.view(self._masters).copy_(masters.get(place.name, place.parameter))
                place.parameter.data = place.view(self._values)
            self._publish()

    def _publish(self) -> None:
        if self._values is not self._masters:
            self._values.copy_(self._masters)

    def _gradients(self, flat: bool) -> list[Tensor]:
        """One tensor a place. Gradients that were not accumulated are taken where they lie, unless flat is needed."""
        if self._sums is not None:
            self.accumulate()
            return [place.view(self._sums) for place in self._places]
        given = [place.parameter.grad for place in self._places]
        if not flat and all(grad is not None for grad in given):
            return [grad for grad in given if grad is not None]
        buffer = torch.zeros_like(self._values)
        views = [place.view(buffer) for place in self._places]
        for view, grad in zip(views, given, strict=True):
            if grad is not None:
                view.copy_(grad)
        return views

    def _flat_gradient(self, views: list[Tensor]) -> Tensor:
        """The whole buffer that the views lie in."""
        base = views[0]._base
        assert base is not None
        assert base.numel() == self._values.numel()
        return base

    def _update(self, gradients: list[Tensor], scale: Tensor, good: Tensor, rate: float) -> None:
        body = importlib.import_module("paceline.training.adamw").adamw if self._values.is_cuda else _plain_adamw
        for place, gradient in zip(self._places, gradients, strict=True):
            numbers = AdamW(rate, self.config.weight_decay if place.decays else 0.0, *self.config.betas)
            states = [place.view(flat) for flat in (self._masters, self._moment1, self._moment2)]
            body(place.parameter.data, gradient, states, (scale, good, self._applied), numbers)

    def _clear(self) -> None:
        if self._sums is not None:
            self._sums.zero_()
        for place in self._places:
            place.parameter.grad = None


def _lay_out(module: nn.Module) -> tuple[list[_Place], int]:
    places: list[_Place] = []
    end = 0
    for name, parameter in module.named_parameters():
        places.append(_Place(name, parameter, end, decays=parameter.ndim > 1))
        end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    kinds = {(place.parameter.dtype, place.parameter.device) for place in places}
    if len(kinds) != 1:
        raise ValueError(f"parameters of one dtype and device are needed, got {kinds}")
    return places, end


def _norm(tensors: list[Tensor]) -> Tensor:
    """Global 2-norm in float32."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x, dtype=torch.float32) for x in tensors]))


def _plain_adamw(
    parameter: Tensor, gradient: Tensor, states: list[Tensor], facts: tuple[Tensor, Tensor, Tensor], numbers: AdamW
) -> None:
    """The update in torch operations: the CPU's body, and the oracle of the kernel."""
    master, moment1, moment2 = states
    scale, good, applied = facts
    gradient = torch.where(good, gradient.float() * scale, 0.0)
    moment1.lerp_(gradient, (1 - numbers.beta1) * good.float())
    moment2.mul_(torch.where(good, numbers.beta2, 1.0)).addcmul_(gradient, gradient, value=1 - numbers.beta2)
    root = moment2.sqrt().div_((1 - numbers.beta2**applied).sqrt()).add_(numbers.epsilon)
    if numbers.decay:
        master.mul_(torch.where(good, 1 - numbers.rate * numbers.decay, 1.0))
    # Before the first applied step both corrections are 0 / 0: `where` keeps the skipped update out.
    change = moment1 / root * (numbers.rate / (1 - numbers.beta1**applied))
    master.sub_(torch.where(good, change, 0.0))
    if parameter.data_ptr() != master.data_ptr():
        parameter.copy_(master)
