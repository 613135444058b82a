"""Whether a target is the one that a drafter was trained with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.export import files
from paceline.export.origin import Origin, compare, origin_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = bytes(range(251)) * 40_000  # ten megabytes, more than is read


def model(place: Path, parts: dict[str, bytes], **config: object) -> TargetConfig:
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    for name, data in parts.items():
        (place / name).write_bytes(data)
    if len(parts) > 1:
        index = {"weight_map": {name: name for name in parts}}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return TargetConfig(model=str(place))


def test_weights_are_the_same_wherever_they_lie_and_whatever_lies_beside_them(tmp_path: Path):
    one = origin_of(model(tmp_path / "a", {"model.safetensors": LARGE}))
    two = origin_of(model(tmp_path / "b", {"model.safetensors": LARGE}, eos_token_id=5))
    assert one.weights == two.weights
    assert one.revision != two.revision
    assert compare(one, two)[0] == "ok"
    (tmp_path / "b" / "consolidated.safetensors").write_bytes(b"of another format")
    assert origin_of(TargetConfig(model=str(tmp_path / "b"))).weights == two.weights


def test_a_renamed_gguf_file_is_the_same_model(tmp_path: Path):
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"GGUF" + LARGE)
    one, two = (origin_of(TargetConfig(model=str(tmp_path / name))) for name in ("one.gguf", "two.gguf"))
    assert compare(one, two)[0] == "ok"


def test_weights_that_were_trained_further_differ(tmp_path: Path):
    shards = {f"model-{part}.safetensors": LARGE for part in (1, 2)}
    changed = bytearray(LARGE)
    changed[len(LARGE) // 3 : len(LARGE) // 2] = bytes(len(LARGE) // 2 - len(LARGE) // 3)
    one = origin_of(model(tmp_path / "a", shards))
    two = origin_of(model(tmp_path / "b", shards | {"model-2.safetensors": bytes(changed)}))
    status, words = compare(one, two)
    assert status == "note"
    assert all(part in words for part in (one.name, two.name, one.weights, two.weights, "fewer accepted tokens"))


def test_small_files_are_hashed_whole(tmp_path: Path):
    (tmp_path / "a").write_bytes(LARGE[:300_000])
    (tmp_path / "b").write_bytes(LARGE[:150_000] + b"x" + LARGE[150_001:300_000])
    assert files.sampled_digest([tmp_path / "a"]) != files.sampled_digest([tmp_path / "b"])


def test_a_hub_model_in_the_cache_is_the_folder_of_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--acme--tiny"
    model(place / "snapshots" / COMMIT, {"model.safetensors": LARGE})
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    hub = origin_of(TargetConfig(model="acme/tiny"))
    local = origin_of(model(tmp_path / "copy", {"model.safetensors": LARGE}))
    assert hub.revision == COMMIT
    assert compare(hub, local)[0] == "ok"
    (place / "snapshots" / COMMIT / "model.safetensors").unlink()
    assert origin_of(TargetConfig(model="acme/tiny")) == Origin("acme/tiny", COMMIT)


def test_a_hub_model_that_was_never_fetched_has_its_revision_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert origin_of(TargetConfig(model="acme/tiny", revision="v1")) == Origin("acme/tiny", "v1")


def test_an_index_that_is_none_gives_no_fingerprint(tmp_path: Path):
    config = model(tmp_path / "a", {"one.safetensors": b"1", "two.safetensors": b"2"})
    for text in ("{", "[]", '{"weight_map": 5}', '{"weight_map": {"a": "gone.safetensors"}}'):
        (tmp_path / "a" / "model.safetensors.index.json").write_text(text)
        assert origin_of(config).weights == ""


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(_paths: list[Path]) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "sampled_digest", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        origin_of(model(tmp_path / "a", {"model.safetensors": LARGE}))


ONE, TWO = "0" * 16, "1" * 16
PAIRS = [
    (Origin("a", ONE, ONE), Origin("b", TWO, ONE), "ok"),
    (Origin("a", ONE, ONE), Origin("b", ONE, TWO), "note"),
    (Origin("a", ONE), Origin("b", ONE, TWO), "ok"),
    (Origin("a", ONE), Origin("b", TWO, TWO), "note"),
    (Origin("a", COMMIT), Origin("a", COMMIT), "ok"),
    (Origin("a", COMMIT), Origin("a", COMMIT[::-1]), "note"),
    (Origin("a", COMMIT), Origin("b", ONE, ONE), "skip"),
    (Origin("a", "main"), Origin("a", "main"), "skip"),
    (Origin("a", "", ONE), Origin("a", COMMIT), "skip"),
    (Origin("a"), Origin("a", ONE, ONE), "skip"),
    (Origin(), Origin("a", ONE, ONE), "skip"),
]


@pytest.mark.parametrize(("noted", "given", "status"), PAIRS)
def test_what_can_be_compared_is(noted: Origin, given: Origin, status: str):
    found, words = compare(noted, given)
    assert found == status
    assert words.startswith("not made: ") == (status == "skip")


def test_a_fingerprint_of_all_files_does_not_blame_the_weights():
    _, words = compare(Origin("a", ONE), Origin("b", TWO, TWO))
    assert words.endswith("the weights differ, or what lies beside them")
