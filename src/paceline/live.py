"""A running worker answers questions about itself, on a private Unix socket in its run folder.

The answering thread calls no compiled function, imports nothing, and takes no lock of torch's: it reads frames and
counters that are there anyway, so it also answers while the worker compiles, waits in a collective, or is deadlocked
in Python. Who asks, and what is made of the answers, is in `paceline.doctor`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER = "live"
_LONGEST_PATH = 100
"""Bytes; the kernel takes 108 for a socket's path, 104 on some systems."""
_MOST_FRAMES = 200
_MOST_RECOMPILES = 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker is doing, in its own words.

    `role`: "target", "drafter" or "both". `waits_for`: None, or what must come from where, such as "features of batch
    412 from rank 2". `since`: when this phase began, in seconds of `time.time`.
    """

    rank: int
    role: str
    step: int
    phase: str
    waits_for: str | None
    batch: int | None
    since: float


@contextlib.contextmanager
def serve(
    run_folder: Path,
    rank: int,
    status: Callable[[], WorkerStatus],
    fx: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Answer on ``run_folder/live/rank-N.sock`` while the block runs.

    Beside the socket lies ``rank-N.json`` with host and pid, so that a worker which is gone, stopped, or on another
    host can be told from one that never started. A worker that cannot open its socket says so in its log and works on.

    Args:
        run_folder: the run's folder; `live` in it is made if need be.
        rank: the global rank.
        status: called in the answering thread, so it must only read.
        fx: what knows who set torch's tracing flag, e.g. ``paceline.compiling.guard.state``: a dataclass.
    """
    folder = Path(run_folder) / FOLDER
    try:
        listening = _listen(folder, rank)
    except OSError as fault:
        _log.warning("rank %d cannot be asked while it runs: no socket in %s (%s)", rank, folder, fault)
        yield
        return
    answering = threading.Thread(target=_answer_all, args=(listening, status, fx), name="paceline-live", daemon=True)
    answering.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        answering.join(1.0)
        for path in _paths(folder, rank):
            path.unlink(missing_ok=True)


def _paths(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank-{rank}.sock", folder / f"rank-{rank}.json"


def _listen(folder: Path, rank: int) -> socket.socket:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, facts = _paths(folder, rank)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_way_to(path) as short:
            listening.bind(str(short))
        os.chmod(path, 0o600)
        listening.listen(8)
        facts.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}))
    except OSError:
        listening.close()
        raise
    return listening


@contextlib.contextmanager
def short_way_to(path: Path) -> Iterator[Path]:
    """`path`, or a way to it that is short enough for a socket: through a link in a private temporary folder."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="paceline-") as private:
        link = Path(private) / "l"
        link.symlink_to(path.parent.absolute(), target_is_directory=True)
        yield link / path.name


def _answer_all(listening: socket.socket, status: Callable[[], WorkerStatus], fx: Callable[[], object] | None) -> None:
    while True:
        try:
            asking, _ = listening.accept()
        except OSError:  # closed: the worker has finished
            return
        with asking, contextlib.suppress(OSError):
            asking.settimeout(5.0)
            asking.sendall(json.dumps(answer(status, fx), default=str).encode() + b"\n")


def answer(status: Callable[[], WorkerStatus], fx: Callable[[], object] | None = None) -> dict[str, Any]:
    """Everything that this process says about itself; a part that cannot be read is its fault's text."""
    return {
        "protocol": 1,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time": time.time(),
        "python": sys.version.split()[0],
        "torch": str(vars(sys.modules["torch"]).get("__version__")) if "torch" in sys.modules else None,
        "status": _part(lambda: dataclasses.asdict(status())),
        "threads": _part(threads),
        "fx": _part(lambda: _fx(fx)),
        "dynamo": _part(_dynamo),
        "memory": _part(_memory),
    }


def _part(reader: Callable[[], Any]) -> Any:
    try:
        return reader()
    except Exception as fault:  # noqa: BLE001  the rest of the answer must still go out
        return {"fault": f"{type(fault).__name__}: {fault}"}


def threads() -> list[dict[str, Any]]:
    """All threads of this process but the asking one, innermost frame first. Native threads have no name."""
    known = {thread.ident: thread for thread in threading.enumerate()}
    me = threading.get_ident()
    return [_thread(known.get(ident), ident, frame) for ident, frame in sys._current_frames().items() if ident != me]


def _thread(thread: threading.Thread | None, ident: int, frame: FrameType) -> dict[str, Any]:
    return {
        "name": thread.name if thread else None,
        "thread_id": ident,
        "os_thread_id": thread.native_id if thread else None,
        "frames": [_frame(inside) for inside in itertools.islice(_outwards(frame), _MOST_FRAMES)],
    }


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frame(frame: FrameType) -> dict[str, Any]:
    code = frame.f_code
    short = code.co_filename.rsplit("site-packages" + os.sep, maxsplit=1)[-1]
    return {"name": code.co_qualname, "file": short, "line": frame.f_lineno}


def _fx(reader: Callable[[], object] | None) -> dict[str, Any]:
    """The tracing flag, from whoever watches it or else from torch's own module."""
    if reader is not None:
        state = reader()
        assert dataclasses.is_dataclass(state)
        assert not isinstance(state, type)
        return dataclasses.asdict(state)
    names = _names_of("torch.fx._symbolic_trace")
    return {"flag": names.get("_is_fx_tracing_flag"), "patcher_left": names.get("CURRENT_PATCHER") is not None}


def _names_of(module: str) -> Mapping[str, Any]:
    """What a module defines, if it is imported: this thread must not be the one that imports it."""
    return vars(sys.modules[module]) if module in sys.modules else {}


def _dynamo() -> dict[str, Any]:
    names = _names_of("torch._dynamo.utils")
    if "counters" not in names:
        return {"counters": {}, "recompiles": [], "compilations": 0}
    counters = {group: dict(counted) for group, counted in list(names["counters"].items()) if counted}
    compilations = list(names.get("_compilation_metrics", ()))
    again = [metric for metric in compilations if metric.recompile_reason]
    return {
        "counters": counters,
        "compilations": len(compilations),
        "recompiles": [
            {
                "function": metric.co_name,
                "file": metric.co_filename,
                "line": metric.co_firstlineno,
                "reason": str(metric.recompile_reason)[:500],
                "when": (metric.start_time_us or 0) / 1e6,
            }
            for metric in again[-_MOST_RECOMPILES:]
        ],
    }


def _memory() -> dict[str, Any]:
    facts: dict[str, Any] = {"rss": _resident()}
    cuda = _names_of("torch.cuda")
    if cuda and cuda["is_initialized"]():
        facts["cuda_allocated"] = cuda["memory_allocated"]()
        facts["cuda_reserved"] = cuda["memory_reserved"]()
        facts["cuda_peak"] = cuda["max_memory_allocated"]()
    return facts


def _resident() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
