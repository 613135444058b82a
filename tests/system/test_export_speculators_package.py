"""PyPI `speculators` 0.9.0 loads our export in its layout, and computes what our drafter computes.

It needs a good many packages beside it, so it is no part of the development set: this runs where it is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("speculators") is None, reason="PyPI speculators 0.9.0 is not installed"
)
sys.path.append(str(Path(__file__).parents[1] / "numerics"))

from decode_world import make_drafter, make_target, save_target, shapes_of  # noqa: E402

from paceline import export  # noqa: E402
from paceline.evaluation.verify import drafter_hidden  # noqa: E402


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt-oss"])
def test_their_model_is_ours(family: str, tmp_path: Path):
    from speculators.models.dflash import DFlashDraftModel  # type: ignore[import-not-found]

    save_target(make_target(family), tmp_path / "target")
    target, shape = shapes_of(tmp_path / "target")
    drafter = make_drafter(shape)
    folder = export.write(
        tmp_path / "drafter", drafter.state_dict(), shape, target, dtype="float32", layout="speculators"
    )
    theirs, info = DFlashDraftModel.from_pretrained(str(folder), output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.target_layer_ids == [layer + 1 for layer in shape.layer_ids]
    assert (theirs.block_size, theirs.mask_token_id) == (shape.block_size, shape.mask_token_id)
    assert theirs.config.speculators_config.verifier.name_or_path == target.name

    theirs.config.transformer_layer_config._attn_implementation = "eager"
    for first in (0, 100, 5000):
        torch.manual_seed(first)
        features, block = torch.randn(9, shape.features), torch.randn(shape.block_size, shape.hidden_size)
        positions = torch.arange(first, first + 9 + shape.block_size)[None]
        context = theirs.hidden_norm(theirs.fc(features[None]))
        hidden = block[None]
        for layer in theirs.layers:
            hidden = layer(
                hidden_states=hidden,
                target_hidden=context,
                attention_mask=torch.zeros(1, 1, shape.block_size, 9 + shape.block_size),
                position_ids=positions,
                use_cache=False,
                position_embeddings=theirs.rotary_emb(block[None], positions),
            )
        assert torch.allclose(theirs.norm(hidden)[0], drafter_hidden(drafter, features, block, first), atol=1e-5)
