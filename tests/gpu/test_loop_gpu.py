"""The training loop on a CUDA device: between two records no step asks the device for anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import launch
from paceline.config import DrafterConfig, LaunchConfig
from paceline.training.tally import Tally

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(280),
]
SYSTEM = Path(__file__).parents[1] / "system"


def test_no_step_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait in every step would add the host's time to the device's: half as much again for a small target."""
    monkeypatch.syspath_prepend(str(SYSTEM))
    from pipeline_world import config_of, make_world, records

    steps: list[int] = []
    start, finish = Tally.start, Tally.finish

    def watched_start(self: Tally) -> None:
        torch.cuda.set_sync_debug_mode("error")
        start(self)

    def watched_finish(self: Tally, step: int, *rest: Any) -> None:
        try:
            finish(self, step, *rest)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        steps.append(step)

    monkeypatch.setattr(Tally, "start", watched_start)
    monkeypatch.setattr(Tally, "finish", watched_finish)
    make_world(tmp_path, head_dim=32)
    base = config_of(tmp_path)
    config = replace(
        base,
        training=replace(base.training, tokens=256, anchors=32, global_batch=2),
        drafter=DrafterConfig(layers=1, block_size=4, init="random"),
        launch=LaunchConfig(workers=1, collective_seconds=120.0),
    )
    try:
        assert launch.run(config) == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(steps) == 10
    assert all(record["loss"] > 0 for record in records(tmp_path / "runs" / config.run.name) if "loss" in record)
