"""``paceline doctor`` and ``paceline run-there``: gather there, judge here, show, and return the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.doctor import foreign, render, trials
from paceline.doctor.chain import Layer, parse
from paceline.doctor.checks import fx, judge
from paceline.doctor.diagnosis import Seen, diagnose, left_from, seen_from
from paceline.doctor.findings import Finding, exit_code, info
from paceline.doctor.remote import Place, gather, stream
from paceline.errors import UserError

_ANSWER_SECONDS = 5.0
"""What a worker may take to answer; one that holds its interpreter longer is silent."""


@dataclass(frozen=True)
class DoctorOptions:
    """What ``paceline doctor`` was asked.

    `target`: a run's folder, whose workers are asked. `pid`: a process, ours or not. Neither: the machine and its
    Python. `through`: the chain of shells to the place, outermost first. `python`: the interpreter there. `timeout`:
    seconds for the whole answer.
    """

    target: str | None = None
    pid: int | None = None
    through: tuple[str, ...] = ()
    python: str = ""
    json: bool = False
    source: bool = False
    compile_check: bool = False
    race_check: bool = False
    timeout: float = 120.0


@dataclass
class _Report:
    """What has been gathered and found so far."""

    title: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    workers: list[Seen] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


def run_doctor(options: DoctorOptions) -> int:
    """Look, report on standard output, and return 0, 1 (a warning) or 2 (an error).

    Raises:
        UserError: the question makes no sense, or the chain to the place failed (`ChainError`, which names the layer).
    """
    if options.target is not None and options.pid is not None:
        raise UserError(f"both a run ({options.target}) and --pid {options.pid} are given", "ask about one at a time")
    place = place_for(options.through, options.python, options.timeout)
    report = _Report(f"paceline doctor · {place.name}")
    report.findings += _notes(place.layers)
    if options.target is not None:
        _ask_run(report, place, options)
    elif options.pid is not None:
        _ask_process(report, place, options)
    else:
        _ask_machine(report, place, options)
    if options.json:
        print(render.as_json(report.findings, report.facts))
    else:
        console = Console()
        render.show(console, report.findings, report.title, report.workers)
        render.show_lines(console, report.after)
    return exit_code(report.findings)


def run_there(script: str, args: Sequence[str], through: Sequence[str], python: str, timeout: float) -> int:
    """Run a Python file at the end of a chain; its output comes through as it is printed. Its exit code.

    Raises:
        UserError: the script cannot be read, or the chain failed (`ChainError`, which names the layer).
    """
    place = place_for(tuple(through), python, timeout)
    for note in _notes(place.layers):
        print(f"{note.what}: {note.value}", file=sys.stderr, flush=True)
    return stream(place, script, args)


def place_for(through: Sequence[str], python: str, timeout: float) -> Place:
    """The chain as it will be run. Without a chain the interpreter is this one, unless another is named."""
    layers = tuple(parse(through))
    return Place(layers, python or ("python3" if layers else sys.executable), timeout)


def _notes(layers: Sequence[Layer]) -> list[Finding]:
    return [info("chain", layer.text, note) for layer in layers for note in layer.notes]


def _ask_machine(report: _Report, place: Place, options: DoctorOptions) -> None:
    report.facts["machine"] = facts = gather(place, "probe", {"timeout": max(5.0, 0.8 * options.timeout)})
    report.title += f" · {facts['host']}"
    report.findings += judge(facts)
    if options.source:
        report.after += ["", *fx.source(facts)]
    no_torch = "version" not in facts["torch"]
    if options.compile_check and not no_torch:
        longer = Place(place.layers, place.python, 3 * options.timeout)
        report.facts["compile_check"] = tried = gather(longer, "compile_check", {"timeout": options.timeout})
        report.findings += trials.compile_findings(tried)
    if options.race_check and not no_torch:
        report.facts["race_check"] = tried = gather(place, "race_check", {})
        report.findings += trials.race_findings(tried)


def _ask_run(report: _Report, place: Place, options: DoctorOptions) -> None:
    folder = str(options.target) if place.layers else str(Path(str(options.target)).absolute())
    patience = min(_ANSWER_SECONDS, options.timeout / 2)
    report.facts["run"] = facts = gather(place, "workers", {"folder": folder, "timeout": patience})
    if facts.get("absent"):
        raise UserError(f"{facts['folder']} is no folder on {facts['host']}", "give the run's own folder (runs/NAME)")
    report.title += f" · {facts['folder']} on {facts['host']}"
    report.workers = seen_from(facts)
    report.findings += diagnose(report.workers, left_from(facts["left"]))


def _ask_process(report: _Report, place: Place, options: DoctorOptions) -> None:
    report.facts["process"] = facts = gather(place, "process", {"pid": options.pid, "timeout": options.timeout / 4})
    report.title += f" · process {options.pid} on {facts['host']}"
    report.findings += foreign.judge(facts)
    samples = foreign.samples_of(facts)
    report.after += ["", *foreign.stack_lines(samples)] if samples else []
