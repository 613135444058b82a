"""`paceline bench` where it takes more than one process, or real weights from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pipeline_world import MASK, make_world

from paceline import export
from paceline.bench.drafter import random_drafter
from paceline.cli import main
from paceline.config import DrafterConfig, TargetConfig
from paceline.drafter.sizes import shape_for
from paceline.target.describe import read_shape


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder, a drafter's, and prompts."""
    folder = tmp_path_factory.mktemp("bench")
    make_world(folder)
    target = read_shape(TargetConfig(model=str(folder / "target")))
    shape = shape_for(target, (0, 1), DrafterConfig(layers=1, block_size=4), MASK)
    drafter = random_drafter(shape, torch.device("cpu"), torch.float32)
    export.write(folder / "drafter", drafter.state_dict(), shape, target, dtype="float32")
    rows = [json.dumps({"prompt": f"w{number} w{number + 1} w7"}) for number in range(4, 10)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def _bench(out: Path, *words: str) -> dict:
    assert main(["bench", *words, "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_the_handoff_runs_as_two_processes(tmp_path: Path) -> None:
    words = "--part handoff --geometry tiny --tokens 64 --anchors 8 --block-size 4 --steps 2 --warm 1 --form float8"
    record = _bench(tmp_path / "record.json", *words.split())
    assert record["kind"] == "hand-off"
    # Five layers of 64 a token in one byte each, and five scales of four.
    assert record["bytes_of_a_batch"] == 64 * (5 * 64 + 5 * 4)
    assert record["operations"]["total"] == record["operations"]["target"] + record["operations"]["drafter"] > 0
    assert record["step_over_slower_part"] == pytest.approx(
        record["step_seconds"] / max(record["drafter_alone_seconds"], record["target_alone_seconds"])
    )
    assert 0 <= record["waited_share"] <= 1
    assert 0 < record["target"]["busy_share"] <= 1
    assert record["ceilings"]["matmul_tflops"] > 0
    assert record["ceilings_of_target"]["matmul_tflops"] > 0


@pytest.mark.parametrize("part", ["target", "pipeline"])
def test_real_weights_bring_their_own_sizes(part: str, world: Path, tmp_path: Path) -> None:
    words = ["--tokens", "64", "--block-size", "4", "--steps", "1"]
    record = _bench(tmp_path / "record.json", "--part", part, "--model", str(world / "target"), *words)
    assert record["options"]["geometry"] == "target"
    assert record["step_seconds"] > 0


def test_a_real_drafter_decodes_real_prompts(world: Path, tmp_path: Path) -> None:
    places = ["--model", str(world / "target"), "--drafter", str(world / "drafter")]
    words = ["--prompts", str(world / "prompts.jsonl"), "--batches", "1", "2", "--answer", "8"]
    record = _bench(tmp_path / "record.json", "--part", "decoding", *places, *words)
    assert record["prompts"] == 2
    assert set(record["by_batch"]) == {"1", "2"}
    assert all(found["differing_answers"] == 0 for found in record["by_batch"].values())


def test_a_model_of_other_sizes_than_the_geometry_is_refused(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--part", "target", "--geometry", "smollm2", "--model", str(world / "target")]) == 2
    assert "--geometry smollm2 30 layers of 576" in capsys.readouterr().err
