"""Counting what is set aside: every reason by name, with places and one example, and the limits that stop a run."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.data.rows import NOTES, REASONS, Place, Problem, Row, excerpt
from paceline.errors import UserError

_KEPT_PLACES = 1000


@dataclass(frozen=True)
class Reason:
    """One reason's count, its first thousand places (`file:number`), and one example."""

    count: int
    places: tuple[str, ...]
    example: str


@dataclass(frozen=True)
class SetAside:
    """Where every row went: `rows` = `kept` + the counts of all reasons."""

    rows: int
    kept: int
    reasons: dict[str, Reason]
    notes: dict[str, int]
    """Things counted without setting a row aside (`rows.NOTES` has their meanings)."""
    shapes: dict[str, dict[str, int]]
    """Rows by source entry and shape."""

    @property
    def count(self) -> int:
        return sum(reason.count for reason in self.reasons.values())

    @property
    def share(self) -> float:
        return self.count / self.rows if self.rows else 0.0

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def of_plain(facts: dict[str, Any]) -> SetAside:
        reasons = {
            name: Reason(item["count"], tuple(item["places"]), item["example"])
            for name, item in facts["reasons"].items()
        }
        return SetAside(facts["rows"], facts["kept"], reasons, facts["notes"], facts["shapes"])

    def line(self) -> str:
        """One line for people: how many of how many, by reason."""
        if not self.count:
            return f"{self.rows:,} rows, none set aside"
        parts = sorted(self.reasons.items(), key=lambda item: -item[1].count)
        named = ", ".join(f"{name} {reason.count:,}" for name, reason in parts)
        return f"{self.rows:,} rows, {self.count:,} set aside ({self.share:.1%}): {named}"


@dataclass
class Counter:
    """Grows while rows are read; `freeze` gives the SetAside."""

    rows: int = 0
    kept: int = 0
    _counts: dict[str, int] = field(default_factory=dict)
    _places: dict[str, list[str]] = field(default_factory=dict)
    _examples: dict[str, str] = field(default_factory=dict)
    _notes: dict[str, int] = field(default_factory=dict)
    _shapes: dict[str, dict[str, int]] = field(default_factory=dict)

    def seen(self, row: Row, entry: str) -> None:
        """Count a row that was read, and its problem where it has one."""
        self.rows += 1
        if row.problem is not None:
            self.add(row.place, row.problem)
            return
        self.kept += 1
        shapes = self._shapes.setdefault(entry, {})
        shapes[row.shape] = shapes.get(row.shape, 0) + 1

    def add(self, place: Place, problem: Problem, *, was_kept: bool = False) -> None:
        """Set a row aside; `was_kept` where it had been counted as kept before."""
        name = problem.reason
        self.kept -= was_kept
        self._counts[name] = self._counts.get(name, 0) + 1
        places = self._places.setdefault(name, [])
        if len(places) < _KEPT_PLACES:
            places.append(str(place))
        if not self._examples.get(name):
            self._examples[name] = problem.example

    def note(self, name: str, count: int = 1) -> None:
        assert name in NOTES, name
        if count:
            self._notes[name] = self._notes.get(name, 0) + count

    def freeze(self) -> SetAside:
        reasons = {
            name: Reason(self._counts[name], tuple(self._places[name]), self._examples[name])
            for name in REASONS
            if name in self._counts
        }
        return SetAside(self.rows, self.kept, reasons, dict(self._notes), dict(self._shapes))


def check_limits(set_aside: SetAside, most: float) -> None:
    """Raise UserError where more than `most` of the rows are set aside, or none is left, with the commonest reason."""
    if set_aside.rows == 0:
        raise UserError("the data has no rows", "give files that hold conversations")
    if set_aside.kept and set_aside.share <= most:
        return
    name, reason = max(set_aside.reasons.items(), key=lambda item: item[1].count)
    first = reason.places[0] if reason.places else ""
    what = (
        f"{set_aside.count:,} of {set_aside.rows:,} rows are set aside ({set_aside.share:.1%}); most of them, "
        f"{reason.count:,}, for {name!r}: {REASONS[name]}; for example {first}: "
        + excerpt(reason.example, 300).replace("\n", "\\n")
    )
    raise UserError(
        what, f"mend the data or raise data.max_set_aside (now {most:g}); `paceline data show` has the rows"
    )


def write_set_aside(set_aside: SetAside, folder: Path) -> Path:
    """Write `set_aside.json` into a folder: counts, meanings, places and one example of each reason; and its path."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "rows": set_aside.rows,
        "kept": set_aside.kept,
        "set_aside": {
            name: {"meaning": REASONS[name], **dataclasses.asdict(reason)} for name, reason in set_aside.reasons.items()
        },
        "notes": {name: {"meaning": NOTES[name], "count": count} for name, count in set_aside.notes.items()},
        "shapes": set_aside.shapes,
    }
    path = folder / "set_aside.json"
    scratch = folder / ".set_aside.json.new"
    scratch.write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
    scratch.replace(path)
    return path
