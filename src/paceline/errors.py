"""Errors that a user can act on."""

from __future__ import annotations


class UserError(Exception):
    """A fault of input, configuration or machine: printed as one line and a hint, never with a traceback.

    `what` names the thing and the value that is wrong; `remedy` says what to do about it.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  hint: {self.remedy}" if self.remedy else self.what
