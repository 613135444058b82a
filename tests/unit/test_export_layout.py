"""Drafter <-> folder: the exact layout, the round trip, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import export
from paceline.drafter.model import Drafter
from paceline.errors import UserError
from paceline.evaluation.verify import verify
from paceline.export import engines
from paceline.export.layout import config_json, shape_from_config, tensor_shapes
from paceline.export.speculators_layout import shape_from_speculators, speculators_config
from paceline.shapes import DrafterShape, TargetShape

SHAPE = DrafterShape(
    hidden_size=16,
    intermediate_size=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    layer_ids=(1, 3, 4),
    block_size=8,
    mask_token_id=50,
    vocabulary=64,
    target_layers=6,
    rope={"rope_type": "default", "rope_theta": 1_000_000.0},
    bos_token_id=1,
    eos_token_ids=(2, 7),
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
SCALED = dataclasses.replace(SHAPE, embedding_scale=4.0, logit_scale=0.5, logit_softcap=30.0)


def target(**changes: Any) -> TargetShape:
    facts = {
        "name": "acme/tiny",
        "model_type": "llama",
        "hidden_size": 16,
        "layers": 6,
        "vocabulary": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "rms_eps": 1e-6,
        "rope": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "max_positions": 4096,
        "tied": False,
        "bos_ids": (1,),
        "eos_ids": (2, 7),
    }
    return TargetShape(**{**facts, **changes})


def state(shape: DrafterShape = SHAPE) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(size) for name, size in tensor_shapes(shape).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return export.write(tmp_path / "drafter", state(), SHAPE, target(), dtype="float32")


def rewrite(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_names_are_the_networks_own():
    assert {name: tuple(t.shape) for name, t in Drafter(SHAPE).state_dict().items()} == tensor_shapes(SHAPE)
    assert len(tensor_shapes(SHAPE)) == 3 + 11 * SHAPE.layers


def test_config_is_the_documented_one():
    """The example of the method's layout, field by field (Qwen3-8B)."""
    shape = DrafterShape(
        4096, 12288, 5, 32, 8, 128, (1, 9, 17, 25, 33), 16, 151669, 151936, 36, 1e-6,
        {"rope_theta": 1000000, "rope_type": "default"}, 40960, 151643, (151645,),
    )  # fmt: skip
    assert config_json(shape, "bfloat16") == {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
        "block_size": 16, "num_target_layers": 36,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "block_size": 16},
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 5,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "max_position_embeddings": 40960, "vocab_size": 151936, "attention_bias": False,
        "attention_dropout": 0.0, "layer_types": ["full_attention"] * 5,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 5,
        "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
    }  # fmt: skip


shapes = st.builds(
    DrafterShape,
    hidden_size=st.just(16),
    intermediate_size=st.integers(1, 99),
    layers=st.integers(1, 9),
    heads=st.just(4),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([4, 8, 64]),
    layer_ids=st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True).map(lambda ids: tuple(sorted(ids))),
    block_size=st.integers(2, 32),
    mask_token_id=st.integers(0, 63),
    vocabulary=st.just(64),
    target_layers=st.just(12),
    rms_eps=st.sampled_from([1e-5, 1e-6]),
    rope=st.sampled_from([SHAPE.rope, YARN]),
    max_positions=st.integers(1, 1 << 20),
    bos_token_id=st.sampled_from([None, 0, 5]),
    eos_token_ids=st.sampled_from([(), (2,), (2, 7)]),
    embedding_scale=st.sampled_from([1.0, 22.627416997969522]),
    logit_scale=st.sampled_from([1.0, 0.25]),
    logit_softcap=st.sampled_from([0.0, 30.0]),
)


@settings(max_examples=100, deadline=None)
@given(shapes)
def test_config_round_trip(shape: DrafterShape):
    text = json.dumps(config_json(shape, "bfloat16"))
    assert shape_from_config(json.loads(text), "x") == shape


@settings(max_examples=100, deadline=None)
@given(shapes)
def test_every_engine_reads_what_was_trained(shape: DrafterShape):
    config = json.loads(json.dumps(config_json(shape, "bfloat16")))
    for read in engines.READERS:
        wrong = engines.differences(read(config), shape)
        assert all(item.startswith("embedding scale") for item in wrong), wrong
    assert engines.authors_reads(config).embedding_scale == shape.embedding_scale
    assert engines.authors_reads(config).logit_softcap == engines.sglang_reads(config).logit_softcap
    assert engines.vllm_reads(config).draft_tokens == shape.block_size - 1
    assert engines.sglang_reads(config).draft_tokens == shape.block_size


@pytest.mark.parametrize("rope", [SHAPE.rope, YARN], ids=["default", "yarn"])
def test_transformers_sees_one_rope(rope: dict[str, Any]):
    """Theta and kind are equal wherever a reader looks, also after transformers has read the config."""
    from transformers import Qwen3Config

    config = config_json(dataclasses.replace(SHAPE, rope=rope), "bfloat16")
    read = Qwen3Config(**config)
    assert read.rope_parameters["rope_theta"] == config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert read.rope_parameters["rope_type"] == rope["rope_type"]
    assert read.dflash_config["target_layer_ids"] == [1, 3, 4]


def test_engine_readers_notice_what_matters():
    """Each a fault that somebody served with."""
    good = config_json(SHAPE, "bfloat16")
    faults = {
        "rope": good | {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}},
        "layer ids": good | {"dflash_config": {**good["dflash_config"], "target_layer_ids": [2, 4, 5]}},
        "mask token": good | {"dflash_config": {**good["dflash_config"], "mask_token_id": 0}},
        "head_dim": good | {"head_dim": None},
        "causal": good | {"layer_types": ["sliding_attention"] * 2},
        "rms_norm_eps": good | {"rms_norm_eps": 1e-5},
    }
    for word, config in faults.items():
        found = engines.differences(engines.vllm_reads(config), SHAPE)
        assert any(word in item for item in found), word
    unguessed = {key: value for key, value in good.items() if key != "dflash_config"}
    assert engines.sglang_reads(unguessed).layer_ids is None


def test_engine_parameters_are_all_filled():
    assert engines.unfilled_and_unknown(tensor_shapes(SHAPE), SHAPE.layers) == ([], [])
    names = set(tensor_shapes(SHAPE)) - {"layers.1.self_attn.k_proj.weight"} | {"layers.1.attn.k.weight"}
    unfilled, unknown = engines.unfilled_and_unknown(names, SHAPE.layers)
    assert unfilled == ["layers.1.self_attn.qkv_proj.weight[k]"]
    assert unknown == ["layers.1.attn.k.weight"]


def test_written_and_read_back(folder: Path):
    shape, tensors = export.read(folder)
    assert shape == SHAPE
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state().items())
    assert export.compare(folder, state(), SHAPE) == 0.0
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
        "paceline.json",
    }


def test_bfloat16_is_compared_after_rounding(tmp_path: Path):
    folder = export.write(tmp_path / "d", state(), SHAPE, target(), dtype="bfloat16")
    assert 0 < export.compare(folder, state(), SHAPE) < 4e-3
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_scales_are_carried(tmp_path: Path):
    scaled = target(embedding_scale=4.0, logit_scale=0.5, logit_softcap=30.0)
    folder = export.write(tmp_path / "d", state(), SCALED, scaled, dtype="float32")
    assert export.read(folder)[0] == SCALED
    block = json.loads((folder / "config.json").read_text())["dflash_config"]
    assert (block["input_embedding_scale"], block["output_multiplier"], block["final_logit_softcapping"]) == (
        4,
        0.5,
        30,
    )


def test_card_says_how_to_serve(tmp_path: Path):
    card = export.CardFacts(
        target="acme/tiny",
        target_revision="0123abcd",
        data=("chats.jsonl",),
        settings="[training]\nsteps = 20\n",
        results=(export.TauRow("code", 3.25, 2.5, 100, 3.0, 3.5),),
        measured="greedy, float32",
    )
    folder = export.write(tmp_path / "d", state(), SHAPE, target(), dtype="float32", card=card)
    text = (folder / "README.md").read_text()
    for part in (
        "acme/tiny", "0123abcd", "chats.jsonl", "steps = 20", "| code | 3.250 | 3.00 … 3.50 | 2.500 | 100 |",
        '"num_speculative_tokens": 7', "--speculative-num-draft-tokens 8", "The token that the prefill gives",
    ):  # fmt: skip
        assert part in text


def test_speculators_layout_adds_one_and_names_the_target(tmp_path: Path):
    folder = export.write(tmp_path / "d", state(), SHAPE, target(), dtype="float32", layout="speculators")
    config = json.loads((folder / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "acme/tiny", "architectures": ["LlamaForCausalLM"]
    }  # fmt: skip
    assert config["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 1_000_000.0
    assert export.read(folder)[0] == SHAPE


def test_speculators_layout_reads_copies_of_the_verifier(tmp_path: Path):
    config = speculators_config(SHAPE, "float32", "acme/tiny", ["LlamaForCausalLM"])
    del config["num_target_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(state() | {"embed_tokens.weight": torch.zeros(64, 16)}, tmp_path / "model.safetensors")
    shape, tensors = export.read(tmp_path)
    assert shape == dataclasses.replace(SHAPE, target_layers=0)
    assert tensors.keys() == tensor_shapes(SHAPE).keys()


def test_speculators_layout_refuses_what_it_cannot_carry():
    with pytest.raises(UserError, match="cannot carry"):
        speculators_config(SCALED, "float32", "acme/gemma", [])
    config = speculators_config(SHAPE, "float32", "acme/tiny", [])
    with pytest.raises(UserError, match="32 of the target's 64 tokens"):
        shape_from_speculators(config | {"draft_vocab_size": 32}, "x")


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "DFlash 2": ({"architectures": ["DFlash2DraftModel"]}, {}),
    "DFlash 2 by tensor": ({}, {"layers.0.attention_conv.base_kernel": torch.zeros(2, 2, 16)}),
    "DFlash 2 by selector": ({}, {"candidate_selector.predecessor_codebook.weight": torch.zeros(64, 4)}),
    "DFlash 2 by config": ({"dflash_config": {"conv_kernel_size": 2, "conv_group_size": 16}}, {}),
    "DSpark": ({"architectures": ["Qwen3DSparkModel"]}, {}),
    "DSpark by tensor": ({}, {"markov_head.w1.weight": torch.zeros(64, 4)}),
    "DSpark by speculators": ({"speculators_model_type": "dspark"}, {}),
    "Domino": ({"dflash_config": {"projector_type": "domino", "shift_label": True}}, {}),
    "DFlare": ({"architectures": ["DFlareDraftModel"]}, {}),
    "JetSpec": ({"is_causal": True}, {}),
}


@pytest.mark.parametrize("which", OTHERS)
def test_other_methods_are_refused_by_name(folder: Path, which: str):
    config, tensors = OTHERS[which]
    if "dflash_config" in config:
        config = {"dflash_config": config_json(SHAPE, "float32")["dflash_config"] | config["dflash_config"]}
    rewrite(folder, **config)
    save_file(state() | tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"is a {which.partition(' by ')[0]} drafter"):
        export.read(folder)


def test_a_causal_override_is_jetspecs(folder: Path):
    rewrite(folder, dflash_config=config_json(SHAPE, "float32")["dflash_config"] | {"causal": True})
    with pytest.raises(UserError, match="JetSpec"):
        export.read(folder)


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "sliding-window": {"layer_types": ["sliding_attention", "full_attention"]},
    "biases": {"attention_bias": True},
    "interleaved": {"is_neox_style": False},
    "activation": {"hidden_act": "gelu"},
    "anchor slot": {"sample_from_anchor": True},
}


@pytest.mark.parametrize("word", UNSUPPORTED)
def test_kinds_that_we_do_not_compute_are_refused(folder: Path, word: str):
    rewrite(folder, **UNSUPPORTED[word])
    with pytest.raises(UserError, match=word):
        export.read(folder)


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "block_size": {"block_size": 16},
    "rope_theta": {"rope_theta": 10_000.0},
    "layer ids are 0-based": {"num_target_layers": 4},
}


@pytest.mark.parametrize("word", CONTRADICTIONS)
def test_contradictions_are_refused(folder: Path, word: str):
    rewrite(folder, **CONTRADICTIONS[word])
    with pytest.raises(UserError, match=word):
        export.read(folder)


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id"])
def test_nothing_is_guessed(folder: Path, key: str):
    block = config_json(SHAPE, "float32")["dflash_config"]
    rewrite(folder, dflash_config={name: value for name, value in block.items() if name != key})
    with pytest.raises(UserError, match=f"does not say {key}"):
        export.read(folder)


def test_unknown_missing_misshapen_and_broken_tensors_are_refused(folder: Path):
    good = state()
    bad: dict[str, dict[str, Tensor]] = {
        "no DFlash drafter has: rotary.inv_freq": good | {"rotary.inv_freq": torch.zeros(4)},
        "lacks norm.weight": {name: t for name, t in good.items() if name != "norm.weight"},
        r"fc.weight is \[16, 32\]": good | {"fc.weight": torch.zeros(16, 32)},
        "not finite": good | {"norm.weight": torch.full((16,), torch.nan)},
        "norm.weight is in float8_e4m3fn": good | {"norm.weight": torch.ones(16).to(torch.float8_e4m3fn)},
        "norm.weight is in int64": good | {"norm.weight": torch.ones(16, dtype=torch.long)},
        "norm.weight is in complex64": good | {"norm.weight": torch.ones(16, dtype=torch.complex64)},
    }
    for message, tensors in bad.items():
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(UserError, match=message):
            export.read(folder)
    (folder / "model.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(UserError, match="is damaged"):
        export.read(folder)


def test_folders_that_are_no_drafters_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match="not found"):
        export.read(tmp_path / "nowhere")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 16}')
    with pytest.raises(UserError, match="LlamaForCausalLM, not a DFlash drafter"):
        export.read(folder)
    (folder / "config.json").write_text("[1")
    with pytest.raises(UserError, match="cannot be read"):
        export.read(folder)
    rewritten = tmp_path / "pickled"
    rewritten.mkdir()
    (rewritten / "config.json").write_text(json.dumps(config_json(SHAPE, "float32")))
    (rewritten / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="pickles only"):
        export.read(rewritten)


def test_sharded_weights_are_read(folder: Path):
    tensors = state()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for name, part in parts.items():
        save_file({key: tensors[key] for key in part}, folder / name)
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"both model\.safetensors and model\.safetensors\.index\.json"):
        export.read(folder)
    (folder / "model.safetensors").unlink()
    assert export.read(folder)[1].keys() == tensors.keys()


WRONG_TARGETS: dict[str, TargetShape] = {
    "hidden size 16, but acme/other has 32": target(name="acme/other", hidden_size=32),
    "depth 6, but acme/other has 8": target(name="acme/other", layers=8),
    "vocabulary 64, but acme/other has 72": target(name="acme/other", vocabulary=72),
    "embedding scale 1.0, but acme/other has 4.0": target(name="acme/other", embedding_scale=4.0),
}


@pytest.mark.parametrize("message", WRONG_TARGETS)
def test_one_line_names_both_sizes(message: str, tmp_path: Path):
    with pytest.raises(UserError, match=message):
        export.write(tmp_path / "d", state(), SHAPE, WRONG_TARGETS[message], dtype="float32")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from paceline.export import folder as module

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.files, "write_json", full)
    with pytest.raises(UserError, match="No space left"):
        export.write(folder, state(), SHAPE, target(), dtype="bfloat16")
    assert export.compare(folder, state(), SHAPE) == 0.0
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_place_that_cannot_be_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "d", tmp_path / "file"):
        with pytest.raises(UserError, match="file"):
            export.write(place, state(), SHAPE, target())


def test_what_a_link_leads_to_is_replaced(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):
        export.write(tmp_path / "link", state(), SHAPE, target(), dtype="float32")
    assert (tmp_path / "link").is_symlink()
    assert export.compare(tmp_path / "real", state(), SHAPE) == 0.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_folders_of_others_are_not_overwritten(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="not a drafter that Paceline wrote"):
        export.write(tmp_path, state(), SHAPE, target(), dtype="float32")
    with pytest.raises(UserError, match="dtype 'int8'"):
        export.write(tmp_path / "d", state(), SHAPE, target(), dtype="int8")
    with pytest.raises(UserError, match="not finite in float16"):
        export.write(
            tmp_path / "d", state() | {"norm.weight": torch.full((16,), 1e6)}, SHAPE, target(), dtype="float16"
        )


def test_a_layout_is_checked_for_the_engines_that_read_it(tmp_path: Path):
    found = {}
    for layout in ("dflash", "speculators"):
        folder = export.write(tmp_path / layout, state(), SHAPE, target(), dtype="float32", layout=layout)
        found[layout] = {check.name: check.status for check in verify(folder)}
    engines = [f"read by {engine}" for engine in ("vLLM", "SGLang", "dflash (transformers)", "llama.cpp converter")]
    assert [found["dflash"][name] for name in engines] == ["ok"] * 4
    assert [found["speculators"][name] for name in engines] == ["ok", "skip", "skip", "skip"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("block_size", value) for value in (0, -3, 1, "8", 8.5, True, 100_000)),
        *(("mask_token_id", value) for value in (-1, 4.0, 1 << 40)),
        ("target_layer_ids", [1.0, 2]),
    ],
)
def test_a_number_that_no_drafter_can_have_is_named(tmp_path: Path, key: str, value: object):
    folder = export.write(tmp_path / "d", state(), SHAPE, target(), dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    for block in (config, config["dflash_config"]):
        if key in block:
            block[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=key):
        verify(folder)
