"""AdamW with float32 masters over flat buffers: reduce, divide, clip, skip and update without asking the host.

Gradients arrive as unnormalised sums. A step reduces them and the weight sum over the drafter ranks, divides, clips by
the global norm (after the division), and updates; a step whose gradient is not finite, or whose weight sum is zero,
changes nothing. All of that is decided on the device: the host learns of it from the report, when it likes.

All parameters live in one flat buffer of the compute dtype, each padded to whole cache lines, and so do the float32
masters (the same buffer when the compute dtype is float32) and both moments. So few large kernels and all-reduces serve
all.

With R shards, rank r keeps masters and moments of the r-th of R equal ranges of the flat buffer alone (ZeRO, stage 1:
arXiv 1910.02054). A step then reduces the gradient to its owners, adds up the squares of their norms together with the
weight sums, updates each range on its owner, and gathers the compute weights.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.config import TrainingConfig
from paceline.pipeline.reduce import Shards
from paceline.training.checkpoint import Shard

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

    @property
    def end(self) -> int:
        return self.offset + self.parameter.numel()

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.end].view(self.parameter.shape)


@dataclass(frozen=True)
class _Piece:
    """What this rank keeps of a parameter: elements `low` to `high` of the flat buffer, which is kept from `start`."""

    place: _Place
    low: int
    high: int
    start: int

    @property
    def whole(self) -> bool:
        return (self.low, self.high) == (self.place.offset, self.place.end)

    def of_flat(self, flat: Tensor) -> Tensor:
        return flat[self.low : self.high]

    def of_kept(self, kept: Tensor) -> Tensor:
        return kept[self.low - self.start : self.high - self.start]

    def of_parameter(self, tensor: Tensor) -> Tensor:
        """The same elements of a tensor of the parameter's shape."""
        return tensor.reshape(-1)[self.low - self.place.offset : self.high - self.place.offset]


class Optimizer:
    """AdamW (decoupled decay, on matrices only) for a module whose parameters have one dtype and device.

    It moves the parameters into its flat buffer: build it after the module is on its device in its compute dtype and
    holds its weights. Pass float32 weights as `masters` (by parameter name, on any device) when the compute dtype is
    narrower, or the masters start as what that dtype kept. `shards` divides masters and moments among its ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        config: TrainingConfig,
        total_steps: int,
        masters: dict[str, Tensor] | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.steps_done = 0
        self._shards = shards
        self._places, length = _lay_out(module, 1 if shards is None else shards.ranks)
        first = self._places[0].parameter
        self._values = torch.zeros(length, dtype=first.dtype, device=first.device)
        kept = self._values if shards is None else shards.part(self._values)
        self._pieces = _cut(self._places, 0 if shards is None else shards.rank * kept.numel(), kept.numel())
        self._masters = kept if first.dtype == torch.float32 else torch.zeros_like(kept, dtype=torch.float32)
        self._moment1 = torch.zeros_like(self._masters)
        self._moment2 = torch.zeros_like(self._masters)
        self._sums = torch.zeros_like(self._values, dtype=torch.float32) if config.global_batch > 1 else None
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
        flat gradient (which shards reduce themselves) and on the weight sum. Without it nothing is exchanged, and
        with shards only this rank's part is updated: for a warm-up, whose ranks do not keep step.
        """
        rate = learning_rate(self.steps_done, self.total_steps, self.config)
        gradients, norm, total = self._reduced(weight_sum.detach().to(torch.float32).clone(), reduce)
        norm = norm / total
        clip = (self.config.clip / (norm + 1e-6)).clamp(max=1.0)
        good = norm.isfinite() & (total > 0)
        self._applied += good
        self._update(gradients, clip / total, good, rate)
        if self._shards is not None and reduce is not None:
            self._shards.all_gather(self._values)
        self._clear()
        self.steps_done += 1
        return StepReport(grad_norm=norm, skipped=~good, learning_rate=rate)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the state that shards divide, on this rank."""
        masters = 0 if self._values.dtype == torch.float32 else self._masters.nbytes
        return masters + self._moment1.nbytes + self._moment2.nbytes

    @property
    def whole_bytes(self) -> int:
        """The same, of all ranks together (or of each, where nothing is sharded)."""
        return self.kept_bytes * (1 if self._shards is None else self._shards.ranks)

    def state(self) -> dict[str, Tensor]:
        """What this rank needs to go on, by name: views of the live buffers, flat where they are parts of tensors."""
        tensors = {"applied": self._applied, "steps_done": torch.tensor(self.steps_done)}
        for kind, kept in self._kinds().items():
            for piece in self._pieces:
                values = piece.of_kept(kept)
                shape = piece.place.parameter.shape
                tensors[f"{kind}.{piece.place.name}"] = values.view(shape) if piece.whole else values
        return tensors

    def share(self) -> dict[str, Tensor | Shard]:
        """The state as `checkpoint.save` takes it: all ranks' shares together are all that a resumed run needs."""
        if self._shards is None:
            return dict(self.state())
        tensors: dict[str, Tensor | Shard] = {
            "applied": self._applied,
            "steps_done": torch.tensor(self.steps_done),
        }
        for kind, kept in self._kinds().items():
            for piece in self._pieces:
                place = piece.place
                values, start = piece.of_kept(kept), piece.low - place.offset
                tensors[f"{kind}.{place.name}"] = Shard(values, start, tuple(place.parameter.shape))
        return tensors

    @torch.no_grad()
    def masters(self) -> dict[str, Tensor]:
        """The float32 weights by parameter name; views of the live buffer.

        Where they are sharded: gathered on the CPU of shard 0. Every rank calls it then, and the others get nothing.
        """
        whole: Tensor | None = self._masters
        if self._values.dtype == torch.float32:
            whole = self._values
        elif self._shards is not None:
            whole = self._shards.gather(self._masters)
        return {} if whole is None else {place.name: place.view(whole) for place in self._places}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave here, or whole tensors of any number of ranks; the parameters follow.

        Raises KeyError for a missing name.
        """
        self._applied.copy_(tensors["applied"])
        self.steps_done = int(tensors["steps_done"])
        for kind, kept in self._kinds().items():
            for piece in self._pieces:
                found, mine = tensors[f"{kind}.{piece.place.name}"], piece.of_kept(kept)
                mine.copy_(found.reshape(-1) if found.numel() == mine.numel() else piece.of_parameter(found))
        self._publish(tensors)

    def _kinds(self) -> dict[str, Tensor]:
        return {"master": self._masters, "moment1": self._moment1, "moment2": self._moment2}

    def _adopt(self, masters: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for piece in self._pieces:
                given = masters.get(piece.place.name, piece.place.parameter)
                piece.of_kept(self._masters).copy_(piece.of_parameter(given))
            for place in self._places:
                place.view(self._values).copy_(masters.get(place.name, place.parameter))
                place.parameter.data = place.view(self._values)

    def _publish(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute weights from the masters; those of other ranks' masters from `tensors`, where it has them whole."""
        for piece in self._pieces:
            piece.of_flat(self._values).copy_(piece.of_kept(self._masters))
        if self._shards is not None:
            for place in self._places:
                found = tensors.get(f"master.{place.name}")
                if found is not None and found.numel() == place.parameter.numel():
                    place.view(self._values).copy_(found)

    def _reduced(self, total: Tensor, reduce: Reduce | None) -> tuple[list[Tensor], Tensor, Tensor]:
        """Gradients of this rank's pieces, and over all ranks the gradient's norm and `total`."""
        flat = self._flat_gradient(needed=reduce is not None or self._shards is not None)
        if flat is None:
            gradients = [piece.of_parameter(_given(piece.place)) for piece in self._pieces]
            return gradients, _norm(gradients, total), total
        gradients = [piece.of_flat(flat) for piece in self._pieces]
        if reduce is None:
            return gradients, _norm(gradients, total), total
        if self._shards is None:
            reduce(flat)
            reduce(total)
            return gradients, _norm(gradients, total), total
        self._shards.reduce_scatter(flat)
        sums = torch.stack([_norm(gradients, total).square(), total])
        reduce(sums)
        return gradients, sums[0].sqrt(), sums[1]

    def _flat_gradient(self, needed: bool) -> Tensor | None:
        """The step's gradient in one buffer. None where it may stay as the backward left it."""
        if self._sums is not None:
            self.accumulate()
            return self._sums
        given = [place.parameter.grad for place in self._places]
        if not needed and all(grad is not None for grad in given):
            return None
        buffer = torch.zeros_like(self._values)
        for place, grad in zip(self._places, given, strict=True):
            if grad is not None:
                place.view(buffer).copy_(grad)
        return buffer

    def _update(self, gradients: list[Tensor], scale: Tensor, good: Tensor, rate: float) -> None:
        body = importlib.import_module("paceline.training.adamw").adamw if self._values.is_cuda else _plain_adamw
        for piece, gradient in zip(self._pieces, gradients, strict=True):
            numbers = AdamW(rate, self.config.weight_decay if piece.place.decays else 0.0, *self.config.betas)
            states = [piece.of_kept(kept) for kept in (self._masters, self._moment1, self._moment2)]
            body(piece.of_flat(self._values), gradient, states, (scale, good, self._applied), numbers)

    def _clear(self) -> None:
        if self._sums is not None:
            self._sums.zero_()
        for place in self._places:
            place.parameter.grad = None


def _lay_out(module: nn.Module, shards: int) -> tuple[list[_Place], int]:
    """Places, and the length of the flat buffer: a multiple of whole cache lines for each shard."""
    places: list[_Place] = []
    end = 0
    for name, parameter in module.named_parameters():
        places.append(_Place(name, parameter, end, decays=parameter.ndim > 1))
        end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    kinds = {(place.parameter.dtype, place.parameter.device) for place in places}
    if len(kinds) != 1:
        raise ValueError(f"parameters of one dtype and device are needed, got {kinds}")
    step = _ALIGNMENT * shards
    return places, -(-end // step) * step


def _cut(places: list[_Place], start: int, length: int) -> list[_Piece]:
    """What the range of the flat buffer from `start` holds of each parameter, where it holds anything."""
    ranges = [(place, max(place.offset, start), min(place.end, start + length)) for place in places]
    return [_Piece(place, low, high, start) for place, low, high in ranges if low < high]


def _given(place: _Place) -> Tensor:
    assert place.parameter.grad is not None
    return place.parameter.grad


def _norm(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Global 2-norm in float32, a scalar where `like` lies; a rank's share may hold no parameter at all."""
    if not tensors:
        return torch.zeros_like(like)
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
