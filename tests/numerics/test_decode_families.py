"""Every family of targets, end to end: a few training steps, export, verify, decode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decode_world import (
    END,
    FAMILIES,
    grouped_prompts,
    make_drafter,
    make_target,
    save_target,
    shapes_of,
    slow_answers,
    tokenizer,
)

from paceline import export
from paceline.batches import BatchShape, EvaluationBatch, FeatureBatch
from paceline.config import TrainingConfig
from paceline.data.documents import Documents
from paceline.data.stream import Stream
from paceline.drafter.model import Drafter
from paceline.drafter.objective import Objective
from paceline.evaluation.acceptance import agreement_of, exact_tau, summarise
from paceline.evaluation.decode import Engine, decode
from paceline.evaluation.verify import failed, load_drafter, verify
from paceline.target.transformers_body import TransformersTarget

LIMIT = 64
BATCH = BatchShape(tokens=128, anchors=48, block_size=6, gamma=3.0)


def corpus(prompts: list[list[int]], answers: list[list[int]], kinds: tuple[str, ...] = ()) -> Documents:
    rows = [
        ([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return Documents.of(rows, kinds)


def train(
    target: TransformersTarget,
    drafter: Drafter,
    stream: Stream,
    steps: int,
    rate: float,
    batch_shape: BatchShape = BATCH,
) -> None:
    """Plain AdamW over the stream's batches, features made once."""
    drafter.train().requires_grad_(True)
    objective = Objective(drafter, target.ends, batch_shape, TrainingConfig(), "dense")
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate)
    features: dict[int, torch.Tensor] = {}
    for step in range(steps):
        place = step % stream.batches_per_epoch
        batch = stream.batch(place)
        features.setdefault(place, target.features(batch))
        sums = objective.sums(FeatureBatch(batch, features[place]))
        optimizer.zero_grad()
        (sums.loss / sums.weight.clamp_min(1)).backward()
        optimizer.step()
    drafter.eval().requires_grad_(False)


def parallel(target: TransformersTarget, drafter: Drafter, batches: list[EvaluationBatch]):
    """Exact τ by one forward over all anchors, and the agreement of the labels with the target."""
    objective = Objective(drafter, target.ends, BATCH, TrainingConfig(), "dense")
    accepts = [objective.accepts(FeatureBatch(item.tokens, target.features(item.tokens))) for item in batches]
    agreement = [agreement_of(target.next_tokens(item.tokens), item.tokens) for item in batches]
    return exact_tau(accepts, batches, agreement)


@pytest.mark.parametrize("family", FAMILIES)
def test_train_export_verify_decode(family: str, tmp_path: Path):
    model = make_target(family)
    config = save_target(model, tmp_path / "target")
    target_shape, shape = shapes_of(tmp_path / "target")
    prompts = grouped_prompts()
    answers = slow_answers(model, prompts, LIMIT, (END,))
    target = TransformersTarget.load(config, "cpu", shape.layer_ids)
    drafter = make_drafter(shape)
    train(target, drafter, Stream(corpus(prompts, answers), BATCH, seed=0), steps=20, rate=3e-3)

    folder = export.write(
        tmp_path / "drafter", drafter.state_dict(), shape, target_shape, dtype="float32", tokenizer=tokenizer()
    )
    assert export.compare(folder, drafter.state_dict(), shape) == 0.0
    checks = verify(folder, config, trained=drafter.state_dict())
    assert not failed(checks), failed(checks)

    back, tensors = export.read(folder)
    engine = Engine(target.model, target.ends, load_drafter(back, tensors), back)
    timed = decode(engine, prompts, LIMIT, back.eos_token_ids)
    assert [answer.tokens for answer in timed.answers] == answers


def test_exact_and_decoded_tau_agree_to_the_last_digit(tmp_path: Path):
    """A drafter overfitted until much is accepted: the parallel evaluation and the loop walk the same steps."""
    model = make_target("qwen3")
    config = save_target(model, tmp_path / "target")
    _, shape = shapes_of(tmp_path / "target")
    prompts = grouped_prompts(each=4)
    answers = slow_answers(model, prompts, 28, (END,))
    kinds = tuple(f"kind {row % 3}" for row in range(len(prompts)))
    documents = corpus(prompts, answers, kinds)
    target = TransformersTarget.load(config, "cpu", shape.layer_ids)
    drafter = make_drafter(shape)
    stream = Stream(documents, BATCH, seed=0, held_out=documents, evaluation_anchors=4096)
    train(target, drafter, stream, steps=150, rate=1e-2)

    exact = parallel(target, drafter, stream.evaluation_batches())
    timed = decode(Engine(target.model, target.ends, drafter, shape), prompts, 28, shape.eos_token_ids)
    decoded = summarise(
        [answer.walk(kind) for answer, kind in zip(timed.answers, kinds, strict=True)], shape.block_size
    )
    assert exact.agreement == 1.0
    assert exact.tau_micro > 1.5, "too little was accepted for the comparison to mean much"
    assert (exact.tau_micro, exact.steps, exact.by_slot) == (decoded.tau_micro, decoded.steps, decoded.by_slot)
    assert exact.accepted_only == decoded.accepted_only
    assert exact.by_kind == decoded.by_kind
    assert abs(exact.tau_macro - decoded.tau_macro) < 1e-12  # summed in another order of answers


def test_an_overfitted_conversation_decodes_as_it_trained(tmp_path: Path):
    """One conversation of 20 blocks and more, trained until every slot is right, then decoded block by block."""
    model = make_target("llama")
    config = save_target(model, tmp_path / "target")
    _, shape = shapes_of(tmp_path / "target", block_size=4)
    prompts = grouped_prompts(each=1)[:1]
    answers = slow_answers(model, prompts, 90)
    target = TransformersTarget.load(config, "cpu", shape.layer_ids)
    batch_shape = BatchShape(tokens=96, anchors=90, block_size=4, gamma=2.0)
    stream = Stream(corpus(prompts, answers), batch_shape, seed=0)
    drafter = make_drafter(shape)
    batch = FeatureBatch(stream.batch(0), target.features(stream.batch(0)))
    objective = Objective(drafter, target.ends, batch_shape, TrainingConfig(), "dense")
    right = 0.0
    for _ in range(8):
        train(target, drafter, stream, steps=50, rate=1e-2, batch_shape=batch_shape)
        sums = objective.sums(batch)
        right = float(sums.correct_B.sum() / sums.count_B.sum())
        if right == 1.0:
            break
    assert right == 1.0
    answer = decode(Engine(target.model, target.ends, drafter, shape), prompts, 90, ()).answers[0]
    assert answer.tokens == answers[0]
    steps = answer.committed[:-1]
    assert len(steps) >= 20
    assert sum(answer.accepted[:-1]) / len(steps) >= 0.95 * (shape.block_size - 1)
