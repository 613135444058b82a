"""Two GPUs: features over NCCL arrive whole and in order, and a split trains as two colocated workers do."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import launch
from paceline.config import Config, DrafterConfig, LaunchConfig, RunConfig, TopologyConfig

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(280),
]
SYSTEM = Path(__file__).parents[1] / "system"


@pytest.fixture(autouse=True)
def _programs_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.pathsep.join([str(Path(__file__).parent), str(SYSTEM)])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


def _config(folder: Path) -> Config:
    run = RunConfig(name="run", folder=str(folder))
    return Config(run=run, launch=LaunchConfig(workers=2, collective_seconds=60.0, stall_seconds=60.0))


def test_features_arrive_exactly_while_both_sides_compute(tmp_path: Path) -> None:
    assert launch.run(_config(tmp_path), program="pipeline_gpu_programs:exact") == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    print(result)
    assert {form: facts["batches"] for form, facts in result.items()} == dict.fromkeys(result, 90 + 3 * 6)
    assert result["same"]["worst"] == 0
    assert result["bfloat16"]["worst"] == 0
    assert 0 < result["float8"]["worst"] < 2**-3


def test_gradients_are_summed_and_each_worker_sees_one_gpu(tmp_path: Path) -> None:
    assert launch.run(_config(tmp_path), program="pipeline_gpu_programs:reduce_beside_features") == 0
    facts = [json.loads((tmp_path / "run" / f"result-{rank}.json").read_text()) for rank in range(2)]
    assert facts == [{"sum": 3.0, "gathered": [0, 1], "visible": 1}] * 2


def test_shares_are_reduced_and_gathered_in_place(tmp_path: Path) -> None:
    assert launch.run(_config(tmp_path), program="pipeline_gpu_programs:share") == 0
    facts = [json.loads((tmp_path / "run" / f"result-{rank}.json").read_text()) for rank in range(2)]
    for rank in range(2):
        # Rank r gives the numbers i (r + 1); bfloat16 holds the small ones exactly.
        assert facts[rank]["reduced"] == {"float32": True, "bfloat16": True}
        assert facts[rank]["gathered"] == {"float32": True, "bfloat16": True}
        assert facts[rank]["on the host"] is (rank == 0)


def test_drafters_that_share_their_state_train_as_those_that_do_not(tmp_path: Path) -> None:
    sys.path.insert(0, str(SYSTEM))
    from pipeline_world import config_of, make_world, records

    make_world(tmp_path, head_dim=32)
    losses = {}
    for mode in ("off", "on"):
        base = config_of(tmp_path, mode)
        training = replace(base.training, tokens=256, anchors=32, global_batch=2, dtype="float32", shard_optimizer=mode)
        drafter = DrafterConfig(layers=1, block_size=4, init="random")
        launching = LaunchConfig(workers=2, collective_seconds=300.0)
        assert launch.run(replace(base, training=training, drafter=drafter, launch=launching)) == 0
        found = records(tmp_path / "runs" / mode)
        losses[mode] = [record["loss"] for record in found if record["event"] == "step"]
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-4)


def test_one_target_and_one_drafter_train_as_two_colocated_ones(tmp_path: Path) -> None:
    sys.path.insert(0, str(SYSTEM))
    from pipeline_world import config_of, make_world, records

    make_world(tmp_path, head_dim=32)
    base = config_of(tmp_path)
    base = replace(
        base,
        training=replace(base.training, tokens=256, anchors=32, global_batch=2, dtype="float32"),
        drafter=DrafterConfig(layers=1, block_size=4, init="random"),
        launch=LaunchConfig(collective_seconds=120.0),
    )
    alone = replace(base, run=replace(base.run, name="alone"))
    split = replace(
        base,
        run=replace(base.run, name="split"),
        topology=TopologyConfig(kind="split", targets=1, drafters=1),
    )
    assert launch.run(split) == 0
    assert launch.run(alone) == 0
    losses = [
        [record["loss"] for record in records(tmp_path / "runs" / name) if record["event"] == "step"]
        for name in ("alone", "split")
    ]
    assert len(losses[0]) == 10
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
