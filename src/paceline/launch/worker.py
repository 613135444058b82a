"""One worker of a local world: `python -m paceline.launch ORDER`, started by the launcher and by nobody else.

Nothing here imports torch before the process has its GPU, cores and threads.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline import config as configuration
from paceline.config import Config
from paceline.errors import UserError
from paceline.launch.failures import Failure, failure_of, write_failure
from paceline.launch.places import choose_device, settle_on_cores, visible_gpus
from paceline.launch.stacks import answer_signal
from paceline.pipeline.heartbeat import INTERRUPTED, Heartbeat, say_last
from paceline.pipeline.process import World

Program = Callable[[Config, World, bool], int]
"""(configuration, this process's place, whether to resume) -> exit code."""

USER_FAULT = 2
CRASH = 1
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Order:
    """What the launcher tells its workers, as JSON in one argument."""

    config: str
    """Path of the resolved configuration."""
    run_folder: str
    program: str
    resume: bool
    attempt: int
    launcher: int
    """Process id of the launcher."""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Order:
        return Order(**json.loads(text))


def load_program(name: str) -> Program:
    """`package.module:function` -> the function."""
    module, _, function = name.partition(":")
    return vars(importlib.import_module(module))[function]


def log_path(run_folder: Path, rank: int) -> Path:
    return run_folder / "logs" / f"rank-{rank}.log"


def main(argument: str) -> int:
    """A worker's whole life; returns its exit code."""
    order = Order.load(argument)
    die_with(order.launcher)
    os.environ["PACELINE_ATTEMPT"] = str(order.attempt)
    world = World.from_environment("cpu")
    run_folder = Path(order.run_folder)
    _log_to(log_path(run_folder, world.rank))
    try:
        config = configuration.load(order.config)
        return run_here(config, world, run_folder, lambda: load_program(order.program), order.resume)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is written down and ends the worker
        return _end_badly(error, world, run_folder)


def run_here(config: Config, world: World, run_folder: Path, program: Callable[[], Program], resume: bool) -> int:
    """Run the program as this rank: device, cores, heartbeat, then the program itself.

    `program` imports it, after the device is chosen. The heartbeat's last phase says how it ended, if it ended well
    or was interrupted.
    """
    try:
        code = _run_program(config, world, run_folder, program, resume)
    except KeyboardInterrupt:
        say_last(run_folder, world.rank, INTERRUPTED)
        raise
    say_last(run_folder, world.rank, "end")
    return code


def _run_program(config: Config, world: World, run_folder: Path, program: Callable[[], Program], resume: bool) -> int:
    beat = Heartbeat(run_folder, world.rank, "worker")
    try:
        device = choose_device(visible_gpus(), world.local_rank)
        settle_on_cores(config.launch.threads, world.local_rank, world.local_size)
        answer_signal(run_folder, world.rank)
        function = program()
    finally:
        beat.close()
    return function(config, World(**{**asdict(world), "device": device}), resume)


def _end_badly(error: BaseException, world: World, run_folder: Path) -> int:
    failure: Failure = failure_of(error, world.rank, _role_of(run_folder, world.rank))
    write_failure(run_folder, failure)
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    return USER_FAULT if failure.user else CRASH


def _role_of(run_folder: Path, rank: int) -> str:
    try:
        return json.loads((run_folder / "heartbeat" / f"rank-{rank}.json").read_text())["role"]
    except (OSError, ValueError, KeyError):
        return "worker"


def die_with(launcher: int) -> None:
    """Let the kernel kill this process when its launcher dies, however it dies: no orphan holds a GPU."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        # It died before this line.
        os._exit(CRASH)


def _log_to(path: Path) -> None:
    """From here on everything that this process prints, native code included, is added to its log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if os.fstat(file).st_size:
        os.write(file, f"--- started again {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)
