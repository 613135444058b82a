"""Drafters that share their optimiser state against one that keeps all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimizer_world import CASES, HALF, POISONED, STEPS, network
from torch import nn

from paceline.config import TrainingConfig
from paceline.pipeline.reduce import Shards
from paceline.training.checkpoint import Shard
from paceline.training.optimizer import Optimizer

HERE = Path(__file__).parent
WEIGHTS = sum(parameter.numel() for parameter in network(torch.float32).parameters())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which three processes left what every case gave."""
    folder = tmp_path_factory.mktemp("shards")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    script = [sys.executable, str(HERE / "optimizer_world.py")]
    ranks = [subprocess.Popen([*script, str(rank), "3", str(folder)], env=environment) for rank in range(3)]
    try:
        assert [rank.wait(200) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return folder


def _of(world: Path, name: str, rank: int = 0) -> dict[str, Any]:
    return torch.load(world / f"{name}.{rank}.pt")


FULL_WIDTH = [name for name, case in CASES.items() if case.dtype == torch.float32 and name != "whole-1"]


@pytest.mark.parametrize("name", FULL_WIDTH)
def test_any_number_of_ranks_and_any_resumption_gives_the_numbers_of_one_process(name: str, world: Path) -> None:
    alone, found = _of(world, "whole-1"), _of(world, name)
    first = HALF if CASES[name].after else 0
    assert len(alone["losses"]) == STEPS
    for key in ("losses", "norms"):
        assert found[key] == pytest.approx(alone[key][first:], rel=1e-5, nan_ok=True)
    assert found["skipped"] == [step == POISONED for step in range(first, STEPS)]
    for rank in range(CASES[name].ranks):
        weights = _of(world, name, rank)["weights"]
        torch.testing.assert_close(weights, alone["weights"], rtol=1e-5, atol=1e-6)


def test_the_ranks_of_a_narrow_drafter_hold_one_set_of_weights_and_rank_0_gathers_the_masters(world: Path) -> None:
    whole = _of(world, "narrow-whole-3")
    for name, ranks in (("narrow-shared-3", 3), ("narrow-shared-2-after-narrow-shared-3", 2)):
        found = [_of(world, name, rank) for rank in range(ranks)]
        assert [bool(each["masters"]) for each in found] == [True] + [False] * (ranks - 1)
        masters = found[0]["masters"]
        assert all(tensor.dtype == torch.float32 for tensor in masters.values())
        # A weight that lies between two bfloat16 numbers may be rounded either way, and then gradients differ a little.
        torch.testing.assert_close(masters, whole["masters"], rtol=2e-2, atol=2e-3)
        for each in found:
            assert all(torch.equal(tensor, masters[key].bfloat16()) for key, tensor in each["weights"].items())


def test_a_rank_keeps_its_share_alone_and_writes_it_alone(world: Path) -> None:
    for name in ("shared-2", "shared-3", "narrow-shared-3"):
        ranks = CASES[name].ranks
        kept = [_of(world, name, rank)["kept"] for rank in range(ranks)]
        assert len(set(kept)) == 1
        values = kept[0] / (12 if "narrow" in name else 8)
        assert WEIGHTS / ranks <= values <= WEIGHTS / ranks + 64 * 6
        written = [
            (world / name / f"step-{HALF}" / f"share-{rank}.safetensors").stat().st_size for rank in range(ranks)
        ]
        assert sum(written) < 12 * WEIGHTS + 3000 * ranks  # nothing twice


class _Alone(Shards):
    """A rank of several that speaks with nobody."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=5))
def test_the_shares_of_all_ranks_are_the_state_without_gap_or_overlap(ranks: int, sizes: list[tuple[int, int]]) -> None:
    module = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])
    expected = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    seen = {name: torch.zeros(parameter.numel(), dtype=torch.int64) for name, parameter in expected.items()}
    for rank in range(ranks):
        optimizer = Optimizer(module, TrainingConfig(), 1, shards=_Alone(rank, ranks))
        for key, shard in optimizer.share().items():
            kind, _, name = key.partition(".")
            if kind == "master":
                assert isinstance(shard, Shard)
                part = slice(shard.start, shard.start + shard.values.numel())
                seen[name][part] += 1
                assert torch.equal(shard.values, expected[name].reshape(-1)[part])
    assert all((count == 1).all() for count in seen.values())


def test_a_step_without_exchange_changes_this_ranks_part_and_its_state_can_be_put_back() -> None:
    """What a warm-up does, whose ranks do not keep step."""
    for rank in range(3):
        module = nn.Linear(13, 11, bias=False, dtype=torch.bfloat16)
        optimizer = Optimizer(module, TrainingConfig(learning_rate=0.1), 1, shards=_Alone(rank, 3))
        weights = module.weight.detach().clone()
        before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
        module(torch.ones(1, 13, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(torch.ones(()))
        assert 0 < int((module.weight != weights).sum()) < weights.numel()
        optimizer.load_state(before)
        assert torch.equal(module.weight, weights)
        assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.state().items())


class Lonely(Shards):
    """A rank of three whose peers never answer: enough for steps that exchange nothing."""

    def __init__(self, rank: int) -> None:
        self.rank, self.ranks = rank, 3


@pytest.mark.parametrize("rank", range(3))
def test_a_share_without_any_parameter_steps_with_the_rest(rank: int) -> None:
    """Two weights over three ranks: one share is empty; in the warm-up nobody exchanges anything."""
    module = nn.Linear(2, 1, bias=False)
    optimizer = Optimizer(module, TrainingConfig(), 10, shards=Lonely(rank))
    module(torch.ones(2)).sum().backward()
    report = optimizer.step(torch.ones(()))
    assert report.grad_norm.isfinite()
