"""A batch whose features hold `inf`: no step, named and saved; too many in a row end the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pipeline_world import config_of, make_world, records
from safetensors.torch import load_file
from torch import Tensor

from paceline.batches import TokenBatch
from paceline.config import Config
from paceline.errors import UserError
from paceline.pipeline.process import World
from paceline.target.transformers_body import TransformersTarget
from paceline.training import checkpoint
from paceline.training.loop import train

pytestmark = pytest.mark.timeout(120)
ALONE = World()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


def _poison(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool]) -> None:
    """Training batches for which `is_bad(index)` get one feature that is infinite, wherever blocks may see it."""
    features = TransformersTarget.features

    def poisoned(self: TransformersTarget, batch: TokenBatch, out: Tensor | None = None) -> Tensor:
        found = features(self, batch) if out is None else features(self, batch, out)
        trains = bool(batch.documents) and batch.documents[0] >= 0
        if trains and is_bad(batch.index):
            found = found.clone()
            found[0] = torch.inf
        return found

    # The start-up self-check looks at batch 0 and would refuse the target itself.
    monkeypatch.setattr(TransformersTarget, "self_check", lambda self, batch: None)
    monkeypatch.setattr(TransformersTarget, "features", poisoned)


def _config(world: Path, name: str, **training: int) -> Config:
    config = config_of(world, name, steps=4, every=1)
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, every=0))
    return dataclasses.replace(config, training=dataclasses.replace(config.training, **training))


def test_one_infinite_feature_skips_the_step_and_names_the_batch(
    world: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _poison(monkeypatch, lambda index: index == 4)  # the second of the second step's three
    assert train(_config(world, "one"), ALONE) == 0
    run = world / "runs" / "one"
    steps = [record for record in records(run) if record["event"] == "step"]
    assert [record["skipped"] for record in steps] == [False, True, False, False]
    assert "step 2 was skipped on all ranks: values that are not finite in batch 4 " in capfd.readouterr().err
    assert sorted(path.name for path in (run / "skipped").iterdir()) == ["batch-4.safetensors"]
    saved = load_file(run / "skipped" / "batch-4.safetensors")
    assert saved["ids_S"].shape == (64,)
    last = checkpoint.load_latest(run / "checkpoints")
    assert last is not None
    assert int(last.tensors["applied"]) == 3
    assert all(bool(tensor.isfinite().all()) for tensor in last.tensors.values())


def test_nothing_moves_in_a_skipped_step(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _poison(monkeypatch, lambda index: 3 <= index < 6)
    config = _config(world, "still")
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, keep=4))
    assert train(config, ALONE) == 0
    folder = world / "runs" / "still" / "checkpoints"
    one, two, three = (checkpoint.load(folder / f"step-{step}").tensors for step in (1, 2, 3))
    assert all(torch.equal(one[name], two[name]) for name in one if name != "steps_done")
    assert any(not torch.equal(two[name], three[name]) for name in two if name.startswith("master."))


def test_skipped_steps_in_a_row_end_the_run(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _poison(monkeypatch, lambda index: index >= 3)
    with pytest.raises(UserError, match="2 steps in a row had values that are not finite, the last is 3"):
        train(_config(world, "row", max_skipped=2), ALONE)
    run = world / "runs" / "row"
    assert sorted(path.name for path in (run / "skipped").iterdir()) == [
        f"batch-{index}.safetensors" for index in range(3, 9)
    ]


def test_skipped_steps_apart_do_not_end_the_run(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _poison(monkeypatch, lambda index: index // 3 in (0, 2))
    assert train(_config(world, "apart", max_skipped=2), ALONE) == 0
