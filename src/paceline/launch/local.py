"""The world of one host: torch's elastic agent starts and ends the workers, a watcher says what happened to them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config import Config
from paceline.launch.failures import Failure, clear_failures, ended_by, first_of, read_failures
from paceline.launch.watch import Limits, Watcher, stall_words
from paceline.launch.worker import CRASH, USER_FAULT, Order, log_path
from paceline.pipeline.heartbeat import INTERRUPTED, forget_earlier, say_last


@dataclass(frozen=True)
class LocalWorld:
    """A launch: what to run, on how many processes, and where it writes."""

    config: Config
    config_path: Path
    run_folder: Path
    program: str
    workers: int
    resume: bool


def run_local(world: LocalWorld) -> int:
    """Run until all workers have ended well, or the restarts are used up. Returns the exit code.

    Prints the failure that came first as the last thing.
    """
    forget_earlier(world.run_folder)  # its logs stay, and are added to
    restarts = world.config.launch.restarts
    for attempt in range(restarts + 1):
        failure = _attempt(world, attempt)
        if failure is None:
            return 0
        last = attempt == restarts or failure.user
        _say(failure.words(log_path(world.run_folder, failure.rank)))
        if last:
            return USER_FAULT if failure.user else CRASH
        _say(f"restarting all workers from the last whole checkpoint ({attempt + 1} of {restarts})")
    raise AssertionError("the loop returns")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _attempt(world: LocalWorld, attempt: int) -> Failure | None:
    """One start of the whole world; None when it ended well."""
    clear_failures(world.run_folder)
    begun = time.time()
    with (
        Watcher(world.run_folder, Limits.of(world.config), begun, _say) as watcher,
        _follow(log_path(world.run_folder, 0)),
    ):
        exit_codes = _start_and_wait(world, attempt)
    if not any(exit_codes.values()):
        return None
    return _explain(world, watcher, exit_codes)


def _start_and_wait(world: LocalWorld, attempt: int) -> dict[int, int]:
    """Exit code of each worker that did not end well, by rank; empty when all did."""
    # Imported here: torch is not needed, and not paid for, where there is one process.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    order = Order(
        config=str(world.config_path),
        run_folder=str(world.run_folder),
        program=world.program,
        resume=world.resume or attempt > 0,
        attempt=attempt,
        launcher=os.getpid(),
    )
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world.workers,
        run_id=f"{world.config.run.name}-{attempt}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # the system chooses a free port, so no taken one can be in the way
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    with _quiet_elastic(), _signals_kept():
        try:
            elastic_launch(settings, sys.executable)("-m", "paceline.launch", order.dump())
        except ChildFailedError as error:
            return {rank: failure.exitcode for rank, failure in error.failures.items()}
        except SignalException as error:
            # Some had no time to say so themselves: SIGTERM gives them none, and a collective may not let SIGINT in.
            for rank in range(world.workers):
                say_last(world.run_folder, rank, INTERRUPTED)
            _say(f"stopped by {signal.Signals(error.sigval).name}; all workers have ended")
            raise SystemExit(128 + error.sigval) from None
    return {}


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """The agent's own notes would come after, and look like, the failure that it is about."""
    logger = logging.getLogger("torch.distributed.elastic")
    before = logger.propagate
    handler = logging.NullHandler()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """The agent installs handlers and leaves them behind."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(world: LocalWorld, watcher: Watcher, exit_codes: dict[int, int]) -> Failure:
    """The failure to show, from what the workers wrote, how they ended, and what the watcher saw."""
    if watcher.stall is not None:
        return watcher.stall
    beats = watcher.beats()
    written = {failure.rank: failure for failure in read_failures(world.run_folder)}
    silent = [
        Failure(
            rank,
            beats[rank].role if rank in beats else "worker",
            watcher.ended.get(rank, time.time()),
            ended_by(code),
        )
        for rank, code in exit_codes.items()
        if code and rank not in written and rank not in watcher.killed
    ]
    # The agent ends the others by SIGTERM; only where nothing else happened did it come from outside.
    by_themselves = [failure for failure in silent if exit_codes[failure.rank] != -signal.SIGTERM]
    found = [*written.values(), *by_themselves] or silent
    first = first_of(found)
    if first.consequence and watcher.suspects:
        suspect = min(watcher.suspects.values(), key=lambda beat: beat.time)
        return replace(first, rank=suspect.rank, role=suspect.role, what=stall_words(suspect, time.time()))
    return first


@contextmanager
def _follow(path: Path) -> Iterator[None]:
    """Show what rank 0 prints while it prints it."""
    stop = threading.Event()
    begin = path.stat().st_size if path.exists() else 0  # what an earlier start printed has been shown

    def copy() -> None:
        place = begin
        while True:
            last = stop.wait(0.1)
            if path.exists():
                with path.open("rb") as file:
                    file.seek(place)
                    text = file.read()
                place += len(text)
                sys.stderr.write(text.decode(errors="replace"))
                sys.stderr.flush()
            if last:
                return

    thread = threading.Thread(target=copy, name="paceline-follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
