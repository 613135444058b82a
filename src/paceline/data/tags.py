"""What is changed in a template's source before it renders: dates are pinned, generation tags leave marks."""

from __future__ import annotations

import datetime
import re

OPEN, CLOSE = "\ue0f0", "\ue0f1"
_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_DATE = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(["'])(.*?)\1\s*\)""")
_FIXED_DATE = datetime.datetime(2026, 1, 1)

Span = tuple[int, int]


def pin_dates(source: str) -> str:
    """The template with today's date replaced by a fixed one: the same data gives the same tokens on any day."""
    return _DATE.sub(lambda match: repr(_FIXED_DATE.strftime(match.group(2))), source)


def mark_tags(source: str) -> str:
    """The template with its generation tags, in any spelling, replaced by marks in the text; empty without tags."""

    def replaced(match: re.Match[str]) -> str:
        before, closing, after = match.groups()
        # A block, not an expression: blocks and expressions treat the white space around them differently.
        return f"{{%{before} if true %}}{CLOSE if closing else OPEN}{{% endif {after}%}}"

    marked, count = _TAG.subn(replaced, source)
    return marked if count else ""


def marks(text: str) -> list[Span]:
    """Ranges between marks, in the coordinates of the text without them."""
    spans, low, gone = [], None, 0
    for place, letter in enumerate(text):
        if letter == OPEN:
            low, gone = place - gone, gone + 1
        elif letter == CLOSE:
            if low is not None:
                spans.append((low, place - gone))
            low, gone = None, gone + 1
    return spans
