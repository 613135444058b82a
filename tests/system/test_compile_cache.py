"""Launches on a shared compile cache: who compiles, and what the next start does after damage or a kill.

Each worker is a process of its own (repro/warm_worker.py), on CPU; compiling needs g++.
"""

import shutil
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "repro"))
from fast_cpu import have_compiler
from spawning import answer, start

pytestmark = [
    pytest.mark.skipif(not have_compiler(), reason="Inductor needs g++ to compile for the CPU"),
    pytest.mark.timeout(900),  # half a minute on an idle core, minutes on a busy one
]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Four workers on an empty cache, started together and with nothing but the lock between them."""
    root = tmp_path_factory.mktemp("shared")
    workers = [start("warm_worker.py", root, f"rank {rank}", "--flex", *leader(rank)) for rank in range(4)]
    return root, [answer(worker) for worker in workers]


def leader(rank: int) -> list[str]:
    return ["--leader"] if rank == 0 else []


@pytest.fixture
def warm_root(launch: tuple[Path, list[dict]], tmp_path: Path) -> Path:
    """A copy of the cache that the launch left."""
    return Path(shutil.copytree(launch[0], tmp_path / "copy"))


def generated(root: Path, pattern: str) -> list[Path]:
    return sorted(file for file in root.glob(f"*/inductor/*/{pattern}") if file.parent.name != "locks")


def test_exactly_one_of_four_cold_workers_compiles(launch: tuple[Path, list[dict]]) -> None:
    _, workers = launch
    compiled = [worker["compiled"] for worker in workers]
    assert sorted(compiled)[:3] == [0, 0, 0]
    assert sum(compiled) == 3  # the step's forward and backward, and flex_attention


def test_the_others_load_everything_and_trace_nothing(launch: tuple[Path, list[dict]]) -> None:
    _, workers = launch
    for worker in workers:
        if not worker["compiled"]:
            assert (worker["loaded"], worker["traces"], worker["warnings"]) == (3, 0, [])


def test_a_cut_file_kills_torch_at_every_start_and_is_repaired_by_ours(warm_root: Path) -> None:
    victim = next(file for file in generated(warm_root, "*.py") if "flex" not in file.read_text())
    source = victim.read_bytes()
    victim.write_bytes(source[: len(source) // 2] + b"\n(")
    (lost,) = generated(warm_root, "*.so")[:1]
    lost.unlink()

    repaired = answer(start("warm_worker.py", warm_root, "rank 0", "--leader", "--bare-first"))
    assert "Failed to import" in repaired["bare_error"]
    assert "removed 2 damaged entries" in repaired["repair"]
    assert victim.name in repaired["repair"]
    assert lost.name in repaired["repair"]
    assert victim.read_bytes() == source


def test_killed_in_the_middle_of_the_first_compile_the_next_start_works_and_says_so(tmp_path: Path) -> None:
    killed = start("warm_worker.py", tmp_path, "rank 3", "--leader", "--die-in-backward")
    killed.communicate(timeout=240)
    assert killed.returncode == -signal.SIGKILL
    generated(tmp_path, "*.py")[0].write_text("def half(")  # what a full disk leaves of the file being written

    after = answer(start("warm_worker.py", tmp_path, "rank 0", "--leader"))
    assert "did not finish (rank 3 (pid" in after["repair"]
    assert "removed its" in after["repair"]
    assert after["compiled"] == 2


def test_entries_cut_while_a_warm_up_runs_are_dropped_at_its_end_and_not_met_again(warm_root: Path) -> None:
    """Torch compiles anew beside a cut entry, but leaves it, and would complain of it at every later start."""
    first = answer(start("warm_worker.py", warm_root, "rank 0", "--leader", "--cut-entries"))
    assert "is whole" in first["repair"]
    assert first["complaints"], "torch has met the cut entries"
    assert first["compiled"] == 2
    (said,) = first["warnings"]
    assert "removed 5 entries (inductor/" in said
    assert "cut or changed" in said
    assert "while the warm-up ran" in said

    second = answer(start("warm_worker.py", warm_root, "rank 0", "--leader"))
    assert "is whole" in second["repair"]
    assert (second["compiled"], second["loaded"], second["traces"]) == (0, 2, 0)
    assert (second["complaints"], second["warnings"]) == ([], [])
