"""Decoding with and without a drafter, over the same caches, batched, greedy or sampled.

One step drafts a block from the features committed so far, verifies it in one forward of the target, and commits what
was accepted and one token more. Blocks keep their full length to the end, so every step has the same shapes: on CUDA
with `graphs`, a step is captured once and replayed.

Letters: R requests, B block size (1 without a drafter), T tokens of a forward, C capacity, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.batches import FrozenEnds
from paceline.drafter.blocks import dense_attend
from paceline.errors import UserError
from paceline.evaluation.acceptance import Walk
from paceline.evaluation.cache import TargetCache, put
from paceline.evaluation.capture import Capture
from paceline.evaluation.sampling import Sampling, distribution, draw, verify_greedy, verify_sampled
from paceline.shapes import DrafterShape

KeyValue = tuple[Tensor, Tensor]


class Drafts(Protocol):
    """What decoding needs of a drafter (`drafter.model.Drafter`, or a stand-in with the same two methods)."""

    @property
    def dtype(self) -> torch.dtype: ...

    def context_kv(self, features_RSF: Tensor, positions_RS: Tensor) -> list[KeyValue]: ...

    def blocks(
        self,
        block_RQH: Tensor,
        positions_RQ: Tensor,
        context: list[KeyValue],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor: ...


@dataclass(frozen=True)
class Engine:
    """A target, and a drafter or none, ready to decode."""

    model: PreTrainedModel
    ends: FrozenEnds
    drafter: Drafts | None = None
    shape: DrafterShape | None = None
    """Block size, mask token and layer ids of the drafter."""
    sampling: Sampling = field(default_factory=Sampling)
    generator: torch.Generator | None = None
    static: bool = False
    """Attend over the whole capacity at every step, so that shapes never change."""
    graphs: bool = False
    """Capture a step in a CUDA graph (greedy, static)."""

    @property
    def block(self) -> int:
        return self.shape.block_size if self.drafter is not None and self.shape is not None else 1

    def without_drafter(self) -> Engine:
        """Plain decoding over the same caches."""
        return dataclasses.replace(self, drafter=None)


@dataclass(frozen=True)
class Decoded:
    """One answer."""

    tokens: list[int]
    """The prefill's token first; an end token, if any, last."""
    accepted: list[int]
    """Per step, the drafted tokens that were committed."""
    committed: list[int]
    """Per step, all tokens committed; their sum is len(tokens) - 1."""

    @property
    def steps(self) -> int:
        return len(self.committed)

    def walk(self, kind: str = "") -> Walk:
        return Walk(tuple(self.committed), tuple(self.accepted), kind)


@dataclass(frozen=True)
class Timed:
    """Answers of one batch and what they took. Capturing a graph, which a server does once, is in neither time."""

    answers: list[Decoded]
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the prefill's own, a second of decoding."""
        total = sum(len(answer.tokens) - 1 for answer in self.answers)
        return total / self.decode_seconds if self.decode_seconds else 0.0


def speculate(  # noqa: PLR0913  (each is a fact of one request; they are packed into an Engine at once)
    target_model: PreTrainedModel,
    drafter: Drafts,
    ends: FrozenEnds,
    shape: DrafterShape,
    prompt_ids: Sequence[int],
    limit: int,
    temperature: float = 0.0,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    end_ids: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> Decoded:
    """Speculative decoding of one prompt: at most `limit` new tokens, ended by any of `end_ids` (the drafter's own
    `eos_token_ids` when None).

    Greedy output in float32 is token for token that of `plain`; sampled output has the same distribution.
    Raises UserError for a target whose layers cannot go back (recurrent states).
    """
    engine = Engine(target_model, ends, drafter, shape, Sampling(temperature, top_k, top_p), generator)
    return decode(engine, [prompt_ids], limit, shape.eos_token_ids if end_ids is None else end_ids).answers[0]


def plain(
    target_model: PreTrainedModel,
    ends: FrozenEnds,
    prompt_ids: Sequence[int],
    limit: int,
    sampling: Sampling | None = None,
    *,
    end_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Decoded:
    """Decoding by the target alone, over the same kind of caches."""
    engine = Engine(target_model, ends, sampling=sampling or Sampling(), generator=generator)
    return decode(engine, [prompt_ids], limit, end_ids).answers[0]


@torch.no_grad()
def decode(engine: Engine, prompts: Sequence[Sequence[int]], limit: int, end_ids: Sequence[int]) -> Timed:
    """Decode a batch of prompts together, each to `limit` new tokens or to its first end token.

    Raises UserError for an empty prompt, for a limit below 1, and for a target whose logits are not finite.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise UserError("a prompt without tokens cannot be decoded", "leave empty prompts out")
    if limit < 1:
        raise UserError(f"a limit of {limit} new tokens decodes nothing", "give at least 1")
    loop = DecodingLoop(engine, prompts, limit, end_ids)
    with loop.capture:
        start = _now(loop.device)
        loop.prefill()
        prefilled = _now(loop.device)
        if engine.graphs:
            loop.prepare()
        begun = _now(loop.device)
        loop.run()
        end = _now(loop.device)
    loop.check_finite()
    return Timed(loop.answers(), prefilled - start, end - begun)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class DecodingLoop:
    """The tensors of a batch that is being decoded; `step` touches nothing else, and waits for nothing.

    `capture` must be active while it runs.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], limit: int, end_ids: Sequence[int]) -> None:
        self.engine = engine
        self.device = next(engine.model.parameters()).device
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        longest, rows = max(self.prompt_lengths), len(prompts)
        self.capacity = longest + limit + engine.block
        self.tokens_RC = torch.zeros(rows, self.capacity, dtype=torch.long, device=self.device)
        for row, prompt in enumerate(prompts):
            self.tokens_RC[row, : len(prompt)] = torch.tensor(list(prompt), dtype=torch.long)
        self.lengths_R = torch.tensor(self.prompt_lengths, device=self.device)
        self.limits_R = self.lengths_R + limit
        self.done_R = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self.committed_R = torch.zeros_like(self.lengths_R)
        self.accepted_R = torch.zeros_like(self.lengths_R)
        self.finite_R = torch.ones_like(self.done_R)
        self.end_ids = torch.tensor(sorted(set(end_ids)), dtype=torch.long, device=self.device)
        self.offsets_B = torch.arange(engine.block, device=self.device)
        self.target_cache = TargetCache(engine.model, self.capacity)
        self.context: list[KeyValue] = []
        layer_ids = engine.shape.layer_ids if engine.drafter is not None and engine.shape is not None else ()
        self.capture = Capture(engine.model, layer_ids)
        self.history: list[tuple[Tensor, Tensor]] = []

    # -- prefill

    def prefill(self) -> None:
        longest = max(self.prompt_lengths)
        positions = torch.arange(longest, device=self.device).expand(len(self.prompt_lengths), -1).contiguous()
        last = torch.tensor(sorted({length - 1 for length in self.prompt_lengths}), device=self.device)
        logits = self._target(self.tokens_RC[:, :longest], positions, longest, logits_to_keep=last)
        rows = torch.arange(len(self.prompt_lengths), device=self.device)
        first = self._choose(logits[rows, torch.searchsorted(last, self.lengths_R - 1)])
        self.note_features(positions)
        self.tokens_RC.scatter_(1, self.lengths_R[:, None], first[:, None])
        self.lengths_R += 1
        self.done_R |= torch.isin(first, self.end_ids) | (self.lengths_R >= self.limits_R)

    def _choose(self, logits: Tensor) -> Tensor:
        if self.engine.sampling.greedy:
            return logits.argmax(dim=-1)
        return draw(distribution(logits, self.engine.sampling), self.engine.generator)

    def _target(self, ids: Tensor, positions: Tensor, visible: int, **extra: Tensor) -> Tensor:
        logits = self.engine.model(input_ids=ids, **self.target_cache.arguments(positions, visible), **extra).logits
        self.finite_R &= logits.amax(dim=(1, 2)).isfinite()
        return logits

    def check_finite(self) -> None:
        """Raise UserError where logits were not finite: their argmax is the same with and without a drafter, so such a
        target would measure as one that every draft agrees with."""
        if not bool(self.finite_R.all()):
            dtype = str(self.engine.model.dtype).removeprefix("torch.")
            raise UserError(
                f"the target's logits are not finite in {dtype}", "check its weights, or decode in another --dtype"
            )

    def note_features(self, positions: Tensor) -> None:
        """Add the context keys and values of the latest forward's tokens to the drafter's cache."""
        if self.engine.drafter is None:
            return
        fresh = self.engine.drafter.context_kv(self.capture.features().to(self.engine.drafter.dtype), positions)
        if not self.context:
            self.context = [(self._buffer(k), self._buffer(v)) for k, v in fresh]
        for (keys, values), (k, v) in zip(self.context, fresh, strict=True):
            put(keys, k, positions)
            put(values, v, positions)

    def _buffer(self, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape[0], like.shape[1], self.capacity, like.shape[3])

    # -- steps

    def run(self) -> None:
        advance = self._graphed if self.engine.graphs else self._eager
        while not bool(self.done_R.all()):
            advance()
            self.history.append((self.committed_R.clone(), self.accepted_R.clone()))

    def _eager(self) -> None:
        self.step(self.capacity if self.engine.static else int(self.lengths_R.max()) + self.engine.block)

    def step(self, visible: int) -> None:
        """Draft, verify and commit for every request; `visible` slots are attended to."""
        drafts, draft_probabilities = self.draft(visible)
        logits = self.target_forward(drafts, visible)
        accepted_R, bonus_R = self._verify(drafts, draft_probabilities, logits)
        self.note_features(self.positions())
        self._commit(drafts, accepted_R, bonus_R)

    def positions(self) -> Tensor:
        return (self.lengths_R - 1)[:, None] + self.offsets_B

    def _anchor_tokens(self) -> Tensor:
        return self.tokens_RC.gather(1, (self.lengths_R - 1)[:, None])

    def target_forward(self, drafts: Tensor, visible: int) -> Tensor:
        """The target on the anchor and the drafts [R, B-1]: logits [R, B, V]."""
        return self._target(torch.cat((self._anchor_tokens(), drafts), dim=1), self.positions(), visible)

    def draft(self, visible: int) -> tuple[Tensor, Tensor | None]:
        """Proposals [R, B-1], and what they were drawn from when sampling."""
        engine, anchors_R = self.engine, self.lengths_R - 1
        block_RB = self._anchor_tokens().expand(-1, engine.block)
        if engine.drafter is None or engine.shape is None:
            return block_RB[:, 1:], None
        inputs = torch.where(self.offsets_B == 0, block_RB, engine.shape.mask_token_id)
        places = torch.arange(visible, device=self.device)
        seen = (places < anchors_R[:, None])[:, None, None].expand(-1, 1, engine.block, -1)
        mask = torch.nn.functional.pad(seen, (0, engine.block), value=True)
        context = [(k[:, :, :visible], v[:, :, :visible]) for k, v in self.context]
        block = engine.ends.embed(inputs).to(engine.drafter.dtype)
        hidden = engine.drafter.blocks(block, self.positions(), context, dense_attend(mask))
        logits = engine.ends.logits(hidden[:, 1:].to(engine.ends.head_VH.dtype))
        if engine.sampling.greedy:
            return logits.argmax(dim=-1), None
        probabilities = distribution(logits, engine.sampling)
        return draw(probabilities, engine.generator), probabilities

    def _verify(self, drafts: Tensor, draft_probabilities: Tensor | None, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.engine.sampling.greedy:
            return verify_greedy(drafts, logits)
        probabilities = distribution(logits, self.engine.sampling)
        if draft_probabilities is None:
            return torch.zeros_like(self.lengths_R), draw(probabilities[:, 0], self.engine.generator)
        return verify_sampled(drafts, draft_probabilities, probabilities, self.engine.generator)

    def _commit(self, drafts: Tensor, accepted_R: Tensor, bonus_R: Tensor) -> None:
        new_RB = torch.nn.functional.pad(drafts, (0, 1)).scatter(1, accepted_R[:, None], bonus_R[:, None])
        count_R = torch.minimum(accepted_R + 1, self.limits_R - self.lengths_R)
        ends_RB = torch.isin(new_RB, self.end_ids) & (self.offsets_B < count_R[:, None])
        ended_R = ends_RB.any(dim=1)
        count_R = torch.where(ended_R, ends_RB.long().argmax(dim=1) + 1, count_R).masked_fill(self.done_R, 0)
        # What lies beyond `count` is overwritten by the next step, or never read.
        self.tokens_RC.scatter_(1, self.lengths_R[:, None] + self.offsets_B, new_RB)
        self.committed_R.copy_(count_R)
        self.accepted_R.copy_(torch.minimum(accepted_R, count_R))
        self.lengths_R += count_R
        self.done_R |= ended_R | (self.lengths_R >= self.limits_R)

    # -- CUDA graphs

    _graph: torch.cuda.CUDAGraph | None = None

    def prepare(self) -> None:
        """Capture a step, to be replayed by `run`, and leave the requests where they are.

        The steps that capture asks for run for nothing: what they write lies beyond each request's length, where the
        next real step overwrites it. Raises UserError where a step cannot be captured.
        """
        if not self.engine.sampling.greedy or self.device.type != "cuda":
            raise UserError("CUDA graphs decode greedily on a GPU only", "use --graphs off")
        moving = (self.tokens_RC, self.lengths_R, self.done_R, self.committed_R, self.accepted_R, self.finite_R)
        kept = [tensor.clone() for tensor in moving]
        with _side_stream():
            for _ in range(2):
                self.step(self.capacity)
        self._graph = self._captured()
        for tensor, value in zip(moving, kept, strict=True):
            tensor.copy_(value)

    def _graphed(self) -> None:
        assert self._graph is not None, "prepare comes before run"
        self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.step(self.capacity)
        except RuntimeError as error:
            raise UserError(
                f"a decoding step of this target cannot be captured in a CUDA graph: {str(error).splitlines()[0]}",
                "use --graphs off; the measured speeds are then those of eager decoding",
            ) from error
        return graph

    # -- answers

    def answers(self) -> list[Decoded]:
        tokens, lengths = self.tokens_RC.tolist(), self.lengths_R.tolist()
        committed = torch.stack([c for c, _ in self.history], dim=1).tolist() if self.history else [[]] * len(tokens)
        accepted = torch.stack([a for _, a in self.history], dim=1).tolist() if self.history else [[]] * len(tokens)
        return [
            self._answer(tokens[row][self.prompt_lengths[row] : lengths[row]], committed[row], accepted[row])
            for row in range(len(tokens))
        ]

    def _answer(self, tokens: list[int], committed: list[int], accepted: list[int]) -> Decoded:
        steps = [step for step, count in enumerate(committed) if count]
        return Decoded(tokens, [accepted[step] for step in steps], [committed[step] for step in steps])


@contextlib.contextmanager
def _side_stream():  # type: ignore[no-untyped-def]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
