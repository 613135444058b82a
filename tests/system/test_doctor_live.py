"""Workers in processes of their own, asked over their sockets: alive, stopped, killed, holding their interpreter."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import live
from paceline.doctor.command import DoctorOptions, run_doctor
from paceline.doctor.diagnosis import Seen, diagnose, seen_from
from paceline.doctor.findings import Level
from paceline.doctor.travel import workers

WORKER = """
import ctypes, json, sys, threading, time
from pathlib import Path
from paceline import live

folder, rank, waits_for, act = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None, sys.argv[4]
status = live.WorkerStatus(rank, "both", 7, "train", waits_for, 7, time.time())

def step_of_the_worker():
    print("serving", flush=True)
    if act == "hold":  # a native call that keeps the interpreter to itself
        ctypes.PyDLL(None).sleep(600)
    sys.stdin.read()  # until the test lets go

with live.serve(folder, rank, lambda: status):
    step_of_the_worker()
print("left", flush=True)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker that serves in `tmp_path` and waits until it does."""
    begun: list[subprocess.Popen[str]] = []

    def starter(rank: int, waits_for: str = "", act: str = "", folder: Path = tmp_path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER, str(folder), str(rank), waits_for, act]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        begun.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        return process

    yield starter
    for process in begun:
        process.kill()
        process.communicate()


def ask(folder: Path, timeout: float = 10.0) -> dict[int, Seen]:
    facts = json.loads(json.dumps(workers.main({"folder": str(folder), "timeout": timeout})))
    return {seen.rank: seen for seen in seen_from(facts)}


def test_a_worker_tells_what_it_does(start: Start, tmp_path: Path) -> None:
    process = start(3, "features of batch 7 from rank 0")
    seen = ask(tmp_path)[3]
    assert (seen.state, seen.pid, seen.step, seen.phase) == ("answered", process.pid, 7, "train")
    assert seen.waits_for == "features of batch 7 from rank 0"
    main = next(thread for thread in seen.threads if thread.name == "MainThread")
    assert main.own_code is not None
    assert main.own_code.function == "step_of_the_worker"
    assert seen.answer["memory"]["rss"] > 1 << 20
    assert seen.answer["fx"] == {"flag": None, "patcher_left": False}, (
        "torch is not imported, and asking must not do it"
    )
    assert not any(thread.name == "paceline-live" for thread in seen.threads)


def test_the_socket_is_private_and_gone_afterwards(start: Start, tmp_path: Path) -> None:
    process = start(0)
    path = tmp_path / "live" / "rank-0.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    process.communicate("")
    assert process.returncode == 0
    assert list(path.parent.iterdir()) == []
    assert ask(tmp_path) == {}


def test_a_run_folder_with_a_long_name(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20) / ("name" * 20)
    assert len(str(folder)) > 108
    start(0, folder=folder)
    assert ask(folder)[0].state == "answered"


def test_a_stopped_worker_is_told_from_a_busy_one(start: Start, tmp_path: Path) -> None:
    stopped = start(1)
    start(2, "features of batch 7 from rank 1")
    os.kill(stopped.pid, signal.SIGSTOP)
    os.waitpid(stopped.pid, os.WUNTRACED)
    found = diagnose(list(ask(tmp_path, timeout=1.0).values()))
    assert [(one.subject, one.level) for one in found] == [("rank 1", Level.ERROR), ("rank 2", Level.ERROR)]
    assert found[0].remedy == f"kill -CONT {stopped.pid}"
    assert found[1].value.endswith("rank 1 is stopped")
    os.kill(stopped.pid, signal.SIGCONT)
    assert ask(tmp_path)[1].state == "answered"


def test_a_killed_worker_is_gone_and_its_heartbeat_tells_the_rest(start: Start, tmp_path: Path) -> None:
    killed = start(1)
    killed.kill()
    killed.wait()
    (tmp_path / "heartbeat").mkdir()
    beat = {"pid": killed.pid, "step": 410, "phase": "train", "time": 5.0}
    (tmp_path / "heartbeat" / "rank-1.json").write_text(json.dumps(beat))
    (found,) = diagnose(list(ask(tmp_path).values()))
    assert (found.what, found.level) == ("the worker is gone", Level.ERROR)
    assert "at step 410 in phase train" in found.value


def test_a_worker_whose_interpreter_is_held_is_silent(start: Start, tmp_path: Path) -> None:
    process = start(1, act="hold")
    while "clock_nanosleep" not in Path(f"/proc/{process.pid}/wchan").read_text() and not _sleeps(process.pid):
        pass
    seen = ask(tmp_path, timeout=0.5)[1]
    assert seen.state == "silent"
    (found,) = diagnose([seen])
    assert "holds the interpreter" in found.why


def _sleeps(pid: int) -> bool:
    """In nanosleep (35) or clock_nanosleep (230), by the number of the call that its main thread is in."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] in ("35", "230")


def test_a_new_worker_takes_the_place_of_one_that_was_killed(start: Start, tmp_path: Path) -> None:
    old = start(0)
    old.kill()
    old.wait()
    new = start(0)
    assert ask(tmp_path)[0].pid == new.pid


def test_workers_of_another_host_are_not_taken_for_dead(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "rank-5.json").write_text(json.dumps({"pid": 1, "host": "another", "started": 0}))
    assert ask(tmp_path)[5].state == "elsewhere"


def test_a_worker_that_has_a_heartbeat_but_no_socket_yet(tmp_path: Path) -> None:
    (tmp_path / "heartbeat").mkdir()
    beat = {"pid": os.getpid(), "host": socket.gethostname(), "step": 0, "phase": "load target", "time": 5.0}
    (tmp_path / "heartbeat" / "rank-0.json").write_text(json.dumps(beat))
    assert ask(tmp_path)[0].state == "unopened"
    assert max(one.level for one in diagnose(list(ask(tmp_path).values()))) is Level.INFO


def test_a_worker_that_cannot_open_its_socket_works_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "live").write_text("in the way")
    with live.serve(tmp_path, 0, lambda: live.WorkerStatus(0, "both", 0, "train", None, None, 0.0)):
        pass
    assert "cannot be asked" in caplog.text


def test_a_status_that_fails_does_not_cost_the_rest(tmp_path: Path) -> None:
    def broken() -> live.WorkerStatus:
        raise RuntimeError("no status yet")

    with live.serve(tmp_path, 0, broken):
        seen = ask(tmp_path)[0]
    assert seen.answer["status"] == {"fault": "RuntimeError: no status yet"}
    assert seen.threads
    assert [one.what for one in diagnose([seen])] == ["nothing is wrong", "its status could not be read"]


def test_an_asker_that_hangs_up_does_no_harm(tmp_path: Path) -> None:
    with live.serve(tmp_path, 0, lambda: live.WorkerStatus(0, "both", 0, "train", None, None, 0.0)):
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as asking, live.short_way_to(tmp_path / "live" / "rank-0.sock") as path:
                asking.connect(str(path))
        assert ask(tmp_path)[0].state == "answered"


def test_torch_is_read_without_being_touched(tmp_path: Path) -> None:
    """Counters, recompilations with reasons, and the flag with whoever set it, from a process that compiles."""
    import torch

    from paceline.compiling import guard

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    for length in (3, 4):
        compiled(torch.ones(length))
    state = live.WorkerStatus(0, "both", 1, "train", None, None, 0.0)
    with live.serve(tmp_path, 0, lambda: state, fx=guard.state):
        answer: dict[str, Any] = ask(tmp_path)[0].answer
    assert answer["torch"] == torch.__version__
    assert answer["dynamo"]["counters"]["stats"]["unique_graphs"] >= 2
    assert "size mismatch" in answer["dynamo"]["recompiles"][-1]["reason"]
    assert answer["fx"]["implementation"] == guard.implementation()
    assert answer["fx"]["flag"] is False


def test_the_command_on_a_run(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(0)
    start(1, "features of batch 7 from rank 0")
    assert run_doctor(DoctorOptions(target=str(tmp_path), timeout=60)) == 0
    text = capsys.readouterr().out
    assert "rank 0 | role both | step 7 | phase train" in text
    assert "rank 1 waits for features of batch 7 from rank 0; rank 0 is in phase train" in text
    assert "at step_of_the_worker" in text
