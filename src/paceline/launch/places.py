"""Which GPU and which cores each worker gets. No torch here: this is read before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence

from paceline.config import Config
from paceline.errors import UserError


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES spells them; empty where there is none."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    return [str(index) for index in range(_count_gpus())]


def _count_gpus() -> int:
    import pynvml  # noqa: PLC0415 - only where nobody has said which GPUs to use

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return 0


def workers_wanted(config: Config, gpus: Sequence[str]) -> int:
    """Processes of this host. Raises UserError when there are fewer GPUs than that."""
    topology = config.topology
    needed = topology.targets * config.target.tensor_parallel + topology.drafters
    split = needed if topology.kind == "split" else 0
    wanted = config.launch.workers or split or len(gpus) or 1
    if gpus and wanted > len(gpus):
        why = "launch.workers" if config.launch.workers else "the topology's targets and drafters"
        raise UserError(
            f"{wanted} workers are wanted ({why}), and {len(gpus)} GPUs are visible",
            "each worker has a GPU of its own: ask for fewer, or show more (CUDA_VISIBLE_DEVICES)",
        )
    return wanted


def choose_device(gpus: Sequence[str], local_rank: int) -> str:
    """Show this process its own GPU alone, as device 0, and name it; `cpu` where there is none.

    To be called before CUDA is initialised. One visible device makes the cache of one worker serve all others: the
    index of a device is part of a compile cache's keys.
    """
    if not gpus:
        return "cpu"
    if local_rank >= len(gpus):
        raise UserError(
            f"local rank {local_rank} has no GPU: {len(gpus)} are visible on this host",
            "start one process a GPU (torchrun --nproc-per-node)",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank]
    return "cuda:0"


def cores_of(available: Sequence[int], local_rank: int, local_size: int) -> list[int]:
    """An even, contiguous share of the cores; all of them where there are fewer than workers."""
    cores = sorted(available)
    if len(cores) < local_size:
        return cores
    first = local_rank * len(cores) // local_size
    return cores[first : (local_rank + 1) * len(cores) // local_size]


def settle_on_cores(threads: int, local_rank: int, local_size: int) -> int:
    """Pin this process to its share of the cores and bound its CPU threads (0: as many as its share of cores).

    To be called before torch is imported. Returns the number of threads.
    """
    available = os.sched_getaffinity(0)
    if local_size > 1:
        os.sched_setaffinity(0, cores_of(list(available), local_rank, local_size))
    count = threads or max(1, len(available) // local_size)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(count)
    return count
