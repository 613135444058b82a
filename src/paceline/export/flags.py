"""Messages of a command that is given by flags: they name the flag, not the configuration's key."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Generator
from contextlib import contextmanager

from paceline.errors import UserError


@contextmanager
def named_by_flags(options: type) -> Generator[None]:
    """Say `--target` for `target.model`, `--dtype` for `target.dtype` and `--top-k = …` for `top_k = …` in a UserError.

    options: the dataclass whose fields are the command's flags; what has no flag there keeps its name.
    """
    try:
        yield
    except UserError as error:
        raise UserError(in_flags(error.what, options), in_flags(error.remedy, options)) from error.__cause__


def in_flags(text: str, options: type) -> str:
    """`text` with the names of this command's flags."""
    fields = {field.name for field in dataclasses.fields(options)}
    keys = {"target.model": "target", "target.dtype": "dtype", "target.revision": "revision"}
    for key, field in keys.items():
        if field in fields:
            text = text.replace(key, _flag(field))
    for field in fields:
        text = re.sub(rf"(?<![\w.-]){field} = ", f"{_flag(field)} = ", text)
    return text


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
