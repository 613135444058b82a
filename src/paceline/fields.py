"""Values of a JSON object that another program wrote, each checked for its kind and its range as it is read."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.errors import UserError

LARGEST = 1 << 32
"""No size in a model's configuration is larger: beyond it a file is damaged, and what is built from it never ends."""


@dataclass(frozen=True)
class Fields:
    """One object. Null counts as absent; true and false are no numbers. Every method raises UserError by name."""

    values: Mapping[str, Any]
    where: str
    """The file or folder, for messages."""
    remedy: str

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def need(self, key: str) -> Any:
        if not self.has(key):
            raise UserError(f"{self.where} does not say {key}", self.remedy)
        return self.values[key]

    def whole(self, key: str, low: int, high: int = LARGEST, default: int | None = None) -> int:
        """A whole number in low … high; without `default` it must be there."""
        value = self.need(key) if default is None else self._given(key, default)
        return self._whole(key, value, low, high)

    def wholes(self, key: str, low: int, high: int = LARGEST, *, alone: bool = False) -> tuple[int, ...]:
        """A list of whole numbers, or with `alone` a single one; () where absent."""
        value = self._given(key, [])
        if not isinstance(value, list):
            if not alone:
                self._refuse(key, value, "a list of whole numbers")
            value = [value]
        return tuple(self._whole(key, item, low, high) for item in value)

    def number(self, key: str, default: float | None = None, *, below: float = math.inf, zero: bool = False) -> float:
        """A finite number above 0 (or 0 itself, with `zero`) and below `below`, whole or not."""
        value = self.need(key) if default is None else self._given(key, default)
        if not _is_number(value) or not (0 < value < below or (zero and value == 0)):
            least = "of at least 0" if zero else "above 0"
            most = "" if below == math.inf else f" and below {below:g}"
            self._refuse(key, value, f"a number {least}{most}")
        return float(value)

    def figure(self, key: str) -> float:
        """Any finite number; nan where absent, for JSON has none."""
        value = self._given(key, math.nan)
        if self.has(key) and not _is_number(value):
            self._refuse(key, value, "a number")
        return float(value)

    def text(self, key: str, default: str = "") -> str:
        value = self._given(key, default)
        if not isinstance(value, str):
            self._refuse(key, value, "text")
        return value

    def object(self, key: str) -> dict[str, Any]:
        """A JSON object; {} where absent."""
        value = self._given(key, {})
        if not isinstance(value, dict):
            self._refuse(key, value, "an object")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """A list of values of one kind; [] where absent."""
        value = self._given(key, [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            self._refuse(key, value, f"a list of {_KINDS[kind]}")
        return value

    def _given(self, key: str, default: Any) -> Any:
        return self.values[key] if self.has(key) else default

    def _whole(self, key: str, value: Any, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            self._refuse(key, value, f"a whole number from {low} to {high}")
        return value

    def _refuse(self, key: str, value: Any, meant: str) -> NoReturn:
        raise UserError(f"{self.where}: {key} = {short(value)} is not {meant}", self.remedy)


def short(value: Any) -> str:
    """A value as a message shows it, however long it is."""
    return reprlib.repr(value)


_KINDS = {str: "texts", dict: "objects"}


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the largest float
        return False
