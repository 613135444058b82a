"""The journal of a regeneration: one whole line a finished row, on disk before the row counts as done.

It may be cut off anywhere, by a kill or a full disk: a last line without its end is dropped when it is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from paceline.errors import UserError


@dataclass(frozen=True)
class Entry:
    """Where a row's line lies, and what is wrong with it."""

    offset: int
    flags: tuple[str, ...]
    tokens: int


class Journal:
    """Append-only rows by key; a later line of the same key replaces the earlier."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        """Open or begin. Raises UserError where another process holds it, or where it was written with other settings.

        `broken` counts whole lines that are no rows; they are ignored.
        """
        self.path = path
        self.entries: dict[str, Entry] = {}
        self.broken = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("ab+")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error}", "choose another output") from None
        self._lock()
        self._read()
        self._check(fingerprint)

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Write rows, and return when they are on disk. Raises UserError."""
        start = self._file.seek(0, os.SEEK_END)
        lines = []
        for record in records:
            line = json.dumps(record, ensure_ascii=True).encode() + b"\n"
            self._note(record, start + sum(map(len, lines)))
            lines.append(line)
        try:
            self._file.write(b"".join(lines))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error}", "free some space, then start again") from None

    def is_done(self, key: str) -> bool:
        """Whether a row needs no further try: failures are tried again by the next start."""
        return key in self.entries and "failed" not in self.entries[key].flags

    def record(self, key: str) -> dict[str, Any]:
        self._file.seek(self.entries[key].offset)
        return json.loads(self._file.readline())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(
                f"another process is writing {self.path}", "wait for it, or choose another output"
            ) from None

    def _read(self) -> None:
        end = 0
        for offset, line in self._lines():
            if not line.endswith(b"\n"):
                break
            end = offset + len(line)
            try:
                record = json.loads(line)
            except ValueError:
                self.broken += 1
                continue
            if isinstance(record, dict):
                self._note(record, offset)
        self._file.truncate(end)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        self._file.seek(0)
        offset = 0
        for line in self._file:
            yield offset, line
            offset += len(line)

    def _note(self, record: dict[str, Any], offset: int) -> None:
        if "settings" in record:
            self._settings = str(record["settings"])
        elif "key" in record and "messages" in record:
            flags = tuple(record.get("flags", ()))
            self.entries[str(record["key"])] = Entry(offset, flags, int(record.get("tokens", 0)))

    _settings = ""

    def _check(self, fingerprint: str) -> None:
        if not self._settings:
            self.append([{"settings": fingerprint}])
        elif self._settings != fingerprint:
            self._file.close()
            raise UserError(
                f"{self.path} was begun with another model, template or sampling",
                "repeat the settings that it was begun with, choose another output, or remove it",
            )
