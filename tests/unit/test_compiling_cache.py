"""The cache folder: locked, checked, repaired, listed, pruned, packed. No compiler runs here."""

import base64
import hashlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.compiling import lock, places
from paceline.compiling.cache import CompileCache, last_warmup_seconds, list_caches, pack, prune, unpack
from paceline.compiling.damage import by_form
from paceline.compiling.fingerprint import Fingerprint
from paceline.compiling.lock import is_held, locked
from paceline.errors import UserError

ELSEWHERE = Fingerprint("2.11.0", "3.6", "13.0", "570", "NVIDIA H200 sm_90", "x86_64", "3.12", "abc")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    """A finished one, with the kinds of files that compilers leave."""
    made = CompileCache(tmp_path / "root", ELSEWHERE)
    made.activate()
    inductor, triton = made.compiled
    write(inductor / "ab" / "cab.py", "x = 1\n")
    write(inductor / "cd" / "ccd.main.cpp", "int f() { return 1; }\n")
    write(inductor / "cd" / "ccd.main.so", ELF)
    write_entry(inductor / "fxgraph" / "f" / "key", {"graph": "one"})
    write(inductor / "locks" / "cab.lock", "")
    write_kernel(triton / "HASH")
    assert made.finish(["step"], 12.5) is None
    return made


def write(file: Path, contents: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return file


def write_entry(folder: Path, value: object) -> Path:
    """As torch saves a graph: a pickle, named by its hash."""
    data = pickle.dumps(value)
    return write(folder / base64.b32encode(hashlib.sha256(data).digest())[:51].decode().lower(), data)


def write_kernel(folder: Path) -> Path:
    """As Triton saves one: its metadata, its binary, and a list of both."""
    parts = [write(folder / "kernel.json", '{"num_warps": 4}'), write(folder / "kernel.cubin", ELF)]
    group = {"child_paths": {part.name: str(part) for part in parts}}
    write(folder / "__grp__kernel.json", json.dumps(group))
    return folder


def entry(cache: CompileCache) -> Path:
    (only,) = (cache.folder / "inductor" / "fxgraph" / "f" / "key").iterdir()
    return only


def loaded_objects() -> list[str]:
    """Small shared objects of this very interpreter."""
    import _json
    import _struct

    return [module.__file__ for module in (_json, _struct)]


ELF = Path(next(file for file in loaded_objects() if file.startswith("/"))).read_bytes()


# -- the folder ------------------------------------------------------------------------------------------------------


def test_activate_points_the_compilers_at_it(cache: CompileCache) -> None:
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache.folder / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(cache.folder / "triton")


def test_a_root_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    write(tmp_path / "file", "")
    with pytest.raises(UserError, match="cannot write the compile cache"):
        CompileCache(tmp_path / "file", ELSEWHERE).activate()


def test_a_whole_cache_is_left_alone(cache: CompileCache) -> None:
    repair = cache.repair()
    assert (repair.damages, cache.condition()) == ([], "finished")
    assert "is whole" in repair.message


def test_a_deleted_cache_is_cold_and_said_so(cache: CompileCache) -> None:
    import shutil

    shutil.rmtree(cache.folder)
    cache.activate()
    assert cache.repair().message == f"compile cache {cache.folder} is empty: compiling"
    assert not cache.holds(["step"])


@pytest.mark.parametrize(("damage", "reason"), [(b"", "empty"), (b"x =", "cut or changed"), (b"y = 2\n", "contents")])
def test_a_damaged_file_of_a_finished_cache_is_removed_alone(cache: CompileCache, damage: bytes, reason: str) -> None:
    victim = cache.folder / "inductor" / "ab" / "cab.py"
    victim.write_bytes(damage)
    repair = cache.repair()
    assert [found.path for found in repair.damages] == ["inductor/ab/cab.py"]
    assert reason in repair.message
    assert not victim.exists()
    assert entry(cache).exists()
    assert not cache.holds(["step"])


def test_tritons_files_go_together(cache: CompileCache) -> None:
    (cache.folder / "triton" / "HASH" / "kernel.cubin").unlink()
    assert "missing" in cache.repair().message
    assert not (cache.folder / "triton" / "HASH").exists()
    assert (cache.folder / "inductor" / "ab" / "cab.py").exists()


def test_a_file_that_came_after_the_warm_up_is_judged_by_its_form(cache: CompileCache) -> None:
    write(cache.folder / "inductor" / "cd" / "ccd.py", "def half(")
    assert [found.path for found in cache.check()] == ["inductor/cd/ccd.py"]


def test_an_unfinished_cache_with_a_doubt_is_emptied_and_without_one_is_kept(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, ELSEWHERE)
    cache.activate()
    good = write(cache.folder / "inductor" / "ab" / "cab.py", "x = 1\n")
    kept = cache.repair()
    assert "did not finish (it was stopped); its 1 file look whole and are kept" in kept.message
    assert good.exists()
    write(cache.folder / "triton" / "HASH" / "kernel.json", '{"a": ')
    emptied = cache.repair()
    assert "removed its 2 files, for triton/HASH/kernel.json: not JSON" in emptied.message
    assert not good.exists()
    assert cache.condition() == "cold"


def test_a_finished_cache_holds_only_the_parts_that_ran(cache: CompileCache) -> None:
    assert cache.holds(["step"])
    assert not cache.holds(["step", "evaluation"])
    cache.finish(["evaluation"], 1.0)
    assert cache.holds(["step", "evaluation"])


def test_listing_and_pruning(cache: CompileCache) -> None:
    (facts,) = list_caches(cache.root)
    assert (facts.key, facts.condition, facts.fingerprint) == (ELSEWHERE.key, "finished", ELSEWHERE)
    assert facts.bytes > 0
    assert prune(cache.root, keep=[facts.key]) == []
    assert prune(cache.root, older_than_days=1) == []
    with cache.lock("rank 0"):
        assert prune(cache.root) == []
    assert [removed.key for removed in prune(cache.root)] == [ELSEWHERE.key]
    assert list_caches(cache.root) == []


# -- damage while a warm-up runs -------------------------------------------------------------------------------------


def cut(file: Path) -> Path:
    """In place, as a full disk or a stray hand does it."""
    with open(file, "r+b") as handle:
        handle.truncate(file.stat().st_size // 2)
    return file


def listed(cache: CompileCache) -> set[str]:
    return set(json.loads((cache.folder / "manifest.json").read_text())["files"])


def everything(cache: CompileCache) -> set[str]:
    return {
        str(file.relative_to(cache.folder)) for folder in cache.compiled for file in folder.rglob("*") if file.is_file()
    }


@pytest.mark.parametrize(
    ("victim", "gone"),
    [
        ("inductor/ab/cab.py", {"inductor/ab/cab.py"}),
        ("inductor/cd/ccd.main.so", {"inductor/cd/ccd.main.so", "inductor/cd/ccd.main.cpp"}),
        ("inductor/cd/ccd.main.cpp", {"inductor/cd/ccd.main.so", "inductor/cd/ccd.main.cpp"}),
        (
            "triton/HASH/kernel.cubin",
            {"triton/HASH/kernel.cubin", "triton/HASH/kernel.json", "triton/HASH/__grp__kernel.json"},
        ),
    ],
)
def test_a_file_cut_while_a_warm_up_runs_is_not_recorded_as_whole(
    cache: CompileCache, victim: str, gone: set[str]
) -> None:
    before = everything(cache)
    cache.repair()
    cut(cache.folder / victim)
    said = cache.finish(["step"], 1.0)
    assert said is not None
    assert f"removed 1 entry ({victim}: cut or changed" in said
    assert "while the warm-up ran" in said
    assert len(said.splitlines()) == 1
    assert everything(cache) == before - gone
    assert listed(cache) == {name for name in everything(cache) if "locks" not in name}
    assert not cache.holds(["step"]), "what is missing must be compiled before anybody relies on it"
    assert cache.repair().damages == []
    assert cache.finish(["step"]) is None
    assert cache.holds(["step"])


def test_an_entry_that_torch_replaced_by_a_new_one_is_removed_and_the_new_one_kept(cache: CompileCache) -> None:
    cache.repair()
    old = cut(entry(cache))
    new = write_entry(old.parent, {"graph": "compiled anew"})
    said = cache.finish(["step"], 1.0)
    assert said is not None
    assert old.name in said
    assert list(old.parent.iterdir()) == [new]


@pytest.mark.parametrize("damage", ["cut", "garbled"])
def test_a_new_entry_that_was_damaged_before_the_record_is_removed(cache: CompileCache, damage: str) -> None:
    cache.repair()
    folder = cache.folder / "inductor" / "aotautograd" / "akey"
    whole, broken = (write_entry(folder, {"graph": name}) for name in ("two", "three"))
    if damage == "cut":
        cut(broken)
    else:
        broken.write_bytes(broken.read_bytes().replace(b"three", b"thrEE"))
    assert broken.name in (cache.finish(["step"], 1.0) or "")
    assert list(folder.iterdir()) == [whole]


def test_what_vanished_while_a_warm_up_ran_is_told(cache: CompileCache) -> None:
    cache.repair()
    victim = entry(cache)
    victim.unlink()
    assert f"{victim.name}: missing" in (cache.finish(["step"], 1.0) or "")


def test_what_a_compiler_wrote_anew_is_whole(cache: CompileCache) -> None:
    """Renamed into place, or of the kind that torch rewrites: measured times."""
    times = write(cache.folder / "inductor" / "ab" / "cab.best_config", '{"num_warps": 4}')
    cache.repair()
    times.write_text('{"num_warps": 8}')
    kernel = cache.folder / "triton" / "HASH" / "kernel.json"
    write(kernel.with_suffix(".new"), '{"num_warps": 8}').replace(kernel)
    assert cache.finish(["step"], 1.0) is None
    times.write_text('{"num_wa')
    assert "cab.best_config: not JSON" in (cache.finish(["step"], 1.0) or "")


def test_what_a_killed_writer_left_is_neither_recorded_nor_packed(cache: CompileCache, tmp_path: Path) -> None:
    known = listed(cache)
    inductor, triton = cache.compiled
    for leftover in (
        inductor / "fxgraph" / "f" / "key" / ".77.140.tmp",
        inductor / "cd" / "ccd.main_CxxBuild" / "part.o",
        triton / "HASH" / "tmp.pid_77_4f6a" / "kernel.cubin",
        triton / "tmp.4f6a" / "kernel.cubin",
    ):
        write(leftover, "half")
    cache.repair()
    assert cache.finish(["step"], 1.0) is None
    assert listed(cache) == known
    pack(cache.folder, tmp_path / "warm.tar.gz")
    with tarfile.open(tmp_path / "warm.tar.gz") as packed:
        assert not [name for name in packed.getnames() if "tmp" in name or "_CxxBuild" in name]


def test_a_kernel_of_triton_that_lacks_a_part_is_no_whole_one(cache: CompileCache) -> None:
    cache.repair()
    part = write_kernel(cache.folder / "triton" / "OTHER") / "kernel.cubin"
    part.unlink()
    assert "kernel.cubin of its kernel is missing" in (cache.finish(["step"], 1.0) or "")
    assert not part.parent.exists()


def test_a_warm_start_keeps_the_seconds_that_compiling_took(cache: CompileCache) -> None:
    cache.repair()
    cache.finish(["step"])
    assert last_warmup_seconds(cache.root) == 12.5


# -- the form of damaged files ---------------------------------------------------------------------------------------


@given(value=st.recursive(st.binary() | st.text() | st.integers(), st.lists), lost=st.integers(min_value=1))
def test_a_pickle_cut_anywhere_is_noticed_without_loading_it(
    tmp_path_factory: pytest.TempPathFactory, value: object, lost: int
) -> None:
    folder = tmp_path_factory.mktemp("pickle")
    file = write_entry(folder / "inductor" / "fxgraph", value)
    assert by_form(folder, [file]) == []
    data = file.read_bytes()
    file.write_bytes(data[: lost % len(data)])
    assert [found.path for found in by_form(folder, [file])] == [str(file.relative_to(folder))]


def test_names_that_follow_another_rule_condemn_nothing(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "inductor" / "fxgraph" / "fkey" / name, pickle.dumps({"graph": name}))
        for name in ("one", "two")
    ]
    assert by_form(tmp_path, files) == []


def test_a_rule_holds_for_the_folder_whose_names_follow_it(tmp_path: Path) -> None:
    """Earlier versions of torch name the entries of aotautograd/ `entry`, and those of fxgraph/ by their hash."""
    graph = write_entry(tmp_path / "inductor" / "fxgraph" / "fkey", {"graph": 1})
    other = write(graph.with_name("x" * len(graph.name)), pickle.dumps({"graph": 2}))
    backward = write(tmp_path / "inductor" / "aotautograd" / "akey" / "entry", pickle.dumps({"backward": 1}))
    assert [found.path for found in by_form(tmp_path, [graph, other, backward])] == [str(other.relative_to(tmp_path))]


@given(st.integers(min_value=0, max_value=10_000))
def test_a_shared_object_cut_anywhere_is_noticed(tmp_path_factory: pytest.TempPathFactory, lost: int) -> None:
    folder = tmp_path_factory.mktemp("elf")
    (folder / "a.so").write_bytes(ELF)
    (folder / "b.so").write_bytes(ELF[: len(ELF) - 1 - lost])
    assert [found.path for found in by_form(folder, [folder / "a.so", folder / "b.so"])] == ["b.so"]


# -- the lock --------------------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from paceline.compiling.lock import locked
with locked(Path(sys.argv[1]), "rank 5", 10):
    print("held", flush=True)
    sys.stdin.readline()
"""


def another_holder(file: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", HOLD, str(file)]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_waiting_too_long_names_the_holder_and_kill_9_frees_the_lock(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    other = another_holder(file)
    assert is_held(file)
    with pytest.raises(UserError, match=rf"held by rank 5 \(pid {other.pid} on "), locked(file, "rank 0", 0.0):
        pass
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert not is_held(file)
    with locked(file, "rank 0", 0.0) as killed:
        assert killed is not None
        assert (killed.who, killed.pid) == ("rank 5", other.pid)
    with locked(file, "rank 0", 0.0) as killed:
        assert killed is None


def test_a_lock_file_that_was_removed_between_is_locked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning removes it: whoever had opened it then holds a lock that keeps nobody out."""
    file, attempts = tmp_path / "lock", []
    really = lock._try

    def after_a_prune(handle: int) -> bool:
        if not attempts:
            file.unlink()
        attempts.append(handle)
        return really(handle)

    monkeypatch.setattr(lock, "_try", after_a_prune)
    with locked(file, "rank 0", 10.0):
        assert file.exists()
        assert is_held(file)


def test_an_error_inside_frees_the_lock_and_is_no_kill(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), locked(tmp_path / "lock", "rank 0", 0.0):
        raise ValueError("inside")
    with locked(tmp_path / "lock", "rank 1", 0.0) as killed:
        assert killed is None


# -- one file --------------------------------------------------------------------------------------------------------


def test_a_packed_cache_unpacks_the_same_elsewhere(cache: CompileCache, tmp_path: Path) -> None:
    file = tmp_path / "warm.tar.gz"
    assert pack(cache.folder, file) == file.stat().st_size
    there = unpack(file, tmp_path / "there", ELSEWHERE)
    moved = CompileCache(tmp_path / "there", ELSEWHERE)
    assert (there.folder, there.differences) == (moved.folder, [])
    assert moved.check() == []
    assert moved.holds(["step"])
    assert "code that will run here" in str(there)
    with pytest.raises(UserError, match="is there already"):
        unpack(file, tmp_path / "there", ELSEWHERE)
    unpack(file, tmp_path / "there", ELSEWHERE, replace=True)


def test_unpacking_says_when_it_does_not_fit_this_machine(cache: CompileCache, tmp_path: Path) -> None:
    import dataclasses

    pack(cache.folder, tmp_path / "warm.tar.gz")
    here = dataclasses.replace(ELSEWHERE, gpu="NVIDIA A100 sm_80")
    there = unpack(tmp_path / "warm.tar.gz", tmp_path / "there", here)
    assert there.differences == ["gpu NVIDIA A100 sm_80 -> NVIDIA H200 sm_90"]
    assert "will not be used here" in str(there)


def test_a_damaged_or_unfinished_cache_is_not_packed(cache: CompileCache, tmp_path: Path) -> None:
    (cache.folder / "inductor" / "ab" / "cab.py").write_text("")
    with pytest.raises(UserError, match=r"damaged: inductor/ab/cab\.py: empty"):
        pack(cache.folder, tmp_path / "warm.tar.gz")
    (cache.folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="no finished compile cache"):
        pack(cache.folder, tmp_path / "warm.tar.gz")


def test_a_file_that_would_write_elsewhere_is_refused(cache: CompileCache, tmp_path: Path) -> None:
    link = tarfile.TarInfo("inductor/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    for number, member in enumerate([tarfile.TarInfo("../escaped"), tarfile.TarInfo("/absolute"), link]):
        file = tmp_path / f"bad{number}.tar.gz"
        with tarfile.open(file, "w:gz") as tar:
            tar.addfile(member, io.BytesIO(b""))
        with pytest.raises(UserError, match="not a plain file inside its folder"):
            unpack(file, tmp_path / "there", ELSEWHERE)
    assert list((tmp_path / "there").iterdir()) == []


def test_an_unlisted_file_in_a_packed_cache_is_refused(cache: CompileCache, tmp_path: Path) -> None:
    file = tmp_path / "warm.tar"
    pack(cache.folder, tmp_path / "warm.tar.gz")
    with tarfile.open(tmp_path / "warm.tar.gz") as packed, tarfile.open(file, "w:gz") as tampered:
        for member in packed.getmembers():
            tampered.addfile(member, packed.extractfile(member))
        tampered.addfile(tarfile.TarInfo("inductor/ab/extra.py"), io.BytesIO(b""))
    with pytest.raises(UserError, match=r"extra\.py: not listed"):
        unpack(file, tmp_path / "there", ELSEWHERE)


def test_what_is_no_packed_cache_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot unpack"):
        unpack(write(tmp_path / "x", "hello"), tmp_path / "there", ELSEWHERE)


# -- places ----------------------------------------------------------------------------------------------------------


def test_network_file_systems_are_known_by_their_mount(tmp_path: Path) -> None:
    mounts = write(
        tmp_path / "mounts", "/dev/sda / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\ntmp /home/me/local tmpfs 0\n"
    )
    assert places.filesystem(Path("/var/cache"), mounts) == "ext4"
    assert places.is_network_filesystem(Path("/home/me/.cache"), mounts)
    assert not places.is_network_filesystem(Path("/home/me/local/x"), mounts)
    assert not places.is_network_filesystem(Path("/homeless"), mounts)
    assert places.filesystem(Path("/"), tmp_path / "missing") == "unknown"


def test_the_root_follows_the_setting_then_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/big")
    assert places.chosen_root() == Path("/big/paceline/compile")
    assert places.chosen_root("/fast/disk") == Path("/fast/disk")
