"""Checkpoints of processes that are killed in the middle, and of a disk that is really full."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

from paceline.errors import UserError
from paceline.training.checkpoint import load_latest, save

KILLS = 20


def _state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"tensor {number}": torch.randn(64, 33, generator=generator) for number in range(6)}


def _in_child(work: Callable[[], None]) -> int:
    """Run in a forked process; its wait status. (No other thread runs torch here, so the fork is safe.)"""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def _calls_of(work: Callable[[], object], at: int = 0) -> int:
    """Count the native calls (writes, syncs, renames and all others) of `work`; kill this process at number `at`."""
    count = 0

    def hook(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event == "c_call":
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(hook)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_save_that_is_killed_anywhere_loses_only_itself(tmp_path: Path) -> None:
    save(tmp_path, 1, _state(1), {"step": 1}, keep=1)
    dry = tmp_path / "dry"
    shutil.copytree(tmp_path / "step-1", dry / "step-1")
    calls = _calls_of(lambda: save(dry, 2, _state(2), {"step": 2}, keep=1))
    shutil.rmtree(dry)
    seen = {1: 0, 2: 0}
    torn = 0
    for number in range(KILLS):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(tmp_path / "step-1", folder / "step-1")
        at = 1 + number * (calls - 1) // (KILLS - 1)
        status = _in_child(lambda: _calls_of(lambda: save(folder, 2, _state(2), {"step": 2}, keep=1), at))  # noqa: B023
        assert os.WTERMSIG(status) == signal.SIGKILL
        heard: list[str] = []
        found = load_latest(folder, heard.append)
        assert found is not None
        assert found.facts == {"step": found.step}
        assert all(found.tensors[name].equal(tensor) for name, tensor in _state(found.step).items())
        assert all("step-2.partial" in line for line in heard)
        seen[found.step] += 1
        torn += len(heard)
        # And the next save is not in the way of what was left.
        save(folder, 3, _state(3), {"step": 3}, keep=1)
        assert [path.name for path in folder.iterdir()] == ["step-3"]
    assert seen[1] > 0, "no kill came before the end"
    assert seen[2] > 0, "no kill came after the marker"
    assert torn > 5


def test_a_checkpoint_cut_short_at_twenty_lengths(tmp_path: Path) -> None:
    save(tmp_path, 1, _state(1), {}, keep=5)
    whole = save(tmp_path, 2, _state(2), {}, keep=5) / "share-0.safetensors"
    data = whole.read_bytes()
    for number in range(KILLS):
        whole.write_bytes(data[: number * len(data) // KILLS])
        heard: list[str] = []
        found = load_latest(tmp_path, heard.append)
        assert found is not None
        assert found.step == 1
        assert heard == [f"ignored {whole.parent}: share-0.safetensors has {whole.stat().st_size} bytes of {len(data)}"]


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    save(tmp_path, 1, _state(1), {})
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(UserError, match="no space for the checkpoint of step 2"):
            save(tmp_path, 2, _state(2), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
        signal.signal(signal.SIGXFSZ, handler)
    found = load_latest(tmp_path)
    assert found is not None
    assert (found.step, found.ignored) == (1, ())
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(place)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small disk: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full(small_disk: Path) -> None:
    save(small_disk, 1, _state(1), {})
    with pytest.raises(UserError) as caught:  # noqa: PT012 - whichever of them finds the disk full
        for step in range(2, 5):
            save(small_disk, step, _state(step), {}, keep=5)
    assert "no space for the checkpoint" in caught.value.what
    assert "MiB free" in caught.value.what
    found = load_latest(small_disk)
    assert found is not None
    assert all(found.tensors[name].equal(tensor) for name, tensor in _state(found.step).items())
    assert not list(small_disk.glob("*.partial"))
