"""Facts of a target without its weights, and each refusal as one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.shapes import TargetShape
from paceline.target import gguf
from paceline.target.describe import (
    check_mask_token,
    choose_layers,
    load_tokenizer,
    mask_candidates,
    mask_note,
    mask_offer,
    read_shape,
)
from paceline.target.ends import load_ends

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": [2, 4],
}


def write_config(folder: Path, kind: str = "qwen3", **changes: object) -> TargetConfig:
    AutoConfig.for_model(kind, **(SMALL | changes)).save_pretrained(folder)
    return TargetConfig(model=str(folder))


def tokenizer(reserved: tuple[str, ...] = ("<|reserved_0|>", "<|reserved_1|>")) -> PreTrainedTokenizerFast:
    words = ["<unk>", "<s>", "</s>", "<pad>", "<|im_end|>", *"abcdefghij"]
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    special = ["<|im_end|>", *reserved]
    fast.add_special_tokens({"additional_special_tokens": [AddedToken(name, special=True) for name in special]})
    fast.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    return fast


# -- layers


@pytest.mark.parametrize(
    ("layers", "features", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (30, 5, (1, 8, 14, 20, 27)),
        (28, 5, (1, 7, 13, 19, 25)),
        (36, 1, (18,)),
        (7, 1, (3,)),
    ],
)
def test_the_methods_spacing(layers: int, features: int, expected: tuple[int, ...]) -> None:
    assert choose_layers(layers, features) == expected


@pytest.mark.parametrize("layers", range(1, 20))
@pytest.mark.parametrize("features", range(1, 9))
def test_ids_are_distinct_ascending_and_in_range(layers: int, features: int) -> None:
    ids = choose_layers(layers, features)
    assert list(ids) == sorted(set(ids))
    assert 1 <= len(ids) <= features
    assert 0 <= ids[0] <= ids[-1] < layers


@pytest.mark.parametrize("ids", [(3,), (0, 3), (-1,), (0, 0), (1, 0)])
def test_ids_that_cannot_be_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="layer_ids"):
        choose_layers(3, 5, ids)


def test_first_and_last_id_are_taken() -> None:
    assert choose_layers(3, 5, (0, 2)) == (0, 2)


# -- facts


def test_facts_of_a_folder_without_weights(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, tie_word_embeddings=True))
    assert (shape.hidden_size, shape.layers, shape.vocabulary, shape.heads, shape.kv_heads) == (32, 3, 60, 4, 2)
    assert (shape.head_dim, shape.intermediate_size, shape.max_positions, shape.tied) == (8, 48, 128, True)
    assert (shape.bos_ids, shape.eos_ids) == ((1,), (2, 4))
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32 + 2 * 8
    assert shape.parameters == 60 * 32 + 3 * layer + 32


def test_ends_of_the_generation_configuration_count(tmp_path: Path) -> None:
    config = write_config(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert read_shape(config).eos_ids == (2, 7)


def test_rope_theta_survives_and_partial_rotation_does_not(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}
    assert read_shape(write_config(tmp_path, rope_parameters=rope)).rope == {
        "rope_type": "default",
        "rope_theta": 1_000_000.0,
    }


def test_scaled_embeddings_and_logits(tmp_path: Path) -> None:
    gemma = read_shape(write_config(tmp_path / "gemma", "gemma3_text", sliding_window=8))
    assert gemma.embedding_scale == pytest.approx(32**0.5)
    assert gemma.rope["rope_theta"] == 1_000_000.0  # full attention's, not the local one of 10,000
    capped = read_shape(write_config(tmp_path / "gemma2", "gemma2", final_logit_softcapping=20.0))
    assert capped.logit_softcap == 20.0
    granite = read_shape(write_config(tmp_path / "granite", "granite", embedding_multiplier=12.0, logits_scaling=8.0))
    assert (granite.embedding_scale, granite.logit_scale) == (12.0, 0.125)
    cohere = read_shape(write_config(tmp_path / "cohere", "cohere", logit_scale=0.0625))
    assert cohere.logit_scale == 0.0625


# -- refusals


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba", "bloom"])
def test_models_whose_packed_documents_would_mix(kind: str, tmp_path: Path) -> None:
    own = {} if kind == "qwen3_next" else {"head_dim": None}
    with pytest.raises(UserError, match=r"packed document|kept apart"):
        read_shape(write_config(tmp_path, kind, **own))


def test_nothing_is_found(tmp_path: Path) -> None:
    for name in ("", "./missing", str(tmp_path / "missing"), str(tmp_path), "missing.gguf"):
        with pytest.raises(UserError, match=r"target\.model"):
            read_shape(TargetConfig(model=name))


def test_a_hub_id_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for read in (read_shape, load_tokenizer):
        with pytest.raises(UserError, match="no-such-owner/no-such-model"):
            read(TargetConfig(model="no-such-owner/no-such-model"))


def test_files_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match="not a GGUF file"):
        read_shape(TargetConfig(model=str(tmp_path / "model.bin")))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 40)
    with pytest.raises(UserError, match=r"broken\.gguf"):
        read_shape(TargetConfig(model=str(tmp_path / "broken.gguf")))
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="split GGUF"):
        read_shape(TargetConfig(model=str(tmp_path / "m-00001-of-00003.gguf")))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("{")
    with pytest.raises(UserError, match="configuration"):
        read_shape(TargetConfig(model=str(tmp_path / "odd")))


ODD_NUMBERS = {
    "rms_norm_eps": (0, 0.0, -1e-6, "1e-6", True, 2.0, [1e-6]),
    "hidden_size": (0, -32, "32", 32.0, True, None),
    "num_hidden_layers": (0, -3, "3", 1 << 40),
    "num_attention_heads": (0, -4, 2.5),
    "num_key_value_heads": (0, -2, "2"),
    "head_dim": (0, -8, 8.5),
    "intermediate_size": (0, -48, "48", 1 << 60),
    "max_position_embeddings": (0, -128, 128.5, True),
    "vocab_size": (0, -60, 1 << 60),
    "eos_token_id": ("2", 2.5, {"a": 1}),
    "rope_parameters": (5, [1], {"rope_type": "default", "rope_theta": 0}, {"rope_type": "default", "rope_theta": "x"}),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ODD_NUMBERS.items() for value in values])
def test_a_number_that_no_model_has_is_one_line(key: str, value: object, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts | {key: value}))
    with pytest.raises(UserError) as caught:
        read_shape(config)
    assert "\n" not in caught.value.what
    words = ("rope_theta" if key == "rope_parameters" else key, "cannot read the configuration")
    assert any(word in caught.value.what for word in words)


def test_token_ids_below_zero_stand_for_none(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, bos_token_id=-1, eos_token_id=[-1, 2]))
    assert (shape.bos_ids, shape.eos_ids) == ((), (2,))


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}'])
def test_a_broken_generation_configuration_is_one_line(text: str, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError):
        read_shape(config)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', "[" * 100_000])
def test_a_broken_index_of_weights_is_one_line(text: str, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"index of weights|index\.json does not say"):
        load_ends(config, "cpu", torch.float32)


# -- the mask token


def shape_of(vocabulary: int = 20) -> TargetShape:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    return TargetShape("t", "qwen3", 32, 3, vocabulary, 4, 2, 8, 48, 1e-6, rope, 128, True, (1,), (2,))


def test_no_mask_id_lists_ids_that_it_could_be() -> None:
    with pytest.raises(UserError) as caught:
        check_mask_token(TargetConfig(), shape_of(), tokenizer())
    for token_id in (15, 16, 17, 18, 19):
        assert str(token_id) in caught.value.remedy
    assert " 3 (" not in caught.value.remedy


def test_padded_rows_come_first_then_reserved_tokens() -> None:
    offered = mask_candidates(shape_of(18), tokenizer())
    assert offered == [(17, "unused row"), (15, "<|reserved_0|>"), (16, "<|reserved_1|>")]


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (20, "has no row"),
        (400, "has no row"),
        (1, "beginning"),
        (2, "end-of-sequence"),
        (0, "unknown"),
        (3, "padding"),
        (4, "chat template's token"),
    ],
)
def test_mask_ids_that_mean_something_or_do_not_exist(mask: int, why: str) -> None:
    with pytest.raises(UserError, match=why):
        check_mask_token(TargetConfig(mask_token_id=mask), shape_of(), tokenizer())


@pytest.mark.parametrize("mask", [15, 16, 17, 19])
def test_mask_ids_that_serve(mask: int) -> None:
    check_mask_token(TargetConfig(mask_token_id=mask), shape_of(), tokenizer())


def test_an_ordinary_token_as_the_mask_is_noted() -> None:
    assert mask_note(7, shape_of(), tokenizer()) == "an ordinary token of the target, 'c'"
    assert mask_note(2, shape_of(), tokenizer()) == "the target's end-of-sequence token"
    assert [mask_note(mask, shape_of(), tokenizer()) for mask in (15, 16, 17, 19)] == [""] * 4
    assert "17 (unused row)" in mask_offer(shape_of(), tokenizer())


def test_pad_that_is_eos_is_no_fallback() -> None:
    fast = tokenizer(reserved=())
    fast.pad_token = "</s>"
    with pytest.raises(UserError, match="not set"):
        check_mask_token(TargetConfig(), shape_of(len(fast)), fast)
    assert [token_id for token_id, _ in mask_candidates(shape_of(len(fast)), fast)] == [3]


# -- the tokenizer


def test_a_template_file_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    write_config(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "own.jinja").write_text("mine")
    loaded = load_tokenizer(TargetConfig(model=str(tmp_path), chat_template=str(tmp_path / "own.jinja")))
    assert loaded.chat_template == "mine"
    assert "im_end" in str(load_tokenizer(TargetConfig(model=str(tmp_path))).chat_template)
    with pytest.raises(UserError, match="chat_template"):
        load_tokenizer(TargetConfig(model=str(tmp_path), chat_template=str(tmp_path / "none.jinja")))


def test_repairs_of_a_gguf_tokenizer() -> None:
    fast = tokenizer()
    fast.eos_token, fast.pad_token = "<s>", None
    facts = {
        "general.architecture": "llama",
        "llama.context_length": 8192,
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.chat_template": "of the header",
    }
    gguf.repair_tokenizer(fast, facts)
    assert (fast.bos_token, fast.eos_token, fast.pad_token) == ("<s>", "<|im_end|>", "<|im_end|>")
    assert (fast.chat_template, fast.model_max_length) == ("of the header", 8192)
    pieces = [text for text, _ in fast.backend_tokenizer.pre_tokenizer.pre_tokenize_str("\n\n1. 12")]
    assert pieces == ["ĊĊ", "1", ".", "Ġ", "1", "2"]
    assert gguf.end_ids(facts) == (4, 2)


def test_a_broken_tokenizer_is_one_line(tmp_path: Path) -> None:
    write_config(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    for broken in ("{", "[]", json.dumps(whole | {"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}})):
        (tmp_path / "tokenizer.json").write_text(broken)
        with pytest.raises(UserError, match="tokenizer"):
            load_tokenizer(TargetConfig(model=str(tmp_path)))
