"""Asks every worker of a run for its answer, and looks at the processes of those that give none."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from paceline.doctor.travel.common import attempt, read, status_of

_NAME = re.compile(r"rank-(\d+)\.(json|sock)$")
_LONGEST_PATH = 100


def main(argument: dict[str, Any]) -> dict[str, Any]:
    """`argument`: ``folder`` of the run; ``timeout``, seconds that each worker may take (all are asked at once)."""
    folder, timeout = argument["folder"], float(argument["timeout"])
    if not os.path.isdir(folder):
        return {"absent": True, "folder": os.path.abspath(folder), "host": socket.gethostname()}
    ranks = sorted({*_ranks(os.path.join(folder, "live")), *_ranks(os.path.join(folder, "heartbeat"))})
    with concurrent.futures.ThreadPoolExecutor(max(1, len(ranks))) as pool:
        seen = list(pool.map(lambda rank: look_at(folder, rank, timeout), ranks))
    return {
        "folder": os.path.abspath(folder),
        "host": socket.gethostname(),
        "time": time.time(),
        "workers": seen,
        "left": left_in(os.path.abspath(folder)),
    }


def left_in(folder: str) -> dict[str, Any]:
    """What the run has left in its folder: how far it came, what it measured, where its own words are."""
    step, evaluations = _progress(os.path.join(folder, "metrics.jsonl"))
    return {
        "folder": folder,
        "step": step,
        "total": _steps_wanted(read(os.path.join(folder, "config.toml"))),
        "evaluations": evaluations,
        "claimed": os.path.exists(os.path.join(folder, "config.toml")),
        "checkpoint": max(_whole_checkpoints(os.path.join(folder, "checkpoints")), default=None),
        "words": [
            *_filled(folder, "logs", r"rank-\d+\.log$"),
            *_filled(folder, "stacks", r"rank-\d+(\.signal)?\.txt$"),
        ],
    }


def _progress(path: str) -> tuple[int | None, list[list[float]]]:
    """The last step, and [step, tau] of each evaluation."""
    step, evaluations = None, []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                record = attempt(lambda line=line: json.loads(line), ValueError) or {}
                if record.get("event") == "step":
                    step = record.get("step")
                elif record.get("event") == "evaluation":
                    evaluations.append([record.get("step"), record.get("tau")])
    except OSError:
        pass
    return step, evaluations


def _steps_wanted(config: str) -> int:
    """`training.steps` of the run's configuration; 0 where its epochs decide."""
    section = config.partition("[training]")[2].partition("\n[")[0]
    found = re.search(r"^steps = (\d+)", section, re.MULTILINE)
    return int(found.group(1)) if found else 0


def _whole_checkpoints(folder: str) -> list[int]:
    names = (re.match(r"step-(\d+)$", name) for name in attempt(lambda: os.listdir(folder)) or [])
    whole = (name for name in names if name and os.path.exists(os.path.join(folder, name.group(0), "whole.json")))
    return [int(name.group(1)) for name in whole]


def _filled(folder: str, inside: str, pattern: str) -> list[str]:
    """Files of that name that are not empty, as paths below the run's folder."""
    names = sorted(attempt(lambda: os.listdir(os.path.join(folder, inside))) or [])
    paths = [os.path.join(inside, name) for name in names if re.match(pattern, name)]
    return [path for path in paths if os.path.getsize(os.path.join(folder, path))]


def _ranks(folder: str) -> list[int]:
    names = (_NAME.match(name) for name in attempt(lambda: os.listdir(folder)) or [])
    return [int(name.group(1)) for name in names if name]


def look_at(folder: str, rank: int, timeout: float) -> dict[str, Any]:
    """One worker. ``state``: "answered", "elsewhere", "gone", "stopped", "silent", "unopened" or "ended"."""
    facts = _json(os.path.join(folder, "live", f"rank-{rank}.json"))
    heartbeat = _json(os.path.join(folder, "heartbeat", f"rank-{rank}.json"))
    host, pid = facts.get("host") or heartbeat.get("host"), facts.get("pid") or heartbeat.get("pid")
    seen = {"rank": rank, "host": host, "heartbeat": heartbeat or None}
    if host not in (None, socket.gethostname()):
        return {**seen, "state": "elsewhere", "pid": pid}
    begun = time.monotonic()
    answer, fault = _ask(os.path.join(folder, "live", f"rank-{rank}.sock"), timeout)
    waited = round(time.monotonic() - begun, 2)
    if answer is not None:
        return {**seen, "state": "answered", "pid": answer["pid"], "answer": answer}
    return {**seen, "pid": pid, "waited": waited, "fault": fault, **_process(pid, had_socket=bool(facts))}


def _process(pid: int | None, had_socket: bool) -> dict[str, Any]:
    """What /proc says of a worker that did not answer."""
    status = status_of(pid) if pid else {}
    letter = status.get("State", "")[:1]
    if letter in ("", "Z", "X"):
        return {"state": "gone" if had_socket else "ended", "letter": letter}
    if letter in ("T", "t"):
        return {"state": "stopped", "letter": letter, "traced_by": int(status.get("TracerPid", "0"))}
    if not had_socket:
        return {"state": "unopened", "letter": letter}
    return {"state": "silent", "letter": letter, "wchan": read(f"/proc/{pid}/wchan").strip()}


def _ask(path: str, timeout: float) -> tuple[dict[str, Any] | None, str]:
    end = time.monotonic() + timeout
    data = b""
    try:
        with _short_way_to(path) as short, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(timeout)
            asking.connect(short)
            while not data.endswith(b"\n"):
                asking.settimeout(max(0.01, end - time.monotonic()))
                more = asking.recv(1 << 20)
                if not more:
                    return None, "it closed the connection in the middle of its answer"
                data += more
    except OSError as fault:
        return None, f"{type(fault).__name__}: {fault}"
    return json.loads(data), ""


@contextlib.contextmanager
def _short_way_to(path: str) -> Iterator[str]:
    """A socket's path has to be short: through a link in a private temporary folder, if it is not."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="paceline-") as private:
        os.symlink(os.path.abspath(os.path.dirname(path)), os.path.join(private, "l"))
        yield os.path.join(private, "l", os.path.basename(path))


def _json(path: str) -> dict[str, Any]:
    text = read(path)
    return attempt(lambda: json.loads(text), ValueError) or {}
