"""Whole runs whose drafters share their optimiser state, and whole runs on sharded targets: one process's numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from pipeline_world import config_of, half_done, make_world, records, same_numbers
from safetensors import safe_open
from shard_programs import RESUMED, SHARED, TARGETS, Trial

from paceline import launch
from paceline.config import CompilingConfig, LaunchConfig, TopologyConfig

pytestmark = pytest.mark.timeout(280)
HALF = 5


@pytest.fixture(autouse=True)
def _programs_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def _world(folder: Path, kv_heads: int = 1) -> Path:
    make_world(folder, kv_heads=kv_heads)
    assert launch.run(config_of(folder, "alone")) == 0
    return folder


def _run(folder: Path, program: str, trials: Mapping[str, Trial]) -> None:
    for name, trial in trials.items():
        if trial.after:
            half_done(folder, name, trial.after)
    workers = max(trial.size for trial in trials.values())
    config = replace(
        config_of(folder, program), launch=LaunchConfig(workers=workers, threads=1, collective_seconds=120.0)
    )
    assert launch.run(config, program=f"shard_programs:{program}") == 0


def test_drafters_that_share_their_optimiser_state_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    world = _world(tmp_path)
    _run(world, "shared", SHARED)
    for name in SHARED:
        same_numbers(world, name)
    _run(world, "resumed", RESUMED)
    for name in RESUMED:
        same_numbers(world, name, first=HALF)
    _assert_written_in_equal_shares(world / "runs" / "shared-1-3" / "checkpoints" / "step-10", 3)


def _assert_written_in_equal_shares(checkpoint: Path, ranks: int) -> None:
    held = []
    for rank in range(ranks):
        with safe_open(checkpoint / f"share-{rank}.safetensors", framework="pt") as file:
            held.append({name: file.get_tensor(name).numel() for name in file.keys()})  # noqa: SIM118 - not a dict
    moments = [sum(size for name, size in each.items() if name.startswith("moment1.")) for each in held]
    assert min(moments) > 0.8 * sum(moments) / ranks


def test_a_target_over_two_ranks_gives_the_losses_of_a_whole_one(tmp_path: Path) -> None:
    """Sums over two ranks are rounded otherwise than whole ones, so features differ in their last bits."""
    world = _world(tmp_path, kv_heads=2)
    _run(world, "targets", TARGETS)
    for name, trial in TARGETS.items():
        same_numbers(world, name, first=HALF if trial.after else 0, relative=1e-4)
        assert records(world / "runs" / name)[-1]["step"] == 10


def test_a_sharded_target_warms_up_one_rank_after_another(tmp_path: Path) -> None:
    """The leader's forward must not wait for the other rank, which waits for the leader."""
    world = _world(tmp_path, kv_heads=2)
    config = config_of(world, "warmed")
    config = replace(
        config,
        target=replace(config.target, tensor_parallel=2, feature_cache="memory"),
        topology=TopologyConfig(kind="split", targets=1, drafters=1),
        launch=replace(config.launch, workers=3),
        compiling=CompilingConfig(mode="on", cache=str(tmp_path / "compiled"), warmup_seconds=90.0),
    )
    assert launch.run(config, program="shard_programs:warmed") == 0
    same_numbers(world, "warmed", relative=1e-4)
