"""A drafter's config.json with any value anywhere: read, or refused in one line that names the field."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_export_layout import SHAPE, YARN, rewrite, state, target

from paceline import export
from paceline.errors import UserError
from paceline.evaluation.verify import verify
from paceline.export.layout import config_json
from paceline.export.speculators_layout import speculators_config

ODD_VALUES: dict[str, Any] = {
    "zero": 0,
    "zero float": 0.0,
    "negative": -1,
    "one": 1,
    "fraction": 2.5,
    "small": 1e-9,
    "true": True,
    "text": "8",
    "null": None,
    "list": [1],
    "object": {"a": 1},
    "nan": math.nan,
    "infinity": math.inf,
    "huge": 10**400,
    "large": 1 << 40,
}


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON value, inner ones too."""
    yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from places(inner, (*path, key))


def changed(config: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    inner: Any = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return config


def refusal(folder: Path) -> str:
    """What `verify` refuses the folder with, or nothing."""
    try:
        verify(folder)
    except UserError as error:
        return error.what
    return ""


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES)
def test_any_value_anywhere_is_read_or_refused_in_a_line(layout: Any, value: Any, tmp_path: Path):
    folder = export.write(tmp_path / "d", state(), SHAPE, target(), dtype="float32", layout=layout)
    whole = json.loads((folder / "config.json").read_text())
    whole |= {"logit_scale": 1.0, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]} if layout == "dflash" else {}
    for path in places(whole):
        if path:
            rewrite(folder, **changed(whole, path, value))
            told = refusal(folder)
            assert "\n" not in told
            assert len(told) < 400


NUMBERS = {
    "rms_norm_eps": (0, -1, 1, "1e-6", True, [1e-6], math.nan),
    "rope_theta": (0, -1.0, "10000", True, math.inf),
    "hidden_size": (0, -1, 16.0, "16", True),
    "num_hidden_layers": (0, -1, 2.0, "2", True, 1 << 40),
    "num_attention_heads": (0, -1, 4.0, "4", True),
    "num_key_value_heads": (0, -1, 3, "2", True),
    "head_dim": (0, -1, 7, "8", True),
    "intermediate_size": (0, -1, 24.0, True),
    "max_position_embeddings": (-1, 40960.0, "40960", True),
    "vocab_size": (0, -1, "64", True),
    "num_target_layers": (-1, 6.0, "6", True),
    "eos_token_id": ("2", True, 2.0, ["2"]),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in NUMBERS.items() for value in values])
def test_a_number_of_another_kind_is_named(key: str, value: Any, tmp_path: Path):
    folder = export.write(tmp_path / "d", state(), SHAPE, target(), dtype="float32")
    block = {"rope_parameters": {"rope_type": "default"}} if key == "rope_theta" else {}
    rewrite(folder, **block, **{key: value})
    with pytest.raises(UserError, match=key):
        export.read(folder)


@pytest.mark.parametrize("key", ["input_embedding_scale", "output_multiplier", "final_logit_softcapping"])
@pytest.mark.parametrize("value", [-1, "2", True, math.nan])
def test_a_scale_of_another_kind_is_named(key: str, value: Any, tmp_path: Path):
    folder = export.write(tmp_path / "d", state(), SHAPE, target(), dtype="float32")
    rewrite(folder, dflash_config=config_json(SHAPE, "float32")["dflash_config"] | {key: value})
    with pytest.raises(UserError, match=key):
        export.read(folder)


ROPES: dict[str, dict[str, Any]] = {
    "'dynamic' is not computed": {"rope_type": "dynamic", "factor": 2.0},
    "'longrope' is not computed": {"rope_type": "longrope"},
    "factor = 0": YARN | {"factor": 0},
    "factor = '32'": YARN | {"factor": "32"},
    "beta_fast = True": YARN | {"beta_fast": True},
    "original_max_position_embeddings = -1": YARN | {"original_max_position_embeddings": -1},
    "give no rotation": {"rope_type": "llama3"},
    "partial_rotary_factor": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "rope_type = 5": {"rope_type": 5},
}


@pytest.mark.parametrize("message", ROPES)
def test_a_rotation_that_is_none_is_refused(message: str, tmp_path: Path):
    folder = export.write(tmp_path / "d", state(), SHAPE, target(), dtype="float32")
    rope = {"rope_theta": 1_000_000.0} | ROPES[message]
    rewrite(folder, rope_parameters=rope, rope_scaling=rope, rope_theta=rope["rope_theta"])
    with pytest.raises(UserError, match=message):
        export.read(folder)


def test_two_rotations_of_one_file_are_refused(tmp_path: Path):
    folder = export.write(tmp_path / "d", state(), SHAPE, target(), dtype="float32")
    rewrite(folder, rope_parameters=YARN, rope_scaling=YARN | {"factor": 4.0}, rope_theta=YARN["rope_theta"])
    with pytest.raises(UserError, match=r"factor = 32.0 in rope_parameters and 4.0 in rope_scaling"):
        export.read(folder)


def test_whole_numbers_serve_where_fractions_are_meant(tmp_path: Path):
    folder = export.write(tmp_path / "d", state(), SHAPE, target(), dtype="float32")
    rope = {"rope_type": "default", "rope_theta": 1_000_000}
    rewrite(folder, rope_theta=1_000_000, rope_parameters=rope, attention_dropout=0)
    assert export.read(folder)[0].rope["rope_theta"] == SHAPE.rope["rope_theta"]
    assert {check.status for check in verify(folder)} == {"ok", "skip"}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, "9" * 10_000, "", "null", "\x00\x01"])
def test_a_config_that_is_no_object_is_one_line(text: str, tmp_path: Path):
    folder = export.write(tmp_path / "d", state(), SHAPE, target(), dtype="float32")
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        export.read(folder)


@pytest.mark.parametrize(
    "index",
    [[], {}, {"weight_map": []}, {"weight_map": {"a": 5}}, {"weight_map": {"a": "../x.safetensors"}}, "{"],
    ids=str,
)
def test_an_index_that_is_none_is_one_line(index: Any, tmp_path: Path):
    folder = export.write(tmp_path / "d", state(), SHAPE, target(), dtype="float32")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(UserError, match=r"index\.json"):
        export.read(folder)


def test_the_other_layouts_numbers_are_checked_too():
    from paceline.export.speculators_layout import shape_from_speculators

    config = speculators_config(SHAPE, "float32", "acme/tiny", [])
    for key in ("mask_token_id", "block_size", "draft_vocab_size", "num_target_layers", "aux_hidden_state_layer_ids"):
        with pytest.raises(UserError, match=key.removeprefix("aux_hidden_state_")):
            shape_from_speculators(config | {key: "5"}, "x")
