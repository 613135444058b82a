"""What the doctor says: one finding a fact, with its level, why it matters and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any


class Level(IntEnum):
    """How bad; the worst of a report decides the exit code."""

    OK = 0
    INFO = 1
    WARNING = 2
    ERROR = 3

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    `subject` groups findings ("versions", "rank 3"); `what` and `value` are the fact; `why` says what it does to a
    launch and `remedy` what to do, both empty where nothing is wrong.
    """

    level: Level
    subject: str
    what: str
    value: str
    why: str = ""
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "level": self.level.word}


def ok(subject: str, what: str, value: object) -> Finding:
    return Finding(Level.OK, subject, what, str(value))


def info(subject: str, what: str, value: object, why: str = "", remedy: str = "") -> Finding:
    return Finding(Level.INFO, subject, what, str(value), why, remedy)


def warning(subject: str, what: str, value: object, why: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, subject, what, str(value), why, remedy)


def error(subject: str, what: str, value: object, why: str, remedy: str) -> Finding:
    return Finding(Level.ERROR, subject, what, str(value), why, remedy)


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), default=Level.OK)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 when all is well or merely worth knowing, 1 for a warning, 2 for an error."""
    return max(0, worst(findings) - Level.INFO)
