"""What is written for others can be read by them, as far as the umask lets it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.permissions import apply_umask


@pytest.fixture(params=[0o022, 0o027, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_files_and_folders_have_what_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    (folder / "inner").mkdir(mode=0o700)
    save_file({"x": torch.zeros(1)}, folder / "inner" / "x.safetensors")
    apply_umask(folder)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert modes == {folder.name: 0o777 & ~umask, "inner": 0o777 & ~umask, "x.safetensors": 0o666 & ~umask}
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
