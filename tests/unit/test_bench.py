"""The bench's own arithmetic, and every part that needs one process on a tiny geometry (nothing here judges speed)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.batches import BatchShape
from paceline.bench import (
    GEOMETRIES,
    BenchOptions,
    compare,
    count_operations,
    run_bench,
    synthetic_batch,
)
from paceline.bench.case import Case, make_case
from paceline.bench.decoding import count_decoding_operations
from paceline.bench.drafter import random_drafter
from paceline.bench.geometry import batch_of, mixed_batch, target_of
from paceline.bench.measuring import Marks
from paceline.bench.models import load_target
from paceline.bench.target import count_target_operations
from paceline.cli import main
from paceline.errors import UserError
from paceline.evaluation.decode import DecodingLoop, Engine

TINY = BenchOptions(geometry="tiny", tokens=128, anchors=16, block_size=4, documents=2, steps=2)
TINY_PARTS = {
    "drafter": TINY,
    "target": dataclasses.replace(TINY, part="target", anchors=0),
    "pipeline": dataclasses.replace(TINY, part="pipeline", warm=1),
    "decoding": BenchOptions(part="decoding", geometry="tiny", block_size=4, batches=(1, 3), context=5, answer=6),
}
CPU = torch.device("cpu")


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


def _tiny_case(part: str) -> Case:
    return make_case(TINY_PARTS[part], CPU)


_MM, _ADDMM, _BMM = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm


def _products(work: FlopCounterMode, operators: tuple[object, ...] = (_MM, _ADDMM)) -> int:
    """Operations of matrix products with weights; a CPU's fused attention is not among them."""
    return sum(count for operator, count in work.get_flop_counts()["Global"].items() if operator in operators)


def test_target_operations_are_what_torch_counts_in_the_products() -> None:
    case = _tiny_case("target")
    target = load_target(case)
    target.close_upper_layers()
    batch = synthetic_batch(case.batch, 2, case.target.vocabulary, 0)
    with FlopCounterMode(display=False) as work:
        target.features(batch)
    found = count_target_operations(case.target, target.layer_ids[-1] + 1, batch)
    assert found.products == _products(work) > 0


def test_target_attention_is_counted_over_the_pairs_that_see_each_other() -> None:
    shape = target_of("tiny")
    batch = mixed_batch(BatchShape(100, 1, 4, 4.0), shape.vocabulary, 0)
    places, owners = torch.arange(100), batch.documents_S
    seen = (owners[:, None] == owners) & (places[:, None] >= places) & (owners >= 0)
    found = count_target_operations(shape, 3, batch)
    assert found.attention == 3 * 2 * 2 * shape.heads * shape.head_dim * int(seen.sum())


def test_decoding_operations_are_what_torch_counts_in_the_products() -> None:
    case, batch = _tiny_case("decoding"), 3
    body = load_target(case)
    drafter = random_drafter(case.drafter, CPU, case.dtype).eval().requires_grad_(False)
    loop = DecodingLoop(Engine(body.model, body.ends, drafter, case.drafter), [[1, 2, 3]] * batch, 8, ())
    with torch.no_grad(), loop.capture:
        loop.prefill()
        with FlopCounterMode(display=False) as drafting:
            drafts, _ = loop.draft(loop.capacity)
        with FlopCounterMode(display=False) as verifying:
            loop.target_forward(drafts, loop.capacity)
        with FlopCounterMode(display=False) as noting:
            loop.note_features(loop.positions())
    found = count_decoding_operations(case.target, case.drafter, batch)
    assert found.target == _products(verifying) > 0
    # The head's input is a part of the block, which torch multiplies in batches.
    assert found.drafter == _products(drafting, (_MM, _ADDMM, _BMM)) + _products(noting) > 0


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


def test_documents_of_any_length_are_a_row() -> None:
    batch = batch_of([3, 1, 5], BatchShape(12, 4, 4, 4.0), 50, 0)
    assert batch.bounds == (0, 3, 4, 9)
    assert batch.positions_S.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 0, 0]
    assert batch.documents_S.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2, -1, -1, -1]
    assert batch.supervised_S.tolist() == [True] * 9 + [False] * 3
    for anchor, start in zip(batch.anchors_A.tolist(), batch.starts_A.tolist(), strict=True):
        # No anchor at a document's last token: it would have no label.
        assert anchor in (0, 1, 4, 5, 6, 7)
        assert start == (0 if anchor < 3 else 4)


def test_marks_share_the_time_out() -> None:
    marks = Marks(CPU)
    for part in ("start", "a", "b", "a"):
        marks.mark(part)
    found = marks.seconds()
    assert set(found) == {"a", "b"}
    assert sum(found.values()) == pytest.approx(marks._laps[-1][1] - marks._laps[0][1])


_FIELDS = {
    "drafter": {"step_p99_over_p50", "tokens_per_second", "loss"},
    "target": {"seconds_of_forms", "shares_of_forms", "tokens_per_second", "layers", "form"},
    "pipeline": {"seconds_of_parts", "shares_of_parts", "tokens_per_second"},
    "decoding": {"by_batch", "graphs", "plain_share_of_copy_rate"},
}
_KINDS = {"drafter": "drafter step", "target": "target forward", "pipeline": "pipeline", "decoding": "decoding"}


@pytest.mark.parametrize("part", TINY_PARTS)
def test_a_part_writes_its_record_and_compares(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records" / "tiny.json"
    options = TINY_PARTS[part]
    assert run_bench(dataclasses.replace(options, out=str(path))) == 0
    record = json.loads(path.read_text())
    printed = capsys.readouterr()
    assert record == json.loads(printed.out)
    assert f"{record['kind']}: {1e3 * record['step_seconds']:.4g} ms, " in printed.err
    common = {"command", "machine", "ceilings", "operations", "share_of_matmul_peak", "first_step_seconds", "peak_gib"}
    assert record.keys() >= common | _FIELDS[part]
    assert record["kind"] == _KINDS[part]
    assert record["options"]["geometry"] == "tiny"
    assert record["step_seconds"] > 0
    assert record["host_peak_gib"] > 0
    assert record["operations"]["total"] > 0
    assert record["ceilings"]["matmul_tflops"] > 0
    assert run_bench(dataclasses.replace(options, compare=str(path), tolerance=1000.0)) == 0
    path.write_text(json.dumps(record | {"step_seconds": record["step_seconds"] / 1e6}))
    assert run_bench(dataclasses.replace(options, compare=str(path), tolerance=1000.0)) == 1
    assert "worse than" in capsys.readouterr().err


def test_shares_of_the_pipeline_are_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(TINY_PARTS["pipeline"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record["shares_of_parts"]) == {"target", "drafter", "optimizer"}
    assert sum(record["shares_of_parts"].values()) == pytest.approx(1)
    assert sum(record["seconds_of_parts"].values()) == pytest.approx(record["step_seconds"])


def test_decoding_tells_each_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(TINY_PARTS["decoding"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record["by_batch"]) == {"1", "3"}
    for found in record["by_batch"].values():
        assert found["differing_answers"] == 0
        assert found["speedup"] == pytest.approx(
            found["speculative_tokens_per_second"] / found["plain_tokens_per_second"]
        )
        assert found["tau"] >= 1
        assert set(found["forwards"]["verify"]) == {"2", "4"}


def test_comparison_has_a_tolerance() -> None:
    earlier = {"step_seconds": 1.0, "beyond_kept_gib": 8.0}
    assert compare({"step_seconds": 1.04, "beyond_kept_gib": 8.0}, earlier, 0.05) == []
    assert len(compare({"step_seconds": 1.06, "beyond_kept_gib": 9.0}, earlier, 0.05)) == 2


def test_comparison_looks_into_the_record_and_knows_which_way_is_worse() -> None:
    earlier = {"by_batch": {"8": {"plain_tokens_per_second": 100.0, "speculative_tokens_per_second": 200.0}}}
    slower = {"by_batch": {"8": {"plain_tokens_per_second": 110.0, "speculative_tokens_per_second": 180.0}}}
    (line,) = compare(slower, earlier, 0.05)
    assert line.startswith("by_batch.8.speculative_tokens_per_second: 200 -> 180")
    assert compare(earlier, slower, 0.15) == []


def test_only_like_is_compared_with_like(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    good = {"kind": "drafter step", "step_seconds": 1.0, "options": {"geometry": "tiny", "tokens": 64}}
    for record, words in (
        (good, "tokens = 64"),
        (good | {"kind": "pipeline"}, "'pipeline', not of 'drafter step'"),
        ({"kind": "drafter step"}, "no step_seconds"),
        ([], "no step_seconds"),
    ):
        path.write_text(json.dumps(record))
        with pytest.raises(UserError, match=words):
            run_bench(dataclasses.replace(TINY, compare=str(path)))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--geometry qwen9", "geometry 'qwen9' is unknown"),
        ("--part handof", "did you mean handoff?"),
        ("--part target --form float8", "--form = 'float8' says nothing to part target"),
        ("--dtype float8", "dtype 'float8' is unknown"),
        ("--documents 0", "--documents = 0 is less than 1"),
        ("--tokens 3", "too few for 2 documents"),
        ("--part decoding --model somewhere", "both --model and --drafter"),
        ("--part target --model no/such/folder/here", "no such file or folder"),
        ("--part decoding --batches 0", "--batches"),
        ("--compare absent.json", "cannot read the record absent.json"),
    ],
)
def test_what_cannot_be_timed_is_one_clear_line(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split()]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) <= 2  # what, and what to do
