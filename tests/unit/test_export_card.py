"""What a card and the printed commands say of a target, and the modes of what is written."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file
from test_export_layout import SHAPE, state, target

from paceline import export
from paceline.config import Config
from paceline.errors import UserError
from paceline.export import files
from paceline.export.card import serving_commands, target_words
from paceline.export.command import ExportOptions
from paceline.export.flags import named_by_flags
from paceline.training.scores import Scores


@pytest.fixture
def umask(request: pytest.FixtureRequest):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002], indirect=True)
def test_every_file_follows_the_umask(umask: int, tmp_path: Path):
    def fill(place: Path) -> None:
        (place / "inner").mkdir()
        save_file(state(), place / "inner" / "more.safetensors")

    export.write(tmp_path / "drafter", state(), SHAPE, target(), dtype="float32")
    files.write_folder(tmp_path / "nested", fill)
    written = [*tmp_path.rglob("*")]
    assert {"model.safetensors", "config.json", "more.safetensors"} <= {path.name for path in written}
    for path in written:
        wanted = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path.name


def gguf(folder: Path) -> Path:
    path = folder / "tiny-q8.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    return path


def model_folder(folder: Path) -> Path:
    path = folder / "tiny-model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def gone(folder: Path) -> Path:
    return folder / "was" / "tiny-model"


@pytest.mark.parametrize("make", [gguf, model_folder, gone])
def test_no_path_of_this_machine_travels(make: Any, tmp_path: Path):
    place = make(tmp_path)
    out = export.write(
        tmp_path / "d", state(), SHAPE, target(), dtype="float32", card=export.CardFacts(target=str(place))
    )
    card = (out / "README.md").read_text()
    assert str(tmp_path) not in card
    assert "base_model" not in card
    assert place.name in card
    assert "vllm serve TARGET" in card
    assert "TARGET is the folder or hub id of" in card
    assert "Run inside this folder" in card
    assert ("llama-server -m tiny-q8.gguf" in card) == (make is gguf)
    printed = "\n".join(command for _, command in serving_commands(SHAPE, str(place), "out", "dflash"))
    assert str(tmp_path) not in printed


def test_a_hub_id_is_served_by_its_name(tmp_path: Path):
    out = export.write(tmp_path / "d", state(), SHAPE, target(), card=export.CardFacts(target="acme/tiny"))
    card = (out / "README.md").read_text()
    assert "vllm serve acme/tiny" in card
    assert "base_model: acme/tiny" in card
    assert "TARGET" not in card
    assert "Run inside this folder" in card
    assert not target_words("acme/tiny").local


def test_a_folder_of_one_gguf_file_is_one(tmp_path: Path):
    gguf(tmp_path)
    assert target_words(str(tmp_path)).gguf == "tiny-q8.gguf"


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("target.model = 'x': no such file", "--target = 'x': no such file"),
        ("check target.revision", "check --revision"),
        ("layout = 'gguf' is not one", "--layout = 'gguf' is not one"),
        ("training.layout = 3", "training.layout = 3"),
        ("top_k = 3", "top_k = 3"),
    ],
)
def test_flags_are_named(said: str, heard: str):
    with pytest.raises(UserError) as caught, named_by_flags(ExportOptions):
        raise UserError(said, said)
    assert (caught.value.what, caught.value.remedy) == (heard, heard)


def test_training_notes_the_same_revision_as_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place, taken = gguf(tmp_path), []
    config = dataclasses.replace(Config(), target=dataclasses.replace(Config().target, model=str(place)))
    scores = Scores.__new__(Scores)
    scores._run = SimpleNamespace(config=config, setup=SimpleNamespace(target=target()))  # type: ignore[assignment]
    scores._last = None
    whole = files.fingerprint
    monkeypatch.setattr(files, "fingerprint", lambda path: taken.append(path) or whole(path))
    assert {scores._card(step).target_revision for step in (1, 2)} == {whole(place)}
    assert taken == [place], "the target's files are read once"


def test_a_local_targets_fingerprint_is_the_one_that_verify_tells(tmp_path: Path):
    facts = export.CardFacts(target=str(gguf(tmp_path)), target_revision="a" * 16, target_weights="b" * 16)
    out = export.write(tmp_path / "d", state(), SHAPE, target(), card=facts)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"(fingerprint `{'b' * 16}`)" in card
    assert "a" * 16 not in card
