"""The bench's own arithmetic, and a whole run on a tiny geometry (nothing here judges speed)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from paceline.batches import BatchShape
from paceline.bench import (
    GEOMETRIES,
    BenchOptions,
    compare,
    count_operations,
    run_bench,
    synthetic_batch,
)
from paceline.errors import UserError

TINY = BenchOptions(geometry="tiny", tokens=128, anchors=16, block_size=4, documents=2, steps=2)


def test_operations_of_the_reference_geometry() -> None:
    """Qwen3-8B's drafter, two documents of 4,096 tokens, 512 anchors each, block 16: counted by hand, in parts."""
    shape = GEOMETRIES["qwen3-8b"]
    batch = synthetic_batch(BatchShape(8192, 1024, 16, 7.0), 2, shape.vocabulary, 0)
    found = count_operations(shape, batch)
    weights = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 12_288
    assert found.blocks == 6 * 16_384 * 5 * weights
    assert found.head == 4 * 1024 * 15 * 4096 * 151_936
    assert found.context == 8192 * (5 * 6 * 2 * 4096 * 1024 + 4 * 5 * 4096 * 4096)
    seen = sum(int(a - s) + 16 for a, s in zip(batch.anchors_A, batch.starts_A, strict=True)) * 16
    assert found.attention == 5 * 7 * 2 * 4096 * seen
    assert found.total == pytest.approx(147.6e12, rel=0.01)


def test_synthetic_batch_is_a_batch() -> None:
    batch = synthetic_batch(BatchShape(130, 40, 4, 4.0), 2, 50, 3)
    assert batch.bounds == (0, 65, 130)
    anchors = batch.anchors_A.tolist()
    assert anchors == sorted(anchors)
    assert len(set(anchors)) == 40
    for block, anchor in enumerate(anchors):
        start = 65 * (anchor // 65)
        assert int(batch.starts_A[block]) == start
        for slot in range(4):
            inside = anchor + slot < start + 65
            assert (float(batch.weights_AB[block, slot]) > 0) == (inside and slot > 0)
            if inside:
                assert int(batch.labels_AB[block, slot]) == int(batch.ids_S[anchor + slot])


def test_more_anchors_than_places_are_padding_blocks() -> None:
    batch = synthetic_batch(BatchShape(16, 40, 4, 4.0), 2, 50, 0)
    assert int((batch.weights_AB.sum(dim=1) > 0).sum()) == 14
    assert batch.anchors_A[14:].tolist() == [0] * 26


def test_a_run_writes_its_record_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records" / "tiny.json"
    assert run_bench(dataclasses.replace(TINY, out=str(path))) == 0
    record = json.loads(path.read_text())
    assert record["options"]["geometry"] == "tiny"
    assert record["step_seconds"] > 0
    assert record["operations"]["total"] > 0
    capsys.readouterr()
    assert run_bench(dataclasses.replace(TINY, compare=str(path), tolerance=1000.0)) == 0
    path.write_text(json.dumps(record | {"step_seconds": record["step_seconds"] / 1e6}))
    assert run_bench(dataclasses.replace(TINY, compare=str(path))) == 1
    assert "step_seconds" in capsys.readouterr().err


def test_comparison_has_a_tolerance() -> None:
    earlier = {"step_seconds": 1.0, "beyond_kept_gib": 8.0}
    assert compare({"step_seconds": 1.04, "beyond_kept_gib": 8.0}, earlier, 0.05) == []
    assert len(compare({"step_seconds": 1.06, "beyond_kept_gib": 9.0}, earlier, 0.05)) == 2


def test_what_cannot_be_timed_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="geometry"):
        run_bench(dataclasses.replace(TINY, geometry="qwen9"))
    with pytest.raises(UserError, match="cannot read"):
        run_bench(dataclasses.replace(TINY, compare=str(tmp_path / "absent.json")))
