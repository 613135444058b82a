"""What went wrong first: each failing worker writes down its own failure, the launcher picks the one to show."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import UserError

FOLDER = "failures"


@dataclass(frozen=True)
class Failure:
    """One worker's end. `consequence`: it lost or waited for another one, so that one's failure explains it."""

    rank: int
    role: str
    time: float
    """Seconds of `time.time`."""
    what: str
    remedy: str = ""
    user: bool = False
    """A fault of input, configuration or machine that a restart would only meet again."""
    consequence: bool = False

    def words(self, log: Path | None) -> str:
        """What the user sees last."""
        lines = [f"error: rank {self.rank} ({self.role}): {self.what}"]
        if self.remedy:
            lines.append(f"  hint: {self.remedy}")
        if log is not None:
            lines.append(f"  log:  {log}")
        return "\n".join(lines)


def failure_of(error: BaseException, rank: int, role: str) -> Failure:
    """An exception as a failure."""
    lost = _lost_another(error)
    if isinstance(error, UserError):
        return Failure(rank, role, time.time(), error.what, error.remedy, user=not lost, consequence=lost)
    what = "".join(traceback.format_exception_only(error)).strip()
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in place)
    return Failure(rank, role, time.time(), what.splitlines()[0] + where, consequence=lost)


def _lost_another(error: BaseException) -> bool:
    """Whether an error only says that another rank went away or did not come."""
    if "torch" not in sys.modules or "paceline.pipeline.world" not in sys.modules:
        return False
    import torch.distributed as dist  # noqa: PLC0415 - loaded already, see above

    from paceline.pipeline.world import LostPeer  # noqa: PLC0415

    if isinstance(error, LostPeer | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and ("gloo/" in str(error) or "NCCL" in str(error))


def write_failure(run_folder: Path, failure: Failure) -> None:
    folder = run_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"rank-{failure.rank}.new"
    aside.write_text(json.dumps(asdict(failure)))
    os.replace(aside, folder / f"rank-{failure.rank}.json")


def read_failures(run_folder: Path) -> list[Failure]:
    return [Failure(**json.loads(path.read_text())) for path in sorted((run_folder / FOLDER).glob("rank-*.json"))]


def clear_failures(run_folder: Path) -> None:
    for path in (run_folder / FOLDER).glob("rank-*.json"):
        path.unlink(missing_ok=True)


def ended_by(exit_code: int) -> str:
    """A worker's end, from its exit code, for a worker that left no word of its own."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code} and no word"
    name = signal.Signals(-exit_code).name
    hints = {
        "SIGKILL": "it was killed, by somebody or by the system for memory (dmesg says so then)",
        "SIGSEGV": "a crash in native code",
        "SIGABRT": "native code gave up",
        "SIGBUS": "it ran out of shared memory or its disk went away",
    }
    return f"ended by {name}" + (f": {hints[name]}" if name in hints else "")


def first_of(failures: Iterable[Failure]) -> Failure:
    """The failure that explains the others: the earliest that is no consequence, or else the earliest."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time))
