"""The manual names every reason and note, with the meaning that the program prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.data.rows import NOTES, REASONS

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.mark.parametrize(("name", "meaning"), [*REASONS.items(), *NOTES.items()])
def test_the_manual_has_it(name: str, meaning: str) -> None:
    assert f"| `{name}` | {meaning} |" in PAGE.read_text(encoding="utf-8").splitlines()
