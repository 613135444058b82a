"""What a run says of itself: metrics.jsonl is the truth, TensorBoard and the terminal are views of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Record = dict[str, Any]


class MetricsFile:
    """Appends one JSON object a line to `metrics.jsonl`.

    A resumed run drops the lines after the step that it resumes from, so that every step stands there once, and with
    `looks_again` that step's evaluation too.
    """

    def __init__(self, folder: Path, resume_step: int, *, looks_again: bool = False) -> None:
        self.path = folder / "metrics.jsonl"
        last = resume_step - 1 if looks_again else resume_step
        limits = {"evaluation": last}
        earlier = read_metrics(folder) if resume_step else []
        kept = [line for line in earlier if line["step"] <= limits.get(line.get("event", ""), resume_step)]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        aside = self.path.with_suffix(".partial")
        aside.write_text(text)
        aside.replace(self.path)
        self._file = self.path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(folder: Path) -> list[Record]:
    """The records of a run, oldest first; a last line cut short by a kill is left out."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break  # only a killed writer leaves a cut line, and it is the last
    return records


class TensorBoardView:
    """The numbers of each record as TensorBoard scalars."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - half a second that only rank 0 pays

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, record: Record) -> None:
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float):
                self._writer.add_scalar(key, value, record["step"])

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True)
class _Pending:
    step: int
    values: Tensor
    """The step's numbers on their way to the host."""
    ready: torch.cuda.Event | None
    facts: Record


class Delayed:
    """Hands each step's device numbers to the host one step later, so that no step waits for its own.

    `put` starts the copy of step n and delivers step n - 1, whose copy has long arrived.
    """

    def __init__(self, deliver: Callable[[int, list[float], Record], None]) -> None:
        self._deliver = deliver
        self._pending: _Pending | None = None

    def put(self, step: int, values: Tensor, facts: Record) -> None:
        """`values` is a 1-D float tensor on the device of the run; `facts` are numbers the host knows already."""
        self.flush()
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            self._pending = _Pending(step, host, ready, facts)
        else:
            self._pending = _Pending(step, values.clone(), None, facts)

    def flush(self) -> None:
        """Deliver what is pending; waits for that step to end."""
        if self._pending is None:
            return
        done, self._pending = self._pending, None
        if done.ready is not None:
            done.ready.synchronize()
        self._deliver(done.step, done.values.tolist(), done.facts)


class Clock:
    """Seconds from step to step. What lies between `stop` and `start` belongs to no step: an evaluation, say."""

    def __init__(self) -> None:
        self._last: float | None = None

    def start(self) -> None:
        """A step begins: its time is counted from here, or from the end of the one before it."""
        if self._last is None:
            self._last = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last lap or start; the next step's are counted from now."""
        now = time.monotonic()
        assert self._last is not None, "a lap without a start"
        seconds, self._last = now - self._last, now
        return seconds

    def stop(self) -> None:
        self._last = None
