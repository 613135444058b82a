"""Where every worker stands, as stacks in the run folder: by py-spy, or by the worker's own handler of SIGUSR1."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

FOLDER = "stacks"
_PATIENCE = 10.0
_keep_open: list[object] = []


def answer_signal(run_folder: Path, rank: int) -> None:
    """Let SIGUSR1 write this process's Python stacks to `stacks/rank-N.signal.txt`; fatal signals write there too."""
    folder = run_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"rank-{rank}.signal.txt").open("w")
    _keep_open.append(file)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    faulthandler.enable(file=file if sys.__stderr__ is None else sys.__stderr__)


def dump_stacks(run_folder: Path, pids: Mapping[int, int]) -> Path:
    """Write `stacks/rank-N.txt` for each rank's pid; returns the folder. Bounded in time, never raises."""
    folder = run_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    tool = _py_spy()
    running = {}
    for rank, pid in pids.items():
        if tool is not None:
            running[rank] = _start(tool, pid, folder / f"rank-{rank}.txt")
    end = time.monotonic() + _PATIENCE
    for rank, pid in pids.items():
        if rank not in running or not _succeeded(running[rank], end):
            _ask_by_signal(pid)
    return folder


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _start(tool: str, pid: int, path: Path) -> subprocess.Popen[bytes] | None:
    # A stopped process cannot be paused once more, and a process that hangs need not be: so do not pause it.
    command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        with path.open("wb") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    except OSError:
        return None


def _succeeded(process: subprocess.Popen[bytes] | None, end: float) -> bool:
    if process is None:
        return False
    try:
        return process.wait(max(0.1, end - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def _ask_by_signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return  # it has ended meanwhile, and its log says how
