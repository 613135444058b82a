"""Worlds of real processes: what each worker gets, whose failure is shown, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline import launch
from paceline.config import Config, LaunchConfig, RunConfig
from paceline.errors import UserError
from paceline.pipeline.heartbeat import read_beats

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _programs_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def _config(folder: Path, workers: int, **launch: float) -> Config:
    return Config(run=RunConfig(name="run", folder=str(folder)), launch=LaunchConfig(workers=workers, **launch))


@contextmanager
def _when_ready(folder: Path, count: int, act: Callable[[], None]) -> Iterator[None]:
    """Run `act` once `count` workers have written to the pipe `ready`."""
    (folder / "run").mkdir(parents=True)
    os.mkfifo(folder / "run" / "ready")
    pipe = os.open(folder / "run" / "ready", os.O_RDWR)

    def wait() -> None:
        seen: set[int] = set()
        while len(seen) < count:
            if not select.select([pipe], [], [], 90)[0]:
                return
            seen.update(os.read(pipe, 64))
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        os.write(pipe, bytes(range(100, 100 + count)))
        thread.join()
        os.close(pipe)


def _pid(folder: Path, rank: int) -> int:
    return read_beats(folder / "run")[rank].pid


def _nothing_is_left(folder: Path) -> bool:
    pids = [beat.pid for beat in read_beats(folder / "run").values()]
    assert pids
    shared = [path.name for path in Path("/dev/shm").iterdir()]
    return not any(Path(f"/proc/{pid}").exists() or any(f"_{pid}_" in name for name in shared) for pid in pids)


def test_each_worker_has_its_own_gpu_cores_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-abc,3")
    assert launch.run(_config(tmp_path, 0, threads=1), program="launch_programs:tell") == 0
    told = [json.loads((tmp_path / "run" / f"told-{rank}.json").read_text()) for rank in range(3)]
    assert [facts["gpu"] for facts in told] == ["7", "GPU-abc", "3"]
    assert [facts["world"]["rank"] for facts in told] == [0, 1, 2]
    assert {facts["world"]["size"] for facts in told} == {3}
    assert {facts["world"]["device"] for facts in told} == {"cuda:0"}
    assert {facts["threads"] for facts in told} == {"1"}
    assert all(facts["resume"] is False for facts in told)
    cores = set(os.sched_getaffinity(0))
    assert all(set(facts["cores"]) <= cores for facts in told)
    assert "rank 0 was here" in capfd.readouterr().err
    assert (tmp_path / "run" / "logs" / "rank-2.log").read_text() == "rank 2 was here\n"
    assert _nothing_is_left(tmp_path)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(told[0]["port"])))


def test_one_process_is_not_spawned(tmp_path: Path) -> None:
    assert launch.run(_config(tmp_path, 1), program="launch_programs:tell") == 0
    told = json.loads((tmp_path / "run" / "told-0.json").read_text())
    assert (told["world"]["size"], told["world"]["device"]) == (1, "cpu")
    assert read_beats(tmp_path / "run")[0].pid == os.getpid()


def test_more_workers_than_gpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match="8 workers are wanted"):
        launch.run(_config(tmp_path, 8), program="launch_programs:tell")


def test_a_users_fault_is_one_line_and_a_hint_and_is_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch.run(_config(tmp_path, 2, restarts=3), program="launch_programs:user_fault") == 2
    log = tmp_path / "run" / "logs" / "rank-1.log"
    assert capfd.readouterr().err.splitlines()[-3:] == [
        "error: rank 1 (worker): data.train = 'nowhere' is not a file",
        "  hint: give a file",
        f"  log:  {log}",
    ]
    assert "Traceback" not in log.read_text()
    assert _nothing_is_left(tmp_path)


def test_a_crash_is_shown_with_its_place_and_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.run(_config(tmp_path, 2), program="launch_programs:crash") == 1
    error, log = capfd.readouterr().err.splitlines()[-2:]
    assert error.startswith("error: rank 1 (worker): ZeroDivisionError: ")
    assert "launch_programs.py:" in error
    assert "Traceback" in Path(log.split()[-1]).read_text()
    assert _nothing_is_left(tmp_path)


def test_restarts_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.run(_config(tmp_path, 2, restarts=1), program="launch_programs:crash_once") == 0
    told = [json.loads((tmp_path / "run" / f"told-{rank}.json").read_text()) for rank in range(2)]
    assert [(facts["resume"], facts["world"]["attempt"]) for facts in told] == [(True, 1), (True, 1)]
    printed = capfd.readouterr().err
    assert "the first start fails" in printed
    assert "restarting all workers from the last whole checkpoint (1 of 1)" in printed


def test_a_killed_worker_is_named_and_not_those_that_lost_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with _when_ready(tmp_path, 3, lambda: os.kill(_pid(tmp_path, 1), signal.SIGKILL)):
        assert launch.run(_config(tmp_path, 3), program="launch_programs:reduce_for_ever") == 1
    error, log = capfd.readouterr().err.splitlines()[-2:]
    assert error.startswith("error: rank 1 (role 1): ended by SIGKILL")
    assert log == f"  log:  {tmp_path / 'run' / 'logs' / 'rank-1.log'}"
    assert _nothing_is_left(tmp_path)


def test_a_stopped_worker_is_named_with_the_stacks_of_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = _config(tmp_path, 3, stall_seconds=10.0)
    with _when_ready(tmp_path, 3, lambda: os.kill(_pid(tmp_path, 1), signal.SIGSTOP)):
        assert launch.run(config, program="launch_programs:follow_the_stopped") == 1
    error, hint, _ = capfd.readouterr().err.splitlines()[-3:]
    assert error.startswith("error: rank 1 (role 1): no progress for ")
    assert "at step 7, phase 'train'" in error
    assert "the process is stopped (SIGSTOP)" in error
    assert str(tmp_path / "run" / "stacks") in hint
    stacks = [(tmp_path / "run" / "stacks" / f"rank-{rank}.txt").read_text() for rank in (0, 2)]
    signalled = [(tmp_path / "run" / "stacks" / f"rank-{rank}.signal.txt").read_text() for rank in (0, 2)]
    assert all("follow_the_stopped" in spied + asked for spied, asked in zip(stacks, signalled, strict=True))
    assert _nothing_is_left(tmp_path)


def test_sides_that_differ_are_told_what_differs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.run(_config(tmp_path, 2), program="launch_programs:differ") == 2
    assert "features: hidden size differs between ranks: rank 0 has 64, rank 1 has 65" in capfd.readouterr().err
