"""Three threads that drive one GPU hang, and the doctor says why; three processes that do the same do not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline.doctor import foreign
from paceline.doctor.travel import process as traveller

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WORKERS = """
import sys, threading
import torch
from torch.nn.attention.flex_attention import flex_attention

def work(index):
    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) * (index + 1)).sum()
    compiled = torch.compile(attend, dynamic=False)
    for step in range(4):
        length = 128 * (step + 1 + index)
        q, k, v = (torch.randn(1, 2, length, 64, device="cuda", requires_grad=True) for _ in range(3))
        compiled(q, k, v).backward()
    torch.cuda.synchronize()

torch.ones(1, device="cuda")
threads = [threading.Thread(target=work, args=(int(i),), name=f"drafter-{i}") for i in sys.argv[1:]]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def start(tmp_path: Path, *indices: int) -> subprocess.Popen[bytes]:
    cache = tmp_path / f"cache-{'-'.join(map(str, indices))}"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", WORKERS, *map(str, indices)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


def test_three_threads_on_one_gpu_are_recognised_as_deadlocked(tmp_path: Path) -> None:
    child = start(tmp_path, 0, 1, 2)
    end = time.monotonic() + 120
    found: list[str] = []
    try:
        while child.poll() is None and time.monotonic() < end and not found:
            facts = traveller.main({"pid": child.pid, "timeout": 20})
            if facts["spy_kind"] in ("absent", "refused"):
                pytest.skip(f"no stacks: {facts['spy_fault']}")
            found = [one.value for one in foreign.judge(facts) if one.what.startswith("deadlock")]
    finally:
        child.kill()
        child.wait()
    if child.returncode == 0:
        pytest.skip("the threads did not meet this time")
    assert found, "it neither ended nor was it recognised"
    assert "holds the compile lock" in found[0]


def test_three_processes_on_one_gpu_end(tmp_path: Path) -> None:
    children = [start(tmp_path, index) for index in range(3)]
    assert [child.wait(timeout=240) for child in children] == [0, 0, 0]
