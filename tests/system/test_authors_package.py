"""The method's own package loads what we export, and decodes as our loop does.

PyPI `dflash` 0.1.0, installed with --no-deps beside our torch and transformers. Its last block is shortened near the
limit, so its accepted lengths are compared at every step but the last.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("dflash") is None,
    reason="PyPI dflash 0.1.0 is not installed (pip install --no-deps dflash==0.1.0)",
)
sys.path.append(str(Path(__file__).parents[1] / "numerics"))

from decode_world import (  # noqa: E402
    END,
    ends_of,
    grouped_prompts,
    make_drafter,
    make_target,
    save_target,
    shapes_of,
    slow_answers,
)

from paceline import export  # noqa: E402
from paceline.drafter.blocks import dense_attend  # noqa: E402
from paceline.evaluation.decode import Engine, decode  # noqa: E402
from paceline.evaluation.verify import drafter_hidden, load_drafter  # noqa: E402

# Gemma's and the window's families are not among those that the package's transformers backend supports.
FAMILIES = ["llama", "qwen3"]


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package times itself by waiting for a GPU; it is asked to on a machine that has none."""
    import dflash.model as theirs

    monkeypatch.setattr(theirs, "_cuda_time", lambda: 0.0)


def exported(family: str, tmp_path: Path):
    model = make_target(family)
    save_target(model, tmp_path / "target")
    target_shape, shape = shapes_of(tmp_path / "target")
    folder = export.write(tmp_path / "drafter", make_drafter(shape).state_dict(), shape, target_shape, dtype="float32")
    return model, target_shape, folder


def theirs_of(folder: Path):
    from dflash.model import DFlashDraftModel

    loaded, info = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return loaded.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_their_loop_gives_our_tokens_and_lengths(family: str, tmp_path: Path):
    from dflash.model import dflash_generate

    model, target_shape, folder = exported(family, tmp_path)
    shape, tensors = export.read(folder)
    theirs = theirs_of(folder)
    assert list(theirs.target_layer_ids) == list(shape.layer_ids)
    assert (theirs.block_size, theirs.mask_token_id) == (shape.block_size, shape.mask_token_id)
    prompts = grouped_prompts(each=2)
    ours = decode(Engine(model, ends_of(model, target_shape), load_drafter(shape, tensors), shape), prompts, 40, (END,))
    for prompt, answer in zip(prompts, ours.answers, strict=True):
        found = dflash_generate(theirs, model, torch.tensor([prompt]), 40, [END], return_stats=True)
        assert found.output_ids[0, len(prompt) :].tolist() == answer.tokens
        assert found.acceptance_lengths[:-1] == answer.committed[:-1]


def test_their_loop_agrees_when_much_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both loops around one stand-in drafter that is right in seven places of eight: long and short steps alike."""
    import dflash.model as package

    model, _, folder = exported("llama", tmp_path)
    shape, _ = export.read(folder)
    prompts = grouped_prompts(each=2)
    truth = slow_answers(model, prompts, 40)
    theirs, crop = theirs_of(folder), package._crop_to
    # The stand-in keeps no cache, so there is none to crop.
    monkeypatch.setattr(package, "_crop_to", lambda cache, size: crop(cache, size) if cache.get_seq_length() else None)
    for prompt, answer in zip(prompts, truth, strict=True):
        whole = torch.tensor([*prompt, *answer, *[0] * 64])
        whole[torch.arange(len(whole)) % 8 == 5] = 3

        def say(self, position_ids, noise_embedding, whole=whole, **_rest):
            return torch.nn.functional.one_hot(whole[position_ids[0, -noise_embedding.shape[1] :]], 97).float()[None]

        monkeypatch.setattr(theirs, "forward", types.MethodType(say, theirs))
        monkeypatch.setattr(theirs, "compute_logits", lambda hidden, _head: hidden)
        found = package.dflash_generate(theirs, model, torch.tensor([prompt]), 40, None, return_stats=True)
        ours = decode(_one_hot_engine(model, shape, whole), [prompt], 40, ()).answers[0]
        assert found.output_ids[0, len(prompt) :].tolist() == ours.tokens == answer
        assert found.acceptance_lengths[:-1] == ours.committed[:-1]
        assert max(ours.committed) > 3


def _one_hot_engine(model, shape, whole) -> Engine:
    from decode_world import Oracle, one_hot_ends

    return Engine(model, one_hot_ends(), Oracle([whole.tolist()]), shape)


@pytest.mark.parametrize("first", [0, 100, 5000])
def test_their_forward_is_ours(first: int, tmp_path: Path):
    _, _, folder = exported("qwen3", tmp_path)
    shape, tensors = export.read(folder)
    torch.manual_seed(first)
    features, block = torch.randn(9, shape.features), torch.randn(shape.block_size, shape.hidden_size)
    positions = torch.arange(first, first + 9 + shape.block_size)[None]
    wanted = theirs_of(folder)(position_ids=positions, noise_embedding=block[None], target_hidden=features[None])
    assert torch.allclose(drafter_hidden(load_drafter(shape, tensors), features, block, first), wanted[0], atol=1e-5)
    assert callable(dense_attend)


def test_their_embedding_scale_and_soft_cap_are_ours(tmp_path: Path):
    """A Gemma kind: the package embeds and caps from the three fields of the config."""
    import dflash.model as package

    model, target_shape, folder = exported("gemma3", tmp_path)
    shape, _ = export.read(folder)
    theirs, ends = theirs_of(folder), ends_of(model, target_shape)
    ids = torch.tensor([[3, shape.mask_token_id, 8]])
    scale = float(package._draft_value(theirs.config, "input_embedding_scale", 1.0))
    assert torch.allclose(package._raw_input_embeddings(model, ids, scale), ends.embed(ids))
    assert torch.allclose(model.get_input_embeddings()(ids), ends.embed(ids))
    hidden = torch.randn(2, shape.hidden_size) * 30
    assert torch.allclose(theirs.compute_logits(hidden, model.lm_head), ends.logits(hidden), atol=1e-5)
