"""One rank of sharded targets: run by test_target_shards, a process each.

Ranks 1 and 2 of a world of 3 hold the targets: a target's ranks are a part of the world.
"""

from __future__ import annotations

import datetime
import sys

import torch


def hold(folder: str, group: torch.distributed.ProcessGroup, out: str) -> None:
    from target_world import documents, pack
    from torch.distributed.device_mesh import DeviceMesh

    from paceline.config import TargetConfig
    from paceline.target.transformers_body import TransformersTarget

    mesh = DeviceMesh.from_group(group, "cpu")
    config = TargetConfig(model=folder, layer_ids=(0, 3), tensor_parallel=2)
    target = TransformersTarget.load(config, "cpu", device_mesh=mesh)
    batch = pack(documents(20, 11, 25))
    target.self_check(batch)
    tokens = target.next_tokens(batch)
    target.close_upper_layers()
    held = sum(tensor.numel() for tensor in target.layers.state_dict().values())
    torch.save({"features": target.features(batch), "tokens": tokens, "held": held}, out)


def main(rank: int, store: str, folders: list[str]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=datetime.timedelta(seconds=200)
    )
    group = torch.distributed.new_group([1, 2])
    if rank:
        for folder in folders:
            hold(folder, group, f"{folder}.{rank}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
