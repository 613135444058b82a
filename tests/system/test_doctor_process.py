"""A process that is not ours, seen with py-spy and /proc."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.doctor import foreign
from paceline.doctor.command import DoctorOptions, run_doctor
from paceline.doctor.findings import Finding, Level
from paceline.doctor.travel import process as traveller

RACE = """
import sys, threading
import torch
from torch.fx import symbolic_trace

entered, stop = threading.Event(), threading.Event()
password = "hunter2-in-a-local"

def traced_by_the_loader(x):
    entered.set()
    stop.wait()
    return x + 1

def keep_training():
    while not stop.is_set():
        stop.wait(0.01)

threading.Thread(target=symbolic_trace, args=(traced_by_the_loader,), name="loader", daemon=True).start()
threading.Thread(target=keep_training, name="drafter-1", daemon=True).start()
entered.wait()
print("ready", flush=True)
sys.stdin.read()
"""

Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run() -> Iterator[Run]:
    begun: list[subprocess.Popen[str]] = []

    def runner(source: str, *words: str, **environment: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", source, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        begun.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield runner
    for child in begun:
        child.kill()
        child.communicate()


def look(pid: int) -> dict[str, object]:
    facts = traveller.main({"pid": pid, "timeout": 30})
    if facts["spy_kind"] == "refused":
        pytest.skip(f"py-spy may not look into processes here: {facts['spy_fault']}")
    assert facts["spy_fault"] is None, facts["spy_fault"]
    return json.loads(json.dumps(facts))


def serious(facts: dict[str, object]) -> list[Finding]:
    return [finding for finding in foreign.judge(facts) if finding.level >= Level.WARNING]


def test_a_process_in_the_fx_race(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    child = run(RACE, "--api-key", "hunter2", HF_TOKEN="hunter2", TORCH_LOGS="recompiles")
    facts = look(child.pid)
    (found,) = serious(facts)
    assert found.what == "FX race possible"
    assert "loader (from traced_by_the_loader (<string>:" in found.value
    assert "drafter-1 (at keep_training (<string>:" in found.value
    assert "hunter2" not in json.dumps(facts)
    environment = facts["environment"]
    assert isinstance(environment, dict)
    assert environment["TORCH_LOGS"] == "recompiles"
    assert run_doctor(DoctorOptions(pid=child.pid)) == 1
    text = capsys.readouterr().out
    assert "FX race possible" in text
    assert "    trace (torch/fx/_symbolic_trace.py:" in text, "the stacks are printed too"


def test_a_stopped_process(run: Run) -> None:
    child = run("import sys; print('ready', flush=True); sys.stdin.read()")
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    found = foreign.judge(traveller.main({"pid": child.pid, "timeout": 30}))
    os.kill(child.pid, signal.SIGCONT)
    assert any(one.what == "state" and one.level is Level.ERROR for one in found)


def test_forked_children_and_open_files_are_seen(run: Run, tmp_path: Path) -> None:
    source = """
import os, socket, sys
listening = socket.create_server(("127.0.0.1", 0))
child = os.fork()
if child == 0:
    sys.stdin.read(); os._exit(0)
print("ready", flush=True); sys.stdin.read()
"""
    child = run(source)
    facts = traveller.main({"pid": child.pid, "timeout": 30})
    assert len(facts["forked"]) == 1
    assert [one["state"] for one in facts["files"]["tcp"]] == ["listening"]
    assert facts["files"]["tcp"][0]["here"].startswith("127.0.0.1:")
    os.kill(facts["forked"][0], signal.SIGKILL)


def test_no_such_process() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert run_doctor(DoctorOptions(pid=ended.pid)) == 2


def test_a_process_that_is_not_python() -> None:
    sleeper = subprocess.Popen([shutil.which("sleep") or "sleep", "600"])
    try:
        facts = traveller.main({"pid": sleeper.pid, "timeout": 30})
    finally:
        sleeper.kill()
        sleeper.wait()
    (found,) = serious(facts)
    assert found.what == "not a Python process"
    assert "sleep" in found.value


def test_the_python_below_a_shell_is_found_and_the_one_that_asks_is_not() -> None:
    source = "import sys; print('ready', flush=True); sys.stdin.read()"
    words = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, source]
    shell = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    assert shell.stdout.readline() == "ready\n"
    facts = traveller.main({"pid": shell.pid, "timeout": 30})
    shell.communicate()
    assert facts["python"] is False
    assert [one["command"].startswith(sys.executable) for one in facts["python_below"]] == [True]
    above = traveller.main({"pid": os.getppid(), "timeout": 30})
    assert os.getpid() not in [one["pid"] for one in above["python_below"]]


def test_the_first_process_of_the_machine_is_never_called_what_it_is_not() -> None:
    facts = traveller.main({"pid": 1, "timeout": 30})
    whats = {finding.what for finding in foreign.judge(facts)}
    assert ("not a Python process" in whats) == (facts["python"] is False)
    if facts["python"] is None:
        torch = next(finding for finding in foreign.judge(facts) if finding.what == "torch")
        assert "may not see" in torch.value
