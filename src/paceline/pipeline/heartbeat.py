"""What each worker does, in a file that others can read: `heartbeat/rank-N.json` of the run folder.

The worker's own thread says what it does (`beat`); a second thread writes that down, at every change and at least
every second. So a reader can tell a worker that makes no progress (`time` is old) from one whose interpreter does not
run at all (`alive` is old too), and one that waits for others (`waits_for`) from the one that they wait for.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.live import FOLDER as LIVE
from paceline.live import WorkerStatus

FOLDER = "heartbeat"
WAIT_FOR_FEATURES = "wait for the features of the data"
"""The phase of a worker whose own part of the feature cache is done, or who has none."""
INTERRUPTED = "interrupted"
"""The last phase of a worker that was asked to stop (Ctrl-C), and has."""
_INTERVAL = 1.0


@dataclass(frozen=True)
class Beat:
    """One heartbeat file. Times are seconds of `time.time`."""

    rank: int
    role: str
    pid: int
    host: str
    step: int
    phase: str
    waits_for: str | None
    """What this worker waits for from others; None while it works itself."""
    batch: int | None
    time: float
    """When the worker last said what it does."""
    alive: float
    """When its interpreter last ran."""


class Heartbeat:
    """Writes this worker's file until closed. `beat` costs a few microseconds and never waits for the disk.

    Raises UserError where the run folder cannot be made.
    """

    def __init__(self, run_folder: Path, rank: int, role: str, earlier: dict[str, float] | None = None) -> None:
        """`earlier`: phases that were over before, with their seconds."""
        folder = run_folder / FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(*unwritable(run_folder, error)) from None
        self._path = folder / f"rank-{rank}.json"
        now = time.time()
        self._last = Beat(rank, role, os.getpid(), socket.gethostname(), 0, "start", None, None, now, now)
        self._spent = dict(earlier or {})
        self._phase_begun = now
        self._changed = threading.Event()
        self._closed = False
        self._write()
        self._thread = threading.Thread(target=self._keep_writing, name="paceline-heartbeat", daemon=True)
        self._thread.start()

    def beat(self, phase: str, step: int, *, waits_for: str | None = None, batch: int | None = None) -> None:
        """Say what this worker does from now on; also to be called again for each step of the same phase."""
        last, now = self._last, time.time()
        self._last = Beat(last.rank, last.role, last.pid, last.host, step, phase, waits_for, batch, now, now)
        if phase != last.phase:
            self._spent[last.phase] = self._spent.get(last.phase, 0.0) + now - self._phase_begun
            self._phase_begun = now
            self._changed.set()

    def spent(self) -> dict[str, float]:
        """Seconds in each phase so far, in the order in which they first came."""
        running = self._spent.get(self._last.phase, 0.0) + time.time() - self._phase_begun
        return {**self._spent, self._last.phase: running}

    def become(self, role: str) -> None:
        """A role that is known only after the start."""
        last = self._last
        self._last = Beat(**{**asdict(last), "role": role})

    def status(self) -> WorkerStatus:
        """The same, for `paceline.live`."""
        last = self._last
        return WorkerStatus(last.rank, last.role, last.step, last.phase, last.waits_for, last.batch, last.time)

    def close(self) -> None:
        self._closed = True
        self._changed.set()
        self._thread.join(5.0)
        self._write()

    def _keep_writing(self) -> None:
        while not self._closed:
            self._changed.wait(_INTERVAL)
            self._changed.clear()
            self._write()

    def _write(self) -> None:
        aside = self._path.with_suffix(".new")
        try:
            aside.write_text(json.dumps({**asdict(self._last), "alive": time.time()}))
            os.replace(aside, self._path)
        except OSError:
            # A full disk must not end a run through its heartbeat: the checkpoint will say so, or nobody needs to know.
            return


def say_last(run_folder: Path, rank: int, phase: str) -> None:
    """Let `phase` be the last word of a worker that has closed its heartbeat; its step stays."""
    last = read_beats(run_folder).get(rank)
    beat = Heartbeat(run_folder, rank, last.role if last else "worker")
    beat.beat(phase, last.step if last else 0)
    beat.close()


def forget_earlier(run_folder: Path) -> None:
    """Workers of an earlier launch, of which there may have been more, must not be taken for this one's."""
    for name in (FOLDER, LIVE):
        shutil.rmtree(run_folder / name, ignore_errors=True)


def unwritable(run_folder: Path, error: OSError) -> tuple[str, str]:
    """What to say of a run folder that cannot be written, and the remedy."""
    return f"cannot write the run folder {run_folder}: {error}", "set run.folder to a place you own"


def read_beats(run_folder: Path) -> dict[int, Beat]:
    """The heartbeats of a run by rank; files that are half gone are left out."""
    beats = {}
    for path in (run_folder / FOLDER).glob("rank-*.json"):
        try:
            beat = Beat(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        beats[beat.rank] = beat
    return beats
