"""Reported faults of the method as smallest inputs: one anchor, shallow targets, the table of labels, sampled ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decode_world import Oracle, drafter_shape, grouped_prompts, make_target, one_hot_ends, slow_greedy
from drafter_world import world
from target_world import documents, pack, write_model

from paceline.batches import BatchShape, FeatureBatch, FrozenEnds
from paceline.config import DrafterConfig, TargetConfig, TrainingConfig
from paceline.data.documents import Documents
from paceline.data.stream import Stream
from paceline.drafter.init import build
from paceline.drafter.objective import Objective
from paceline.drafter.sizes import shape_for
from paceline.evaluation.decode import Engine, decode
from paceline.evaluation.sampling import Sampling
from paceline.target.describe import choose_layers, read_shape
from paceline.target.transformers_body import TransformersTarget
from paceline.training.optimizer import Optimizer

CONFIG = TrainingConfig()


def test_exactly_one_valid_anchor_is_used() -> None:
    """An answer of two tokens is one anchor and one label; it is drawn every epoch, and its loss moves the drafter."""
    it = world()
    shape = BatchShape(tokens=32, anchors=4, block_size=4, gamma=2.5)
    stream = Stream(Documents.of([([5, 6, 7, 8, 9], [False, False, True, True, False])]), shape, seed=0)
    features = torch.randn(32, it.drafter.shape.features)
    objective = Objective(it.drafter, it.ends, shape, CONFIG, "dense")
    for epoch in range(3):
        batch = stream.batch(epoch)
        assert batch.anchors_A.tolist() == [2, 0, 0, 0]
        assert batch.weights_AB.nonzero().tolist() == [[0, 1]]
        assert batch.labels_AB[0, :2].tolist() == [7, 8]
        sums = objective.sums(FeatureBatch(batch, features))
        assert float(sums.weight) == 1.0
        assert bool(sums.loss.isfinite())
        sums.loss.backward()
        norms = [parameter.grad.norm() for parameter in it.drafter.parameters() if parameter.grad is not None]
        assert len(norms) == len(list(it.drafter.parameters()))
        assert all(0 < float(norm) < float("inf") for norm in norms)
        it.drafter.zero_grad()


def test_one_document_with_one_anchor_at_its_very_start() -> None:
    """No context at all is before it: the block sees itself, and nothing is NaN."""
    it = world(lengths=(2,), tokens=16, anchors=(0,), padding_blocks=0)
    sums = Objective(it.drafter, it.ends, it.shape, CONFIG, "dense").sums(it.batch)
    assert float(sums.weight) == 1.0
    assert bool(sums.loss.isfinite())


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("features", [1, 5])
def test_targets_of_few_layers_train(layers: int, features: int, tmp_path: Path) -> None:
    """Ids that exist and differ, states that are the target's, and a loss that falls."""
    config = TargetConfig(model=str(write_model("qwen3", tmp_path, num_hidden_layers=layers)), dtype="float32")
    facts = read_shape(config)
    ids = choose_layers(layers, features)
    target = TransformersTarget.load(config, "cpu", ids)
    batch = pack(documents(20, 11))
    target.self_check(batch)
    drafter = build(shape_for(facts, ids, DrafterConfig(layers=1, block_size=4), 96), "random", 0)
    shape = BatchShape(tokens=32, anchors=16, block_size=4, gamma=2.5)
    stream = Stream(Documents.of([(list(range(3, 23)), [False] * 4 + [True] * 16)]), shape, seed=0)
    tokens = stream.batch(0)
    given = FeatureBatch(tokens, target.features(tokens))
    objective = Objective(drafter, target.ends, shape, CONFIG, "dense")
    optimizer = Optimizer(drafter, TrainingConfig(learning_rate=1e-2), 20)
    losses = []
    for _ in range(20):
        sums = objective.sums(given)
        sums.loss.backward()
        optimizer.step(sums.weight)
        losses.append(float(sums.loss.detach() / sums.weight))
    assert losses[-1] < 0.7 * losses[0]


def test_norms_of_a_bfloat16_drafter_move() -> None:
    """A hundred steps at the paper's rate move every norm: updates too small for bfloat16 add up in the masters."""
    it = world()
    drafter = build(it.drafter.shape, "random", 0).to(torch.bfloat16)
    before = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters() if "norm" in name}
    assert all(bool((weight == 1).all()) for weight in before.values())
    ends = FrozenEnds(it.ends.embedding_VH.bfloat16(), it.ends.head_VH.bfloat16())
    config = TrainingConfig(learning_rate=6e-4)
    objective, optimizer = Objective(drafter, ends, it.shape, config, "dense"), Optimizer(drafter, config, 100)
    batch = FeatureBatch(it.batch.tokens, it.batch.features_SF.bfloat16())
    for _ in range(100):
        sums = objective.sums(batch)
        sums.loss.backward()
        optimizer.step(sums.weight)
    for name, parameter in drafter.named_parameters():
        if name in before:
            moved = (parameter != before[name]).float().mean()
            assert float(moved) > 0.5, name
            assert optimizer.masters()[name].dtype == torch.float32


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=1)], ids=["greedy", "sampled"])
def test_an_end_at_slot_three(sampling: Sampling) -> None:
    """Greedy and by rejection (with one token to choose from, so that the answer is known): nothing after it counts."""
    model = make_target("llama")
    shape = drafter_shape(model, 6)
    answers = [(prompt, slow_greedy(model, prompt, 12)) for prompt in grouped_prompts(each=4)]
    prompt, truth = next((prompt, truth) for prompt, truth in answers if truth[3] not in truth[:3])
    oracle = Oracle([[*prompt, *truth]])
    engine = Engine(model, one_hot_ends(), oracle, shape, sampling, torch.Generator().manual_seed(0))
    answer = decode(engine, [prompt], 12, (truth[3],)).answers[0]
    assert answer.tokens == truth[:4]
    assert answer.committed == [3]
    assert answer.accepted == [3]
