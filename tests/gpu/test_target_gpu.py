"""The target on a GPU: the varlen body, no waiting for the device, compiled layers, float8 weights."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "numerics"))

from target_world import FAMILIES, documents, pack, write_model

from paceline.config import TargetConfig
from paceline.target import packing
from paceline.target.transformers_body import TransformersTarget

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
LENGTHS = (170, 3, 1, 120, 90)


def load(folder: Path, **changes: object) -> TransformersTarget:
    return TransformersTarget.load(TargetConfig(model=str(folder), layer_ids=(0, 1, 3), **changes), "cuda")


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_rows_in_both_dtypes(family: str, tmp_path: Path) -> None:
    """bfloat16 against float32 weights of the same values, and each against documents alone (the self-check)."""
    folder = write_model(family, tmp_path, max_position_embeddings=512)
    batch = pack(documents(*LENGTHS), 512).to(torch.device("cuda"))
    half = load(folder)
    assert half.dtype == torch.bfloat16
    whole = load(folder, dtype="float32")
    whole.self_check(batch)
    half.self_check(batch)
    features = half.features(batch)
    assert features.isfinite().all()
    if not family.endswith(("moe", "oss")) and family != "deepseek":  # rounding sends tokens to other experts
        assert difference(features[:384], whole.features(batch)[:384]) < 0.05


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_varlen_and_by_document_bodies_agree(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load(write_model(family, tmp_path, max_position_embeddings=512))
    batch = pack(documents(*LENGTHS), 512).to(torch.device("cuda"))
    calls = []
    honest = packing._varlen
    monkeypatch.setattr(packing, "_varlen", lambda *args: calls.append(1) or honest(*args))
    fast = target.features(batch)
    assert len(calls) == 4
    monkeypatch.setattr(packing, "_HALF", ())
    assert difference(fast[:384], target.features(batch)[:384]) < 0.02
    assert len(calls) == 4


def test_features_do_not_wait_for_the_device(tmp_path: Path) -> None:
    target = load(write_model("qwen3", tmp_path, max_position_embeddings=512))
    batch = pack(documents(*LENGTHS), 512).to(torch.device("cuda"))
    out = torch.empty(512, target.width, dtype=torch.bfloat16, device="cuda")
    target.features(batch, out)
    target.close_upper_layers()
    target.features(batch, out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        target.features(batch, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out[: batch.bounds[-1]].isfinite().all()


def test_compiled_layers_agree_and_compile_once(tmp_path: Path) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    target = load(write_model("qwen3", tmp_path, max_position_embeddings=512))
    batches = [pack(documents(*lengths), 512).to(torch.device("cuda")) for lengths in (LENGTHS, (400,), (9,) * 30)]
    expected = [target.features(batch) for batch in batches]
    target.close_upper_layers()
    target.compile_layers()
    target.features(batches[0])
    torch.compiler.set_stance("fail_on_recompile")
    try:
        found = [target.features(batch) for batch in batches]
    finally:
        torch.compiler.set_stance("default")
    for got, want, batch in zip(found, expected, batches, strict=True):
        assert difference(got[: batch.bounds[-1]], want[: batch.bounds[-1]]) < 0.02


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs float8 matmuls"
)
def test_float8_weights_are_near(tmp_path: Path) -> None:
    folder = write_model("qwen3", tmp_path, max_position_embeddings=512, hidden_size=256, intermediate_size=512)
    batch = pack(documents(*LENGTHS), 512).to(torch.device("cuda"))
    rounded, whole = load(folder, weights="float8"), load(folder)
    rounded.self_check(batch)
    size = difference(rounded.features(batch)[:384], whole.features(batch)[:384])
    assert 1e-4 < size < 0.3  # four random layers add up what single matmuls lose
    lean = dataclasses.replace(TargetConfig(), model=str(folder), layer_ids=(0,), weights="float8")
    held = TransformersTarget.load(lean, "cuda").layers[0].mlp.up_proj
    assert held.weight_OI.dtype == torch.float8_e4m3fn
