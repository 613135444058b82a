"""Which state is captured, and that nothing but the document decides it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from target_world import documents, pack, write_model

from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.target import packing
from paceline.target.transformers_body import TransformersTarget


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def target(folder: Path) -> TransformersTarget:
    return TransformersTarget.load(TargetConfig(model=str(folder), layer_ids=(0, 1, 2, 3)), "cpu")


def captured(folder: Path, *layer_ids: int) -> torch.Tensor:
    target = TransformersTarget.load(TargetConfig(model=str(folder), layer_ids=layer_ids), "cpu")
    return target.features(pack(documents(25, 30)))


def test_first_and_last_ids_work_and_one_more_is_refused(folder: Path) -> None:
    assert captured(folder, 0).isfinite().all()
    assert captured(folder, 3).isfinite().all()
    with pytest.raises(UserError, match="0 … 3"):
        captured(folder, 4)


def test_neighbouring_ids_differ(folder: Path) -> None:
    states = [captured(folder, layer) for layer in range(4)]
    assert all(not torch.allclose(a, b, atol=1e-2) for a, b in itertools.pairwise(states))


def test_last_layer_is_captured_before_the_final_norm(target: TransformersTarget) -> None:
    batch = pack(documents(20))
    raw = target.features(batch)[:, -32:]
    normed = target.final_hidden(batch)
    torch.testing.assert_close(target.decoder.norm(raw), normed)
    assert not torch.allclose(raw, normed, atol=1e-2)


def test_three_documents_together_alone_and_twice(target: TransformersTarget) -> None:
    rows = documents(20, 15, 18)
    together = target.features(pack(rows))
    assert torch.equal(together, target.features(pack(rows)))
    place = 0
    for row in rows:
        alone = target.features(pack([row]))[: len(row)]
        torch.testing.assert_close(together[place : place + len(row)], alone, rtol=1e-5, atol=1e-5)
        place += len(row)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_any_packing_gives_each_document_its_own_states(
    target: TransformersTarget, lengths: list[int], seed: int
) -> None:
    rows = documents(*lengths, seed=seed)
    batch = pack(rows, tokens=160)
    features = target.features(batch)
    for start, row in zip(batch.bounds, rows, strict=False):
        alone = target.features(pack([row], tokens=len(row)))
        torch.testing.assert_close(features[start : start + len(row)], alone, rtol=1e-4, atol=1e-4)


def test_features_are_written_where_they_are_wanted(target: TransformersTarget) -> None:
    batch = pack(documents(25, 30))
    room = torch.full((3, 64, target.width), 7.0)
    returned = target.features(batch, out=room[1])
    assert returned.data_ptr() == room[1].data_ptr()
    assert torch.equal(room[1], target.features(batch))
    assert (room[0] == 7).all()
    assert (room[2] == 7).all()


def test_features_carry_no_graph_and_can_be_trained_on(target: TransformersTarget) -> None:
    features = target.features(pack(documents(25)))
    weight = torch.ones(target.width, requires_grad=True)
    (features @ weight).sum().backward()
    assert not features.requires_grad
    assert weight.grad is not None


def test_bounds_are_found_when_a_batch_has_none(target: TransformersTarget) -> None:
    import dataclasses

    batch = pack(documents(25, 1, 30))
    bare = dataclasses.replace(batch, bounds=(), documents=())
    assert torch.equal(target.features(bare), target.features(batch))


def test_a_row_of_padding_alone_is_finite(target: TransformersTarget) -> None:
    assert target.features(pack([])).isfinite().all()


def test_models_own_attention_returns_after_a_packed_row(target: TransformersTarget) -> None:
    ids = torch.tensor(documents(12))
    before = target.model(ids).logits
    target.features(pack(documents(25)))
    assert torch.equal(target.model(ids).logits, before)
    with pytest.raises(AssertionError):
        packing.attend(torch.nn.Identity(), *torch.zeros(3, 1, 2, 4, 8), None)


def test_a_leak_between_documents_fails_the_self_check(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that the check is there for: attention that takes the row for one document."""
    honest = packing._by_document

    def leaky(query, key, value, row, rule):
        return honest(query, key, value, packing.PackedRow((0, row.tokens), row.tokens), rule)

    batch = pack(documents(25, 30))
    target.self_check(batch)
    monkeypatch.setattr(packing, "_by_document", leaky)
    with pytest.raises(UserError, match="differ from those of the document alone"):
        target.self_check(batch)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, 32),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 32,
                "factor": 2.0,
            },
            64,
        ),
    ],
)
def test_rotations_that_follow_the_longest_document(rope: dict, limit: int, tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path, rope_parameters=rope, max_position_embeddings=limit)
    target = TransformersTarget.load(TargetConfig(model=str(folder), layer_ids=(1,)), "cpu")
    short = documents(30, 12)
    together = target.features(pack(short))
    torch.testing.assert_close(together[30:42], target.features(pack(short[1:]))[:12], rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="beyond 32 tokens"):
        target.features(pack(documents(12, 33)))
