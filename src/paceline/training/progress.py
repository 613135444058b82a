"""The run as a person watches it: a live line on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class View(Protocol):
    """Receives what happens; owns no number of its own."""

    def step(self, record: dict[str, Any]) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


def step_words(record: dict[str, Any]) -> str:
    """One step in a few words, for the live line and the plain one alike."""
    words = [f"loss {record['loss']:.3f}", f"slot 1 {record['accuracy'][0]:.0%}"]
    if "tau" in record:
        words.append(f"τ {record['tau']:.3f}")
    return "  ".join([*words, f"lr {record['learning_rate']:.1e}", f"{record['tokens_per_second']:,.0f} tok/s"])


def evaluation_words(record: dict[str, Any]) -> str:
    slots = " ".join(f"{share:.0%}" for share in record["by_slot"][:6])
    words = f"held-out τ {record['tau']:.3f} (accepted {record['accepted']:.3f} + 1 bonus)  reached by slot: {slots}"
    return words + (f"  agreement {record['agreement']:.0%}" if record.get("agreement") is not None else "")


def closing_words(folder: Path, records: list[dict[str, Any]]) -> list[str]:
    """What a run that has ended gave: its drafters, each with its step and τ, and whether training was worth it."""
    found = [record for record in records if record["event"] == "evaluation"]
    if not found:
        return [f"drafter: {folder / 'last'} (nothing was held out, so no τ); report: {folder / 'report.html'}"]
    best, last = max(found, key=lambda record: record["tau"]), found[-1]  # the first of equals, as it was kept
    lines = [
        f"drafter: {folder / 'best'} (best held-out τ {best['tau']:.3f}, step {best['step']}) and {folder / 'last'} "
        f"(τ {last['tau']:.3f}, step {last['step']}); report: {folder / 'report.html'}"
    ]
    if best["step"] == 0 and last["step"] > 0:
        lines.append(
            "training did not improve on what it started from: best is the drafter of step 0, untouched. "
            "Try a lower training.learning_rate (a tenth, say) with a warm-up, or more steps"
        )
    return lines


class PlainView:
    """Lines for logs: the first steps, then one every few seconds, and every evaluation."""

    def __init__(self, total: int, seconds: float = 10.0) -> None:
        self._total, self._seconds = total, seconds
        self._next = 0.0
        self._begun: tuple[int, float] | None = None
        """The step that was done when the first one of this start began, and the time then."""

    def step(self, record: dict[str, Any]) -> None:
        step, now = record["step"], time.monotonic()
        if self._begun is None:
            self._begun = step - 1, now - record["seconds"]
        first, started = self._begun
        if now < self._next and step != self._total:
            return
        self._next = now + self._seconds
        left = (now - started) / (step - first) * (self._total - step)
        self.say(f"step {step}/{self._total}  {step_words(record)}  {_clock(left)} left")

    def evaluation(self, record: dict[str, Any]) -> None:
        self.say(f"step {record['step']}/{self._total}  {evaluation_words(record)}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class LiveView:
    """A progress bar with the numbers beside it."""

    def __init__(self, total: int, done: int, console: Console) -> None:
        columns = (
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}"),
        )
        self._progress = Progress(*columns, console=console, refresh_per_second=4)
        self._task = self._progress.add_task("train", total=total, completed=done, words="")
        self._progress.start()

    def step(self, record: dict[str, Any]) -> None:
        self._progress.update(self._task, completed=record["step"], words=step_words(record))

    def evaluation(self, record: dict[str, Any]) -> None:
        self.say(f"step {record['step']}  {evaluation_words(record)}")

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._progress.stop()


class SilentView:
    """For every rank but the first."""

    def step(self, record: dict[str, Any]) -> None:
        pass

    def evaluation(self, record: dict[str, Any]) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def open_view(rank: int, total: int, done: int) -> View:
    if rank != 0:
        return SilentView()
    console = Console(stderr=True)
    return LiveView(total, done, console) if console.is_terminal else PlainView(total)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
