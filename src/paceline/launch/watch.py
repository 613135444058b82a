"""Watches the workers of this host: when each of them ended, and whether they make progress."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.config import Config
from paceline.launch.failures import Failure, write_failure
from paceline.launch.stacks import dump_stacks
from paceline.pipeline.heartbeat import WAIT_FOR_FEATURES, Beat, read_beats

STARTING_SECONDS = 120.0
"""What importing and loading may take at least, however short `launch.stall_seconds` is."""
GRACE_SECONDS = 5.0
"""Between the first worker's end and the killing of those that have not followed."""


@dataclass(frozen=True)
class Limits:
    """How long a phase may last without a word."""

    stall: float
    warm_up: float

    @staticmethod
    def of(config: Config) -> Limits:
        return Limits(config.launch.stall_seconds, config.compiling.warmup_seconds)

    def of_phase(self, phase: str) -> float:
        if phase.startswith("warm-up"):
            return max(self.stall, self.warm_up)
        if phase == WAIT_FOR_FEATURES:
            return math.inf  # as long as those who make them take; these are watched
        return max(self.stall, STARTING_SECONDS) if phase == "start" else self.stall


def stalled(beats: Iterable[Beat], limits: Limits, now: float) -> Beat | None:
    """The worker that holds the others up, once any worker has said nothing for its limit; None if all is well.

    First a worker that does not even run (stopped, or hung with the interpreter's lock held), then one that does not
    wait for others, each by who fell silent first.
    """
    everyone = list(beats)
    late = [beat for beat in everyone if now - beat.time > limits.of_phase(beat.phase)]
    if not late:
        return None
    dead = [beat for beat in everyone if now - beat.alive > max(3.0, min(limits.stall / 2, 30.0))]
    busy = [beat for beat in late if beat.waits_for is None]
    return min(dead or busy or late, key=lambda beat: beat.time)


def stall_words(beat: Beat, now: float) -> str:
    waits = f", waiting for {beat.waits_for}" if beat.waits_for else ""
    state = _state(beat.pid)
    why = {
        "T": "; the process is stopped (SIGSTOP)",
        "t": "; a debugger holds the process",
        "D": "; it waits for a disk or driver",
    }
    return (
        f"no progress for {now - beat.time:.0f} s at step {beat.step}, phase {beat.phase!r}{waits}"
        f" (pid {beat.pid}){why.get(state, '')}"
    )


def _state(pid: int) -> str:
    """The letter of /proc/PID/stat, or '' when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_stopped(pid: int) -> bool:
    return _state(pid) in ("T", "t")


@dataclass
class Watcher:
    """A thread that looks at the workers of one attempt. `begun`: older heartbeats belong to an earlier one."""

    run_folder: Path
    limits: Limits
    begun: float
    say: Callable[[str], None]
    ended: dict[int, float] = field(default_factory=dict)
    """When each rank's process ended, by rank."""
    stall: Failure | None = None
    suspects: dict[int, Beat] = field(default_factory=dict)
    """Workers that were stopped at the time of the first end."""
    killed: set[int] = field(default_factory=set)
    """Ranks that this watcher killed because others had ended."""

    def __post_init__(self) -> None:
        self._handles: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-watch", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for handle in self._handles.values():
            os.close(handle)

    def beats(self) -> dict[int, Beat]:
        """Heartbeats of this attempt's workers on this host."""
        here = socket.gethostname()
        beats = read_beats(self.run_folder)
        return {rank: beat for rank, beat in beats.items() if beat.host == here and beat.time >= self.begun}

    def _watch(self) -> None:
        while not self._stop.is_set():
            beats = self.beats()
            self._open_handles(beats)
            self._note_ends(0.2)
            if self.ended:
                self._end_the_rest(beats)
            elif self.stall is None:
                self._look_for_stall(beats)

    def _open_handles(self, beats: dict[int, Beat]) -> None:
        for rank, beat in beats.items():
            if rank not in self._handles:
                with contextlib.suppress(ProcessLookupError):
                    self._handles[rank] = os.pidfd_open(beat.pid)

    def _note_ends(self, seconds: float) -> None:
        waiting = {handle: rank for rank, handle in self._handles.items() if rank not in self.ended}
        poll = select.poll()
        for handle in waiting:
            poll.register(handle, select.POLLIN)
        for handle, _ in poll.poll(seconds * 1000):
            if not self.ended:
                self.suspects = {rank: beat for rank, beat in self.beats().items() if is_stopped(beat.pid)}
            self.ended[waiting[handle]] = time.time()

    def _end_the_rest(self, beats: dict[int, Beat]) -> None:
        """The agent asks the others to end; what has not followed in time (stopped, or deep in a driver) is killed."""
        if time.time() - min(self.ended.values()) < GRACE_SECONDS or not self._failed():
            return
        for rank in beats:
            if rank not in self.ended and rank not in self.killed:
                self.killed.add(rank)
                self._kill(rank)

    def _failed(self) -> bool:
        """Workers that end in good order do so together, within seconds; their last phase says so."""
        beats = self.beats()
        return any(beats[rank].phase != "end" for rank in self.ended if rank in beats)

    def _look_for_stall(self, beats: dict[int, Beat]) -> None:
        now = time.time()
        culprit = stalled(beats.values(), self.limits, now)
        if culprit is None:
            return
        what = stall_words(culprit, now)
        self.say(f"rank {culprit.rank} ({culprit.role}): {what}; writing the stacks of all workers")
        folder = dump_stacks(self.run_folder, {rank: beat.pid for rank, beat in beats.items()})
        remedy = f"stacks of all workers are in {folder}; raise launch.stall_seconds if it was only slow"
        self.stall = Failure(culprit.rank, culprit.role, culprit.time, what, remedy)
        write_failure(self.run_folder, self.stall)
        self._kill(culprit.rank)

    def _kill(self, rank: int) -> None:
        if rank in self._handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)
