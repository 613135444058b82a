"""Lengths and counts that broke attention elsewhere: off the tile, uncompiled, and anchor counts that vary."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafter_world import World, gradients, relative, world
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import BlockMask

from paceline.batches import BatchShape, FeatureBatch
from paceline.config import TrainingConfig
from paceline.data.documents import Documents
from paceline.data.stream import Stream
from paceline.drafter import blocks
from paceline.drafter.blocks import BlockMaskWriter
from paceline.drafter.objective import Objective
from paceline.errors import UserError
from paceline.training.parts import Learner
from paceline.training.warm import SelfCheck, attention_error

CONFIG = TrainingConfig()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo off: flex_attention in plain operations, and its mask function asked about every query and key."""
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(blocks, "_compiled_flex", flex_module.flex_attention)


@torch.no_grad()
def _both(it: World) -> tuple[Tensor, Tensor]:
    """Every block's states by flex_attention on its padded grid, and by the dense mask."""
    flex, dense = (Objective(it.drafter, it.ends, it.shape, CONFIG, body) for body in ("flex", "dense"))
    return flex.hidden(it.batch), dense.hidden(it.batch)


def test_fifteen_queries_and_143_keys_uncompiled(uncompiled: None) -> None:
    """A mask on a grid rounded up to 128 must not ask for anchors that are not there."""
    it = world(lengths=(100, 28), tokens=128, anchors=(3, 50, 101, 126), padding_blocks=1, block_size=3)
    assert it.shape.anchors * it.shape.block_size == 15
    found, expected = _both(it)
    assert found.shape == (5, 2, 32)
    assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("tokens", [127, 128, 129, 130])
def test_lengths_about_a_tile(uncompiled: None, tokens: int) -> None:
    """Forward alone, since a CPU has no backward of flex_attention: tests/gpu has the gradients at such lengths."""
    anchors = tuple(range(0, tokens - 1, 3))[:32]
    it = world(lengths=(tokens - 40, 40), tokens=tokens, anchors=anchors, padding_blocks=tokens % 4)
    found, expected = _both(it)
    assert bool(found.isfinite().all())
    assert relative(found, expected) < 1e-5


def _self_check(it: World) -> float:
    objective = Objective(it.drafter, it.ends, it.shape, CONFIG, "flex")
    return attention_error(objective, it.drafter.shape, it.batch.tokens, torch.float32)


@pytest.mark.parametrize("tokens", [127, 128])
def test_the_self_check_of_attention_alone(uncompiled: None, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of float8 runs, whose drafters differ by rounding: right masks pass, and three wrong ones do not."""
    anchors = tuple(range(0, tokens - 1, 3))[:32]
    it = world(lengths=(tokens - 40, 40), tokens=tokens, anchors=anchors, padding_blocks=5)
    assert _self_check(it) < 1e-5
    write = BlockMaskWriter.write
    for starts, anchored in ((0, 1), (1, 0), (-1, 0)):

        def wrong(self: BlockMaskWriter, starts_A: Tensor, anchors_A: Tensor, by: tuple[int, int]) -> BlockMask:
            return write(self, starts_A + by[0], anchors_A + by[1])

        monkeypatch.setattr(BlockMaskWriter, "write", functools.partialmethod(wrong, by=(starts, anchored)))
        assert _self_check(it) > 5e-2


@pytest.mark.parametrize("matmul", ["same", "float8"])
def test_a_run_with_a_wrong_mask_is_refused(uncompiled: None, matmul: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = world(lengths=(88, 40), tokens=128, anchors=tuple(range(0, 120, 4)), padding_blocks=2)
    objective = Objective(it.drafter, it.ends, it.shape, CONFIG, "flex")
    run: Any = SimpleNamespace(
        config=SimpleNamespace(training=dataclasses.replace(CONFIG, matmul=matmul), run=SimpleNamespace(seed=0)),
        setup=SimpleNamespace(batch=it.shape, drafter=it.drafter.shape),
        device=torch.device("cpu"),
    )
    said: list[str] = []
    check = SelfCheck(Learner(it.drafter, objective, None), it.batch.tokens, run)  # type: ignore[arg-type]
    check.part.run()
    check.judge(said.append)
    assert ("drafter" in said[0]) == (matmul == "same")
    write = BlockMaskWriter.write
    monkeypatch.setattr(BlockMaskWriter, "write", lambda self, starts, anchors: write(self, starts, anchors + 1))
    check.part.run()
    with pytest.raises(UserError, match="compiled attention differs from the dense one by"):
        check.judge(said.append)


COUNTS = (1, 7, 33, 200, 512)


def test_anchor_counts_of_the_data_compile_once() -> None:
    """Rows with 1, 7, 33, 200 and 512 places for an anchor are batches of one shape and one compiled graph,
    which evaluation runs too."""
    shape = BatchShape(tokens=520, anchors=512, block_size=2, gamma=1.0)
    rows = [([1 + place % 80 for place in range(520)], [place < count + 1 for place in range(520)]) for count in COUNTS]
    stream = Stream(Documents.of(rows), shape, seed=0)
    it = world(block_size=2)
    objective = Objective(it.drafter, it.ends, shape, CONFIG, "dense")
    plain = Objective(it.drafter, it.ends, shape, CONFIG, "dense")
    features = torch.randn(520, it.drafter.shape.features, generator=torch.Generator().manual_seed(0))
    batches = [FeatureBatch(stream.batch(index), features) for index in range(stream.batches_per_epoch)]
    assert sorted(int((batch.tokens.weights_AB > 0).sum()) for batch in batches) == sorted(COUNTS)
    expected = [(float(plain.sums(batch).loss.detach()), plain.accepts(batch)) for batch in batches]
    torch._dynamo.reset()
    objective.compile(backend="aot_eager")
    _step(objective, batches[0])  # the warm-up
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, (loss, accepts) in zip(batches, expected, strict=True):
            assert _step(objective, batch) == pytest.approx(loss, rel=1e-5)
            assert torch.equal(objective.accepts(batch), accepts)
    torch._dynamo.reset()


def _step(objective: Objective, batch: FeatureBatch) -> float:
    sums = objective.sums(batch)
    sums.loss.backward()
    gradients(objective.drafter)
    return float(sums.loss.detach())
