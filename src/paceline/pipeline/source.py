"""Where a drafter's batches come from: the same two iterators whether its own device runs the target or another does.

S context tokens, A anchors, F = K·H width of a token's feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.batches import EvaluationBatch, FeatureBatch, TokenBatch
from paceline.pipeline.topology import Item, Schedule

if TYPE_CHECKING:
    from paceline.data.stream import Stream
    from paceline.target.base import Target

Gather = Callable[[Sequence[Tensor], int], list[Tensor]]
"""(this drafter's equal-shaped CPU tensors, number of tensors of all drafters) -> all of them, dealt back in order."""


def gather_alone(mine: Sequence[Tensor], total: int) -> list[Tensor]:
    assert len(mine) == total
    return list(mine)


class FeatureSource(ABC):
    """Features for one drafter, in the order of the schedule. Use it from one thread."""

    def __init__(self, stream: Stream, schedule: Schedule, drafter: int, gather: Gather) -> None:
        self.schedule = schedule
        self.drafter = drafter
        self.held_out: tuple[EvaluationBatch, ...] = tuple(stream.evaluation_batches())
        assert len(self.held_out) == schedule.held_out, "the schedule was made for other held-out batches"
        self._gather = gather
        self._steps_done = schedule.start

    @abstractmethod
    def global_batch(self, step: int) -> Iterator[FeatureBatch]:
        """This drafter's ⌈G/D⌉ micro-batches of optimiser step `step`; empty ones fill up. Steps go up by one."""

    @abstractmethod
    def evaluation(self) -> Iterator[tuple[EvaluationBatch, FeatureBatch]]:
        """This drafter's share of the held-out batches.

        Called exactly where `schedule.evaluates_first` and `schedule.evaluates_after` say so.
        """

    @abstractmethod
    def next_tokens(self) -> list[Tensor]:
        """The target's own next token at every place of every held-out batch, int64 [S] on CPU.

        Called once on every drafter, before the first batch.
        """

    def gather(self, mine: Sequence[Tensor]) -> list[Tensor]:
        """One CPU tensor for each batch that `evaluation` yielded, all of one shape -> those of all held-out batches,
        on every drafter, in the order of `held_out`."""
        return self._gather(mine, len(self.held_out))

    def waited(self) -> float:
        """Seconds for which this drafter's device waited for features since this was last asked; asking waits for
        nothing."""
        return 0.0

    def _due(self) -> list[Item]:
        return [Item("held_out", number, self._steps_done) for number in self.schedule.held_out_of(self.drafter)]

    def close(self) -> None:  # noqa: B027 - nothing to close is a fine answer
        """Free what the source holds."""


class TokenBatches:
    """Token batches of a sequence of items, each prepared by a thread while the one before it is in use.

    The thread runs only the data stream (NumPy); it calls no compiled function.
    """

    def __init__(self, stream: Stream, held_out: Sequence[EvaluationBatch], items: Iterator[Item], pin: bool) -> None:
        self._stream = stream
        self._held_out = held_out
        self._items = items
        self._pin = pin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-data")
        self._next: tuple[Item, Future[TokenBatch]] | None = None
        self._prepare()

    def take(self, item: Item) -> TokenBatch:
        """The tokens of `item`, which must be the next one of the sequence."""
        assert self._next is not None, f"{item} lies beyond the end of the schedule"
        due, future = self._next
        assert due == item, f"{item} was asked for where the schedule has {due}"
        batch = future.result()
        self._prepare()
        return batch

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _prepare(self) -> None:
        item = next(self._items, None)
        self._next = None if item is None else (item, self._thread.submit(self._make, item))

    def _make(self, item: Item) -> TokenBatch:
        if item.kind == "held_out":
            return self._held_out[item.index].tokens
        batch = self._stream.batch(item.index)
        return pinned(batch) if self._pin else batch


def pinned(batch: TokenBatch) -> TokenBatch:
    """The same batch in page-locked memory, so that its copy to a GPU does not wait."""
    return batch.map(Tensor.pin_memory)


class InProcessSource(FeatureSource):
    """The colocated body: this drafter's own device runs the target on the batches that the drafter uses."""

    def __init__(
        self,
        stream: Stream,
        target: Target,
        schedule: Schedule,
        drafter: int = 0,
        gather: Gather = gather_alone,
    ) -> None:
        super().__init__(stream, schedule, drafter, gather)
        self._stream = stream
        self._target = target
        self._device = torch.device(target.device)
        self._batches = TokenBatches(stream, self.held_out, schedule.for_drafter(drafter), self._device.type == "cuda")
        self._nothing: FeatureBatch | None = None

    def global_batch(self, step: int) -> Iterator[FeatureBatch]:
        self._steps_done = step + 1
        indices = self.schedule.batches_of(self.drafter, step)
        for index in indices:
            yield self._with_features(self._batches.take(Item("train", index, step)))
        for _ in range(self.schedule.micro_batches - len(indices)):
            yield self._empty(step)

    def evaluation(self) -> Iterator[tuple[EvaluationBatch, FeatureBatch]]:
        for item in self._due():
            yield self.held_out[item.index], self._with_features(self._batches.take(item))

    def next_tokens(self) -> list[Tensor]:
        mine = self.schedule.held_out_of(self.drafter)
        return self.gather(
            [self._target.next_tokens(self._move(self.held_out[number].tokens)).cpu() for number in mine]
        )

    def close(self) -> None:
        self._batches.close()

    def _with_features(self, tokens: TokenBatch) -> FeatureBatch:
        moved = self._move(tokens)
        return FeatureBatch(moved, self._target.features(moved))

    def _move(self, tokens: TokenBatch) -> TokenBatch:
        return tokens.to(self._device)

    def _empty(self, step: int) -> FeatureBatch:
        if self._nothing is None:
            tokens = self._move(self._stream.empty(step))
            width = self._target.shape.hidden_size * len(self._target.layer_ids)
            features = torch.zeros(tokens.ids_S.shape[0], width, dtype=self._target.dtype, device=self._device)
            self._nothing = FeatureBatch(tokens, features)
        return self._nothing
