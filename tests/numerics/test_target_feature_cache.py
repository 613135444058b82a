"""Kept features against online ones: in memory, on disk, in float8, after faults, from several processes."""

from __future__ import annotations

import dataclasses
import fcntl
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from target_world import documents, pack, write_model

from paceline.batches import TokenBatch
from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.target import feature_cache
from paceline.target.feature_cache import CachedTarget, pack_rows
from paceline.target.transformers_body import TransformersTarget

TOKENS = 64


@dataclass(frozen=True)
class Texts:
    rows: list[list[int]]

    @property
    def lengths(self) -> np.ndarray:
        return np.asarray([len(row) for row in self.rows], np.int64)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.asarray(self.rows[index], np.int32)
        return ids, np.ones(len(ids), bool)


TEXTS = Texts(documents(17, 30, 2, 64, 90, 11, 5, 40, 33))


class Counting(TransformersTarget):
    """A target that counts its forwards."""

    forwards = 0

    def hidden(self, batch: TokenBatch) -> torch.Tensor:
        self.forwards += 1
        return super().hidden(batch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def target(folder: Path) -> Counting:
    loaded = Counting.load(TargetConfig(model=str(folder), layer_ids=(0, 2)), "cpu")
    assert isinstance(loaded, Counting)
    return loaded


@pytest.fixture
def settings(tmp_path: Path) -> TargetConfig:
    return TargetConfig(feature_cache="disk", feature_cache_dtype="same", feature_cache_folder=str(tmp_path / "kept"))


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "_SHARD_BYTES", 100 * 2 * 32 * 4)


def rows() -> list[TokenBatch]:
    """Rows whose packing is not the cache's; document 4 is longer than a row and cut."""
    chosen = [(1, 0, 5), (4,), (8, 2, 6), (7, 5), (3,)]
    return [pack([TEXTS.rows[n][:TOKENS] for n in numbers], TOKENS, numbers) for numbers in chosen]


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_kept_features_equal_online_ones(target: Counting, settings: TargetConfig, where: str) -> None:
    said: list[str] = []
    config = dataclasses.replace(settings, feature_cache=where)
    cached = CachedTarget(target, TEXTS, TOKENS, config, said.append)
    target.forwards = 0
    found = [cached.features(batch) for batch in rows()]
    assert target.forwards == 0
    for batch, features in zip(rows(), found, strict=True):
        end = batch.bounds[-1]
        torch.testing.assert_close(features[:end], target.features(batch)[:end], rtol=1e-5, atol=1e-5)
        assert (features[end:] == 0).all()
    assert "266 tokens" in said[0]


def test_the_same_packing_gives_the_same_bits(target: Counting) -> None:
    texts = Texts(TEXTS.rows[:2])
    cached = CachedTarget(target, texts, TOKENS, TargetConfig(feature_cache="memory"))
    numbers = tuple(pack_rows(texts.lengths, TOKENS)[0])
    batch = pack([texts.rows[n] for n in numbers], TOKENS, numbers)
    assert torch.equal(cached.features(batch)[: batch.bounds[-1]], target.features(batch)[: batch.bounds[-1]])


def test_float8_keeps_each_layer_to_a_sixteenth(target: Counting, settings: TargetConfig) -> None:
    cached = CachedTarget(target, TEXTS, TOKENS, dataclasses.replace(settings, feature_cache_dtype="float8"))
    for batch in rows():
        end = batch.bounds[-1]
        kept, online = (item[:end].view(end, 2, 32) for item in (cached.features(batch), target.features(batch)))
        largest = online.abs().amax(dim=-1, keepdim=True)
        assert ((kept - online).abs() <= online.abs() / 16 + largest / 448 / 512).all()


def test_disks_keep_float8_and_memory_the_dtype_unless_told_otherwise() -> None:
    forms = {where: feature_cache.kept_form(TargetConfig(feature_cache=where)) for where in ("memory", "disk")}
    assert forms == {"memory": "same", "disk": "float8"}
    assert feature_cache.kept_form(TargetConfig(feature_cache="disk", feature_cache_dtype="same")) == "same"


def test_a_second_start_computes_nothing(target: Counting, settings: TargetConfig) -> None:
    first = CachedTarget(target, TEXTS, TOKENS, settings)
    target.forwards = 0
    second = CachedTarget(target, TEXTS, TOKENS, settings)
    assert target.forwards == 0
    assert all(torch.equal(first.features(batch), second.features(batch)) for batch in rows())


def test_other_text_layers_or_weights_are_other_features(
    target: Counting, settings: TargetConfig, folder: Path
) -> None:
    CachedTarget(target, TEXTS, TOKENS, settings)

    def forwards(other: Counting, texts: Texts = TEXTS) -> int:
        other.forwards = 0
        CachedTarget(other, texts, TOKENS, settings)
        return other.forwards

    changed = [list(row) for row in TEXTS.rows]
    changed[3][7] += 1
    assert forwards(target, Texts(changed)) > 0
    config = TargetConfig(model=str(folder), layer_ids=(0, 2))
    assert forwards(Counting.load(config, "cpu")) == 0
    assert forwards(Counting.load(dataclasses.replace(config, layer_ids=(1, 2)), "cpu")) > 0
    touched = Counting.load(config, "cpu")
    with torch.no_grad():
        touched.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    assert forwards(touched) > 0


def test_a_torn_or_missing_shard_is_computed_anew(target: Counting, settings: TargetConfig) -> None:
    first = CachedTarget(target, TEXTS, TOKENS, settings)
    expected = [first.features(batch) for batch in rows()]
    shards = sorted(Path(settings.feature_cache_folder).rglob("*.safetensors"))
    assert len(shards) >= 3
    shards[0].write_bytes(shards[0].read_bytes()[:200])
    shards[1].unlink()
    target.forwards = 0
    again = CachedTarget(target, TEXTS, TOKENS, settings)
    assert 0 < target.forwards <= 4
    assert all(torch.equal(again.features(batch), want) for batch, want in zip(rows(), expected, strict=True))
    assert not list(Path(settings.feature_cache_folder).rglob("*.tmp"))


def test_what_does_not_fit_is_refused_before_anything_is_computed(
    target: Counting, settings: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_cache, "free_memory", lambda: 1000)
    said: list[str] = []
    with pytest.raises(UserError, match="feature cache needs"):
        CachedTarget(target, TEXTS, TOKENS, dataclasses.replace(settings, feature_cache="memory"), said.append)
    assert target.forwards == 0
    assert "free" in said[0]


def test_a_folder_that_cannot_be_made_is_one_line(target: Counting, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = TargetConfig(feature_cache="disk", feature_cache_folder=str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot write"):
        CachedTarget(target, TEXTS, TOKENS, config)


def test_held_out_rows_are_computed_once(target: Counting) -> None:
    cached = CachedTarget(target, TEXTS, TOKENS, TargetConfig(feature_cache="memory"))
    held_out = documents(20, 25, seed=5)
    batch = pack(held_out, TOKENS, (-1, -2))
    target.forwards = 0
    first = cached.features(batch)
    assert torch.equal(cached.features(batch), first)
    assert target.forwards == 1
    assert torch.equal(first, target.features(batch))


def test_rows_of_other_documents_are_refused(target: Counting) -> None:
    cached = CachedTarget(target, TEXTS, TOKENS, TargetConfig(feature_cache="memory"))
    with pytest.raises(AssertionError, match="not of the documents"):
        cached.features(pack(documents(17, seed=5), TOKENS, (0,)))


def test_a_shard_that_another_process_computes_is_waited_for(
    folder: Path, target: Counting, settings: TargetConfig, tmp_path: Path
) -> None:
    """The other process is played by this test: it holds the first shard's lock and puts the shard there at last."""
    alone = dataclasses.replace(settings, feature_cache_folder=str(tmp_path / "alone"))
    expected = CachedTarget(target, TEXTS, TOKENS, alone)
    (done,) = (path for path in (tmp_path / "alone").iterdir() if path.is_dir())
    shared = Path(settings.feature_cache_folder) / done.name
    shared.mkdir(parents=True)
    shards = len(list(done.glob("*.safetensors")))
    others_done, said, results = threading.Event(), [], []

    def report(line: str) -> None:
        said.append(line)
        if len(said) == shards:  # the size, and every shard but the first
            others_done.set()

    mine = Counting.load(TargetConfig(model=str(folder), layer_ids=(0, 2)), "cpu")
    with (shared / "features-00000.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: results.append(CachedTarget(mine, TEXTS, TOKENS, settings, report)))
        thread.start()
        assert others_done.wait(60)
        assert not (shared / "features-00000.safetensors").exists()
        shutil.copy(done / "features-00000.safetensors", shared / "partial")
        (shared / "partial").rename(shared / "features-00000.safetensors")
    thread.join(60)
    assert 0 < mine.forwards < target.forwards
    for batch in rows():
        assert torch.equal(results[0].features(batch), expected.features(batch))


def test_work_and_waits_are_told(target: Counting, tmp_path: Path) -> None:
    """A launcher that watches must hear of every row, and of a wait for another process."""
    heard: list[str] = []
    config = TargetConfig(feature_cache="disk", feature_cache_folder=str(tmp_path))
    told = {"computing": lambda: heard.append("row"), "waiting": lambda: heard.append("wait")}
    CachedTarget(target, TEXTS, TOKENS, config, None, **told)
    assert heard.count("row") == target.forwards > 1
    assert heard.index("wait") > heard.index("row")
    heard.clear()
    CachedTarget(target, TEXTS, TOKENS, config, None, **told)
    assert heard == []
