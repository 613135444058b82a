"""`paceline cache`: what it says and does with none, one and several caches, and which of them are this machine's."""

import contextlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import cli
from paceline.compiling import fingerprint
from paceline.compiling.cache import CompileCache, list_caches, prune
from paceline.compiling.fingerprint import Fingerprint
from paceline.compiling.lock import locked
from paceline.errors import UserError

NOBODY = 65534


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")


@pytest.fixture(scope="module")
def here() -> Fingerprint:
    return fingerprint.take()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def finished(root: Path, of: Fingerprint) -> CompileCache:
    """A cache in which a warm-up ended."""
    cache = CompileCache(root, of)
    cache.activate()
    module = cache.compiled[0] / "ab" / "cab.py"
    module.parent.mkdir()
    module.write_text("x = 1\n")
    cache.finish(["step"], 2.0)
    return cache


def of_run(here: Fingerprint, matmul: str = "same") -> Fingerprint:
    """As a run's: with what its configuration adds."""
    return replace(here, flags={**here.flags, "matmul": matmul})


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert cli.main(["cache", *words]) == code
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return output.err if code else output.out


@pytest.mark.parametrize("action", ["list", "prune"])
def test_none_yet_is_one_line_that_says_where(action: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for made in (False, True):
        if made:
            root.mkdir()
        (line,) = told(capsys, action, "--root", str(root)).splitlines()
        assert "no compile cache yet" in line
        assert str(root) in line


def test_a_runs_cache_is_known_as_this_machines(
    root: Path, here: Fingerprint, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = finished(root, of_run(here))
    finished(root, replace(here, torch="2.0.0"))
    lines = told(capsys, "list", "--root", str(root)).splitlines()
    (mine,) = [line for line in lines if "(this machine)" in line]
    assert cache.fingerprint.key in mine
    assert "matmul=same" in mine
    with cache.lock("rank 3"):
        assert "in use by rank 3 (pid" in told(capsys, "list", "--root", str(root))


def test_pruning_keeps_this_machines(root: Path, here: Fingerprint, capsys: pytest.CaptureFixture[str]) -> None:
    kept = {finished(root, of_run(here, matmul)).fingerprint.key for matmul in ("same", "float8")}
    finished(root, replace(here, torch="2.0.0"))
    assert "removed 1 of 3 caches" in told(capsys, "prune", "--root", str(root))
    assert {facts.key for facts in list_caches(root)} == kept
    told(capsys, "prune", "--root", str(root), "--key", next(iter(kept)))
    assert len(list_caches(root)) == 1


def test_packing_takes_this_machines_and_asks_where_there_are_two(
    root: Path, here: Fingerprint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "warm.tar.gz")
    assert "no compile cache yet" in told(capsys, "pack", file, "--root", str(root), code=2)
    finished(root, replace(here, torch="2.0.0"))
    assert "made for this machine" in told(capsys, "pack", file, "--root", str(root), code=2)
    finished(root, of_run(here))
    told(capsys, "pack", file, "--root", str(root))
    float8 = finished(root, of_run(here, "float8")).fingerprint.key
    assert "2 caches" in told(capsys, "pack", file, "--root", str(root), code=2)
    told(capsys, "pack", file, "--root", str(root), "--key", float8)
    there = str(tmp_path / "there")
    assert "it matches this machine" in told(capsys, "unpack", file, "--root", there)
    assert "add --replace" in told(capsys, "unpack", file, "--root", there, code=2)
    assert "it matches this machine" in told(capsys, "unpack", file, "--root", there, "--replace")


def test_a_cache_in_use_is_not_unpacked_over(
    root: Path, here: Fingerprint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, file = finished(root, here), str(tmp_path / "warm.tar.gz")
    told(capsys, "pack", file, "--root", str(root))
    with cache.lock("rank 3"):
        said = told(capsys, "unpack", file, "--root", str(root), "--replace", code=2)
    assert "held by rank 3" in said
    assert cache.check() == []


def test_a_file_that_cannot_be_packed_leaves_nothing(
    root: Path, here: Fingerprint, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(root, here)
    assert "cannot pack" in told(capsys, "pack", str(tmp_path / "no" / "x.tar.gz"), "--root", str(root), code=2)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(tarfile.TarFile, "add", full)
    assert "No space left" in told(capsys, "pack", str(tmp_path / "x.tar.gz"), "--root", str(root), code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_cache_whose_fingerprint_is_lost_is_listed_and_pruned(root: Path, here: Fingerprint) -> None:
    cache = finished(root, replace(here, torch="2.0.0"))
    (cache.folder / "fingerprint.json").unlink()
    (facts,) = list_caches(root)
    assert facts.fingerprint is None
    assert prune(root) == [facts]
    assert not cache.folder.exists()


def test_what_a_killed_unpacking_left_is_no_cache_and_goes_with_time(root: Path, here: Fingerprint) -> None:
    draft = root / ".unpack-abc"
    shutil.copytree(finished(root, here).folder, draft)
    assert [facts.key for facts in list_caches(root)] == [here.key]
    prune(root, keep=[here.key])
    assert draft.exists(), "it may be at work"
    os.utime(draft, (0, 0))
    prune(root, keep=[here.key])
    assert not draft.exists()


# -- folders that may not be written -----------------------------------------------------------------------------------


@pytest.fixture
def foreign(root: Path, here: Fingerprint) -> CompileCache:
    """A damaged cache of somebody else's, which this user may read and not write."""
    cache = finished(root, here)
    (cache.compiled[0] / "ab" / "cab.py").write_text("x =")
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return cache


@contextlib.contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """Root may write everything: be nobody for a while."""
    if os.geteuid():
        yield
        return
    for place in (folder, *folder.parents):
        if place.is_relative_to(tempfile.gettempdir()) and not place.stat().st_mode & 0o001:
            place.chmod(0o755)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("act", ["activate", "lock", "prune", "unpack", "repair"])
def test_a_folder_that_may_not_be_written_is_one_clear_line(act: str, foreign: CompileCache, tmp_path: Path) -> None:
    with as_nobody(tmp_path):
        with pytest.raises(UserError, match=r"cannot write the compile cache .*: Permission denied"):
            attempt(act, foreign, tmp_path)
        assert [facts.condition for facts in list_caches(foreign.root)] == ["finished"]


@pytest.mark.parametrize("look", [list_caches, prune])
def test_a_folder_that_may_not_be_looked_into_is_one_clear_line(look: Callable[[Path], object], tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "caches").mkdir(parents=True)
    closed.chmod(0)
    try:
        with (
            as_nobody(tmp_path),
            pytest.raises(UserError, match=r"cannot read the compile caches in .*: Permission denied"),
        ):
            look(closed / "caches")
    finally:
        closed.chmod(0o755)


def attempt(act: str, cache: CompileCache, tmp_path: Path) -> None:
    if act == "activate":
        cache.activate()
    elif act == "lock":
        with locked(cache.root / "new.lock", "rank 0", 0.0):
            pass
    elif act == "prune":
        prune(cache.root)
    elif act == "repair":
        cache.repair()
    else:
        from paceline.compiling.archive import unpack

        unpack(tmp_path / "none.tar.gz", cache.root, cache.fingerprint)
