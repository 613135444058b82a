"""A target sharded over two of three processes against the whole one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "numerics"))

from target_world import documents, pack, write_model  # noqa: E402

from paceline.config import TargetConfig  # noqa: E402
from paceline.errors import UserError  # noqa: E402
from paceline.target.tensor_parallel import shard  # noqa: E402
from paceline.target.transformers_body import TransformersTarget  # noqa: E402

FAMILIES = ("qwen3", "qwen3-moe")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models, and beside them what the two ranks that held each of them saw."""
    root = tmp_path_factory.mktemp("world")
    folders = [str(write_model(family, root / family)) for family in FAMILIES]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(HERE / "target_shards.py")]
    ranks = [
        subprocess.Popen([*script, str(rank), str(root / "store"), *folders], env=environment) for rank in range(3)
    ]
    try:
        assert [rank.wait(200) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_two_shards_give_the_whole_targets_features(family: str, sharded: Path) -> None:
    whole = TransformersTarget.load(TargetConfig(model=str(sharded / family), layer_ids=(0, 3)), "cpu")
    batch = pack(documents(20, 11, 25))
    parts = [torch.load(sharded / f"{family}.{rank}") for rank in (1, 2)]
    assert torch.equal(parts[0]["features"], parts[1]["features"])
    torch.testing.assert_close(parts[0]["features"][:56], whole.features(batch)[:56], rtol=1e-4, atol=1e-4)
    assert parts[0]["tokens"][:56].tolist() == whole.next_tokens(batch)[:56].tolist()
    weights = sum(tensor.numel() for tensor in whole.layers.state_dict().values())
    assert parts[0]["held"] < 0.6 * weights


class Mesh:
    """Two ranks that are never asked to speak."""

    def get_group(self) -> None:
        return None

    def get_local_rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("gpt-oss", {}, "no plan for its layers"),
        ("phi3", {}, "styles colwise_gather_output"),
        ("llama", {"num_key_value_heads": 1}, "1 key-value heads"),
        ("llama", {"intermediate_size": 49}, "49 is not divisible"),
    ],
)
def test_what_cannot_be_sharded_is_said(family: str, changes: dict, what: str, tmp_path: Path) -> None:
    folder = write_model(family, tmp_path, **changes)
    target = TransformersTarget.load(TargetConfig(model=str(folder), layer_ids=(0,)), "cpu")
    with pytest.raises(UserError, match=what):
        shard(target.decoder, target.decoder.config, Mesh(), "t")


def test_shards_need_a_group(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path)
    with pytest.raises(UserError, match="without a group of 2 ranks"):
        TransformersTarget.load(TargetConfig(model=str(folder), tensor_parallel=2), "cpu")
