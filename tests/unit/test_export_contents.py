"""What an export records of itself: weights and configuration, and what becomes of a damaged record."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export_config_values import ODD_VALUES, changed, places
from test_export_layout import SHAPE, rewrite, state, target
from torch import Tensor

from paceline import export
from paceline.errors import UserError
from paceline.evaluation.checks import Check
from paceline.evaluation.command import VerifyOptions, run_verify
from paceline.evaluation.verify import failed, verify
from paceline.export.command import ExportOptions, run_export
from paceline.export.layout import config_json


@pytest.fixture(params=["dflash", "speculators"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return export.write(tmp_path / "d", state(), SHAPE, target(), dtype="bfloat16", layout=request.param)


def check_of(folder: Path, name: str) -> Check:
    (found,) = [check for check in verify(folder) if check.name == name]
    return found


def edit(folder: Path, **tensors: Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)


def edit_facts(folder: Path, **changes: Any) -> None:
    path = folder / "paceline.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_export_is_unchanged(folder: Path):
    found = check_of(folder, "contents")
    assert found.status == "ok"
    assert "unchanged since export: 25 tensors" in found.detail


def test_tensors_in_other_files_are_the_same(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for name, tensor in tensors.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert check_of(folder, "contents").status == "ok"


def test_swapped_tensors_are_named(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    one, two = (f"layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    edit(folder, **{one: tensors[two], two: tensors[one]})
    found = failed(verify(folder))
    assert [check.name for check in found] == ["contents"]
    assert f"{one} (holds what was {two}), {two} (holds what was {one})" in found[0].detail


def test_a_zeroed_tensor_is_named(folder: Path):
    name = "layers.1.self_attn.k_proj.weight"
    edit(folder, **{name: torch.zeros_like(load_file(folder / "model.safetensors")[name])})
    found = {check.name: check.detail for check in failed(verify(folder))}
    assert found == {"values": f"all zero: {name}", "contents": f"changed since export: other values in {name}"}


def test_one_bit_is_seen(folder: Path):
    weight = load_file(folder / "model.safetensors")["fc.weight"]
    weight.view(torch.int16)[0, 0] ^= 1
    edit(folder, **{"fc.weight": weight})
    assert "other values in fc.weight" in check_of(folder, "contents").detail


def test_layer_ids_that_are_all_one_off_are_seen(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    if "dflash_config" in config:
        config["dflash_config"]["target_layer_ids"] = [0, 2, 3]
    else:
        config["aux_hidden_state_layer_ids"] = [1, 3, 4]
    rewrite(folder, **config)
    found = failed(verify(folder))
    assert [check.name for check in found] == ["contents"]
    assert found[0].detail == "changed since export: layer ids [0, 2, 3] instead of [1, 3, 4]"


def test_weights_in_another_dtype_are_no_longer_those_of_the_export(folder: Path):
    save_file({name: t.float() for name, t in load_file(folder / "model.safetensors").items()}, folder / "w")
    (folder / "w").rename(folder / "model.safetensors")
    assert check_of(folder, "contents").detail == "changed since export: dtype 'float32' instead of 'bfloat16'"


def test_what_cannot_be_compared_is_said(folder: Path):
    facts = json.loads((folder / "paceline.json").read_text())
    (folder / "paceline.json").write_text(json.dumps({k: v for k, v in facts.items() if k != "contents"}))
    old = check_of(folder, "contents")
    assert (old.status, "did not record them" in old.detail) == ("skip", True)
    (folder / "paceline.json").unlink()
    foreign = check_of(folder, "contents")
    assert (foreign.status, "cannot be seen" in foreign.detail) == ("skip", True)


def test_a_later_versions_record_is_read(folder: Path):
    """Fields that this version does not know are no damage, and no change."""
    from paceline.export.contents import _digest

    facts = json.loads((folder / "paceline.json").read_text())
    noted = facts["contents"]
    noted["shape"]["new_field"] = 5
    noted["sha256"] = _digest(noted["shape"], noted["tensors"])
    facts["card"]["new_field"] = facts["new_field"] = {"a": 1}
    (folder / "paceline.json").write_text(json.dumps(facts))
    assert check_of(folder, "contents").status == "ok"
    read = export.read_facts(folder)
    assert read is not None
    assert read.card is not None


def test_a_changed_drafter_is_not_exported_anew(folder: Path, tmp_path: Path):
    edit(folder, **{"norm.weight": torch.ones(16, dtype=torch.bfloat16)})
    with pytest.raises(UserError, match=r"was changed since it was exported: other values in norm.weight"):
        run_export(ExportOptions(str(folder), str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


# -- values that speak for themselves


def foreign(place: Path, **tensors: Tensor) -> Path:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config_json(SHAPE, "float32")))
    save_file(state() | tensors, place / "model.safetensors")
    return place


HALF = torch.randn(16, 48, generator=torch.Generator().manual_seed(0))
HALF[:, :24] = 0
ROWS = torch.randn(16, 48, generator=torch.Generator().manual_seed(0))
ROWS[3:5] = 0

VALUES: dict[str, tuple[dict[str, Tensor], str]] = {
    "all zero: fc.weight": ({"fc.weight": torch.zeros(16, 48)}, "fail"),
    "all zero: norm.weight": ({"norm.weight": torch.zeros(16)}, "fail"),
    "one value everywhere: fc.weight": ({"fc.weight": torch.full((16, 48), 0.02)}, "fail"),
    "as before training: norm.weight": ({"norm.weight": torch.ones(16)}, "note"),
    "50% of fc.weight is zero": ({"fc.weight": HALF}, "note"),
    "2 of the 16 rows of fc.weight are zero": ({"fc.weight": ROWS}, "note"),
    "layers.1.mlp.up_proj.weight equals layers.0.mlp.up_proj.weight": (
        {"layers.1.mlp.up_proj.weight": state()["layers.0.mlp.up_proj.weight"]},
        "note",
    ),
}


@pytest.mark.parametrize("words", VALUES)
def test_values_that_no_training_gives_are_findings_in_any_folder(words: str, tmp_path: Path):
    tensors, status = VALUES[words]
    found = check_of(foreign(tmp_path / "d", **tensors), "values")
    assert (found.status, words in found.detail) == (status, True), found.detail


def test_good_values_of_any_folder_pass(tmp_path: Path):
    assert check_of(foreign(tmp_path / "d"), "values").status == "ok"


def test_many_findings_are_not_all_listed(tmp_path: Path):
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state().items() if ".mlp." in name}
    assert "and 3 more" in check_of(foreign(tmp_path / "d", **zeros), "values").detail


@pytest.mark.parametrize(("ids", "words"), [((1, 2, 3), ""), ((2, 3, 4), "one more"), ((0, 1, 2), "one less")])
def test_layer_ids_one_off_the_methods_are_noted_in_any_folder(ids: tuple[int, ...], words: str, tmp_path: Path):
    place = foreign(tmp_path / "d")
    rewrite(place, **config_json(dataclasses.replace(SHAPE, layer_ids=ids), "float32"))
    found = [check for check in verify(place) if check.name == "layer ids"]
    assert [(check.status, words in check.detail) for check in found] == ([("note", True)] if words else [])


def test_an_end_token_as_the_mask_is_noted_without_a_target(tmp_path: Path):
    place = tmp_path / "d"
    shape = dataclasses.replace(SHAPE, mask_token_id=7)
    export.write(place, state(), shape, target(), dtype="float32")
    found = check_of(place, "mask token")
    assert found.status == "note"
    assert "7 is an end-of-sequence token" in found.detail


# -- a damaged record


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda _: b"",
        lambda _: b"\x00\xff\xfe" * 50,
        lambda _: b"[]",
        lambda _: b"{}",
        lambda _: b"null",
        lambda data: data.replace(b'"layers": 2', b'"layers": 3'),
    ],
    ids=["cut", "empty", "binary", "list", "object", "null", "edited"],
)
def test_a_damaged_record_is_one_line(damage: Any, folder: Path):
    path = folder / "paceline.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"paceline\.json") as caught:
        run_verify(VerifyOptions(str(folder)))
    assert "\n" not in caught.value.what
    assert "remove the file" in caught.value.remedy


@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES)
def test_a_record_of_other_kinds_is_one_line_or_none(value: Any, tmp_path: Path):
    row = export.TauRow("code", 2.5, 1.5, 10)
    card = export.CardFacts(target="acme/tiny", data=("a",), notes=("b",), results=(row,))
    folder = export.write(tmp_path / "d", state(), SHAPE, target(), dtype="float32", card=card)
    whole = json.loads((folder / "paceline.json").read_text())
    refused = set()
    for path in places(whole):
        if path:
            (folder / "paceline.json").write_text(json.dumps(changed(copy.deepcopy(whole), path, value)))
            try:
                export.read_facts(folder)
            except UserError as error:
                assert_one_line(error)
                refused.add(path[0])
    assert refused >= ({"contents"} if value is None else {"target", "card", "contents"})


def assert_one_line(error: UserError) -> None:
    assert "\n" not in error.what
    assert len(error.what) < 400
    assert "paceline.json" in error.what
