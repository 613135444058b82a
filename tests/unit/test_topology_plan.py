"""The plan: numbers that were worked out by hand for Qwen3-8B, records that are used, and what cannot fit."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from paceline.config import CheckpointConfig, Config, DataConfig, TargetConfig, TopologyConfig, TrainingConfig
from paceline.errors import UserError
from paceline.pipeline.cost import (
    GIB,
    Sizes,
    checkpoint_bytes,
    drafter_operations,
    drafter_parameters,
    target_parameters,
    wire_bytes,
)
from paceline.pipeline.plan import find_gpu, make_plan, read_records, render
from paceline.pipeline.topology import Topology, note_on_idle
from paceline.shapes import DrafterShape, TargetShape

QWEN = TargetShape(
    name="Qwen3-8B",
    model_type="qwen3",
    hidden_size=4096,
    layers=36,
    vocabulary=151_936,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate_size=12_288,
    rms_eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 1e6},
    max_positions=40_960,
    tied=False,
    bos_ids=(151_643,),
    eos_ids=(151_645,),
)
DRAFTER = DrafterShape(
    hidden_size=4096,
    intermediate_size=12_288,
    layers=5,
    heads=32,
    kv_heads=8,
    head_dim=128,
    layer_ids=(1, 9, 17, 25, 33),
    block_size=16,
    mask_token_id=151_669,
    vocabulary=151_936,
    target_layers=36,
)
CONFIG = Config(
    data=DataConfig(max_tokens=4096),
    training=TrainingConfig(tokens=8192, anchors=1024, global_batch=8),
    checkpoint=CheckpointConfig(keep=2),
)


def test_counted_sizes_of_qwen3_8b() -> None:
    sizes = Sizes(CONFIG, QWEN, DRAFTER)
    assert target_parameters(sizes) == pytest.approx(8.19e9, rel=0.01)
    assert wire_bytes(sizes) / 8192 == 40_960
    # 5 layers of 193 M and a fusion of 84 M.
    assert drafter_parameters(sizes) == pytest.approx(1.049e9, rel=0.005)
    assert checkpoint_bytes(sizes) == 12 * drafter_parameters(sizes)
    # Two documents of 4,096 tokens with 512 anchors each are 147.6 TFLOP.
    assert drafter_operations(sizes) == pytest.approx(147.6e12, rel=0.05)


def test_parameters_of_the_drafter_are_those_of_the_network() -> None:
    import torch

    from paceline.drafter.model import Drafter

    with torch.device("meta"):
        network = Drafter(DRAFTER)
    counted = drafter_parameters(Sizes(CONFIG, QWEN, DRAFTER))
    assert counted == sum(parameter.numel() for parameter in network.parameters())


def test_a_split_plan_names_roles_memory_and_traffic() -> None:
    config = replace(CONFIG, topology=TopologyConfig(kind="split", targets=5, drafters=3))
    plan = make_plan(config, QWEN, DRAFTER, 8, "NVIDIA H200")
    assert [rank.role.name for rank in plan.ranks][2:4] == ["drafter 2", "target 0"]
    assert all(0 < rank.total < 130 * GIB for rank in plan.ranks)
    text = render(plan)
    assert "split 5 targets + 3 drafters on 8 × H200" in text
    assert "40,960 bytes a token" in text
    assert "ranks 0-2  drafter" in text
    assert "ranks 3-7  target" in text
    assert "counted operations at 45% of its published peak" in text


def test_a_record_of_the_same_gpu_sets_the_rate(tmp_path: Path) -> None:
    record = {
        "kind": "drafter step",
        "machine": {"device": "NVIDIA H200"},
        "operations": {"total": 100e12},
        "parameters": 0,
        "step_seconds": 0.2,
    }
    (tmp_path / "h200.json").write_text(json.dumps(record))
    (tmp_path / "other.json").write_text(
        json.dumps({**record, "machine": {"device": "NVIDIA H100"}, "step_seconds": 9})
    )
    (tmp_path / "broken.json").write_text("{")
    records = read_records(tmp_path)
    assert len(records) == 2
    plan = make_plan(CONFIG, QWEN, DRAFTER, 8, "H200", records)
    assert "drafter: 500 TFLOP/s, as recorded in h200.json (its optimiser step counted apart)" in plan.basis
    assert "target: no record for H200" in plan.basis[0]


def _record(kind: str, seconds: float, file: str, **options: Any) -> dict[str, Any]:
    facts = {"operations": {"total": 150e12}, "step_seconds": seconds}
    return {"kind": kind, "machine": {"device": "NVIDIA H200"}, "options": options, "file": file, **facts}


def _step(records: list[dict[str, Any]], config: Config = CONFIG) -> float:
    return make_plan(config, QWEN, DRAFTER, 1, "H200", records).prediction.step_seconds


def test_the_optimiser_of_a_recorded_step_is_not_counted_for_every_batch() -> None:
    """A step of eight batches does eight forwards and backwards and one optimiser step; the record's had one each."""
    drafter = _record("drafter step", 0.3, "drafter.json")
    records = [drafter, _record("target forward", 0.2, "target.json")]
    one = replace(CONFIG, training=replace(CONFIG.training, global_batch=1))
    optimizer = 30 * drafter_parameters(Sizes(CONFIG, QWEN, DRAFTER)) / 4.8e12
    assert _step(records) - _step(records, one) == pytest.approx(7 * (_step(records, one) - optimizer))
    small = [{**drafter, "parameters": 0}, records[1]]
    scale = drafter_operations(Sizes(CONFIG, QWEN, DRAFTER)) / 150e12
    assert _step(small, one) - _step(records, one) == pytest.approx(optimizer * scale)


def test_a_plan_of_the_recorded_work_gives_back_the_recorded_seconds() -> None:
    """The count of a batch agrees with the bench's, which is made from the anchors that were drawn."""
    from paceline.batches import BatchShape
    from paceline.bench import count_operations, synthetic_batch

    found = count_operations(DRAFTER, synthetic_batch(BatchShape(8192, 1024, 16, 7.0), 2, DRAFTER.vocabulary, 0))
    assert drafter_operations(Sizes(CONFIG, QWEN, DRAFTER)) == pytest.approx(found.total, rel=0.005)


@pytest.mark.parametrize(
    ("part", "kind", "option", "other", "changed"),
    [
        (0, "target forward", "weights", "float8", replace(CONFIG, target=TargetConfig(weights="float8"))),
        (1, "drafter step", "matmul", "float8", replace(CONFIG, training=replace(CONFIG.training, matmul="float8"))),
    ],
)
def test_a_record_of_another_arithmetic_is_not_taken(
    part: int, kind: str, option: str, other: str, changed: Config
) -> None:
    plain = "full" if option == "weights" else "same"
    records = [_record(kind, 0.1, "other.json", **{option: other}), _record(kind, 0.2, "own.json", **{option: plain})]
    assert "own.json" in make_plan(CONFIG, QWEN, DRAFTER, 8, "H200", records).basis[part]
    assert "other.json" in make_plan(changed, QWEN, DRAFTER, 8, "H200", records).basis[part]
    assert f"no record for H200 with {option} = float8" in make_plan(changed, QWEN, DRAFTER, 8, "H200").basis[part]
    uncompiled = [{**records[1], "options": {"compile": False}}]
    assert "no record" in make_plan(CONFIG, QWEN, DRAFTER, 8, "H200", uncompiled).basis[part]


def test_of_equally_near_records_the_one_with_more_steps_is_taken() -> None:
    records = [_record("drafter step", 0.3, f"{steps}.json", steps=steps) for steps in (20, 200, 5)]
    assert "200.json" in make_plan(CONFIG, QWEN, DRAFTER, 8, "H200", records).basis[1]


def test_a_record_of_far_more_work_is_named_as_such() -> None:
    records = [_record("target forward", 0.2, "target.json")]
    few = replace(CONFIG, training=replace(CONFIG.training, tokens=1024, anchors=64))
    assert "times the work: a guess here" in make_plan(few, QWEN, DRAFTER, 8, "H200", records).basis[0]
    assert "guess" not in make_plan(CONFIG, QWEN, DRAFTER, 8, "H200", records).basis[0]


def test_auto_prints_the_table_that_it_chose_from() -> None:
    config = replace(CONFIG, topology=TopologyConfig(kind="auto"))
    plan = make_plan(config, QWEN, DRAFTER, 8, "H200")
    text = render(plan)
    assert text.count("split ") == 7
    assert text.count("<- chosen") == 1


def test_what_cannot_fit_is_refused_by_how_much() -> None:
    with pytest.raises(UserError) as caught:
        make_plan(CONFIG, QWEN, DRAFTER, 1, "RTX 4090")
    assert "rank 0 (worker 0) needs" in caught.value.what
    assert "GiB short; most of it is" in caught.value.what
    large = replace(QWEN, parameters=235 * 10**9)
    split = replace(CONFIG, topology=TopologyConfig(kind="split", targets=4, drafters=4))
    with pytest.raises(UserError, match="most of it is target: weights"):
        make_plan(split, large, DRAFTER, 8, "H200")
    sharded = replace(
        split,
        target=TargetConfig(tensor_parallel=4),
        topology=TopologyConfig(kind="split", targets=1, drafters=4),
    )
    assert make_plan(sharded, large, DRAFTER, 8, "H200").topology.world == 8


def _memory(config: Config, world: int, gpu: str) -> dict[str, int]:
    return make_plan(config, QWEN, DRAFTER, world, gpu).ranks[0].memory


def _with(config: Config, mode: Literal["auto", "on", "off"]) -> Config:
    return replace(config, training=replace(config.training, shard_optimizer=mode))


def test_the_optimiser_state_is_shared_where_it_would_not_fit_whole_or_on_demand() -> None:
    state = 12 * drafter_parameters(Sizes(CONFIG, QWEN, DRAFTER))
    split = replace(CONFIG, topology=TopologyConfig(kind="split", targets=4, drafters=4))
    assert _memory(split, 8, "H200")["drafter: optimiser"] == state
    assert _memory(_with(split, "on"), 8, "H200")["drafter: optimiser, 1/4 of it"] == state // 4
    plan = make_plan(split, QWEN, DRAFTER, 8, "RTX 5090")
    assert plan.ranks[0].total < 32e9 - 2 * GIB < plan.ranks[0].total + state * 3 // 4
    text = render(plan)
    assert f"{state / 4 / GIB:.2f}  drafter: optimiser, 1/4 of it" in text
    assert "each keeping its share; 2.10 GB of weights gathered" in text
    with pytest.raises(UserError, match="short") as caught:
        make_plan(_with(split, "off"), QWEN, DRAFTER, 8, "RTX 5090")
    assert "training.shard_optimizer = 'auto'" in caught.value.remedy
    assert "drafter: optimiser" in _memory(_with(CONFIG, "on"), 1, "H200")


@pytest.mark.parametrize(("memory", "short"), [(141e9, False), (32e9, True)])
def test_a_run_decides_by_its_own_devices_memory_as_the_plan_does(
    memory: float, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from paceline.training import parts

    def run(device: str) -> Any:
        setup = SimpleNamespace(target=QWEN, drafter=DRAFTER)
        return SimpleNamespace(
            config=CONFIG, setup=setup, topology=Topology("split", 4, 4), device=torch.device(device)
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=int(memory)))
    assert parts._short_of_memory(run("cuda")) is short
    assert not parts._short_of_memory(run("cpu"))


def test_unknown_gpus_are_refused_with_those_known() -> None:
    assert find_gpu("nvidia geforce rtx4090").name == "RTX 4090"
    assert find_gpu("NVIDIA H200 NVL").name == "H200"
    with pytest.raises(UserError, match="not in the table"):
        find_gpu("TPU v5p")


@pytest.mark.parametrize(
    ("drafters", "batches", "said"),
    [
        (8, 1, "in a step 7 of 8 drafters get no batch, for training.global_batch = 1; set it to 8"),
        (3, 8, "drafters stand idle for 11% of a step, for training.global_batch = 8; set it to 9"),
        (3, 9, ""),
        (1, 1, ""),
        (3, 32, ""),
    ],
)
def test_drafters_without_a_batch_are_named(drafters: int, batches: int, said: str) -> None:
    found = note_on_idle(Topology("split", 1, drafters), batches)
    assert said in found
    assert bool(found) == bool(said)


def test_a_plan_says_who_stands_idle() -> None:
    config = replace(CONFIG, training=replace(CONFIG.training, global_batch=1))
    assert "7 of 8 drafters get no batch" in render(make_plan(config, QWEN, DRAFTER, 8, "H200"))
    assert "get no batch" not in render(make_plan(CONFIG, QWEN, DRAFTER, 8, "H200"))


def test_planning_imports_no_torch() -> None:
    code = "import sys, paceline.pipeline.plan, paceline.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
