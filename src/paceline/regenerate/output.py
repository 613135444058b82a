"""The finished file of a regeneration, and the file of what was flagged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.errors import UserError
from paceline.regenerate.journal import Journal
from paceline.regenerate.options import FLAGS

_MESSAGE_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
_MESSAGE = pa.struct([(name, pa.string()) for name in _MESSAGE_FIELDS])
_ROW = pa.schema(
    [
        ("messages", pa.list_(_MESSAGE)),
        ("kind", pa.string()),
        ("tools", pa.string()),
        ("flags", pa.list_(pa.string())),
        ("tokens", pa.int64()),
    ]
)


def flagged_path(output: Path) -> Path:
    return output.with_name(output.stem + ".flagged.jsonl")


def write_outputs(journal: Journal, keys: Iterable[str], output: Path, keep: tuple[str, ...]) -> tuple[int, int]:
    """Write the journal's rows of these keys, in this order: (rows written, rows flagged).

    Both files are replaced whole. Raises UserError.
    """
    counts = [0, 0]

    def rows(*, good: bool) -> Iterator[dict[str, Any]]:
        for key in keys:
            if key in journal.entries and _is_good(journal.entries[key].flags, keep) == good:
                counts[not good] += 1
                yield _row(journal.record(key), keep_error=not good)

    try:
        _replace(output, rows(good=True))
        _replace(flagged_path(output), rows(good=False))
    except OSError as error:
        raise UserError(f"cannot write {output}: {error}", "free some space, then start again") from None
    return counts[0], counts[1]


def _is_good(flags: Iterable[str], keep: tuple[str, ...]) -> bool:
    return not any(flag in FLAGS and flag not in keep for flag in flags)


def _row(record: dict[str, Any], *, keep_error: bool) -> dict[str, Any]:
    left_out = ("key",) if keep_error else ("key", "error")
    return {name: value for name, value in record.items() if name not in left_out}


def _replace(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.suffix == ".parquet":
            _write_parquet(scratch, rows)
        else:
            with scratch.open("w", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with pq.ParquetWriter(path, _ROW) as writer:
        while chunk := list(islice(rows, 1024)):
            writer.write_table(pa.Table.from_pylist([_flat(row) for row in chunk], schema=_ROW))


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Columns of fixed types: tools and tool calls, which have any shape, become JSON text."""
    messages = [
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in item.items()}
        for item in row["messages"]
    ]
    tools = json.dumps(row["tools"]) if "tools" in row else None
    return row | {"messages": messages, "tools": tools}
