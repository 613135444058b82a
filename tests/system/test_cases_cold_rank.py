"""Warm on rank 0, cold on rank 1: the others wait for a compilation longer than any collective may take."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from pipeline_world import config_of, make_world, records

from paceline import launch
from paceline.config import CompilingConfig, LaunchConfig

pytestmark = pytest.mark.timeout(150)


def test_a_rank_that_compiles_longer_than_a_collective_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    make_world(tmp_path)
    config = dataclasses.replace(
        config_of(tmp_path, steps=3),
        launch=LaunchConfig(workers=2, threads=1, collective_seconds=6.0),
        compiling=CompilingConfig(cache=str(tmp_path / "caches"), warmup_seconds=100.0),
    )
    assert launch.run(config, program="cases_programs:one_compiles_long") == 0, capfd.readouterr().err
    steps = [record for record in records(tmp_path / "runs" / "run") if record["event"] == "step"]
    looks = [record for record in records(tmp_path / "runs" / "run") if record["event"] == "evaluation"]
    assert [record["step"] for record in steps] == list(range(1, 4))
    assert [record["step"] for record in looks] == [0, 3]
    told = capfd.readouterr().err
    waited = next(line for line in told.splitlines() if line.startswith("meeting the other workers: "))
    assert float(waited.split()[4]) > 6.0, "nothing was waited for, so nothing was tested"
