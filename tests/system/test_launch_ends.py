"""Ends from outside: a launcher killed or asked to stop, a port that is taken, a rank that is late."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import config as configuration
from paceline.config import Config, LaunchConfig, RunConfig
from paceline.pipeline.heartbeat import INTERRUPTED, read_beats, say_last

pytestmark = pytest.mark.timeout(120)
_MAIN = """
import sys
from paceline import config, launch
from paceline.errors import UserError
try:
    sys.exit(launch.run(config.load(sys.argv[1]), program=sys.argv[2]))
except UserError as error:
    sys.exit(f"error: {error}")
"""


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **more}


def _written(folder: Path, workers: int = 0, **launch: float) -> str:
    config = Config(run=RunConfig(folder=str(folder)), launch=LaunchConfig(workers=workers, **launch))
    (folder / "run").mkdir(exist_ok=True)
    path = folder / "config.toml"
    path.write_text(configuration.dump(config))
    return str(path)


def _start(config: str, program: str, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _MAIN, config, f"launch_programs:{program}"]
    return subprocess.Popen(command, env=_environment(**more), stderr=subprocess.PIPE, text=True)


def _ready_pipe(folder: Path) -> int:
    os.mkfifo(folder / "run" / "ready")
    return os.open(folder / "run" / "ready", os.O_RDWR)


def _read_ready(pipe: int, count: int) -> None:
    seen: set[int] = set()
    while len(seen) < count:
        assert select.select([pipe], [], [], 90)[0], "the workers did not come up"
        seen.update(os.read(pipe, 64))
    os.close(pipe)


def _all_end(folder: Path, seconds: float) -> bool:
    for beat in read_beats(folder / "run").values():
        try:
            handle = os.pidfd_open(beat.pid)
        except ProcessLookupError:
            continue
        if not select.select([handle], [], [], seconds)[0]:
            return False
        os.close(handle)
    return True


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_workers_end_with_their_launcher(tmp_path: Path, number: int, code: int) -> None:
    config = _written(tmp_path, 2)
    pipe = _ready_pipe(tmp_path)
    launcher = _start(config, "block")
    _read_ready(pipe, 2)
    assert not _all_end(tmp_path, 0)
    launcher.send_signal(number)
    printed = launcher.communicate(timeout=15)[1]
    assert launcher.returncode == code
    assert _all_end(tmp_path, 15)
    if number == signal.SIGTERM:
        assert printed.splitlines()[-1] == "stopped by SIGTERM; all workers have ended"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_of_one_process_that_is_asked_to_stop_was_interrupted(tmp_path: Path, number: int) -> None:
    config = _written(tmp_path, 1)
    say_last(tmp_path / "run", 1, INTERRUPTED)  # of an earlier launch, which had two workers
    (tmp_path / "run" / "live").mkdir()
    (tmp_path / "run" / "live" / "rank-1.json").write_text("{}")
    pipe = _ready_pipe(tmp_path)
    before = signal.signal(number, signal.SIG_DFL)  # under nohup the run would inherit that it is ignored
    try:
        run = _start(config, "block")
    finally:
        signal.signal(number, before)
    _read_ready(pipe, 1)
    run.send_signal(number)
    printed = run.communicate(timeout=15)[1]
    assert run.returncode == 128 + number
    assert printed.splitlines()[-1] == f"stopped by {signal.Signals(number).name}"
    beats = read_beats(tmp_path / "run")
    assert {rank: beat.phase for rank, beat in beats.items()} == {0: INTERRUPTED}
    assert not (tmp_path / "run" / "live" / "rank-1.json").exists()


def test_a_port_that_is_taken_is_one_clear_line(tmp_path: Path) -> None:
    config = _written(tmp_path, collective_seconds=30.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        rank = _start(config, "meet", **place)
        printed = rank.communicate(timeout=60)[1]
    assert rank.returncode == 1
    assert f"error: the port of 127.0.0.1:{port} is already taken by another process" in printed
    assert "Traceback" not in printed


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_a_late_rank_is_waited_for_and_a_missing_one_is_named(tmp_path: Path) -> None:
    """Rank 1 starts when rank 0 already waits. (The bound is `launch.collective_seconds`: 600 s by default.)"""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    config = _written(tmp_path, collective_seconds=90.0)
    port = _free_port()
    first = _start(config, "meet", RANK="0", LOCAL_RANK="0", MASTER_PORT=port, **place)
    (tmp_path / "other").mkdir()
    impatient = _written(tmp_path / "other", collective_seconds=2.0)
    alone = _start(impatient, "meet", RANK="0", LOCAL_RANK="0", MASTER_PORT=_free_port(), **place)
    _until_listening(int(port), first)
    second = _start(config, "meet", RANK="1", LOCAL_RANK="1", MASTER_PORT=port, **place)
    printed = alone.communicate(timeout=60)[1]
    assert alone.returncode == 1
    assert "error: rank 1 of 2 did not come to 'start' within 2 s" in printed
    assert "Traceback" not in printed
    assert [first.wait(60), second.wait(60)] == [0, 0]


def _until_listening(port: int, process: subprocess.Popen[str]) -> None:
    """Rank 0 hosts the meeting: once its port answers, it waits for the others."""
    while process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
    pytest.fail(f"rank 0 ended: {process.communicate()[1]}")
