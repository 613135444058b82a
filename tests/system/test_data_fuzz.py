"""Mutated files: never a traceback, never a hang, and every row is either kept or set aside.

PACELINE_FUZZ=10000 runs it in full; the default is a sample.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_byte_world import END, MASK, byte_tokenizer

from paceline.data.quarantine import Counter
from paceline.data.rows import Row
from paceline.data.sources import read
from paceline.data.template import Template
from paceline.data.work import Settings, tokenise_chunk

COUNT = int(os.environ.get("PACELINE_FUZZ", "600"))
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "é"]}}}
ROWS: list[Any] = [
    {
        "messages": [{"role": "user", "content": "hi é"}, {"role": "assistant", "content": "yo 😀 <|im_end|>"}],
        "kind": "k",
    },
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b\nc"}], "id": 1},
    {"instruction": "do", "input": "", "output": "done"},
    {"messages": [{"role": "user", "content": "w"}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]},
    {"prompt": "p", "completion": "c"},
    {"text": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nbc<|im_end|>\n"},
]
_ODD: list[Any] = [
    None,
    0,
    -1.5,
    True,
    "",
    "\ud800",
    "\x00",
    [],
    {},
    [[]],
    {"role": "user"},
    "assistant",
    "x" * 50,
    10**30,
]
_BYTES = [
    b"\xff",
    b"\x00",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b"\\",
    b",",
    b"\n",
    b"\\ud83d",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"NaN",
]


def mutate_value(value: Any, rng: random.Random) -> Any:
    """The value with one node replaced, removed, doubled or renamed."""
    value = copy.deepcopy(value)
    nodes = [
        (holder, key) for holder in walk(value) for key in (holder if isinstance(holder, dict) else range(len(holder)))
    ]
    holder, key = rng.choice(nodes)
    action = rng.randrange(4)
    if action == 0:
        holder[key] = rng.choice(_ODD)
    elif action == 1:
        del holder[key]
    elif action == 2 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif isinstance(holder, dict):
        holder[rng.choice(["role", "content", "value", "from", "messages", "tools", "text", "zz"])] = holder.pop(key)
    return value


def walk(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = [item for part in inner if isinstance(part, dict | list) for item in walk(part)]
    return ([value] if isinstance(value, dict | list) and value else []) + found


def mutate_bytes(body: bytes, rng: random.Random) -> bytes:
    if not body:
        return body
    place, action = rng.randrange(len(body)), rng.randrange(5)
    if action == 0:
        return body[:place] + bytes([rng.randrange(256)]) + body[place + 1 :]
    if action == 1:
        return body[:place] + rng.choice(_BYTES) + body[place:]
    if action == 2:
        return body[:place] + body[place + rng.randrange(1, 20) :]
    return body[:place] if action == 3 else body[:place] + body[rng.randrange(len(body)) :]


def body_of(rows: list[Any], form: str) -> bytes:
    if form == "parquet":
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(ROWS[:1] * 3), sink)
        return sink.getvalue()
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    array = json.dumps(rows, indent=1, ensure_ascii=False).encode("utf-8", "surrogatepass")
    bodies = {"lines": lines, "array": array, "line": json.dumps(rows).encode()}
    return gzip.compress(lines) if form == "gzip" else zstandard.compress(array) if form == "zstd" else bodies[form]


def made(rng: random.Random) -> tuple[str, bytes]:
    rows = [mutate_value(row, rng) if rng.random() < 0.4 else row for row in rng.sample(ROWS, rng.randrange(1, 5))]
    form = rng.choice(["lines", "lines", "array", "array", "line", "gzip", "zstd", "parquet"])
    body = body_of(rows, form)
    for _ in range(rng.randrange(4)):
        body = mutate_bytes(body, rng)
    return form, body


@pytest.mark.timeout(600)
def test_mutated_files_never_raise_and_counts_add_up(tmp_path: Path) -> None:
    settings = Settings(Template(byte_tokenizer(), (END,)), 200, MASK)
    path = tmp_path / "a.jsonl"
    kept = set_aside = 0
    for number in range(COUNT):
        rng = random.Random(number)
        _, body = made(rng)
        path.write_bytes(body)
        rows = list(read((str(path),), rng.choice(["auto", "auto", "messages", "text"])))
        check_rows(rows, number)
        talks = [row.conversation for row in rows if row.conversation is not None]
        chunk = tokenise_chunk(settings, talks)
        assert len(chunk.kept) + len(chunk.problems) == len(talks), number
        assert int(chunk.lengths.sum()) == len(chunk.ids) == len(chunk.supervised), number
        kept += len(chunk.kept)
        set_aside += len(rows) - len(chunk.kept)
    assert kept > COUNT / 3
    assert set_aside > COUNT / 4


def check_rows(rows: list[Row], seed: int) -> None:
    counter = Counter()
    for row in rows:
        assert (row.conversation is None) != (row.problem is None), seed
        counter.seen(row, "a")
    numbers = [row.place.number for row in rows]
    assert numbers == sorted(set(numbers)), seed
    counted = counter.freeze()
    assert counted.rows == counted.kept + counted.count == len(rows), seed
    json.dumps(counted.plain()).encode()
