"""Each family's packed, cut forward against the plain model on single documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from target_world import FAMILIES, documents, pack, write_model
from transformers import AutoModelForCausalLM

from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.target.describe import read_shape
from paceline.target.ends import load_ends
from paceline.target.transformers_body import TransformersTarget

LAYERS = (0, 1, 3)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def target(folder: Path) -> TransformersTarget:
    return TransformersTarget.load(TargetConfig(model=str(folder), layer_ids=LAYERS), "cpu")


@pytest.fixture(scope="module")
def plain(folder: Path) -> torch.nn.Module:
    """The same model with the library's own, slowest attention."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def oracle(plain: torch.nn.Module, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """States of one document from the library's own outputs, but the last layer's, which it norms; and logits."""
    kept: list[torch.Tensor] = []
    hook = (
        plain.get_decoder()
        .layers[-1]
        .register_forward_hook(
            lambda _module, _inputs, output: kept.append(output if torch.is_tensor(output) else output[0])
        )
    )
    with torch.no_grad():
        result = plain(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    hook.remove()
    states = [*result.hidden_states[1:-1], kept[0]]
    return torch.cat([states[layer][0] for layer in LAYERS], dim=-1), result.logits[0]


def test_packed_features_equal_the_plain_models(target: TransformersTarget, plain: torch.nn.Module) -> None:
    rows = documents(17, 3, 1, 12, 9)
    batch = pack(rows)
    features = target.features(batch)
    assert features.shape == (64, target.width)
    assert features.isfinite().all()
    for start, ids in zip(batch.bounds, rows, strict=False):
        expected, _ = oracle(plain, ids)
        torch.testing.assert_close(features[start : start + len(ids)], expected, rtol=1e-4, atol=1e-4)


def test_next_tokens_are_the_plain_models(target: TransformersTarget, plain: torch.nn.Module) -> None:
    rows = documents(20, 11, 16, seed=1)
    batch = pack(rows)
    chosen = target.next_tokens(batch)
    for start, ids in zip(batch.bounds, rows, strict=False):
        assert chosen[start : start + len(ids)].tolist() == oracle(plain, ids)[1].argmax(dim=-1).tolist()


def test_other_documents_leave_no_trace(target: TransformersTarget) -> None:
    first, second, third = documents(14, 13, 12)
    other = documents(14, 13, 12, seed=9)
    features = target.features(pack([first, second, third]))
    changed = target.features(pack([other[0], second, other[2]]))
    torch.testing.assert_close(features[14:27], changed[14:27], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(features[:14], changed[:14], atol=1e-2)


def test_ends_are_the_models_own(folder: Path, target: TransformersTarget, plain: torch.nn.Module) -> None:
    ends = load_ends(TargetConfig(model=str(folder)), "cpu", torch.float32)
    assert torch.equal(ends.embedding_VH, target.ends.embedding_VH)
    assert torch.equal(ends.head_VH, target.ends.head_VH)
    tied = read_shape(TargetConfig(model=str(folder))).tied
    assert tied == (ends.head_VH is ends.embedding_VH) == (target.ends.head_VH is target.ends.embedding_VH)
    batch = pack(documents(30))
    logits = ends.logits(target.final_hidden(batch)[:30])
    torch.testing.assert_close(logits, oracle(plain, batch.ids_S[:30].tolist())[1], rtol=1e-4, atol=1e-4)


def test_self_check_passes_and_closing_changes_nothing(folder: Path) -> None:
    target = TransformersTarget.load(TargetConfig(model=str(folder), layer_ids=(0, 2)), "cpu")
    batch = pack(documents(21, 13, 8))
    target.self_check(batch)
    before = target.features(batch)
    target.close_upper_layers()
    assert len(target.decoder.layers) == 3
    assert torch.equal(target.features(batch), before)
    with pytest.raises(AssertionError):
        target.next_tokens(batch)


def test_self_check_sees_a_wrong_norm_and_a_wrong_scale(folder: Path) -> None:
    batch = pack(documents(21, 13, 8))
    target = TransformersTarget.load(TargetConfig(model=str(folder), layer_ids=(0, 2)), "cpu")
    target.decoder.norm = torch.nn.Identity()
    with torch.no_grad():
        target.model.get_output_embeddings().weight.data = torch.randn_like(target.ends.head_VH)
    with pytest.raises(UserError):
        target.self_check(batch)
