"""A report as a table on a terminal, as plain lines elsewhere, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.doctor.checks.numbers import size
from paceline.doctor.diagnosis import Seen
from paceline.doctor.findings import Finding, Level, worst

_STYLES = {Level.OK: "green", Level.INFO: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}
_WORDS = {Level.OK: "ok", Level.INFO: "info", Level.WARNING: "warning", Level.ERROR: "ERROR"}


def show(console: Console, findings: Sequence[Finding], title: str, workers: Sequence[Seen] = ()) -> None:
    """The whole report: a line on where it is from, the workers if there are any, findings by subject, the sum."""
    if not console.is_terminal:
        print("\n".join(plain(findings, title, workers)), file=console.file)
        return
    console.print(Text(title, style="bold"))
    if workers:
        console.print(_worker_table(workers))
    for subject, group in groupby(findings, key=lambda finding: finding.subject):
        console.print(Text(f"\n{subject}", style="bold"))
        console.print(_table(list(group)))
    console.print(Text("\n" + summary(findings), style=_STYLES[worst(findings)]))


def show_lines(console: Console, lines: Sequence[str]) -> None:
    """Source and stacks: each line as it is, however wide the terminal, or the pipe that has no width."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(findings: list[Finding]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(width=9, no_wrap=True)
    table.add_column(ratio=1)
    for finding in findings:
        table.add_row(Text(f"  {_WORDS[finding.level]}", style=_STYLES[finding.level]), _words(finding))
    return table


def _words(finding: Finding) -> RenderableType:
    head = Text.assemble(
        (finding.what, "bold" if finding.level > Level.INFO else ""), ": " if finding.value else "", finding.value
    )
    parts: list[RenderableType] = [head]
    if finding.why:
        parts.append(Text(finding.why, style="dim"))
    if finding.remedy:
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(Text("→", style=_STYLES[finding.level]), Text(finding.remedy))
        parts.append(line)
    return Group(*parts) if len(parts) > 1 else head


_COLUMNS = ("rank", "role", "step", "phase", "for", "waits for", "memory", "GPU")


def _cells(worker: Seen) -> list[str]:
    memory = worker.answer.get("memory") or {}
    answered = worker.state == "answered"
    return [
        str(worker.rank),
        str(worker.status.get("role", "")),
        "" if worker.step is None else str(worker.step),
        worker.phase if answered or worker.interrupted else worker.state,
        f"{worker.seconds_in_phase:.0f} s" if worker.status else "",
        worker.waits_for or "",
        size(memory["rss"]) if memory.get("rss") else "",
        size(memory["cuda_allocated"]) if "cuda_allocated" in memory else "",
    ]


def _worker_table(workers: Sequence[Seen]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    rows = [_cells(worker) for worker in workers]
    used = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows)]
    for i in used:
        table.add_column(
            _COLUMNS[i], justify="right" if _COLUMNS[i] in ("rank", "step", "for", "memory", "GPU") else "left"
        )
    for worker, row in zip(workers, rows, strict=True):
        table.add_row(
            *(row[i] for i in used),
            style="" if worker.state == "answered" or worker.finished or worker.interrupted else "red",
        )
    return Padding(table, (1, 0, 0, 2))


def plain(findings: Sequence[Finding], title: str, workers: Sequence[Seen] = ()) -> list[str]:
    """One line a fact, `why:` and `do:` below it: for logs, pipes and grep."""
    lines = [title]
    for worker in workers:
        lines.append(
            "  " + " | ".join(f"{name} {cell}" for name, cell in zip(_COLUMNS, _cells(worker), strict=True) if cell)
        )
    for finding in findings:
        value = f": {finding.value}" if finding.value else ""
        lines.append(f"{_WORDS[finding.level]:8}{finding.subject}: {finding.what}{value}")
        lines += [f"        why: {finding.why}"] if finding.why else []
        lines += [f"        do: {finding.remedy}"] if finding.remedy else []
    return [*lines, summary(findings)]


def summary(findings: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    bad = [
        f"{counts[level]} {level.word}{'s' if counts[level] != 1 else ''}"
        for level in (Level.ERROR, Level.WARNING)
        if counts[level]
    ]
    return f"{len(findings)} things looked at: " + (", ".join(bad) if bad else "nothing is wrong")


def as_json(findings: Sequence[Finding], facts: dict[str, Any]) -> str:
    """Findings with the facts that they rest on, and the worst level."""
    body = {"worst": worst(findings).word, "findings": [finding.as_json() for finding in findings], "facts": facts}
    return json.dumps(body, indent=2, ensure_ascii=False, default=str)
