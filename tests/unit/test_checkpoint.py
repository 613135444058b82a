"""The training state on disk: exact, whole or ignored, and independent of the number of ranks."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UserError
from paceline.training import checkpoint
from paceline.training.checkpoint import Shard, load, load_latest, save


def _state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weights": torch.randn(7, 5, generator=generator),
        "half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "step": torch.tensor(17 + seed),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(4, 6, generator=generator).t(),
    }


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(_equal(left[name], right[name]) for name in left)


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.equal(right)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    facts = {"rate": 0.1 + 0.2, "nested": {"position": [1, 2]}, "name": "é"}
    path = save(tmp_path, 5, _state(), facts)
    found = load_latest(tmp_path)
    assert found is not None
    assert (found.step, found.facts, found.path, found.ignored) == (5, facts, path, ())
    assert _same(found.tensors, _state())
    assert sorted(item.name for item in tmp_path.iterdir()) == ["step-5"]


def test_the_files_are_readable_by_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = save(tmp_path, 1, _state(), {})
    assert _same(load_file(path / "share-0.safetensors"), _state())


def test_an_absent_or_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "nowhere") is None
    (tmp_path / "step-x").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert load_latest(tmp_path) is None


def test_the_newest_are_kept_and_numbers_are_not_compared_as_text(tmp_path: Path) -> None:
    for step in [2, 9, 10, 100]:
        save(tmp_path, step, _state(step), {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-100"]
    assert checkpoint.latest_step(tmp_path) == 100


def test_a_save_after_going_back_removes_the_future_that_was_given_up(tmp_path: Path) -> None:
    save(tmp_path, 10, _state(), {}, keep=1)
    torn = tmp_path / "step-20"
    torn.mkdir()
    (torn / "whole.json").write_text("{")
    save(tmp_path, 12, _state(12), {}, keep=1)
    found = load_latest(tmp_path)
    assert found is not None
    assert found.step == 12
    assert found.ignored == ()
    assert [path.name for path in tmp_path.iterdir()] == ["step-12"]


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3, _state(1), {"try": 1})
    save(tmp_path, 3, _state(2), {"try": 2})
    found = load_latest(tmp_path)
    assert found is not None
    assert found.facts == {"try": 2}
    assert _same(found.tensors, _state(2))


def test_a_partial_folder_with_its_marker_is_whole(tmp_path: Path) -> None:
    save(tmp_path, 4, _state(), {}).rename(tmp_path / "step-4.partial")
    found = load_latest(tmp_path)
    assert found is not None
    assert found.step == 4


@given(cut=st.integers(0, 10_000), flip=st.booleans(), file=st.sampled_from(["share-0.safetensors", "whole.json"]))
@settings(max_examples=40, deadline=None)
def test_any_cut_or_changed_byte_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: bool, file: str
) -> None:
    folder = tmp_path_factory.mktemp("run")
    save(folder, 1, _state(1), {})
    damaged = save(folder, 2, _state(2), {}) / file
    data = bytearray(damaged.read_bytes())
    place = cut % len(data)
    if flip:
        # In the marker a changed digit of the step would still be JSON, so break its syntax instead.
        data[place] = data[place] ^ 0x5A if file != "whole.json" else 0
    else:
        del data[place:]
    damaged.write_bytes(data)
    heard: list[str] = []
    found = load_latest(folder, heard.append)
    assert found is not None
    assert found.step == 1
    assert _same(found.tensors, _state(1))
    assert len(heard) == 1
    assert "step-2" in heard[0]
    with pytest.raises(UserError, match="not a whole checkpoint"):
        load(damaged.parent)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (save(tmp_path, 1, _state(), {}) / "share-0.safetensors").unlink()
    heard: list[str] = []
    assert load_latest(tmp_path, heard.append) is None
    assert "share-0.safetensors" in heard[0]


class _FullDisk:
    """A file that takes so many bytes and then says that the disk is full."""

    def __init__(self, path: Path, room: list[int]) -> None:
        self.file = open(path, "wb")  # noqa: SIM115
        self.room = room

    def __enter__(self) -> _FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> int:
        self.room[0] -= len(data)
        if self.room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()


def _open(path: Path, mode: str, room: list[int], rest: dict[str, Any]) -> Any:
    return _FullDisk(path, room) if mode == "wb" else open(path, mode, **rest)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.8, 0.99])
def test_a_full_disk_leaves_the_old_checkpoint_and_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    first = save(tmp_path, 1, _state(1), {})
    left = [int(share * sum(path.stat().st_size for path in first.iterdir()))]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode="r", **rest: _open(path, mode, left, rest))
        with pytest.raises(UserError) as caught:
            save(tmp_path, 2, _state(2), {})
    assert "no space for the checkpoint of step 2" in caught.value.what
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    found = load_latest(tmp_path)
    assert found is not None
    assert _same(found.tensors, _state(1))


class _Ranks:
    """Threads that play ranks, and the vote that they need."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=20)
        self.votes = [True] * world

    def agree(self, rank: int, mine: bool) -> bool:
        self.votes[rank] = mine
        self.barrier.wait()
        result = all(self.votes)
        self.barrier.wait()
        return result


def _save_as(world: int, folder: Path, tensors: list[dict[str, torch.Tensor | Shard]], step: int = 1) -> list[object]:
    ranks = _Ranks(world)
    outcome: list[object] = [None] * world

    def work(rank: int) -> None:
        try:
            outcome[rank] = save(
                folder, step, tensors[rank], {}, rank=rank, world=world, agree=lambda mine: ranks.agree(rank, mine)
            )
        except UserError as error:
            outcome[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


@given(world=st.integers(1, 4), cuts=st.lists(st.integers(0, 35), min_size=3, max_size=3))
@settings(max_examples=25, deadline=None)
def test_any_number_of_ranks_stores_the_same_state(
    tmp_path_factory: pytest.TempPathFactory, world: int, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    whole = _state() | {"moments": torch.arange(35.0).reshape(5, 7)}
    edges = [0, *sorted(cuts[: world - 1]), 35]
    flat = whole["moments"].reshape(-1)
    tensors: list[dict[str, torch.Tensor | Shard]] = [
        {**_state(), "moments": Shard(flat[edges[rank] : edges[rank + 1]], edges[rank], (5, 7))}
        for rank in range(world)
    ]
    assert set(_save_as(world, folder, tensors)) == {folder / "step-1"}
    found = load_latest(folder)
    assert found is not None
    assert _same(found.tensors, whole)


def test_the_ranks_share_the_writing(tmp_path: Path) -> None:
    tensors: list[dict[str, torch.Tensor | Shard]] = [
        {f"w{i}": torch.full((256,), float(i)) for i in range(8)} for _ in range(4)
    ]
    _save_as(4, tmp_path, tensors)
    sizes = [(tmp_path / "step-1" / f"share-{rank}.safetensors").stat().st_size for rank in range(4)]
    assert max(sizes) - min(sizes) <= 16
    assert min(sizes) >= 2048


def test_a_rank_that_cannot_write_stops_the_save_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint._write_share

    def fail_on_one(partial: Path, share: dict[str, torch.Tensor | Shard], rank: int) -> None:
        if rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(partial, share, rank)

    monkeypatch.setattr(checkpoint, "_write_share", fail_on_one)
    outcome = _save_as(3, tmp_path, [dict(_state()) for _ in range(3)])
    assert all(isinstance(item, UserError) for item in outcome)
    assert "no space" in str(outcome[1])
    assert list(tmp_path.iterdir()) == []


def test_missing_elements_of_a_sharded_tensor_are_noticed(tmp_path: Path) -> None:
    _save_as(2, tmp_path, [{"m": Shard(torch.zeros(4), 0, (10,))}, {"m": Shard(torch.zeros(5), 5, (10,))}])
    heard: list[str] = []
    assert load_latest(tmp_path, heard.append) is None
    assert "elements 4 to 5 of m" in heard[0]


def test_the_marker_lists_every_file(tmp_path: Path) -> None:
    path = save(tmp_path, 1, _state(), {})
    marker = json.loads((path / "whole.json").read_text())
    assert [share["file"] for share in marker["shares"]] == ["share-0.safetensors"]
    assert marker["shares"][0]["bytes"] == (path / "share-0.safetensors").stat().st_size
